"""What the failures of a replica say against it: seconds in its cost, less as time passes.

A replica that fails at once is always idle, so by its load alone it would be the cheapest for all
that nobody holds. Each failure costs it `FAILURE_S`; half of that is forgotten in `HALF_LIFE_S`.
So it is asked again, ever less often while it goes on failing, and where all fail none is shut
out.
"""

from __future__ import annotations

import math
from typing import Final

FAILURE_S: Final = 5.0
"""What one failure costs, seconds."""
HALF_LIFE_S: Final = 10.0
"""Time in which half of it is forgotten."""
MOST_S: Final = 60.0
"""What all failures together cost at most, seconds."""
_LEAST_S: Final = 0.01
"""Less than this is forgotten altogether."""


class Failures:
    """The failures of one replica. It knows no time: it is told."""

    __slots__ = ("_cost_s", "_noted_s")

    def __init__(self) -> None:
        """Starts without any."""
        self._cost_s = 0.0
        self._noted_s = -math.inf

    def note(self, now_s: float) -> None:
        """Adds a failure."""
        self._cost_s = min(MOST_S, self.cost_s(now_s) + FAILURE_S)
        self._noted_s = now_s

    def forgive(self, now_s: float, *, noted_s: float) -> None:
        """Takes back what is left of a failure that was noted at `noted_s`."""
        left_s = FAILURE_S * 0.5 ** ((now_s - noted_s) / HALF_LIFE_S)
        self._cost_s = max(0.0, self.cost_s(now_s) - left_s)
        self._noted_s = now_s

    def cost_s(self, now_s: float) -> float:
        """Returns what they cost now, seconds; `now_s` is not before that of the last failure."""
        if not self._cost_s:
            return 0.0
        cost_s = self._cost_s * 0.5 ** ((now_s - self._noted_s) / HALF_LIFE_S)
        return cost_s if cost_s >= _LEAST_S else 0.0
