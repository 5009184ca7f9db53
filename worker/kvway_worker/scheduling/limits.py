"""What a worker can run at all. Pure; values that any thread may read."""

from __future__ import annotations

from dataclasses import dataclass

from kvway_core.errors import ContextLengthExceeded, InvalidRequest
from kvway_worker.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes that decide whether a request can ever run.

    Attributes:
        max_num_seqs: Requests in one step at most.
        max_num_batched_tokens: Tokens in one step at most, at least `max_num_seqs`.
        max_model_len: Tokens of prompt and answer at most.
        num_blocks: Blocks there are.
        block_size: Tokens per block.

    Raises:
        ValueError: If requests could starve.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), and that at least 1"
            )

    def validate(self, seq: Sequence) -> None:
        """Refuses a request that can never run, alone or with its forks.

        Raises:
            ContextLengthExceeded: If prompt and answer do not fit the context or the pool.
            InvalidRequest: If no token is asked for, or more answers than run at once.
            ValueError: If the sequence was made for another block size, or a fork differs from
                its request in more than its id and how its answer is chosen.
        """
        if seq.namespace.block_size != self.block_size:
            raise ValueError(
                f"sequence of block size {seq.namespace.block_size} in a pool of {self.block_size}"
            )
        num_answers = 1 + len(seq.forks)
        if num_answers > self.max_num_seqs:
            raise InvalidRequest(
                f"n is {num_answers}; this worker runs {self.max_num_seqs} answers at once at "
                "most. Ask for fewer, or in several requests.",
                param="n",
            )
        self._validate_length(seq)
        for fork in seq.forks:
            if fork.forks or _what_forks_share(fork) != _what_forks_share(seq):
                raise ValueError(
                    "a fork has the prompt of its request, asks for as many of its log "
                    "probabilities, matters and is kept as much, and has no forks"
                )
            self._validate_length(fork)

    def _validate_length(self, seq: Sequence) -> None:
        if seq.params.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1.", param="max_tokens")
        wanted = seq.num_prompt_tokens + seq.params.max_tokens
        what = (
            f"The prompt has {seq.num_prompt_tokens} tokens and {seq.params.max_tokens} more are "
            f"asked for, together {wanted}"
        )
        if wanted > self.max_model_len:
            raise ContextLengthExceeded(
                f"{what}; the context has {self.max_model_len}. Shorten one of them."
            )
        # The last token of an answer is never fed back, so its KV needs no place.
        capacity = self.num_blocks * self.block_size
        if wanted - 1 > capacity:
            raise ContextLengthExceeded(
                f"{what}; the KV cache of this worker holds {capacity}. Shorten one of them."
            )


def _what_forks_share(seq: Sequence) -> tuple[object, ...]:
    """Returns what is done once for a request and its forks, so that they must want the same."""
    wanted = seq.params.prompt_logprobs, seq.priority, seq.ephemeral
    return (seq.namespace, seq.token_ids, *wanted)
