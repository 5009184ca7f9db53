"""The replicas as the router knows them: who there is, who can take a request, how busy each is.

One task per replica looks at it again and again and has its KV events followed; the state that it
moves is in `replica.py`, the load in `ledger.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import structlog
import zmq.asyncio

from kvway_core.blocks import Namespace
from kvway_core.clock import Clock
from kvway_core.errors import ConnectFailed, ReplicaError
from kvway_router.discovery import ReplicaAddress
from kvway_router.engine_report import EngineReport
from kvway_router.feed import ReplicaFeed
from kvway_router.feed_state import FeedPosition
from kvway_router.feeding import ReplicaFeeds
from kvway_router.index import BlockIndex
from kvway_router.ledger import Ledger
from kvway_router.loads import Loads
from kvway_router.probe import Bad, Good, Prober
from kvway_router.replica import Replica, ReplicaOptions, ReplicaState
from kvway_router.snapshots import Snapshot
from kvway_router.telemetry import Telemetry

INDEX_SLACK: Final = 1.5
"""Blocks listed for a replica, in units of what it can hold: too few is ruinous, more is not."""

_log = structlog.get_logger(__name__)


class _Member:
    """A replica and what watches it."""

    __slots__ = ("asked_engine_s", "engine", "look_now", "replica", "task")

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.look_now = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.engine = EngineReport()
        self.asked_engine_s = -math.inf


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
        self._feeds = ReplicaFeeds(
            index=index,
            clock=clock,
            namespace=Namespace(model, block_size),
            options=self._options.feed,
            sources=self._options.kv_events,
        )
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

    def loads(self, *, exclude: Collection[str] = ()) -> Loads:
        """Returns the load of each usable replica now: the candidates for `policy.choose`."""
        return self._ledger.loads(
            (replica.id, self._index.num_blocks(replica.id))
            for replica in self.usable(exclude=exclude)
        )

    def is_fed(self, replica_id: str) -> bool:
        """Tells whether KV events keep the index true to a replica now."""
        return self._feeds.is_fed(replica_id)

    def feeds(self, replica_id: str) -> Sequence[ReplicaFeed]:
        """Returns what follows the KV events of a replica: one feed for each publisher."""
        return self._feeds.of(replica_id)

    def next_seqs(self) -> Mapping[str, int]:
        """Returns how far the index is true to those replicas whose KV events are followed."""
        positions = {replica.id: self._feeds.position(replica) for replica in self.all()}
        return {name: next_seq for name, next_seq in positions.items() if next_seq is not None}

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
                    self._restore(self._remembered, member.replica)
                self._members[replica_id] = member
                self._watch_if_running(member)
                _log.info("replica_added", replica=replica_id)

    def remember(self, snapshot: Snapshot | None) -> None:
        """Has what a snapshot says of a replica taken for true when that replica is added."""
        self._remembered = snapshot

    def _restore(self, snapshot: Snapshot, replica: Replica) -> None:
        # In another life by now? Its first report tells, and clears it.
        boot_id = replica.boot_id = self._index.restore(snapshot, replica.id)
        saved = snapshot.replicas.get(replica.id)
        if boot_id is not None and saved is not None and saved.next_seq is not None:
            self._feeds.resume(replica.id, FeedPosition(boot_id, saved.next_seq))

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
                self._feeds.stop(member.replica.id)
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
                    self._note_good(member, answer, asked_s=asked_s)
                    if answer.report is None:
                        await self._ask_engine(member, prober)
                    self._feeds.follow(member.replica, group=group, context=context)
                async with self._changed:
                    self._changed.notify_all()
                await self._pause(member)

    async def _pause(self, member: _Member) -> None:
        """Waits for the next look, or for a request that failed."""
        jitter = self._options.jitter * self._rng.uniform(-1.0, 1.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.interval_s * (1.0 + jitter)):
                await member.look_now.wait()

    def _note_good(self, member: _Member, answer: Good, *, asked_s: float) -> None:
        replica, report = member.replica, answer.report
        was = replica.state
        problem = ""
        if report is not None:
            if report.model != self._model:
                problem = f"it serves {report.model!r}, not {self._model!r}"
            if replica.boot_id not in (None, report.boot_id):
                self._begin_again(replica)
            replica.boot_id = report.boot_id
            self._ledger.report(replica.id, Telemetry.of(report), asked_s=asked_s)
            self._set_limit(replica, report.blocks.total * report.block_size)
        elif answer.no_report and replica.report is not None and replica.report.state == "ready":
            report = replica.report  # what it is has not changed; how busy it was goes stale
        if answer.no_report and not replica.no_report:
            _log.warning("replica_without_report", replica=replica.id, reason=answer.no_report)
        replica.no_report = answer.no_report
        replica.on_good(report, problem=problem)
        _log_change(replica, was=was)

    def _note_bad(self, member: _Member, error: str, *, hard: bool) -> None:
        replica = member.replica
        was = replica.state
        replica.on_bad(error, hard=hard)
        if hard and replica.report is None:
            # Without a boot id nothing else tells that it died and comes back with an empty cache.
            self._index.clear(replica.id)
            self._feeds.stop(replica.id)
            member.engine, member.asked_engine_s = EngineReport(), -math.inf
        _log_change(replica, was=was)

    async def _ask_engine(self, member: _Member, prober: Prober) -> None:
        """Learns what an engine without reports says elsewhere: its load each time, if it does."""
        replica, before = member.replica, member.engine
        now = self._clock.monotonic()
        is_due = now - member.asked_engine_s >= self._options.engine_interval_s
        if not (is_due or before.tells_load):
            return
        if is_due:
            member.asked_engine_s = now
        engine = await prober.describe(replica.url, before=None if is_due else before)
        if engine.is_later_life(before):
            self._begin_again(replica)
        member.engine = engine.after(before)
        if engine.num_tokens is not None:
            self._set_limit(replica, engine.num_tokens)
        telemetry = engine.telemetry()
        # A page that fails once does not take back what it said; that becomes too old by itself.
        if telemetry is not None and (engine.tells_load or not before.tells_load):
            self._ledger.report(replica.id, telemetry, asked_s=now)

    def _begin_again(self, replica: Replica) -> None:
        """A replica restarted: nothing that was known of it is true any more."""
        _log.info("replica_restarted", replica=replica.id)
        self._index.clear(replica.id)
        self._ledger.forget(replica.id)
        self._feeds.stop(replica.id)

    def _set_limit(self, replica: Replica, num_tokens: int) -> None:
        """Has as many blocks listed as a replica can hold, and some more."""
        limit = math.ceil(INDEX_SLACK * num_tokens / self._block_size)
        for name in {replica.id, *(feed.source.replica_id for feed in self.feeds(replica.id))}:
            self._index.set_limit(name, limit)

    def _remove(self, replica_id: str) -> None:
        member = self._members.pop(replica_id)
        self._feeds.forget(replica_id)
        if member.task is not None:
            member.task.cancel()
        self._index.remove_replica(replica_id)
        self._ledger.forget(replica_id)
        _log.info("replica_removed", replica=replica_id)


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
