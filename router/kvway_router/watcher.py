"""Watches the replicas: one task for each looks at it again and again.

What a look finds goes to the replica's state, the ledger, the index, the rotation and the feeds of
its KV events. A request that failed has its replica looked at before its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable
from typing import Final

import structlog
import zmq.asyncio

from kvway_core.clock import Clock
from kvway_core.errors import ReplicaLost
from kvway_router.engine_report import EngineReport
from kvway_router.feeding import ReplicaFeeds
from kvway_router.index import BlockIndex
from kvway_router.ledger import Ledger
from kvway_router.probe import Bad, Good, Prober
from kvway_router.replica import Replica, ReplicaOptions, ReplicaState
from kvway_router.rotation import Rotation
from kvway_router.telemetry import Telemetry

INDEX_SLACK: Final = 1.5
"""Blocks listed for a replica, in units of what it can hold: too few is ruinous, more is not."""
SUSPECT_SHARE: Final = 0.5
"""Of the time for a look: one that takes longer makes its replica the last to be chosen."""

_log = structlog.get_logger(__name__)


class Member:
    """A replica and what watches it."""

    __slots__ = (
        "asked_engine_s",
        "asked_s",
        "engine",
        "has_missed",
        "look_now",
        "num_begun",
        "num_ended",
        "replica",
        "task",
        "waiting",
    )

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.look_now = asyncio.Event()
        self.asked_s: float | None = None
        self.has_missed = False
        self.num_begun = 0
        self.num_ended = 0
        self.waiting: set[Place] = set()
        self.task: asyncio.Task[None] | None = None
        self.engine = EngineReport()
        self.asked_engine_s = -math.inf

    def is_suspect(self, now_s: float, *, timeout_s: float) -> bool:
        """Tells whether it owes the answer to a look: it may be frozen already."""
        if self.has_missed or self.asked_s is None:
            return self.has_missed
        return now_s - self.asked_s > SUSPECT_SHARE * timeout_s


class Place:
    """A request at a replica, while it waits for its answer."""

    __slots__ = ("_member", "tell_loss")

    def __init__(self, member: Member, tell_loss: Callable[[ReplicaLost], None]) -> None:
        self._member = member
        self.tell_loss = tell_loss
        member.waiting.add(self)

    def has_answered(self) -> None:
        """The answer has begun: what becomes of it shows in its tokens."""
        self._member.waiting.discard(self)


class Watcher:
    """Looks at replicas, and takes in what it sees.

    Attributes:
        on_change: Called after each look: what can be sent where may have changed.

    Args:
        index: Told of restarts and capacities.
        ledger: Told of reports.
        rotation: Told of who comes, goes and restarts.
        feeds: Told whose KV events are to be followed.
        clock: Tells the time.
        model: The served model: a kvway worker of another one is not used.
        block_size: Tokens per block of the index.
        options: How replicas are watched.
        rng: For jitter.
    """

    def __init__(  # noqa: PLR0913  all that a look may change
        self,
        *,
        index: BlockIndex,
        ledger: Ledger,
        rotation: Rotation,
        feeds: ReplicaFeeds,
        clock: Clock,
        model: str,
        block_size: int,
        options: ReplicaOptions,
        rng: random.Random,
    ) -> None:
        """Watches nobody."""
        self._index = index
        self._ledger = ledger
        self._rotation = rotation
        self._feeds = feeds
        self._clock = clock
        self._model = model
        self._block_size = block_size
        self._options = options
        self._rng = rng
        self._changed = asyncio.Condition()
        self.on_change: Callable[[], None] = lambda: None

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition on the replicas holds; it is tried after each look at one."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def watch(self, member: Member, *, prober: Prober, context: zmq.asyncio.Context) -> None:
        """Watches on whatever happens: what is wrong with one replica is no end to the router."""
        while True:
            try:
                await self._look_on(member, prober=prober, context=context)
            except Exception:  # noqa: BLE001 - the task's supervisor: it logs and goes on
                _log.exception("replica_watch_failed", replica=member.replica.id)
                self._feeds.stop(member.replica.id)
                self.note_bad(member, "watching it failed; see the log", hard=True)
                await self._pause(member)

    async def _look_on(
        self, member: Member, *, prober: Prober, context: zmq.asyncio.Context
    ) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                member.look_now.clear()
                member.num_begun += 1
                asked_s = member.asked_s = self._clock.monotonic()
                answer = await prober.probe(member.replica.url)
                member.asked_s, member.has_missed = None, isinstance(answer, Bad)
                if isinstance(answer, Bad):
                    self.note_bad(member, answer.error, hard=answer.refused)
                    self._note_silence(member)
                else:
                    self._note_good(member, answer, asked_s=asked_s)
                    if answer.report is None:
                        await self._ask_engine(member, prober)
                    self._feeds.follow(member.replica, group=group, context=context)
                member.num_ended = member.num_begun
                async with self._changed:
                    self._changed.notify_all()
                self.on_change()
                await self._pause(member, took_s=self._clock.monotonic() - asked_s)

    async def _pause(self, member: Member, *, took_s: float = 0.0) -> None:
        """Waits for the next look, or for a request that failed.

        A look that took long shortens the pause: one that froze is found in three looks' time.
        """
        jitter = self._options.jitter * self._rng.uniform(-1.0, 1.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.interval_s * (1.0 + jitter) - took_s):
                await member.look_now.wait()

    def _note_good(self, member: Member, answer: Good, *, asked_s: float) -> None:
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
        self._note_change(replica, was=was)

    def note_bad(self, member: Member, error: str, *, hard: bool) -> None:
        """Takes in that a replica did not answer; `hard` means that nobody is there."""
        replica = member.replica
        was = replica.state
        replica.on_bad(error, hard=hard)
        if hard and replica.report is None:
            # Without a boot id nothing else tells that it died and comes back with an empty cache.
            self._index.clear(replica.id)
            self._feeds.stop(replica.id)
            member.engine, member.asked_engine_s = EngineReport(), -math.inf
        self._note_change(replica, was=was)

    def drain(self, member: Member) -> None:
        """Has a replica take nothing new."""
        was = member.replica.state
        member.replica.drain()
        self._note_change(member.replica, was=was)
        self.on_change()

    def _note_silence(self, member: Member) -> None:
        """Lets go who waits for an answer of one that does not even answer a look any more."""
        if member.replica.state is ReplicaState.UNHEALTHY:
            for place in list(member.waiting):
                place.tell_loss(ReplicaLost("The replica went out of service."))

    def _note_change(self, replica: Replica, *, was: ReplicaState) -> None:
        now = replica.state
        if now is was:
            return
        if now is ReplicaState.READY:
            self._rotation.returned(replica.id)
        elif was is ReplicaState.READY and now is ReplicaState.UNHEALTHY:
            self._rotation.lost(replica.id)
        _log_change(replica, was=was)

    async def _ask_engine(self, member: Member, prober: Prober) -> None:
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
        replica.is_sglang = member.engine.is_sglang
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
        self._rotation.restarted(replica.id)
        self._feeds.stop(replica.id)

    def _set_limit(self, replica: Replica, num_tokens: int) -> None:
        """Has as many blocks listed as a replica can hold, and some more."""
        limit = math.ceil(INDEX_SLACK * num_tokens / self._block_size)
        for name in {replica.id, *(feed.source.replica_id for feed in self._feeds.of(replica.id))}:
            self._index.set_limit(name, limit)


def _log_change(replica: Replica, *, was: ReplicaState) -> None:
    log = _log.warning if replica.state is ReplicaState.UNHEALTHY else _log.info
    log(
        "replica_state_changed",
        replica=replica.id,
        was=was.value,
        now=replica.state.value,
        error=replica.error,
    )
