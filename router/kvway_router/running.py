"""The requests that run now, and how they end when the process must."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from kvway_core.errors import ShuttingDown
from kvway_router.cut import Cut


class RunningRequests:
    """Counts what runs; on the way out it waits for that, and breaks off what takes too long."""

    def __init__(self) -> None:
        """Starts with nothing that runs."""
        self._num_running = 0
        self._cuts: set[Cut] = set()
        self._leaving = False
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def leaving(self) -> bool:
        """Whether the process is about to stop."""
        return self._leaving

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken."""
        return self._draining

    @property
    def num_running(self) -> int:
        """Requests inside `entry` now."""
        return self._num_running

    @contextmanager
    def entry(self) -> Iterator[None]:
        """Counts the request inside it as running."""
        self._num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()

    @asynccontextmanager
    async def breakable(self) -> AsyncIterator[Cut]:
        """Runs the part of a request that may be broken off.

        Raises:
            ShuttingDown: The process drains, or has drained for as long as it may.
        """
        if self._draining:
            raise ShuttingDown("The server is shutting down and takes no new requests.")
        async with Cut() as cut:
            self._cuts.add(cut)
            try:
                yield cut
            finally:
                self._cuts.discard(cut)

    def start_leaving(self) -> None:
        """Lets it be known that the process is about to stop; requests are still taken."""
        self._leaving = True

    def start_draining(self) -> None:
        """Takes nothing new from now on."""
        self._leaving = self._draining = True

    async def drain(self, *, timeout_s: float) -> None:
        """Takes nothing new, returns once nothing runs; breaks off what is left at the limit."""
        self.start_draining()
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait_idle()
        except TimeoutError:
            for cut in tuple(self._cuts):
                cut.cut(ShuttingDown("The server shut down before the answer was complete."))
            await self.wait_idle()

    async def wait_idle(self) -> None:
        """Returns once nothing runs."""
        await self._idle.wait()
