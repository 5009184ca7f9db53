"""How fast one replica is, learned from what is seen of it.

Prefilling u tokens behind c cached ones takes

    t = u / R + u (c + u/2) / (R A)          R tokens per second, attention doubles a token after A

which is linear in 1/R and 1/(R A). Both are fitted by least squares of the time per token of work,
older samples counting less. What long and short contexts do not tell apart is taken from the A
that is assumed at first: one sample gives R alone.
"""

from __future__ import annotations

import math
from typing import Final

from kvway_router.policy import running_mean

MIN_RATE: Final = 1.0
MAX_RATE: Final = 1e7
MIN_SAMPLE_TOKENS: Final = 128
"""Shorter prefills say more about overhead than about the rate."""
ATTENTION_RANGE: Final = 16.0
"""A is at most so many times more or less than what is assumed at first."""
_KEEP: Final = 0.85
_PRIOR_WEIGHT: Final = 0.02
_GAP_WEIGHT: Final = 0.1
MAX_STEP_S: Final = 1.0
"""No step is taken for longer: a longer gap between two tokens is somebody's pause."""
_STEP_FRESH_S: Final = 5.0
"""Time for which what was seen of steps counts in full."""
STEP_HALF_LIFE_S: Final = 10.0
"""Time in which half of it is forgotten from then on, while none is seen."""


class PrefillSample:
    """Prefills that were done in one stretch of time.

    Attributes:
        tokens: Sum of u.
        context: Sum of u (c + u/2).
        num_steps: Least number of steps they took.
    """

    __slots__ = ("context", "num_steps", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.context = 0.0
        self.num_steps = 0

    def add(self, num_uncached: int, num_cached: int, *, chunk_tokens: int) -> None:
        """Adds one prefill."""
        self.tokens += num_uncached
        self.context += num_uncached * (num_cached + num_uncached / 2.0)
        self.num_steps += -(-num_uncached // chunk_tokens)


class Rates:
    """The rates of one replica.

    Attributes:
        prefill_tokens_per_s: R, reported or else seen; None while neither.
        attention_tokens: A; None before the first sample.
        decode_step_s: Time of a decode step when last seen; None while none was.
    """

    __slots__ = (
        "_assumed",
        "_report_counts",
        "_reported",
        "_s1",
        "_s2",
        "_s11",
        "_s12",
        "_s22",
        "_seen",
        "_step_seen_s",
        "_weight",
        "attention_tokens",
        "decode_step_s",
    )

    def __init__(self, *, attention_tokens: float) -> None:
        """Starts with nothing known; `attention_tokens` is the A to assume."""
        self._assumed = attention_tokens
        self._weight = self._s1 = self._s2 = self._s11 = self._s12 = self._s22 = 0.0
        self._reported: float | None = None
        self._report_counts = False
        self._seen: float | None = None
        self.attention_tokens: float | None = None
        self.decode_step_s: float | None = None
        self._step_seen_s = 0.0

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """R; None while unknown."""
        if self._seen is not None and not self._report_counts:
            return self._seen
        return self._reported or self._seen

    def report(
        self, *, prefill_tokens_per_s: float, decode_step_s: float, now_s: float = 0.0
    ) -> None:
        """Takes what the replica measured itself, 0 for what it has not."""
        self._report_counts = prefill_tokens_per_s > 0
        if self._report_counts:
            self._reported = _bounded(prefill_tokens_per_s)
        if decode_step_s > 0:
            self.decode_step_s, self._step_seen_s = decode_step_s, now_s

    def distrust_report(self) -> None:
        """The replica says nothing any more: what is seen counts from now on, once it is."""
        self._report_counts = False

    def gap(self, seconds: float, *, now_s: float = 0.0) -> None:
        """Learns from the time between two tokens of a stream: the more, the longer ago others."""
        weight = max(_GAP_WEIGHT, 1.0 - self._step_share(now_s))
        seconds = min(seconds, MAX_STEP_S)
        self.decode_step_s = running_mean(self.decode_step_s, seconds, weight=weight)
        self._step_seen_s = now_s

    def step_s(self, now_s: float, *, fleet_s: float) -> float:
        """Returns what a decode step takes as far as is known, ever more the fleet's with time.

        One that is thought to be slow is sent nothing, so nothing else would show that it is not.
        """
        if self.decode_step_s is None:
            return 0.0
        return fleet_s + self._step_share(now_s) * (self.decode_step_s - fleet_s)

    def _step_share(self, now_s: float) -> float:
        """Returns how much what was seen of steps still counts, 0 to 1."""
        aged_s = max(0.0, now_s - self.step_aged_from_s)
        return float(0.5 ** (aged_s / STEP_HALF_LIFE_S))

    @property
    def step_aged_from_s(self) -> float:
        """When what is known of steps begins to be forgotten; infinite while nothing is."""
        if self.decode_step_s is None:
            return math.inf
        return self._step_seen_s + _STEP_FRESH_S

    def prefilled(self, sample: PrefillSample, seconds: float, *, decoding: bool) -> None:
        """Learns from a stretch of time in which the replica prefilled and did not wait.

        Args:
            sample: What it prefilled; too little teaches nothing.
            seconds: How long the stretch was.
            decoding: Whether it generated meanwhile: its steps are not counted as prefill then,
                but at least half of the time is.
        """
        if sample.tokens < MIN_SAMPLE_TOKENS or seconds <= 0:
            return
        if decoding and self.decode_step_s is not None:
            seconds = max(seconds / 2, seconds - sample.num_steps * self.decode_step_s)
        # Time per token of work as assumed: long and short prefills weigh the same.
        quadratic = sample.context / self._assumed
        work = sample.tokens + quadratic
        x1, x2, y = sample.tokens / work, quadratic / work, seconds / work
        self._weight = _KEEP * self._weight + 1.0
        self._s1 = _KEEP * self._s1 + x1 * y
        self._s2 = _KEEP * self._s2 + x2 * y
        self._s11 = _KEEP * self._s11 + x1 * x1
        self._s12 = _KEEP * self._s12 + x1 * x2
        self._s22 = _KEEP * self._s22 + x2 * x2
        self.attention_tokens = attention = self._fitted_attention()
        # With A given, the 1/R that makes the errors least.
        ratio = self._assumed / attention
        product = self._s1 + ratio * self._s2
        square = self._s11 + 2.0 * ratio * self._s12 + ratio**2 * self._s22
        self._seen = _bounded(square / product)

    def _fitted_attention(self) -> float:
        """Returns A: how 1/R relates to 1/(R A) in the best fit of both."""
        # One more row: "A is as assumed", as heavy as a small share of one mean sample.
        prior = _PRIOR_WEIGHT * self._s11 / self._weight
        s11, s12, s22 = self._s11 + prior, self._s12 - prior, self._s22 + prior
        plain = s22 * self._s1 - s12 * self._s2
        quadratic = s11 * self._s2 - s12 * self._s1
        if plain <= 0:
            return self._assumed / ATTENTION_RANGE
        share = min(ATTENTION_RANGE, max(1.0 / ATTENTION_RANGE, quadratic / plain))
        return self._assumed / share


def _bounded(rate: float) -> float:
    return min(MAX_RATE, max(MIN_RATE, rate))
