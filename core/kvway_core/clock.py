"""Time as a value that is passed in, so that tests can move it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time."""

    def monotonic(self) -> float:
        """Returns seconds since some fixed moment; never goes back."""
        ...

    def time(self) -> float:
        """Returns Unix time in seconds; may jump."""
        ...


class SystemClock:
    """The machine's clock."""

    __slots__ = ()

    def monotonic(self) -> float:
        """Returns seconds since some fixed moment; never goes back."""
        return time.monotonic()

    def time(self) -> float:
        """Returns Unix time in seconds; may jump."""
        return time.time()
