"""One answer as it grows: tokens from the engine become text, and are counted."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from kvway_core.api import FinishReason
from kvway_core.clock import Clock
from kvway_core.errors import EngineFailed, KvwayError
from kvway_core.prompts import PromptEncoder
from kvway_worker.api.text import TextRules, TextStream
from kvway_worker.engine import EngineLoop, TokenOut
from kvway_worker.metrics import WorkerMetrics
from kvway_worker.scheduling.sampling_params import SamplingParams, TokenLogprobs
from kvway_worker.scheduling.sequence import Sequence
from kvway_worker.streams import TokenStream


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token added to an answer.

    Attributes:
        text: New text, often "": characters and stop strings are held until they are certain.
        token_id: The token; None at the end of an answer that was aborted.
        num_tokens: Tokens generated so far, an end token included.
        cached_tokens: Prompt tokens whose KV was reused.
        finish_reason: Why the answer ended; None while it goes on.
        stop_reason: The stop string or the request's stop token that ended it, else None.
        logprobs: Of the token, if asked for.
        prompt_logprobs: Of the prompt's tokens from the second on, in the first delta, if asked
            for.
    """

    text: str
    token_id: int | None
    num_tokens: int
    cached_tokens: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Generator:
    """Generates answers with one engine and counts them."""

    engine: EngineLoop
    encoder: PromptEncoder
    metrics: WorkerMetrics
    clock: Clock

    async def deltas(
        self, stream: TokenStream, rules: TextRules, *, counts_prompt: bool = True
    ) -> AsyncGenerator[Delta, None]:
        """Yield an answer token by token; the last delta, and no other, has a finish reason.

        Closing it early aborts the sequence and frees its blocks.

        Args:
            stream: The engine's answer.
            rules: What of it is shown.
            counts_prompt: Whether its prompt counts in the metrics: once for all answers to it.

        Raises:
            KvwayError: What reading a `TokenStream` raises.
        """
        text = TextStream(self.encoder, rules)
        meter = _Meter(self.metrics, self.clock, stream.seq, counts_prompt=counts_prompt)
        try:
            async with aclosing(stream):
                async for part in stream:
                    _check_logprobs(part, stream.seq.params)
                    piece = _text(part, text, rules)
                    reason: FinishReason | None = "stop" if text.met else part.finish_reason
                    meter.part(part, reason)
                    yield Delta(
                        piece,
                        part.token_id,
                        meter.num_tokens,
                        part.cached_tokens,
                        reason,
                        _stop_reason(part, text, rules),
                        part.logprobs,
                        part.prompt_logprobs,
                    )
                    if reason is not None:
                        return
        except KvwayError:
            meter.outcome = "error"
            raise
        finally:
            self.metrics.request_ended(meter.outcome)


def _text(part: TokenOut, text: TextStream, rules: TextRules) -> str:
    """Return the text a token adds; an end or stop token adds its own only if it is to."""
    piece = ""
    if part.token_id is not None and (part.finish_reason != "stop" or rules.include_stop):
        piece = text.push(part.token_id)
    if part.finish_reason is not None and not text.met:
        piece += text.finish()
    return piece


def _stop_reason(part: TokenOut, text: TextStream, rules: TextRules) -> int | str | None:
    if text.met is not None:
        return text.met
    ended = part.finish_reason == "stop" and part.token_id in rules.stop_token_ids
    return part.token_id if ended else None


def _check_logprobs(part: TokenOut, params: SamplingParams) -> None:
    """Raise EngineFailed if the engine does not tell what was asked for."""
    if params.logprobs is not None and part.token_id is not None and part.logprobs is None:
        raise EngineFailed("The engine gave no log probabilities for a token.")


class _Meter:
    """Observes when the tokens of one answer come."""

    __slots__ = (
        "_clock",
        "_counts_prompt",
        "_last_s",
        "_metrics",
        "_sequence",
        "num_tokens",
        "outcome",
    )

    def __init__(
        self, metrics: WorkerMetrics, clock: Clock, sequence: Sequence, *, counts_prompt: bool
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._sequence = sequence
        self._counts_prompt = counts_prompt
        self._last_s = 0.0
        self.num_tokens = 0
        self.outcome = "abort"

    def part(self, part: TokenOut, finish_reason: FinishReason | None) -> None:
        now_s = self._clock.monotonic()
        since_arrival_s = now_s - self._sequence.arrival_s
        if part.token_id is not None:
            if self.num_tokens:
                self._metrics.itl_s.observe(now_s - self._last_s)
            else:
                self._first_token(since_arrival_s)
            self.num_tokens += 1
            self._last_s = now_s
        if finish_reason is not None:
            self._metrics.e2e_s.observe(since_arrival_s)
            self.outcome = finish_reason

    def _first_token(self, since_arrival_s: float) -> None:
        if self._counts_prompt:
            self._metrics.prompt_tokens.inc(self._sequence.num_prompt_tokens)
        self._metrics.ttft_s.observe(since_arrival_s)
