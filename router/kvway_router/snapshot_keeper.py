"""Keeps a snapshot of the index in a file, for the router that comes after this one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from kvway_router.index import BlockIndex
from kvway_router.replicas import ReplicaSet
from kvway_router.snapshots import read_snapshot, write_snapshot

_log = structlog.get_logger(__name__)


class SnapshotKeeper:
    """Reads the file once, and writes it again and again.

    A file that cannot be read or written is logged and costs nothing but what it would have told.

    Args:
        path: The file.
        index: What is kept.
        replicas: Told what is remembered of them.
        interval_s: Time between two snapshots.
    """

    def __init__(
        self, path: Path, *, index: BlockIndex, replicas: ReplicaSet, interval_s: float = 60.0
    ) -> None:
        """Reads nothing yet."""
        self._path = path
        self._index = index
        self._replicas = replicas
        self._interval_s = interval_s
        self._writing = asyncio.Lock()

    async def load(self) -> None:
        """Has the replicas remembered as the file has them, each when it is added to the set."""
        try:
            snapshot = await asyncio.to_thread(read_snapshot, self._path)
        except (OSError, ValueError) as exc:
            _log.warning("index_snapshot_unusable", path=str(self._path), error=str(exc))
            return
        self._replicas.remember(snapshot)

    async def run(self) -> None:
        """Writes snapshots until cancelled; from the first on what was read is forgotten."""
        while True:
            await asyncio.sleep(self._interval_s)
            self._replicas.remember(None)
            await self.write()

    async def write(self) -> None:
        """Writes what is held now; waits for one that is being written."""
        async with self._writing:
            # One step of the loop: the index and the numbers are of the same moment.
            boot_ids = {replica.id: replica.boot_id for replica in self._replicas.all()}
            snapshot = self._index.snapshot(boot_ids, self._replicas.next_seqs())
            try:
                await asyncio.to_thread(write_snapshot, self._path, snapshot)
            except (OSError, ValueError, OverflowError) as exc:
                _log.warning("index_snapshot_not_written", path=str(self._path), error=str(exc))
