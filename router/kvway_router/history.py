"""The last hour as a line of samples: what the page draws without any other store.

    counters   ---- 5 s ---- 5 s ---- ...     differences of the totals since the start
    gauges         .        .        .        as they are at the end of each
    TTFT       [ ... ]  [ ... ]  [ ... ]      50th and 95th percentile of the streams of each

Pure: it is told the time and the numbers. Of each replica the last five minutes are kept.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from kvway_router.fleet import TokenCounts

STEP_S: Final = 5.0
NUM_SAMPLES: Final = 720
"""One hour."""
NUM_RECENT: Final = 60
"""Five minutes: how far the numbers of a replica reach back."""
MAX_TTFTS: Final = 512
"""Times to first token that are kept of one step, chosen at random if there are more."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in one step, and how it was at its end.

    Attributes:
        time: Its end, Unix seconds.
        span_s: Its length.
        requests: Requests that got an answer of status 200 to its end.
        failed: Requests that broke off, or got a status of 500 or more.
        prompt_tokens: Of answers that told cached tokens.
        ceiling_tokens: Of those: tokens that had been sent before, to whomever.
        reachable_tokens: Tokens that the replica with the longest match held, by the index.
        matched_tokens: Tokens that the chosen one held, by the index.
        cached_tokens: Tokens that it said it had cached.
        ttft_p50_s: Time to first token of streams; None if there were none.
        ttft_p95_s: The same.
        predicted_ttft_s: Mean of what was predicted for them.
        in_flight: Requests at replicas.
        waiting: Requests that wait in the router.
        queued_prefill_s: Prefill work sent and not done, of all replicas.
        ready: Replicas that are ready.
    """

    time: float
    span_s: float
    requests: int
    failed: int
    prompt_tokens: int
    ceiling_tokens: int
    reachable_tokens: int
    matched_tokens: int
    cached_tokens: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    predicted_ttft_s: float | None
    in_flight: int
    waiting: int
    queued_prefill_s: float
    ready: int


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """How it is at one moment.

    Attributes:
        in_flight: Requests at each replica.
        waiting: Requests that wait in the router.
        queued_prefill_s: Prefill work sent and not done, of all replicas.
        ready: Replicas that are ready.
    """

    in_flight: Mapping[str, int]
    waiting: int
    queued_prefill_s: float
    ready: int


class ReplicaHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The last five minutes of one replica.

    Attributes:
        counts: What was counted in them.
        in_flight: Requests there, one number per step, the newest last.
    """

    counts: TokenCounts
    in_flight: list[int]


class HistoryView(msgspec.Struct, frozen=True, kw_only=True):
    """What ``GET /admin/history`` answers.

    Attributes:
        started: When the router started, Unix seconds: with another number all is new.
        step_s: Seconds between two samples.
        samples: Those asked for, the oldest first.
        recent_s: How far the numbers of replicas reach back.
        replicas: By id.
    """

    started: float
    step_s: float
    samples: list[Sample]
    recent_s: float
    replicas: dict[str, ReplicaHistory]


class History:
    """Samples of the last hour. Bounded; not thread-safe.

    Args:
        now_s: When it begins, Unix seconds.
        rng: Chooses which times to first token are kept.
    """

    def __init__(self, now_s: float, *, rng: random.Random) -> None:
        """Nothing has happened yet."""
        self.started_s = now_s
        self._rng = rng
        self._samples: deque[Sample] = deque(maxlen=NUM_SAMPLES)
        self._totals = TokenCounts()
        self._ttfts: list[float] = []
        self._num_streams = 0
        self._num_failed = 0
        self._counts: deque[Mapping[str, TokenCounts]] = deque([{}], maxlen=NUM_RECENT + 1)
        self._in_flight: deque[Mapping[str, int]] = deque(maxlen=NUM_RECENT)

    def saw_ttft(self, ttft_s: float) -> None:
        """Takes in the time to first token of a stream."""
        self._num_streams += 1
        if len(self._ttfts) < MAX_TTFTS:
            self._ttfts.append(ttft_s)
        elif (place := self._rng.randrange(self._num_streams)) < MAX_TTFTS:
            self._ttfts[place] = ttft_s

    def saw_failure(self) -> None:
        """Counts a request that failed."""
        self._num_failed += 1

    def sample(
        self, now_s: float, totals: TokenCounts, gauges: Gauges, counts: Mapping[str, TokenCounts]
    ) -> None:
        """Ends a step.

        Args:
            now_s: Unix seconds.
            totals: Counts since the start, of all replicas.
            gauges: How it is now.
            counts: Counts since the start, of each replica.
        """
        before_s = self._samples[-1].time if self._samples else self.started_s
        more = totals.minus(self._totals)
        ttfts = sorted(self._ttfts)
        self._samples.append(
            Sample(
                time=now_s,
                span_s=max(0.001, now_s - before_s),
                requests=more.requests,
                failed=self._num_failed,
                prompt_tokens=more.prompt_tokens,
                ceiling_tokens=more.ceiling_tokens,
                reachable_tokens=more.reachable_tokens,
                matched_tokens=more.matched_tokens,
                cached_tokens=more.cached_tokens,
                ttft_p50_s=_percentile(ttfts, 0.50),
                ttft_p95_s=_percentile(ttfts, 0.95),
                predicted_ttft_s=more.predicted_ttft_s / more.streams if more.streams else None,
                in_flight=sum(gauges.in_flight.values()),
                waiting=gauges.waiting,
                queued_prefill_s=gauges.queued_prefill_s,
                ready=gauges.ready,
            )
        )
        self._totals = totals
        self._ttfts, self._num_streams, self._num_failed = [], 0, 0
        self._counts.append(counts)
        self._in_flight.append(gauges.in_flight)

    def view(self, counts: Mapping[str, TokenCounts], *, since_s: float = 0.0) -> HistoryView:
        """Returns the samples after `since_s`, and what is known of the replicas of `counts`.

        Args:
            counts: Counts since the start, of each replica that is there now.
            since_s: Unix seconds.
        """
        before = self._counts[0]
        return HistoryView(
            started=self.started_s,
            step_s=STEP_S,
            samples=[sample for sample in self._samples if sample.time > since_s],
            recent_s=STEP_S * NUM_RECENT,
            replicas={
                name: ReplicaHistory(
                    counts=now.minus(before.get(name, TokenCounts())),
                    in_flight=[each.get(name, 0) for each in self._in_flight],
                )
                for name, now in counts.items()
            },
        )


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    """Returns the smallest value that at least this share does not exceed; None of nothing."""
    if not ordered:
        return None
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
