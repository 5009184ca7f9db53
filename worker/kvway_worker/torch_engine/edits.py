"""What a request changes in the model's scores before a token is chosen.

In this order: allowed tokens, bias, repetition penalty, frequency and presence penalty, bans. Bans
are the tokens that `min_tokens` forbids and the last tokens of `bad_words`. Nothing is kept
between steps: all of it follows from the request's tokens, so it is the same after a preemption
and with drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvway_worker.scheduling.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to choose.

    Attributes:
        params: how.
        position: of the new token in its sequence.
        num_prompt_tokens: how many of the tokens before it are the prompt.
        known: the tokens before it that are certain, prompt first.
        drafts: guessed tokens behind these, up to the new one. The token counts only if they turn
            out right, so they are taken for right.
    """

    params: SamplingParams
    position: int
    num_prompt_tokens: int = 0
    known: Sequence[int] = ()
    drafts: Sequence[int] = ()

    @property
    def output(self) -> list[int]:
        """The answer up to the new token."""
        return [*self.known[self.num_prompt_tokens :], *self.drafts]

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer up to the new token."""
        return [*self.known, *self.drafts]


@dataclass(slots=True)
class _Cells:
    """Single scores of a batch, each at most once, and a number for each."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)

    def add(self, row: int, numbers: Mapping[int, float], vocab_size: int) -> None:
        """Adds cells of one row; token ids that the vocabulary lacks are left out."""
        for token, number in numbers.items():
            if 0 <= token < vocab_size:
                self.rows.append(row)
                self.columns.append(token)
                self.numbers.append(number)

    def where(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the index of the cells."""
        index = torch.tensor([self.rows, self.columns], dtype=torch.int64, device=device)
        return index[0], index[1]

    def values(self, device: torch.device) -> Tensor:
        """Returns the numbers, float32."""
        return torch.tensor(self.numbers, dtype=torch.float32, device=device)


def edited(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return the scores as the requests change them; `scores` itself where none does.

    Allowed tokens win over bans: bans that would leave none of them are not applied. Where the
    model itself rules out whatever is left, or a number runs out of float32's range, all allowed
    tokens are equally likely. Token ids outside of the vocabulary have no effect.

    Shapes: scores, result [num_draws, vocab_size] float32, each row with a finite largest score.

    Complexity: O(vocab_size) for each row that changes, plus its tokens where they count.
    """
    rows = [row for row, draw in enumerate(draws) if _changes(draw)]
    if not rows:
        return scores
    vocab_size, device = scores.shape[1], scores.device
    changed = [draws[row] for row in rows]
    index = torch.tensor(rows, device=device)
    out = scores.index_select(0, index)
    allowed = [_in_vocabulary(draw.params.allowed_token_ids, vocab_size) for draw in changed]
    biases, repeated, counted, banned = _Cells(), _Cells(), _Cells(), _Cells()
    for row, (draw, allowed_ids) in enumerate(zip(changed, allowed, strict=True)):
        if allowed_ids:
            _keep_only(out[row], allowed_ids)
        biases.add(row, dict(draw.params.logit_bias), vocab_size)
        repeated.add(row, _repetition(draw), vocab_size)
        counted.add(row, _counts(draw), vocab_size)
        bans = _in_vocabulary(_bans(draw), vocab_size)
        if bans and (allowed_ids - bans if allowed_ids else len(bans) < vocab_size):
            banned.add(row, dict.fromkeys(bans, 0.0), vocab_size)
    _apply(out, biases=biases, repeated=repeated, counted=counted, banned=banned)
    lost = (~torch.isfinite(out.amax(dim=-1))).nonzero()[:, 0].tolist()
    for row in lost:
        out[row] = 0.0
        if allowed[row]:
            _keep_only(out[row], allowed[row])
    return out if len(rows) == len(draws) else scores.index_copy(0, index, out)


def _changes(draw: Draw) -> bool:
    """Tell whether there is anything to do: for most requests there is not."""
    params = draw.params
    return (
        params.allowed_token_ids is not None
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
        or bool(params.logit_bias or params.bad_words)
        or draw.position - draw.num_prompt_tokens < params.min_tokens
    )


def _in_vocabulary(token_ids: Iterable[int] | None, vocab_size: int) -> set[int]:
    return {token for token in token_ids or () if 0 <= token < vocab_size}


def _keep_only(row: Tensor, token_ids: set[int]) -> None:
    ids = torch.tensor(list(token_ids), device=row.device)
    kept = row[ids]
    row.fill_(-torch.inf)
    row[ids] = kept


def _repetition(draw: Draw) -> dict[int, float]:
    """Return the repetition penalty of each token of prompt and answer."""
    penalty = draw.params.repetition_penalty
    return {} if penalty == 1 else dict.fromkeys(draw.tokens, penalty)


def _counts(draw: Draw) -> dict[int, float]:
    """Return what presence and frequency penalty take from each token of the answer."""
    presence, frequency = draw.params.presence_penalty, draw.params.frequency_penalty
    if presence == 0 and frequency == 0:
        return {}
    return {token: presence + frequency * n for token, n in Counter(draw.output).items()}


def _bans(draw: Draw) -> set[int]:
    """Return the tokens that must not come next."""
    params = draw.params
    bans: set[int] = set()
    if draw.position - draw.num_prompt_tokens < params.min_tokens:
        bans |= params.stop_token_ids
    if params.bad_words:
        longest = max(len(run) for run in params.bad_words) - 1
        recent = draw.tokens[-longest:] if longest > 0 else []
        bans |= {run[-1] for run in params.bad_words if run and _ends_with(recent, run[:-1])}
    return bans


def _ends_with(tokens: Sequence[int], run: Sequence[int]) -> bool:
    return not run or tuple(tokens[-len(run) :]) == tuple(run)


def _apply(
    out: Tensor, *, biases: _Cells, repeated: _Cells, counted: _Cells, banned: _Cells
) -> None:
    """Change single scores of all rows, one kind of change after the other."""
    device = out.device
    if biases.rows:
        out[biases.where(device)] += biases.values(device)
    if repeated.rows:
        where, penalty = repeated.where(device), repeated.values(device)
        before = out[where]
        out[where] = torch.where(before > 0, before / penalty, before * penalty)
    if counted.rows:
        out[counted.where(device)] -= counted.values(device)
    if banned.rows:
        out[banned.where(device)] = -torch.inf
