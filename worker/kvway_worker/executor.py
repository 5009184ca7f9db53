"""CPU work off the event loop, with a bound on how much may pile up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvway_core.errors import Overloaded

T = TypeVar("T")


class BoundedExecutor:
    """Runs functions on a few threads; refuses more than `max_pending` at a time.

    Invariants:
        1. At most `max_pending` functions run or wait. One whose caller was cancelled counts
           until it ends, because it still takes a thread.
    """

    def __init__(self, *, num_threads: int, max_pending: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._slots = threading.BoundedSemaphore(max_pending)
        self._max_pending = max_pending

    async def run(self, function: Callable[[], T]) -> T:
        """Return what `function` returns, or raise what it raises.

        Raises:
            Overloaded: `max_pending` functions run or wait already.
        """
        if not self._slots.acquire(blocking=False):
            raise Overloaded(
                f"{self._max_pending} requests are being read, as many as may be; try again later."
            )
        future = self._threads.submit(function)
        future.add_done_callback(lambda _: self._slots.release())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Take no more; what runs ends on its own, what waits is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
