"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the start.

    Attributes:
        generated_tokens: Tokens of answers.
        preemptions: Times a request lost its blocks and waited again.
        num_draft_rows: Times drafts of a request were computed.
        num_drafts: Drafts that were computed.
        num_accepted: Drafts that the model agreed with.
    """

    generated_tokens: int = 0
    preemptions: int = 0
    num_draft_rows: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
