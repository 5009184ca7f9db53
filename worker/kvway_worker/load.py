"""How busy a worker is and how fast it works: values that the step thread hands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvway_worker.cache.cache_stats import CacheReading
from kvway_worker.cache.eviction import Tier
from kvway_worker.cache.histogram import Histogram, HistogramReading
from kvway_worker.scheduling.scheduler import Scheduler
from kvway_worker.scheduling.step import StepPlan
from kvway_worker.streams import Stream

PREFILL_WINDOW_TOKENS: Final = 8192
"""Prefilled tokens after which a measurement counts half."""
MIN_PREFILL_TOKENS: Final = 128
"""Prefill steps below it say more about what any step takes than about the rate: not counted."""
DECODE_SMOOTHING: Final = 0.1
"""Weight of the newest decode step in the average."""
REQUEST_BUCKETS_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
REQUEST_BUCKETS_TOKENS: Final = tuple(
    float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)
)
STEP_BUCKETS_TOKENS: Final = (1.0, *(float(2**power) for power in range(3, 15)))


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step that was computed.

    Attributes:
        duration_s: Time the engine took.
        num_prefill_tokens: Tokens of prompts, or computed again after a preemption.
        num_decode_tokens: Generated tokens that were fed back.
    """

    duration_s: float
    num_prefill_tokens: int
    num_decode_tokens: int

    @classmethod
    def of(cls, plan: StepPlan, *, duration_s: float) -> StepStats:
        """Returns the statistics of a plan that took `duration_s`."""
        num_prefill = plan.num_prefill_tokens
        return cls(duration_s, num_prefill, plan.num_tokens - num_prefill)


class Rates:
    """Prefill rate and decode step time, learned from the steps themselves.

    Attributes:
        decode_step_s: Average time of steps without prefill, newest first in weight; 0 until one
            was seen.
    """

    __slots__ = ("_prefill_s", "_prefill_tokens", "decode_step_s")

    def __init__(self) -> None:
        self.decode_step_s = 0.0
        self._prefill_tokens = 0.0
        self._prefill_s = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens per second of prefill, older ones counting less; 0 until one was seen."""
        return self._prefill_tokens / self._prefill_s if self._prefill_s > 0 else 0.0

    def observe(self, step: StepStats) -> None:
        """Learns from one step.

        Of a step that does both, what a decode step alone takes is not counted as prefill, but
        at least half of it is. Small prefills are not counted: a short prompt would make a worker
        look slow for long ones, and sends them elsewhere.
        """
        if not step.num_prefill_tokens:
            known = self.decode_step_s or step.duration_s
            self.decode_step_s = known + DECODE_SMOOTHING * (step.duration_s - known)
            return
        if step.num_prefill_tokens < MIN_PREFILL_TOKENS:
            return
        prefill_s = step.duration_s
        if step.num_decode_tokens:
            prefill_s = max(prefill_s / 2, prefill_s - self.decode_step_s)
        keep = 0.5 ** (step.num_prefill_tokens / PREFILL_WINDOW_TOKENS)
        self._prefill_tokens = keep * self._prefill_tokens + step.num_prefill_tokens
        self._prefill_s = keep * self._prefill_s + prefill_s


@dataclass(frozen=True, slots=True)
class Spans:
    """Where requests spent their time, and how long they were.

    Attributes:
        queue_s: From being handed over to a first place, seconds.
        prefill_s: From there to the first token.
        decode_s: From there to the end; of requests that ended in any way but an error.
        prompt_tokens: Of the same.
        generation_tokens: Of the same.
        step_tokens: Tokens computed per step.
    """

    queue_s: HistogramReading
    prefill_s: HistogramReading
    decode_s: HistogramReading
    prompt_tokens: HistogramReading
    generation_tokens: HistogramReading
    step_tokens: HistogramReading


@dataclass(frozen=True, slots=True)
class AttentionReading:
    """How an engine attends, and what it read once for several requests. Counted from the start.

    Attributes:
        implementation: Name of what attends.
        reason: Why it was chosen.
        cascade: "on", or why shared prefixes are not read once.
        num_shared_steps: Steps in which a shared prefix was read once.
        num_passes: Shared runs of blocks that were read once.
        num_tokens_once: Tokens of these runs.
        num_tokens_saved: Tokens that the other members of the runs did not read again.
        costs_s: What attention costs in one layer on this machine, seconds, by the names of
            `CascadeCosts`; empty where nothing is shared.
    """

    implementation: str
    reason: str
    cascade: str
    num_shared_steps: int
    num_passes: int
    num_tokens_once: int
    num_tokens_saved: int
    costs_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine loop at one moment. Counters count from the start.

    Attributes:
        num_running: Requests in the batch.
        num_waiting: Requests that wait for a place, those just handed over included.
        waiting_uncached_tokens: Prompt tokens that are neither cached nor computed yet.
        num_free_blocks: Blocks that can be allocated; cached ones are among them.
        num_cached_blocks: Blocks nobody holds whose content can be hit.
        num_pinned_blocks: Blocks that a pin keeps, held or not.
        num_blocks: Blocks there are.
        prefill_tokens_per_s: Measured; 0 until known.
        decode_step_s: Measured time of a step without prefill, seconds; 0 until known.
        generated_tokens: Tokens sampled.
        preemptions: Times a request lost its blocks and waited again.
        num_draft_rows: Times drafts of a request were computed.
        num_drafts: Drafts that were computed.
        num_accepted: Drafts that the model agreed with.
        evictions: Cached blocks given up for new content, by tier.
        num_steps: Steps that were computed.
        num_failed_steps: Steps that raised.
        step_time_s: Time of all computed steps together, seconds.
        spans: Where requests spent their time.
        cache: Hits, misses and the lives of blocks.
        attention: What attends; None of an engine that computes no attention.
    """

    num_running: int
    num_waiting: int
    waiting_uncached_tokens: int
    num_free_blocks: int
    num_cached_blocks: int
    num_pinned_blocks: int
    num_blocks: int
    prefill_tokens_per_s: float
    decode_step_s: float
    generated_tokens: int
    preemptions: int
    num_draft_rows: int
    num_drafts: int
    num_accepted: int
    evictions: Mapping[Tier, int]
    num_steps: int
    num_failed_steps: int
    step_time_s: float
    spans: Spans
    cache: CacheReading
    attention: AttentionReading | None


class Meter:
    """Adds up the steps and the requests of one engine loop.

    Attributes:
        num_failed_steps: Steps that raised.
    """

    def __init__(self) -> None:
        self.num_failed_steps = 0
        self._num_steps = 0
        self._step_time_s = 0.0
        self._rates = Rates()
        self._queue_s = Histogram(REQUEST_BUCKETS_S)
        self._prefill_s = Histogram(REQUEST_BUCKETS_S)
        self._decode_s = Histogram(REQUEST_BUCKETS_S)
        self._prompt_tokens = Histogram(REQUEST_BUCKETS_TOKENS)
        self._generation_tokens = Histogram(REQUEST_BUCKETS_TOKENS)
        self._step_tokens = Histogram(STEP_BUCKETS_TOKENS)

    def scheduled(self, stream: Stream, now_s: float) -> None:
        """Takes note of a request that got its first place."""
        stream.scheduled_s = now_s
        self._queue_s.observe(now_s - stream.submitted_s)

    def first_token(self, stream: Stream, now_s: float) -> None:
        """Takes note of a request whose first token is known."""
        stream.first_token_s = now_s
        if stream.scheduled_s is not None:
            self._prefill_s.observe(now_s - stream.scheduled_s)

    def ended(self, stream: Stream, now_s: float) -> None:
        """Takes note of a request that was answered or aborted."""
        if stream.first_token_s is not None:
            self._decode_s.observe(now_s - stream.first_token_s)
        self._prompt_tokens.observe(stream.seq.num_prompt_tokens)
        self._generation_tokens.observe(stream.seq.num_output_tokens)

    def observe(self, step: StepStats) -> None:
        """Counts a step that was computed."""
        self._num_steps += 1
        self._step_time_s += step.duration_s
        self._step_tokens.observe(step.num_prefill_tokens + step.num_decode_tokens)
        self._rates.observe(step)

    def read(self, scheduler: Scheduler, attention: AttentionReading | None) -> EngineLoad:
        """Returns the load now, between steps."""
        pool, counters = scheduler.pool, scheduler.counters
        return EngineLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            waiting_uncached_tokens=scheduler.waiting_uncached_tokens(),
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_pinned_blocks=pool.num_pinned,
            num_blocks=pool.num_blocks,
            prefill_tokens_per_s=self._rates.prefill_tokens_per_s,
            decode_step_s=self._rates.decode_step_s,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            num_draft_rows=counters.num_draft_rows,
            num_drafts=counters.num_drafts,
            num_accepted=counters.num_accepted,
            evictions=dict(pool.evictions),
            num_steps=self._num_steps,
            num_failed_steps=self.num_failed_steps,
            step_time_s=self._step_time_s,
            spans=Spans(
                queue_s=self._queue_s.read(),
                prefill_s=self._prefill_s.read(),
                decode_s=self._decode_s.read(),
                prompt_tokens=self._prompt_tokens.read(),
                generation_tokens=self._generation_tokens.read(),
                step_tokens=self._step_tokens.read(),
            ),
            cache=pool.stats.read(),
            attention=attention,
        )
