"""How a step is split into calls of the model. Pure: no tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvway_worker.scheduling.step import Row


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive tokens of one row that one call of the model computes.

    Attributes:
        row: the row.
        start: position of the first token.
        end: position behind the last one.
    """

    row: Row
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return self.end - self.start

    @property
    def token_ids(self) -> Sequence[int]:
        """These tokens."""
        return self.row.token_ids[self.start - self.row.start : self.end - self.row.start]

    @property
    def prompt_scored(self) -> range:
        """Positions whose scores are wanted for the log probability of the prompt token behind."""
        if not self.row.wants_prompt_logprobs:
            return range(0)
        return range(self.start, min(self.end, self.row.seq.num_prompt_tokens - 1))

    @property
    def sampled(self) -> range:
        """Positions whose scores are wanted to choose a token: the last one's and the drafts'."""
        if not self.row.sampling:
            return range(0)
        return range(max(self.start, self.row.end - self.row.num_drafts - 1), self.end)

    def split(self, num_tokens: int) -> tuple[Part, Part | None]:
        """Return the first tokens, and what is left if anything is."""
        middle = self.start + num_tokens
        if middle >= self.end:
            return self, None
        return replace(self, end=middle), replace(self, start=middle)


def calls(
    rows: Sequence[Row], *, num_tokens: int | None, num_prompt_scored: int
) -> Iterator[list[Part]]:
    """Split a step into calls of the model.

    The order stays, so that a row finds what an earlier one writes in the same step.

    Args:
        rows: the step.
        num_tokens: tokens of each call at most; None for as many as there are.
        num_prompt_scored: in that case, tokens of each call at most whose scores are wanted for
            the log probabilities of a prompt. It bounds the memory for scores.
    """
    limit = num_prompt_scored if num_tokens is None else num_tokens
    call: list[Part] = []
    room = limit
    for row in rows:
        rest: Part | None = Part(row, row.start, row.end)
        while rest is not None:
            cost = len(rest.prompt_scored) if num_tokens is None else rest.num_tokens
            if cost <= room:
                call.append(rest)
                room -= cost
                break
            if room:
                head, rest = rest.split(room)
                call.append(head)
            yield call
            call, room = [], limit
    if call:
        yield call
