"""What is left of prompts whose replica was chosen after their beginning: read off the path.

A prompt is tokenized no further than some replica could hold it. The rest is read here, by one
thread behind a bounded line, so that the index expects the whole prompt and the counts are exact:

    request    front read --> chosen --> expected: front ............ expected: whole prompt
                                 |                                          ^
    rests                        `--> rest tokenized and hashed ------------'

A sibling whose text goes on as one that is being read waits for it instead: it would be placed
without knowing where the first one went.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import structlog

from kvway_router.holding import Speculation
from kvway_router.index import BlockIndex
from kvway_router.reading import Reading

SLICE_BLOCKS: Final = 16_384
"""Blocks that are listed at once, some milliseconds of the loop's time."""

_log = structlog.get_logger(__name__)


class RestReader:
    """One thread that reads prompts to their end. It belongs to the event loop.

    Attributes:
        num_dropped: Rests that were not read because the line was full.

    Args:
        max_waiting: Rests in line at most.
    """

    def __init__(self, *, max_waiting: int = 64) -> None:
        """Makes it; the thread starts with the first rest."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kvway-rest")
        self._max_waiting = max_waiting
        self._by_key: dict[int, asyncio.Future[None]] = {}
        self._open: dict[Reading, asyncio.Future[None]] = {}
        self.num_dropped = 0

    def start(self, reading: Reading, then: Callable[[], None]) -> bool:
        """Reads a prompt to its end, and calls `then` on the loop; at once if nothing is left.

        `then` is not called if it cannot be read.

        Returns:
            Whether it is read; not if the line is full.
        """
        if reading.done:
            then()
            return True
        future = self._open.get(reading)
        if future is None:
            if len(self._open) >= self._max_waiting:
                self.num_dropped += 1
                return False
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._executor, reading.finish)
            self._open[reading] = future
            key = reading.next_key
            if key is not None:
                self._by_key[key] = future
            future.add_done_callback(lambda done: self._closed(reading, key, done))
        future.add_done_callback(
            lambda done: None if done.cancelled() or done.exception() else then()
        )
        return True

    def of_sibling(self, reading: Reading) -> asyncio.Future[None] | None:
        """Returns the reading of a prompt that goes on as this one does; None if there is none."""
        if not self._by_key:
            return None
        return next(filter(None, map(self._by_key.get, reading.piece_keys)), None)

    def close(self) -> None:
        """Lets the thread end after the rest that it has."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _closed(self, reading: Reading, key: int | None, done: asyncio.Future[None]) -> None:
        del self._open[reading]
        if key is not None and self._by_key.get(key) is done:
            del self._by_key[key]
        if not done.cancelled() and (exc := done.exception()) is not None:
            _log.error("rest_not_read", exc_info=exc)


class ExpectedBlocks:
    """The blocks that one attempt is expected to leave at its replica, while they become known.

    Of very many blocks `SLICE_BLOCKS` are listed at once, and the others in later turns of the
    event loop.

    Args:
        index: Where they are listed.
        replica_id: Where the prompt was sent.
        hashes: The blocks that are known, from the first one on.
        still: Whether the replica is what it was then; nothing more is listed once it is not.
    """

    def __init__(
        self,
        index: BlockIndex,
        replica_id: str,
        hashes: Sequence[int],
        *,
        still: Callable[[], bool] = lambda: True,
    ) -> None:
        """Lists the known blocks."""
        self._index = index
        self._replica_id = replica_id
        self._hashes = hashes
        self._still = still
        self._confirmed = False
        self._num_listed = min(len(hashes), SLICE_BLOCKS)
        self._promise: Speculation | None = index.speculate(
            replica_id, hashes if len(hashes) <= SLICE_BLOCKS else hashes[:SLICE_BLOCKS]
        )
        self._list_later()

    def extend(self, hashes: Sequence[int]) -> None:
        """Lists all blocks of the prompt, in the state that the known ones are in by now."""
        is_listing = self._num_listed < len(self._hashes)
        self._hashes = hashes
        if not is_listing:
            self._list_on()

    def _list_on(self) -> None:
        """Lists the next blocks."""
        if (self._promise is None and not self._confirmed) or not self._still():
            self._num_listed = len(self._hashes)
            return
        self._num_listed = min(len(self._hashes), self._num_listed + SLICE_BLOCKS)
        promise = self._index.speculate(self._replica_id, self._hashes[: self._num_listed])
        if self._confirmed:
            self._index.confirm(promise)
        else:
            before, self._promise = self._promise, promise
            if before is not None:
                self._index.rollback(before)
        self._list_later()

    def _list_later(self) -> None:
        """Comes back for what is not listed, after whatever else the loop has to do."""
        if self._num_listed < len(self._hashes):
            asyncio.get_running_loop().call_soon(self._list_on)

    def confirm(self) -> None:
        """Takes them as held: the replica has computed the prompt."""
        if self._promise is not None:
            self._index.confirm(self._promise)
            self._promise = None
            self._confirmed = True

    def close(self) -> None:
        """Takes back what was not confirmed, and what is still to come of it."""
        if self._promise is not None:
            self._index.rollback(self._promise)
            self._promise = None
