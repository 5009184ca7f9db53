"""Phase 1 of a request: its prompt is read from the front, as far as somebody may hold it.

What is left is counted by estimate, and read after the choice (`rests.py`). When the time is up
it is chosen for as it is, by the hash of its text if nothing of it was read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvway_router.holding import Tier
from kvway_router.index import BlockIndex
from kvway_router.reader_pool import ReaderPool
from kvway_router.reading import Reading, Route, ServedModel
from kvway_router.rests import RestReader


class Intake:
    """Reads requests.

    Args:
        model: What is served.
        index: Who holds which blocks.
        readers: Threads that read.
        parsers: Threads for what is not even parsed when its time is up: nobody tokenizes there,
            so it waits behind no long prompt.
        rests: Reads what is left here.
        max_model_len: Returns the longest context of the replicas; None if nobody says.
        timeout_s: Time for it; then a replica is chosen by what is known.
    """

    def __init__(
        self,
        *,
        model: ServedModel,
        index: BlockIndex,
        readers: ReaderPool,
        parsers: ReaderPool,
        rests: RestReader,
        max_model_len: Callable[[], int | None],
        timeout_s: float,
    ) -> None:
        """Takes what it needs."""
        self._model = model
        self._index = index
        self._readers = readers
        self._parsers = parsers
        self._rests = rests
        self._max_model_len = max_model_len
        self._timeout_s = timeout_s

    async def read(self, body: bytes, *, route: Route, sticky: str | None) -> Reading:
        """Returns a request as far as it has to be known.

        Args:
            body: As the client sent it.
            route: Where it was sent.
            sticky: What the client wants kept together; None for nothing.

        Raises:
            RequestError: No replica could serve it.
            Overloaded: Too many wait to be read.
        """
        reading = Reading(
            body,
            route=route,
            model=self._model,
            max_model_len=self._max_model_len(),
            sticky=sticky,
        )
        if route is Route.OPAQUE:
            await self._parsers.run(reading.parse)
            return reading
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._readers.run(reading.advance)
                await self._read_on(reading)
        except TimeoutError:
            reading.overdue = True
            if not reading.is_parsed:  # what is malformed must be said
                await self._parsers.run(reading.parse)
        return reading

    async def _read_on(self, reading: Reading) -> None:
        """Reads the first prompt as far as somebody may hold it."""
        while not reading.front_done:
            sibling = self._rests.of_sibling(reading)
            if sibling is not None:
                await asyncio.wait([sibling])
            hashes = reading.request.hashes
            matches = self._index.match(hashes, slowest=Tier.DISK)
            if max(matches.values(), default=0) < len(hashes):
                return
            await self._readers.run(reading.advance)
