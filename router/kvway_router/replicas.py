"""The replicas as the router knows them: who there is, who can take a request, how busy each is.

What is known of them comes from `watcher.py`; the state of each is in `replica.py`, its load in
`ledger.py`, and who of those that are ready takes requests now in `rotation.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import structlog
import zmq.asyncio

from kvway_core.blocks import Namespace
from kvway_core.clock import Clock
from kvway_core.errors import (
    ConnectFailed,
    ReplicaError,
    ReplicaLost,
    ReplicaRejected,
    StreamBroken,
)
from kvway_router.discovery import ReplicaAddress
from kvway_router.feed import ReplicaFeed
from kvway_router.feed_state import FeedPosition
from kvway_router.feeding import ReplicaFeeds
from kvway_router.index import BlockIndex
from kvway_router.ledger import Ledger
from kvway_router.loads import Loads
from kvway_router.probe import Prober
from kvway_router.replica import Replica, ReplicaOptions, ReplicaState
from kvway_router.rotation import Outcome, Rotation
from kvway_router.snapshots import Snapshot
from kvway_router.watcher import Member, Place, Watcher

CONFIRM_S: Final = 0.5
"""How long a request that lost its replica waits to hear who is there."""

_log = structlog.get_logger(__name__)


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
        self._options = options or ReplicaOptions()
        rng = rng or random.Random()  # noqa: S311 - spreads probes, keeps no secret
        self.rotation = Rotation(clock, rng)
        self._feeds = ReplicaFeeds(
            index=index,
            clock=clock,
            namespace=Namespace(model, block_size),
            options=self._options.feed,
            sources=self._options.kv_events,
        )
        self.watcher = Watcher(
            index=index,
            ledger=ledger,
            rotation=self.rotation,
            feeds=self._feeds,
            clock=clock,
            model=model,
            block_size=block_size,
            options=self._options,
            rng=rng,
        )
        self._members: dict[str, Member] = {}
        self._remembered: Snapshot | None = None
        self._running: tuple[asyncio.TaskGroup, Prober, zmq.asyncio.Context] | None = None

    # -- questions ------------------------------------------------------------------------------

    def all(self) -> list[Replica]:
        """Returns every replica, whatever its state, in the order they came."""
        return [member.replica for member in self._members.values()]

    def get(self, replica_id: str) -> Replica | None:
        """Returns a replica; None when it is not in the set."""
        member = self._members.get(replica_id)
        return member.replica if member else None

    def ready(self) -> list[str]:
        """Returns the replicas that say that they take requests, and answer."""
        members = self._members.values()
        return [m.replica.id for m in members if m.replica.state is ReplicaState.READY]

    def usable(self, *, exclude: Collection[str] = ()) -> list[Replica]:
        """Returns the replicas that can take a request, without those named."""
        admitted = self.rotation.admitted(self.ready(), num_replicas=len(self._members))
        return [self._members[name].replica for name in admitted if name not in exclude]

    def unusable(self) -> dict[str, str]:
        """Returns why replicas cannot take one more request, for a person; not those that can."""
        room = self.room()
        usable = {replica.id for replica in self.usable()}
        return {
            replica.id: (
                f"{replica.state.value}: {replica.error}"
                if replica.state is not ReplicaState.READY
                else "as many requests are there as it may have"
                if replica.id in usable
                else "left alone for a while, after failures or because it said so"
            )
            for replica in self.all()
            if replica.id not in room
        }

    def slots(self, replica_id: str) -> int:
        """Returns how many requests a replica runs at once, this router's part of them."""
        report = self._members[replica_id].replica.report
        slots = report.max_num_seqs if report and report.max_num_seqs else self._options.slots
        return -(-slots // self._options.num_routers)

    def num_in_flight(self, replica_id: str) -> int:
        """Returns how many requests a replica has from here."""
        return self._ledger.num_in_flight(replica_id)

    def num_awaited(self, replica_id: str) -> int:
        """Returns how many of them have no answer yet."""
        member = self._members.get(replica_id)
        return len(member.waiting) if member is not None else 0

    def room(self) -> dict[str, int]:
        """Returns the usable replicas that have room for more requests, and for how many."""
        now, timeout_s = self._clock.monotonic(), self._options.timeout_s
        usable = [replica.id for replica in self.usable()]
        alive = [n for n in usable if not self._members[n].is_suspect(now, timeout_s=timeout_s)]
        return self.rotation.room(
            alive or usable,
            slots=self.slots,
            in_flight=self.num_in_flight,
        )

    def loads(self, *, exclude: Collection[str] = ()) -> Loads:
        """Returns the loads now of the candidates for `policy.choose`.

        These are the usable replicas that have room; if there are none, all that are usable.
        """
        names = [name for name in self.room() if name not in exclude]
        if not names:
            names = [replica.id for replica in self.usable(exclude=exclude)]
        return self._ledger.loads((name, self._index.num_blocks(name)) for name in names)

    def is_fed(self, replica_id: str) -> bool:
        """Tells whether KV events keep the index true to a replica now."""
        return self._feeds.is_fed(replica_id)

    def tells_ranks(self, replica_id: str) -> bool:
        """Tells whether the KV events of a replica say in which of several caches its blocks are.

        Its engine chooses among its data-parallel ranks, so what is expected of a prompt counts
        until its answer ends, and from then on what the rank says that took it.
        """
        return len(self.feeds(replica_id)) > 1 and self.is_fed(replica_id)

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
                member = Member(Replica(address, options=self._options))
                if self._remembered is not None:
                    self._restore(self._remembered, member.replica)
                self._members[replica_id] = member
                self._watch_if_running(member)
                _log.info("replica_added", replica=replica_id)

    def drain(self, replica_id: str) -> None:
        """Sends a replica of the set nothing new; it finishes what it has."""
        self.watcher.drain(self._members[replica_id])

    def resume(self, replica_id: str) -> None:
        """Takes a `drain` back: the next good look makes the replica ready."""
        member = self._members[replica_id]
        member.replica.is_drained = False
        member.look_now.set()

    def remember(self, snapshot: Snapshot | None) -> None:
        """Has what a snapshot says of a replica taken for true when that replica is added."""
        self._remembered = snapshot

    def _restore(self, snapshot: Snapshot, replica: Replica) -> None:
        # In another life by now? Its first report tells, and clears it.
        boot_id = replica.boot_id = self._index.restore(snapshot, replica.id)
        saved = snapshot.replicas.get(replica.id)
        if boot_id is not None and saved is not None and saved.next_seq is not None:
            self._feeds.resume(replica.id, FeedPosition(boot_id, saved.next_seq))

    @contextmanager
    def at(self, replica_id: str, *, tell_loss: Callable[[ReplicaLost], None]) -> Iterator[Place]:
        """Notes that a request is at a replica while the context is open.

        Args:
            replica_id: The replica; one of the set.
            tell_loss: Called if it is out of service before its answer has begun.
        """
        place = Place(self._members[replica_id], tell_loss)
        try:
            with self.rotation.at(replica_id):
                yield place
        finally:
            place.has_answered()

    def record(self, replica_id: str, outcome: Outcome) -> None:
        """Takes in what a request that has ended says of its replica."""
        self.rotation.record(replica_id, outcome, ready=self.ready())

    def look_at(self, replica_id: str) -> None:
        """Has a replica looked at now instead of at the next interval."""
        member = self._members.get(replica_id)
        if member is not None:
            member.look_now.set()

    async def report_failure(self, replica_id: str, error: ReplicaError) -> bool:
        """Takes in that a request failed at a replica.

        One failed connect makes it UNHEALTHY at once. Any other failure may be the request's own:
        it has the replica looked at now instead of at the next interval, and where the connection
        broke that look is waited for. If it is gone all others are looked at too, so that the next
        attempt goes to one that is alive.

        Returns:
            Whether the replica is out of service, or another process by now.
        """
        member = self._members.get(replica_id)
        if member is None:
            return True
        replica, boot_id = member.replica, member.replica.boot_id
        if isinstance(error, ConnectFailed):
            self.watcher.note_bad(member, error.message, hard=True)
        if isinstance(error, ReplicaRejected) and error.retry_after_s is not None:
            self.rotation.pause(replica_id, error.retry_after_s)
        member.look_now.set()
        if isinstance(error, StreamBroken):
            await self._looked_at(member)
        is_gone = replica.state is ReplicaState.UNHEALTHY or replica.boot_id != boot_id
        if is_gone and isinstance(error, StreamBroken | ReplicaLost):
            await self._looked_at(*self._members.values())  # what took one may have taken more
        return is_gone

    async def _looked_at(self, *members: Member) -> None:
        """Returns once each was looked at again, after `CONFIRM_S` at most: then it is suspect."""
        before = [(member, member.num_begun) for member in members]
        for member in members:
            member.look_now.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONFIRM_S):
                await self.wait_for(lambda: all(m.num_ended > begun for m, begun in before))

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition on the replicas holds; it is tried after each look at one."""
        await self.watcher.wait_for(condition)

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

    def _watch_if_running(self, member: Member) -> None:
        if self._running is not None:
            group, prober, context = self._running
            member.task = group.create_task(
                self.watcher.watch(member, prober=prober, context=context),
                name=f"watch-{member.replica.id}",
            )

    def _remove(self, replica_id: str) -> None:
        member = self._members.pop(replica_id)
        self._feeds.forget(replica_id)
        if member.task is not None:
            member.task.cancel()
        self._index.remove_replica(replica_id)
        self._ledger.forget(replica_id)
        self.rotation.forget(replica_id)
        _log.info("replica_removed", replica=replica_id)
