"""The feeds of all replicas: which there are, what each means to the index, how far each has got.

A kvway worker says where it publishes and how it hashes. For any other engine an option says where
(`feed_source.py`), and its blocks are hashed again from their tokens (`rehash.py`). An engine with
several data-parallel ranks has a feed and a name in the index for each: a prompt is matched by one
rank, never by pieces of several.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import structlog
import zmq.asyncio

from kvway_core.api import LoadReport
from kvway_core.blocks import SCHEME, Namespace
from kvway_core.clock import Clock
from kvway_router.block_events import BlockEvents, OwnBlocks
from kvway_router.feed import ReplicaFeed
from kvway_router.feed_source import EventsOption, FeedSource, find_option
from kvway_router.feed_state import FeedOptions, FeedPosition
from kvway_router.index import BlockIndex
from kvway_router.pacing import Pace
from kvway_router.rehash import EngineBlocks
from kvway_router.replica import Replica

_log: Final = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Followed:
    """A feed and the task that runs it."""

    feed: ReplicaFeed
    task: asyncio.Task[None]


class ReplicaFeeds:
    """Has the KV events of replicas followed.

    Args:
        index: What is kept true.
        clock: Tells the time.
        namespace: Of the served model: what prompts are hashed in.
        options: How KV events are read.
        sources: Where engines publish that do not say it themselves.
    """

    def __init__(
        self,
        *,
        index: BlockIndex,
        clock: Clock,
        namespace: Namespace,
        options: FeedOptions,
        sources: Sequence[EventsOption] = (),
    ) -> None:
        """Follow nobody yet."""
        self._index = index
        self._clock = clock
        self._namespace = namespace
        self._options = options
        self._pace = Pace(clock, budget_s=options.turn_s)
        self._sources = sources
        self._followed: dict[str, list[_Followed]] = {}
        self._positions: dict[str, FeedPosition] = {}
        self._not_understood: set[str] = set()

    # -- questions ------------------------------------------------------------------------------

    def of(self, replica_id: str) -> list[ReplicaFeed]:
        """Returns the feeds of a replica, one for each publisher."""
        return [followed.feed for followed in self._followed.get(replica_id, ())]

    def is_fed(self, replica_id: str) -> bool:
        """Tells whether KV events keep the index true to a replica now."""
        feeds = self.of(replica_id)
        return bool(feeds) and all(feed.is_up for feed in feeds)

    def position(self, replica: Replica) -> int | None:
        """Returns the number of the next batch of a replica's present life, where one is known."""
        feeds = self.of(replica.id)
        position = feeds[0].position if len(feeds) == 1 else None
        if position is None or position.boot_id != replica.boot_id:
            return None
        return position.next_seq

    # -- changes --------------------------------------------------------------------------------

    def resume(self, replica_id: str, position: FeedPosition | None) -> None:
        """Has the next feed of a replica go on from a position of its index, in that life only."""
        if position is None:
            self._positions.pop(replica_id, None)
        else:
            self._positions[replica_id] = position

    def follow(
        self, replica: Replica, *, group: asyncio.TaskGroup, context: zmq.asyncio.Context
    ) -> None:
        """Has the events of a replica followed as it publishes them now; as before if it does.

        Args:
            replica: Whose last look was good.
            group: Owner of the tasks.
            context: Owner of the sockets.
        """
        sources = self._wanted(replica)
        if [feed.source for feed in self.of(replica.id)] == sources:
            return
        self.stop(replica.id)
        followed = []
        for source in sources:
            if source.replica_id != replica.id:
                self._index.count_for(source.replica_id, replica.id)
            feed = ReplicaFeed(
                source,
                blocks=self._blocks(replica, source),
                index=self._index,
                clock=self._clock,
                context=context,
                options=self._options,
                stats=replica.feed_stats,
                pace=self._pace,
                resume=self._resumed(replica),
            )
            task = group.create_task(feed.run(), name=f"feed-{source.replica_id}")
            followed.append(_Followed(feed, task))
        if followed:
            self._followed[replica.id] = followed

    def stop(self, replica_id: str) -> None:
        """Stops the feeds of a replica; they touch the index no more from now on."""
        for followed in self._followed.pop(replica_id, ()):
            followed.task.cancel()
            if followed.feed.source.replica_id != replica_id:
                self._index.remove_replica(followed.feed.source.replica_id)

    def forget(self, replica_id: str) -> None:
        """Stops the feeds of a replica that is no more, and drops what is kept of it."""
        self.stop(replica_id)
        self._positions.pop(replica_id, None)
        self._not_understood.discard(replica_id)

    # -- inside ---------------------------------------------------------------------------------

    def _wanted(self, replica: Replica) -> list[FeedSource]:
        report = replica.report
        if report is None:
            option = find_option(self._sources, replica.id)
            return [] if option is None else option.sources(replica.id, replica.host)
        if report.kv_events is None:
            return []
        if not self._understands(report):
            if replica.id not in self._not_understood:
                self._not_understood.add(replica.id)
                _log.warning(
                    "kv_events_not_understood",
                    replica=replica.id,
                    block_size=report.block_size,
                    hash_scheme=report.hash_scheme,
                    model=report.model,
                    fix="the same model, --block-size and version of kvway at router and worker",
                )
            return []
        return [FeedSource.of_worker(replica.id, replica.host, report.kv_events)]

    def _understands(self, report: LoadReport) -> bool:
        return (
            report.hash_scheme == SCHEME
            and report.block_size == self._namespace.block_size
            and report.model == self._namespace.model
        )

    def _blocks(self, replica: Replica, source: FeedSource) -> BlockEvents:
        if replica.report is not None:
            return OwnBlocks(self._index, source.replica_id, block_size=self._namespace.block_size)
        return EngineBlocks(
            self._index,
            source.replica_id,
            root=self._namespace.root(),
            block_size=self._namespace.block_size,
        )

    def _resumed(self, replica: Replica) -> FeedPosition | None:
        position = self._positions.pop(replica.id, None)
        is_same_life = position is not None and position.boot_id == replica.boot_id
        return position if is_same_life else None
