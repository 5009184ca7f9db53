"""Threads for CPU work, so that one long prompt delays neither others' streams nor the probes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvway_core.errors import Overloaded

_Result = TypeVar("_Result")


class ReaderPool:
    """A few threads for CPU work, and a bounded line in front of them.

    The loop keeps the line, not the executor: who gives up waiting leaves nothing behind.
    """

    def __init__(self, *, num_threads: int, max_waiting: int) -> None:
        """Makes a pool; its threads start with the first work."""
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="kvway-reader")
        self._free = asyncio.Semaphore(num_threads)
        self._max_waiting = max_waiting
        self._num_waiting = 0

    @property
    def num_waiting(self) -> int:
        """Pieces of work in line."""
        return self._num_waiting

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Runs `work` in a thread and returns its result, or raises what it raised.

        Raises:
            Overloaded: The line is full.
        """
        if self._free.locked() and self._num_waiting >= self._max_waiting:
            raise Overloaded("Too many prompts are waiting to be read; come back in a second.")
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        future.add_done_callback(lambda _: self._free.release())
        return await asyncio.shield(future)

    def close(self) -> None:
        """Lets the threads end after the work they have."""
        self._executor.shutdown(wait=False, cancel_futures=True)
