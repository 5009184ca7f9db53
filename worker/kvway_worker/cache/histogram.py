"""Counts by fixed bounds, as Prometheus has them, without Prometheus. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistogramReading:
    """A histogram at one moment.

    Attributes:
        bounds: Upper bounds of the buckets, rising; one more bucket has no bound.
        counts: Observations per bucket, `len(bounds) + 1` of them, not added up.
        total: Sum of all observed values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def num_observed(self) -> int:
        """Observations in all buckets."""
        return sum(self.counts)


class Histogram:
    """Counts values by fixed upper bounds, each of which belongs to its bucket.

    Args:
        bounds: Upper bounds, rising.

    Complexity:
        O(log bounds) per value; the size is fixed.
    """

    __slots__ = ("_bounds", "_counts", "_reading", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._reading: HistogramReading | None = None

    def observe(self, value: float, times: int = 1) -> None:
        """Counts one value, so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times
        self._reading = None

    def observe_unmeasured(self) -> None:
        """Counts a value that is beyond all bounds and has no size; the sum stays."""
        self._counts[-1] += 1
        self._reading = None

    def read(self) -> HistogramReading:
        """Returns the counts as they are now; costs nothing while nothing is observed."""
        if self._reading is None:
            self._reading = HistogramReading(self._bounds, tuple(self._counts), self._total)
        return self._reading
