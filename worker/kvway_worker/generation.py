"""One answer as it grows: tokens from the engine become text, and are counted."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from kvway_core.api import FinishReason
from kvway_core.clock import Clock
from kvway_core.errors import KvwayError
from kvway_core.prompts import Detokenizer, PromptEncoder
from kvway_worker.engine import EngineLoop, TokenOut
from kvway_worker.metrics import WorkerMetrics
from kvway_worker.sequence import Sequence
from kvway_worker.text import TextStream


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token added to an answer.

    Attributes:
        text: New text, often "": characters and stop strings are held until they are certain.
        num_tokens: Tokens generated so far, an end token included.
        cached_tokens: Prompt tokens whose KV was reused.
        finish_reason: Why the answer ended; None while it goes on.
    """

    text: str
    num_tokens: int
    cached_tokens: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Generator:
    """Generates answers with one engine and counts them."""

    engine: EngineLoop
    encoder: PromptEncoder
    metrics: WorkerMetrics
    clock: Clock

    async def deltas(
        self, sequence: Sequence, *, stops: tuple[str, ...]
    ) -> AsyncGenerator[Delta, None]:
        """Yield an answer token by token; the last delta, and no other, has a finish reason.

        Closing it early aborts the sequence and frees its blocks.

        Raises:
            KvwayError: What `EngineLoop.generate` raises.
        """
        text = TextStream(Detokenizer(self.encoder), stops=stops)
        meter = _Meter(self.metrics, self.clock, sequence)
        try:
            async with aclosing(self.engine.generate(sequence)) as parts:
                async for part in parts:
                    piece = _text(part, text)
                    reason: FinishReason | None = "stop" if text.stopped else part.finish_reason
                    meter.token(reason)
                    yield Delta(piece, meter.num_tokens, part.cached_tokens, reason)
                    if reason is not None:
                        return
        except KvwayError:
            meter.outcome = "error"
            raise
        finally:
            self.metrics.request_ended(meter.outcome)


def _text(part: TokenOut, text: TextStream) -> str:
    """Return the text a token adds; an end or stop token adds none of its own."""
    piece = ""
    if part.token_id is not None and part.finish_reason != "stop":
        piece = text.push(part.token_id)
    if part.finish_reason is not None and not text.stopped:
        piece += text.finish()
    return piece


class _Meter:
    """Observes when the tokens of one answer come."""

    __slots__ = ("_clock", "_last_s", "_metrics", "_sequence", "num_tokens", "outcome")

    def __init__(self, metrics: WorkerMetrics, clock: Clock, sequence: Sequence) -> None:
        self._metrics = metrics
        self._clock = clock
        self._sequence = sequence
        self._last_s = 0.0
        self.num_tokens = 0
        self.outcome = "abort"

    def token(self, finish_reason: FinishReason | None) -> None:
        now_s = self._clock.monotonic()
        since_arrival_s = now_s - self._sequence.arrival_s
        if self.num_tokens == 0:
            self._metrics.prompt_tokens.inc(self._sequence.num_prompt_tokens)
            self._metrics.ttft_s.observe(since_arrival_s)
        else:
            self._metrics.itl_s.observe(now_s - self._last_s)
        self.num_tokens += 1
        self._last_s = now_s
        if finish_reason is not None:
            self._metrics.e2e_s.observe(since_arrival_s)
            self.outcome = finish_reason
