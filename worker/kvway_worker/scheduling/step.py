"""What one step computes, and what it gives: the values between scheduler and engine."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field
from typing import TypeAlias

from kvway_worker.scheduling.sampling_params import TokenLogprobs
from kvway_worker.scheduling.sequence import FinishReason, Sequence

Copy: TypeAlias = tuple[int, int, int]
"""From block, to block, leading tokens: KV that is copied before a step writes any."""


@dataclass(frozen=True, slots=True)
class Row:
    """The part of one request that a step computes.

    Attributes:
        seq: The request.
        start: Position of the first token to compute; the KV of [0, start) is in the blocks, or
            is written by this very step.
        num_tokens: Tokens to compute, at least 1, drafts included.
        token_ids: These tokens.
        block_table: Blocks of [0, start + num_tokens), in order.
        sampling: Who gets a next token when this is computed: the request itself, and behind it
            those that fork off here. Empty while known tokens are left to compute.
        num_drafts: So many of the last tokens are guesses. They are computed to be compared with
            what is sampled; the first that differs, and all behind it, are not used.
    """

    seq: Sequence
    start: int
    num_tokens: int
    token_ids: TokenIds[int]
    block_table: TokenIds[int]
    sampling: tuple[Sequence, ...] = ()
    num_drafts: int = 0

    @property
    def end(self) -> int:
        """Position behind the last token to compute."""
        return self.start + self.num_tokens

    @property
    def is_prefill(self) -> bool:
        """False only for a row that computes one generated token, and drafts behind it."""
        return self.num_tokens - self.num_drafts > 1 or self.start < self.seq.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the log probabilities of the prompt tokens in (start, end] are asked for."""
        asked = self.seq.params.prompt_logprobs is not None
        return asked and self.start + 1 < self.seq.num_prompt_tokens


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
        """Tokens the step computes, drafts included."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_drafts(self) -> int:
        """Guesses among the tokens that the step computes."""
        return sum(row.num_drafts for row in self.rows)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of rows that are not a single generated token."""
        return sum(row.num_tokens for row in self.rows if row.is_prefill)

    def missing(self, result: StepResult) -> list[str]:
        """Returns the requests for which a result lacks a token, or has more than it may."""
        return [
            seq.request_id
            for row in self.rows
            for seq in row.sampling
            if not 1 <= result.num_sampled(seq.request_id) <= 1 + row.num_drafts
        ]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step chose for one request.

    Attributes:
        token_ids: The accepted drafts, then the token sampled behind them: at least one.
        logprobs: Of each of these, when the request asks for them; else empty.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an engine gives for a step.

    Attributes:
        sampled: Request id -> what was chosen, for everyone in a row's `sampling`.
        prompt_logprobs: Request id -> of the prompt tokens at row.start + 1 and on, as many as
            the row's scores cover; for rows that want them.
    """

    sampled: Mapping[str, Sampled]
    prompt_logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)

    def num_sampled(self, request_id: str) -> int:
        """Returns how many tokens a request got."""
        sampled = self.sampled.get(request_id)
        return 0 if sampled is None else len(sampled.token_ids)


@dataclass(frozen=True, slots=True)
class SeqOutput:
    """One new token of a request. A step with accepted drafts gives several.

    Attributes:
        seq: The request.
        token_id: The new token; also the one that ended the answer.
        finish_reason: Why the answer ended, None while it goes on.
        logprobs: Of the token, when asked for.
    """

    seq: Sequence
    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None
