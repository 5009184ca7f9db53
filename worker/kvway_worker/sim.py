"""An engine without a model: real scheduler, real pool, a cost model for time, made-up text.

Its KV cache holds, per token, a fingerprint of all tokens up to there, made from the one of the
token before, *as read through the block table*. The next token is a function of the last
fingerprint, and the engine is certain of it: its log probability is 0. So an answer depends on
nothing but the tokens so far, and a block that is shared, copied, freed or written wrongly shows
as another answer.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from kvway_core.errors import ShuttingDown
from kvway_worker.scheduling.sampling_params import TokenLogprobs
from kvway_worker.scheduling.step import Row, Sampled, StepPlan, StepResult

PRINTABLE_ASCII: Final = range(0x20, 0x7F)
"""Token ids of a byte tokenizer that show as text."""

_MASK: Final = 2**64 - 1
_MULTIPLIER: Final = 6364136223846793005
_INCREMENT: Final = 1442695040888963407


@dataclass(frozen=True, slots=True)
class CostModel:
    """How long a step takes. All zero: no time at all.

    Attributes:
        prefill_tokens_per_s: Tokens of prompts per second, attention aside; infinite by default.
        attention_s_per_pair: Time per pair of a computed token and one before it: what makes
            long prompts cost more than their length.
        step_overhead_s: Time of a step before its tokens count.
        decode_s_per_seq: Time per generated token that is fed back.
    """

    prefill_tokens_per_s: float = float("inf")
    attention_s_per_pair: float = 0.0
    step_overhead_s: float = 0.0
    decode_s_per_seq: float = 0.0

    def step_s(self, plan: StepPlan) -> float:
        """Returns the seconds a step takes; none for a step without rows."""
        if not plan.rows:
            return 0.0
        return self.step_overhead_s + sum(self._row_s(row) for row in plan.rows)

    def _row_s(self, row: Row) -> float:
        num_pairs = row.num_tokens * row.start + row.num_tokens * (row.num_tokens - 1) / 2
        linear_s = (
            row.num_tokens / self.prefill_tokens_per_s if row.is_prefill else self.decode_s_per_seq
        )
        return linear_s + self.attention_s_per_pair * num_pairs


class SimEngine:
    """Computes steps by waiting as long as a cost model says.

    Args:
        num_blocks: Blocks of the simulated KV cache.
        block_size: Tokens per block.
        costs: How long steps take.
        answer_ids: Token ids that answers are made of.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        costs: CostModel | None = None,
        answer_ids: Sequence[int] = PRINTABLE_ASCII,
    ) -> None:
        if not answer_ids:
            raise ValueError("an answer needs token ids to be made of")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = num_blocks * block_size
        self.kv_dtype: str | None = None
        self._costs = costs or CostModel()
        self._answer_ids = answer_ids
        self._kv = array("Q", bytes(8 * num_blocks * block_size))
        self._closed = threading.Event()

    def execute(self, plan: StepPlan) -> StepResult:
        """Computes the fingerprints of a step and takes as long as the cost model says.

        Raises:
            ShuttingDown: If the engine is closed, also while it waits.
        """
        size = self.block_size
        for source, target, num_tokens in plan.copies:
            start, end = source * size, source * size + num_tokens
            self._kv[target * size : target * size + num_tokens] = self._kv[start:end]
        sampled: dict[str, Sampled] = {}
        prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        for row in plan.rows:
            states = self._compute(row)
            chosen = self._verified(row, states)
            for seq in row.sampling:
                asked = seq.params.logprobs
                sampled[seq.request_id] = Sampled(
                    chosen,
                    () if asked is None else tuple(_logprobs(one, one, asked) for one in chosen),
                )
            if row.wants_prompt_logprobs:
                prompt_logprobs[row.seq.request_id] = self._prompt_logprobs(row, states)
        if self._closed.wait(self._costs.step_s(plan)):
            raise ShuttingDown("The engine is closed.")
        return StepResult(sampled, prompt_logprobs)

    def attention(self) -> None:
        """Returns nothing: no attention is computed."""

    def close(self) -> None:
        """Ends the engine; a step that waits raises at once."""
        self._closed.set()

    def _compute(self, row: Row) -> list[int]:
        """Writes and returns the fingerprints of a row's tokens."""
        before = self._kv[self._slot(row, row.start - 1)] if row.start else 0
        states = list(accumulate(row.token_ids, _mix, initial=before))[1:]
        for position, state in enumerate(states, start=row.start):
            self._kv[self._slot(row, position)] = state
        return states

    def _verified(self, row: Row, states: Sequence[int]) -> tuple[int, ...]:
        """Returns the drafts that are what comes next, and the token that comes behind them."""
        first = row.num_tokens - row.num_drafts
        chosen: list[int] = []
        for state, draft in zip(states[first - 1 :], (*row.token_ids[first:], None), strict=True):
            chosen.append(_choose(state, self._answer_ids))
            if chosen[-1] != draft:
                break
        return tuple(chosen)

    def _prompt_logprobs(self, row: Row, states: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        asked = row.seq.params.prompt_logprobs or 0
        followers = row.seq.token_ids[row.start + 1 : min(row.end + 1, row.seq.num_prompt_tokens)]
        return tuple(
            _logprobs(token, _choose(state, self._answer_ids), asked)
            for token, state in zip(followers, states, strict=False)
        )

    def _slot(self, row: Row, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return row.block_table[block] * self.block_size + offset


def fingerprints(token_ids: Iterable[int]) -> Iterator[int]:
    """Yields the fingerprint of each prefix of `token_ids`, the empty one first."""
    return accumulate(token_ids, _mix, initial=0)


def answer(
    token_ids: Iterable[int], length: int, answer_ids: Sequence[int] = PRINTABLE_ASCII
) -> list[int]:
    """Returns the tokens with which a SimEngine answers a prompt, however it came to them."""
    (state,) = deque(fingerprints(token_ids), maxlen=1)
    tokens: list[int] = []
    while len(tokens) < length:
        tokens.append(_choose(state, answer_ids))
        state = _mix(state, tokens[-1])
    return tokens


def next_token(token_ids: Iterable[int], answer_ids: Sequence[int] = PRINTABLE_ASCII) -> int:
    """Returns the token with which a SimEngine continues `token_ids`, whatever else it does."""
    return answer(token_ids, 1, answer_ids)[0]


def _mix(state: int, token: int) -> int:
    state = ((state ^ (token + 1)) * _MULTIPLIER + _INCREMENT) & _MASK
    return state ^ (state >> 29)


def _logprobs(token: int, certain: int, num_top: int) -> TokenLogprobs:
    """Returns how likely a token is where the engine is certain of one."""
    top = ((certain, 0.0),)[:num_top]
    if token == certain:
        return TokenLogprobs(token, 0.0, 1, top)
    return TokenLogprobs(token, float("-inf"), 2, top)


def _choose(state: int, answer_ids: Sequence[int]) -> int:
    return answer_ids[(state >> 32) % len(answer_ids)]
