"""What one step computes, and what it gives: the values between scheduler and engine."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass
from typing import TypeAlias

from kvway_worker.sequence import FinishReason, Sequence

Copy: TypeAlias = tuple[int, int, int]
"""From block, to block, leading tokens: KV that is copied before a step writes any."""


@dataclass(frozen=True, slots=True)
class Row:
    """The part of one request that a step computes.

    Attributes:
        seq: The request.
        start: Position of the first token to compute; the KV of [0, start) is in the blocks, or
            is written by this very step.
        num_tokens: Tokens to compute, at least 1.
        token_ids: These tokens.
        block_table: Blocks of [0, start + num_tokens), in order.
        samples: True when the step computes the last known token, so that it gives the next one.
    """

    seq: Sequence
    start: int
    num_tokens: int
    token_ids: TokenIds[int]
    block_table: TokenIds[int]
    samples: bool

    @property
    def is_prefill(self) -> bool:
        """False only for a row that computes one generated token."""
        return self.num_tokens > 1 or self.start < self.seq.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does.

    Attributes:
        step_id: Counts plans from 1.
        rows: One per request. A row may read blocks that an earlier row of the same step writes.
        copies: Done in order, before any row writes.
    """

    step_id: int
    rows: tuple[Row, ...]
    copies: tuple[Copy, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of rows that are not a single generated token."""
        return sum(row.num_tokens for row in self.rows if row.is_prefill)

    def missing(self, sampled: Container[str]) -> list[str]:
        """Returns the requests whose next token a result must have and lacks."""
        ids = (row.seq.request_id for row in self.rows if row.samples)
        return [request_id for request_id in ids if request_id not in sampled]


@dataclass(frozen=True, slots=True)
class SeqOutput:
    """What a step gave one request.

    Attributes:
        seq: The request.
        token_id: The new token; also the one that ended the answer.
        finish_reason: Why the answer ended, None while it goes on.
    """

    seq: Sequence
    token_id: int
    finish_reason: FinishReason | None
