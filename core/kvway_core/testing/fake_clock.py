"""A clock that moves when told to."""

from __future__ import annotations


class FakeClock:
    """A `Clock` for tests: time stands still until `advance`."""

    __slots__ = ("_monotonic_s", "_time_s")

    def __init__(self, *, monotonic_s: float = 0.0, time_s: float = 1_700_000_000.0) -> None:
        self._monotonic_s = monotonic_s
        self._time_s = time_s

    def monotonic(self) -> float:
        """Returns seconds, moved only by `advance`."""
        return self._monotonic_s

    def time(self) -> float:
        """Returns Unix time in seconds, moved only by `advance`."""
        return self._time_s

    def advance(self, seconds: float) -> None:
        """Moves both times on.

        Raises:
            ValueError: If seconds is negative.
        """
        if seconds < 0:
            raise ValueError(f"time cannot go back, got {seconds}")
        self._monotonic_s += seconds
        self._time_s += seconds
