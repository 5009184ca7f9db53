"""Keeps the index true to one worker's cache by following its KV events.

    PUB  --> live batches ------.          in order: applied
                                |          missing number: kept here, the gap is replayed first
                            FeedState -->  other boot id: the replica is cleared, replay from 0
                                |          seen before: ignored
    ROUTER --> replayed batches '

`FeedState` decides and `ReplicaFeed` does: the state is a pure machine over numbered batches, and
around it are two sockets and a clock. What cannot be replayed any more is lost: then the replica is
cleared, for a missed block costs less than one that is not there.

While the replay socket does not answer the feed is down. Then entries that nobody uses are dropped
after a while instead of lying, and once it is up again all is replayed from the start.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias, assert_never

import structlog
import zmq
import zmq.asyncio

from kvway_core.api import KvEventsInfo
from kvway_core.blocks import BlockHash, event_hash
from kvway_core.clock import Clock
from kvway_core.errors import ProtocolError
from kvway_core.events import (
    END_SEQ,
    MAX_BATCH_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    pack_seq,
    unpack_seq,
)
from kvway_router.index import BlockIndex

DEVICE_MEDIA: Final = (None, "GPU")
"""Media that the index lists: the pool itself."""

_MAX_PAST_BOOTS: Final = 8
_DRAINED_PER_TURN: Final = 64
_RECONNECT_MAX_MS: Final = 2_000
_LOW_64_BITS: Final = 2**64 - 1

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FeedOptions:
    """How KV events are read.

    Attributes:
        verify_s: After so long without a message the worker is asked whether one was missed; also
            how a feed that died is noticed.
        replay_timeout_s: Longest silence in the middle of a replay.
        retry_s: Pause before a replay that failed is asked for again.
        stale_after_s: While the feed is down, entries unused for this long are dropped, twice this
            at most.
        max_pending_batches: Live batches kept while a replay runs.
        max_pending_blocks: Blocks named by them.
    """

    verify_s: float = 10.0
    replay_timeout_s: float = 2.0
    retry_s: float = 1.0
    stale_after_s: float = 30.0
    max_pending_batches: int = 4096
    max_pending_blocks: int = 1_000_000


@dataclass(slots=True)
class FeedStats:
    """What became of one replica's events; all only grow.

    Attributes:
        num_batches: Batches applied.
        num_events: Events in them.
        num_bad: Events and batches that could not be read, skipped.
        num_duplicates: Batches seen before, or of a past life of the worker.
        num_gaps: Times that a number was missing.
        num_replays: Replays asked for because of a gap, a start or a restart.
        num_lost: Times that the worker could no longer replay and the replica was cleared.
        num_restarts: Times that another life of the worker answered.
        num_outages: Times that the feed went down.
    """

    num_batches: int = 0
    num_events: int = 0
    num_bad: int = 0
    num_duplicates: int = 0
    num_gaps: int = 0
    num_replays: int = 0
    num_lost: int = 0
    num_restarts: int = 0
    num_outages: int = 0


@dataclass(frozen=True, slots=True)
class Apply:
    """Enter the events of this batch into the index."""

    batch: EventBatch


class ClearReason(StrEnum):
    """Why a replica's entries are dropped."""

    START = "start"
    """A new feed knows nothing; all is replayed."""
    RESTART = "restart"
    """Another life of the worker answers: its cache is another one."""
    LOST = "lost"
    """Batches are gone for good, and removals may have been among them."""


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget what the index lists for the replica."""

    reason: ClearReason


@dataclass(frozen=True, slots=True)
class Replay:
    """Ask for all batches from this number on; an earlier replay is of no interest any more."""

    start_seq: int


Action: TypeAlias = Apply | Clear | Replay


class FeedState:
    """What to do with each batch, from its number and boot id alone. Pure.

    Each method returns what has to be done, in order. At most one replay is outstanding; its end
    or failure must be told.

    Invariants:
        1. Batches of one boot are applied in order of their numbers, each once.
        2. None is applied behind one that is missing, unless everything was cleared in between.
        3. At most the given number of batches and blocks wait, and only while a replay runs.
    """

    __slots__ = (
        "_known_from",
        "_num_pending_blocks",
        "_options",
        "_past_boots",
        "_pending",
        "boot_id",
        "next_seq",
        "replaying",
        "stats",
    )

    def __init__(self, *, options: FeedOptions, stats: FeedStats) -> None:
        """Start knowing nothing; `start` is to be called first."""
        self.boot_id: str | None = None
        self.next_seq = 0
        self.replaying = False
        self.stats = stats
        self._options = options
        self._past_boots: deque[str | None] = deque(maxlen=_MAX_PAST_BOOTS)
        self._pending: dict[int, EventBatch] = {}
        self._num_pending_blocks = 0
        # The lowest live number that was already here when the replay was asked for: all before it
        # existed by then, so a replay that ends without them means that they are gone.
        self._known_from: int | None = None

    def start(self) -> list[Action]:
        """Clears, and asks for everything from the first batch on."""
        self._forget()
        return [Clear(ClearReason.START), self._replay()]

    def on_batch(self, seq: int, batch: EventBatch) -> list[Action]:
        """Takes a live batch."""
        if batch.boot_id != self.boot_id:
            if batch.boot_id in self._past_boots:
                self.stats.num_duplicates += 1
                return []
            if self.boot_id is not None:
                actions = self._restart(batch.boot_id)
                self._keep(seq, batch)
                self.replaying = False
                return [*actions, self._replay()]
            self.boot_id = batch.boot_id
        if seq < self.next_seq:
            self.stats.num_duplicates += 1
            return []
        if not self.replaying and seq == self.next_seq:
            return [self._apply(seq, batch)]
        self._keep(seq, batch)
        if self.replaying:
            return []
        self.stats.num_gaps += 1
        return [self._replay()]

    def on_replayed(self, seq: int, batch: EventBatch) -> list[Action]:
        """Takes a replayed batch."""
        if not self.replaying:
            return []
        actions: list[Action] = []
        if batch.boot_id != self.boot_id:
            # Whoever answers is alive, so this is the present boot.
            if self.boot_id is not None:
                asked_from_start = self.next_seq == 0
                actions += self._restart(batch.boot_id)
                if not asked_from_start:
                    return [*actions, self._replay()]
            self.boot_id = batch.boot_id
            self._drop_pending(lambda _, kept: kept.boot_id != batch.boot_id)
        if seq < self.next_seq:
            self.stats.num_duplicates += 1
            return actions
        if seq > self.next_seq:
            actions.append(self._lose())
        return [*actions, self._apply(seq, batch)]

    def on_replay_end(self) -> list[Action]:
        """Takes the end of a replay: the live batches that waited for it come next."""
        if not self.replaying:
            return []
        self.replaying = False
        known_from, self._known_from = self._known_from, None
        actions: list[Action] = []
        if known_from is not None and self.next_seq < known_from:
            actions.append(self._lose())
            self.next_seq = known_from
        while self.next_seq in self._pending:
            actions.append(self._apply(self.next_seq, self._pending[self.next_seq]))
        self._drop_pending(lambda seq, _: seq < self.next_seq)
        if self._pending:
            actions.append(self._replay())
        return actions

    def resync(self) -> list[Action]:
        """Asks again for what comes next: after a failed replay, or to learn of a silent loss."""
        return [self._replay()]

    def _replay(self) -> Replay:
        self.replaying = True
        self._known_from = min(self._pending, default=None)
        return Replay(self.next_seq)

    def _restart(self, boot_id: str | None) -> list[Action]:
        self.stats.num_restarts += 1
        self._past_boots.append(self.boot_id)
        if boot_id in self._past_boots:
            self._past_boots.remove(boot_id)
        self._forget()
        self.boot_id = boot_id
        return [Clear(ClearReason.RESTART)]

    def _forget(self) -> None:
        self.next_seq = 0
        self._known_from = None
        self._drop_pending(lambda _seq, _batch: True)

    def _lose(self) -> Clear:
        self.stats.num_lost += 1
        return Clear(ClearReason.LOST)

    def _apply(self, seq: int, batch: EventBatch) -> Apply:
        self.next_seq = seq + 1
        self.stats.num_batches += 1
        self.stats.num_events += len(batch.events)
        self.stats.num_bad += batch.num_skipped
        return Apply(batch)

    def _keep(self, seq: int, batch: EventBatch) -> None:
        num_blocks = _num_blocks(batch)
        options = self._options
        if seq in self._pending:
            self.stats.num_duplicates += 1
        elif (
            len(self._pending) < options.max_pending_batches
            and self._num_pending_blocks + num_blocks <= options.max_pending_blocks
        ):
            self._pending[seq] = batch
            self._num_pending_blocks += num_blocks
        # What does not fit is dropped, and is a gap when this replay is done.

    def _drop_pending(self, unwanted: Callable[[int, EventBatch], bool]) -> None:
        self._pending = {
            seq: batch for seq, batch in self._pending.items() if not unwanted(seq, batch)
        }
        self._num_pending_blocks = sum(map(_num_blocks, self._pending.values()))


class ReplicaFeed:
    """Follows one life of one worker: two sockets around a `FeedState`.

    Args:
        replica_id: The replica whose blocks these are.
        host: Where its sockets are.
        info: Their ports and topic.
        block_size: Tokens per block of the index; events of another size are skipped.
        index: What is kept true.
        clock: Tells the time.
        context: Owner of the sockets' thread; the caller destroys it.
        options: Limits and pauses.
        stats: Counted up.
    """

    def __init__(
        self,
        replica_id: str,
        *,
        host: str,
        info: KvEventsInfo,
        block_size: int,
        index: BlockIndex,
        clock: Clock,
        context: zmq.asyncio.Context,
        options: FeedOptions,
        stats: FeedStats,
    ) -> None:
        """Open nothing yet."""
        self.is_up = False
        """Whether the last question to the worker was answered."""
        self.info = info
        self._replica_id = replica_id
        self._host = f"[{host}]" if ":" in host else host
        self._block_size = block_size
        self._index = index
        self._clock = clock
        self._context = context
        self._options = options
        self._stats = stats
        self._state = FeedState(options=options, stats=stats)
        self._topic = info.topic.encode()
        self._dealer: zmq.asyncio.Socket | None = None
        self._due_s = 0.0
        self._down_mark: int | None = None
        self._expire_s = 0.0
        self._has_expired = False

    async def run(self) -> None:
        """Keeps the index true until cancelled. Closes its sockets on the way out."""
        subscriber = self._context.socket(zmq.SUB)
        try:
            self._set_up(subscriber, self.info.pub_port)
            subscriber.setsockopt(zmq.SUBSCRIBE, self._topic)
            self._perform(self._state.start())
            while True:
                await self._turn(subscriber)
        finally:
            subscriber.close(linger=0)
            self._hang_up()

    async def _turn(self, subscriber: zmq.asyncio.Socket) -> None:
        """Waits for one thing to happen and deals with it."""
        poller = zmq.asyncio.Poller()
        poller.register(subscriber, zmq.POLLIN)
        if self._dealer is not None:
            poller.register(self._dealer, zmq.POLLIN)
        due_s = self._due_s if self._down_mark is None else min(self._due_s, self._expire_s)
        wait_s = max(0.0, due_s - self._clock.monotonic())
        ready = dict(await poller.poll(math.ceil(wait_s * 1e3)))
        # Live batches first: those that arrive while the answer to a replay is read are newer.
        if subscriber in ready:
            for frames in await _drain(subscriber):
                self._on_live(frames)
        if self._dealer is not None and self._dealer in ready:
            dealer = self._dealer
            for frames in await _drain(dealer):
                if self._dealer is dealer:
                    self._on_answer(frames)
        self._on_time()

    def _on_live(self, frames: Sequence[bytes]) -> None:
        if len(frames) != 3 or frames[0] != self._topic:
            self._note_bad("a live message is not [topic, seq, batch]")
            return
        numbered = self._decode(frames[1], frames[2])
        if numbered is None:
            return
        if self._dealer is None and not self._state.replaying:
            self._due_s = self._clock.monotonic() + self._options.verify_s
        self._perform(self._state.on_batch(*numbered))

    def _on_answer(self, frames: Sequence[bytes]) -> None:
        # vLLM before 0.23 leaves out the topic.
        if len(frames) not in (3, 4) or frames[0]:
            self._note_bad("a replayed message is not ['', topic, seq, batch]")
            return
        self._due_s = self._clock.monotonic() + self._options.replay_timeout_s
        if frames[-2] == END_SEQ:
            self._hang_up()
            self._due_s = self._clock.monotonic() + self._options.verify_s
            self._perform(self._state.on_replay_end())
            self._note_up()
            return
        numbered = self._decode(frames[-2], frames[-1])
        if numbered is not None:
            self._perform(self._state.on_replayed(*numbered))

    def _on_time(self) -> None:
        """Does what is due: give up on a replay, ask again, let entries go."""
        now = self._clock.monotonic()
        if now >= self._due_s:
            if self._dealer is not None:
                self._hang_up()
                self._note_down()
                self._due_s = now + self._options.retry_s
            else:
                self._perform(self._state.resync())
        if self._down_mark is not None and now >= self._expire_s:
            held = self._index.num_blocks(self._replica_id)
            self._index.expire(self._replica_id, before=self._down_mark)
            self._has_expired |= self._index.num_blocks(self._replica_id) < held
            self._down_mark = self._index.tick
            self._expire_s = now + self._options.stale_after_s

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Apply(batch):
                    self._stats.num_bad += apply_batch(
                        self._index, self._replica_id, batch, block_size=self._block_size
                    )
                case Clear(reason):
                    self._index.clear(self._replica_id)
                    if reason == ClearReason.LOST:
                        _log.warning("kv_events_lost", replica=self._replica_id)
                    elif reason == ClearReason.RESTART:
                        _log.info("kv_feed_restarted", replica=self._replica_id)
                case Replay(start_seq):
                    self._ask(start_seq)
                case _:
                    assert_never(action)

    def _ask(self, start_seq: int) -> None:
        """Asks for a replay on a socket of its own, so that answers to an earlier one are gone."""
        self._hang_up()
        dealer = self._dealer = self._context.socket(zmq.DEALER)
        self._set_up(dealer, self.info.replay_port)
        dealer.send_multipart([b"", pack_seq(start_seq)])
        self._stats.num_replays += 1
        self._due_s = self._clock.monotonic() + self._options.replay_timeout_s

    def _set_up(self, socket: zmq.asyncio.Socket, port: int) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
        socket.setsockopt(zmq.RCVHWM, self._options.max_pending_batches)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        socket.connect(f"tcp://{self._host}:{port}")

    def _hang_up(self) -> None:
        if self._dealer is not None:
            self._dealer.close(linger=0)
            self._dealer = None

    def _note_down(self) -> None:
        if self._down_mark is not None:
            return
        self.is_up = False
        self._stats.num_outages += 1
        self._down_mark = self._index.tick
        self._expire_s = self._clock.monotonic() + self._options.stale_after_s
        _log.warning("kv_feed_down", replica=self._replica_id)

    def _note_up(self) -> None:
        if not self.is_up:
            _log.info("kv_feed_up", replica=self._replica_id)
        self.is_up = True
        self._down_mark = None
        if self._has_expired:
            self._has_expired = False
            self._perform(self._state.start())

    def _decode(self, seq: bytes, payload: bytes) -> tuple[int, EventBatch] | None:
        """Reads a numbered batch; one that cannot be read is an empty one, so its number counts."""
        try:
            number = unpack_seq(seq)
        except ProtocolError as exc:
            self._note_bad(exc.message)
            return None
        try:
            return number, decode_batch(payload)
        except ProtocolError as exc:
            self._note_bad(exc.message)
            return number, EventBatch(ts=0.0, events=(), boot_id=self._state.boot_id)

    def _note_bad(self, problem: str) -> None:
        self._stats.num_bad += 1
        _log.debug("kv_events_skipped", replica=self._replica_id, problem=problem)


def apply_batch(index: BlockIndex, replica_id: str, batch: EventBatch, *, block_size: int) -> int:
    """Enters the events of a batch into the index, in order.

    Blocks in other places than the pool itself are not listed.

    Returns:
        How many events were skipped because their blocks have another size.
    """
    num_skipped = 0
    for event in batch.events:
        match event:
            case BlockStored():
                if event.medium not in DEVICE_MEDIA:
                    continue
                if event.block_size != block_size:
                    num_skipped += 1
                    continue
                parent = event.parent_block_hash
                index.store(
                    replica_id,
                    None if parent is None else _index_hash(parent),
                    [_index_hash(block_hash) for block_hash in event.block_hashes],
                )
            case BlockRemoved():
                if event.medium in DEVICE_MEDIA:
                    index.remove(replica_id, [_index_hash(h) for h in event.block_hashes])
            case AllBlocksCleared():
                index.clear(replica_id)
            case _:
                assert_never(event)
    return num_skipped


async def _drain(socket: zmq.asyncio.Socket) -> list[list[bytes]]:
    """Takes what has arrived, up to a limit, so that other work gets its turn."""
    messages: list[list[bytes]] = []
    while len(messages) < _DRAINED_PER_TURN:
        try:
            messages.append(await socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            break
    return messages


def _index_hash(block_hash: int | bytes) -> int:
    """Returns what the index lists a block under: the low 64 bits."""
    if isinstance(block_hash, bytes):
        return event_hash(BlockHash(block_hash))
    return block_hash & _LOW_64_BITS


def _num_blocks(batch: EventBatch) -> int:
    return sum(
        0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
        for event in batch.events
    )
