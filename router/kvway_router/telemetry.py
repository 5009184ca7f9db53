"""What a replica says of its load, in one form whatever kind of engine it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from kvway_core.api import LoadReport


@dataclass(frozen=True, slots=True)
class Telemetry:
    """How busy a replica says it is.

    Attributes:
        num_running: Requests in its batch.
        num_waiting: Requests in its queue.
        waiting_tokens: Prompt tokens that it has still to compute, queued or begun; None of an
            engine that does not count them.
        used_tokens: Tokens of KV that requests hold; None where it does not say.
        total_tokens: Tokens of KV that it can hold; None where it does not say.
        prefill_tokens_per_s: Its own measure; 0 where it has none.
        decode_step_s: The same.
        lag_s: How old its counts may have been when they were asked for, seconds.
    """

    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int | None = None
    used_tokens: int | None = None
    total_tokens: int | None = None
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    lag_s: float = 0.0

    @classmethod
    def of(cls, report: LoadReport) -> Self:
        """Returns what a kvway worker reports."""
        blocks = report.blocks
        return cls(
            num_running=report.num_running,
            num_waiting=report.num_waiting,
            waiting_tokens=report.waiting_uncached_tokens,
            used_tokens=max(0, blocks.total - blocks.free - blocks.cached) * report.block_size,
            total_tokens=blocks.total * report.block_size,
            prefill_tokens_per_s=report.prefill_tokens_per_s,
            decode_step_s=report.decode_step_s,
        )
