"""Work that takes long, done on the event loop a few milliseconds at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

from kvway_core.clock import Clock

_T = TypeVar("_T")


class Pace:
    """Shares the loop among several that have much to do, and with whoever else waits for it.

    At most one of them works between two turns of the loop, and no longer than the budget and one
    step more. They take turns, so that none waits for another to be done.

    Args:
        clock: Tells the time.
        budget_s: How long they may keep the loop, together.
    """

    def __init__(self, clock: Clock, *, budget_s: float) -> None:
        """Nobody works."""
        self._clock = clock
        self._budget_s = budget_s
        self._spent_s = 0.0
        self._turn = asyncio.Lock()

    async def work(self, steps: Generator[None, None, _T]) -> _T:
        """Does all steps, in order, and returns what they return. Short work does not suspend."""
        while True:
            async with self._turn:
                start_s = self._clock.monotonic()
                spent_s = self._spent_s
                try:
                    while self._spent_s < self._budget_s:
                        next(steps)
                        self._spent_s = spent_s + self._clock.monotonic() - start_s
                except StopIteration as done:
                    result: _T = done.value
                    return result
                self._spent_s = 0.0
                await asyncio.sleep(0)
