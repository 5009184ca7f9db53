"""The replicas as the router knows them: who there is, who can take a request, how busy each is.

One task per replica looks at it again and again and has its KV events followed; the state that it
moves is in `replica.py`, the load in `ledger.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Collection, Iterable
from typing import Final

import structlog
import zmq.asyncio

from kvway_core.api import LoadReport
from kvway_core.blocks import SCHEME
from kvway_core.clock import Clock
from kvway_core.errors import ConnectFailed, ReplicaError
from kvway_router.discovery import ReplicaAddress
from kvway_router.feed import FeedSource, ReplicaFeed
from kvway_router.index import BlockIndex
from kvway_router.ledger import Ledger
from kvway_router.policy import ReplicaLoad
from kvway_router.probe import Bad, Prober
from kvway_router.replica import Replica, ReplicaOptions, ReplicaState
from kvway_router.snapshots import Snapshot

INDEX_SLACK: Final = 1.5
"""Blocks listed for a replica, in units of what it can hold: too few is ruinous, more is not."""

_log = structlog.get_logger(__name__)


class _Member:
    """A replica and what watches it."""

    __slots__ = ("feed", "feed_task", "look_now", "replica", "task")

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.look_now = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.feed: ReplicaFeed | None = None
        self.feed_task: asyncio.Task[None] | None = None


class ReplicaSet:
    """All replicas; watches them while `run` runs.

    Not thread-safe: it belongs to the event loop. Only `run` and `wait_for` wait.

    Args:
        index: Told of restarts, removals, capacities and KV events.
        ledger: Told of reports and removals.
        clock: Tells the time.
        model: The served model: a kvway worker of another one is not used.
        block_size: Tokens per block of the index.
        options: How replicas are watched.
        rng: For jitter.
    """

    def __init__(
        self,
        *,
        index: BlockIndex,
        ledger: Ledger,
        clock: Clock,
        model: str,
        block_size: int,
        options: ReplicaOptions | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """Start with no replica."""
        self._index = index
        self._ledger = ledger
        self._clock = clock
        self._model = model
        self._block_size = block_size
        self._options = options or ReplicaOptions()
        self._rng = rng or random.Random()  # noqa: S311 - spreads probes, keeps no secret
        self._members: dict[str, _Member] = {}
        self._remembered: Snapshot | None = None
        self._running: tuple[asyncio.TaskGroup, Prober, zmq.asyncio.Context] | None = None
        self._changed = asyncio.Condition()

    # -- questions ------------------------------------------------------------------------------

    def all(self) -> list[Replica]:
        """Returns every replica, whatever its state, in the order they came."""
        return [member.replica for member in self._members.values()]

    def get(self, replica_id: str) -> Replica | None:
        """Returns a replica; None when it is not in the set."""
        member = self._members.get(replica_id)
        return member.replica if member else None

    def usable(self, *, exclude: Collection[str] = ()) -> list[Replica]:
        """Returns the replicas that can take a request, without those named."""
        return [
            replica
            for replica in self.all()
            if replica.state is ReplicaState.READY and replica.id not in exclude
        ]

    def loads(self, *, exclude: Collection[str] = ()) -> list[ReplicaLoad]:
        """Returns the load of each usable replica now: the candidates for `policy.choose`."""
        return self._ledger.loads(
            (replica.id, self._index.num_blocks(replica.id))
            for replica in self.usable(exclude=exclude)
        )

    def is_fed(self, replica_id: str) -> bool:
        """Tells whether KV events keep the index true to a replica now."""
        member = self._members.get(replica_id)
        return member is not None and member.feed is not None and member.feed.is_up

    # -- changes --------------------------------------------------------------------------------

    def set_replicas(self, urls: Iterable[str]) -> None:
        """Makes these the replicas. Those that stay are not disturbed.

        One that leaves is no candidate from now on and is forgotten; requests that it is still
        answering are not touched.

        Raises:
            ValueError: A URL is not `http://HOST:PORT`; nothing is changed then.
        """
        wanted = {address.id: address for address in map(ReplicaAddress.parse, urls)}
        for replica_id in [known for known in self._members if known not in wanted]:
            self._remove(replica_id)
        for replica_id, address in wanted.items():
            if replica_id not in self._members:
                member = _Member(Replica(address, options=self._options))
                if self._remembered is not None:
                    # In another life by now? Its first report tells, and clears it.
                    member.replica.boot_id = self._index.restore(self._remembered, replica_id)
                self._members[replica_id] = member
                self._watch_if_running(member)
                _log.info("replica_added", replica=replica_id)

    def remember(self, snapshot: Snapshot | None) -> None:
        """Has what a snapshot says of a replica taken for true when that replica is added."""
        self._remembered = snapshot

    def report_failure(self, replica_id: str, error: ReplicaError) -> None:
        """Takes in that a request failed at a replica.

        One failed connect makes it UNHEALTHY at once. Any other failure may be the request's own:
        it only has the replica looked at now instead of at the next interval.
        """
        member = self._members.get(replica_id)
        if member is None:
            return
        if isinstance(error, ConnectFailed):
            self._note_bad(member, error.message, hard=True)
        member.look_now.set()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition on the replicas holds; it is tried after each look at one."""
        async with self._changed:
            await self._changed.wait_for(condition)

    # -- watching -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Watches the replicas and follows their KV events until cancelled."""
        context = zmq.asyncio.Context()
        try:
            async with (
                Prober(timeout_s=self._options.timeout_s) as prober,
                asyncio.TaskGroup() as group,
            ):
                self._running = (group, prober, context)
                for member in self._members.values():
                    self._watch_if_running(member)
                await asyncio.Event().wait()
        finally:
            self._running = None
            context.destroy(linger=0)

    def _watch_if_running(self, member: _Member) -> None:
        if self._running is not None:
            group, prober, context = self._running
            member.task = group.create_task(
                self._keep_watching(member, prober=prober, context=context),
                name=f"watch-{member.replica.id}",
            )

    async def _keep_watching(
        self, member: _Member, *, prober: Prober, context: zmq.asyncio.Context
    ) -> None:
        """Watches on whatever happens: what is wrong with one replica is no end to the router."""
        while True:
            try:
                await self._watch(member, prober=prober, context=context)
            except Exception:  # noqa: BLE001 - the task's supervisor: it logs and goes on
                _log.exception("replica_watch_failed", replica=member.replica.id)
                _stop_feed(member)
                self._note_bad(member, "watching it failed; see the log", hard=True)
                await self._pause(member)

    async def _watch(
        self, member: _Member, *, prober: Prober, context: zmq.asyncio.Context
    ) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                member.look_now.clear()
                asked_s = self._clock.monotonic()
                answer = await prober.probe(member.replica.url)
                if isinstance(answer, Bad):
                    self._note_bad(member, answer.error, hard=answer.refused)
                else:
                    self._note_good(member, answer.report, asked_s=asked_s)
                    self._follow(member, group, context=context)
                async with self._changed:
                    self._changed.notify_all()
                await self._pause(member)

    async def _pause(self, member: _Member) -> None:
        """Waits for the next look, or for a request that failed."""
        jitter = self._options.jitter * self._rng.uniform(-1.0, 1.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.interval_s * (1.0 + jitter)):
                await member.look_now.wait()

    def _note_good(self, member: _Member, report: LoadReport | None, *, asked_s: float) -> None:
        replica = member.replica
        was = replica.state
        problem = ""
        if report is not None:
            if report.model != self._model:
                problem = f"it serves {report.model!r}, not {self._model!r}"
            if replica.boot_id not in (None, report.boot_id):
                _log.info("replica_restarted", replica=replica.id)
                self._index.clear(replica.id)
                self._ledger.forget(replica.id)
                _stop_feed(member)
            replica.boot_id = report.boot_id
            self._ledger.report(replica.id, report, asked_s=asked_s)
            num_tokens = report.blocks.total * report.block_size
            self._index.set_limit(
                replica.id, math.ceil(INDEX_SLACK * num_tokens / self._block_size)
            )
        replica.on_good(report, problem=problem)
        _log_change(replica, was=was)

    def _note_bad(self, member: _Member, error: str, *, hard: bool) -> None:
        replica = member.replica
        was = replica.state
        replica.on_bad(error, hard=hard)
        if hard and replica.report is None:
            # Without a boot id nothing else tells that it died and comes back with an empty cache.
            self._index.clear(replica.id)
        _log_change(replica, was=was)

    def _follow(
        self, member: _Member, group: asyncio.TaskGroup, *, context: zmq.asyncio.Context
    ) -> None:
        """Has the KV events of a replica followed, if it publishes any that the index knows."""
        replica = member.replica
        report = replica.report
        info = report.kv_events if report is not None else None
        if report is not None and info is not None and not self._understands(report):
            if member.feed is None:
                _log.warning(
                    "kv_events_not_understood",
                    replica=replica.id,
                    block_size=report.block_size,
                    hash_scheme=report.hash_scheme,
                )
            info = None
        if member.feed is not None and member.feed.source.info == info:
            return
        _stop_feed(member)
        if info is None:
            return
        source = FeedSource(replica.id, replica.host, info, self._block_size)
        member.feed = ReplicaFeed(
            source,
            index=self._index,
            clock=self._clock,
            context=context,
            options=self._options.feed,
            stats=replica.feed_stats,
        )
        member.feed_task = group.create_task(member.feed.run(), name=f"feed-{replica.id}")

    def _understands(self, report: LoadReport) -> bool:
        return (
            report.hash_scheme == SCHEME
            and report.block_size == self._block_size
            and report.model == self._model
        )

    def _remove(self, replica_id: str) -> None:
        member = self._members.pop(replica_id)
        _stop_feed(member)
        if member.task is not None:
            member.task.cancel()
        self._index.remove_replica(replica_id)
        self._ledger.forget(replica_id)
        _log.info("replica_removed", replica=replica_id)


def _stop_feed(member: _Member) -> None:
    """Stops a feed; it touches the index no more from now on."""
    if member.feed_task is not None:
        member.feed_task.cancel()
    member.feed = member.feed_task = None


def _log_change(replica: Replica, *, was: ReplicaState) -> None:
    if replica.state is was:
        return
    log = _log.warning if replica.state is ReplicaState.UNHEALTHY else _log.info
    log(
        "replica_state_changed",
        replica=replica.id,
        was=was.value,
        now=replica.state.value,
        error=replica.error,
    )
