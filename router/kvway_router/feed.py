"""Keeps the index true to one worker's cache by following its KV events.

    PUB    --> live batches -----.
                                 +--> FeedState --> index: store, remove, clear
    ROUTER --> replayed batches -'        |
       ^                                  |
       `---------- replay from n ---------'

`FeedState` decides; around it are two sockets and a clock. After a silence the worker is asked
whether something was missed, which also shows that the feed still works. While it gives no answer
the feed is down: entries that nobody uses are dropped after a while instead of lying, and once it
is up again all is replayed from the start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

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
from kvway_router.feed_state import (
    Action,
    Apply,
    Clear,
    ClearReason,
    FeedOptions,
    FeedState,
    FeedStats,
    Replay,
)
from kvway_router.holding import Tier
from kvway_router.index import BlockIndex

TIERS: Final[Mapping[str | None, Tier]] = {
    None: Tier.DEVICE,
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "DISK": Tier.DISK,
    "STORAGE": Tier.DISK,
}
"""Where the index lists the blocks of a medium; others, which a replica shares, are not listed."""

_DRAINED_PER_TURN: Final = 64
_RECONNECT_MAX_MS: Final = 2_000
_LOW_64_BITS: Final = 2**64 - 1

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FeedSource:
    """Where one worker publishes and what it is called.

    Attributes:
        replica_id: The replica whose blocks these are.
        host: Where its sockets are.
        info: Their ports and topic.
        block_size: Tokens per block of the index; events of another size are skipped.
    """

    replica_id: str
    host: str
    info: KvEventsInfo
    block_size: int


class ReplicaFeed:
    """Follows one worker: two sockets around a `FeedState`.

    Args:
        source: The worker.
        index: What is kept true.
        clock: Tells the time.
        context: Owner of the sockets' thread; the caller destroys it.
        options: Limits and pauses.
        stats: Counted up.
    """

    def __init__(
        self,
        source: FeedSource,
        *,
        index: BlockIndex,
        clock: Clock,
        context: zmq.asyncio.Context,
        options: FeedOptions,
        stats: FeedStats,
    ) -> None:
        """Open nothing yet."""
        self.is_up = False
        """Whether the last question to the worker was answered."""
        self.source = source
        self._replica_id = source.replica_id
        self._index = index
        self._clock = clock
        self._context = context
        self._options = options
        self._stats = stats
        self._state = FeedState(options=options, stats=stats)
        self._topic = source.info.topic.encode()
        self._question: int | None = None
        self._dealer: zmq.asyncio.Socket | None = None
        self._due_s = 0.0
        self._down_mark: int | None = None
        self._expire_s = 0.0
        self._has_expired = False

    async def run(self) -> None:
        """Keeps the index true until cancelled. Closes its sockets on the way out."""
        subscriber = self._context.socket(zmq.SUB)
        try:
            self._set_up(subscriber, self.source.info.pub_port)
            subscriber.setsockopt(zmq.SUBSCRIBE, self._topic)
            self._perform(self._state.start())
            while True:
                await self._turn(subscriber)
        finally:
            subscriber.close(linger=0)
            self._hang_up()

    async def _turn(self, subscriber: zmq.asyncio.Socket) -> None:
        """Asks what is to be asked, then waits for one thing to happen and deals with it."""
        if self._question is not None:
            question, self._question = self._question, None
            await self._ask(question)
        poller = zmq.asyncio.Poller()
        poller.register(subscriber, zmq.POLLIN)
        if self._dealer is not None:
            poller.register(self._dealer, zmq.POLLIN)
        due_s = self._due_s if self._down_mark is None else min(self._due_s, self._expire_s)
        wait_s = max(0.0, due_s - self._clock.monotonic())
        # A poll of 0 ms would not suspend, and what is here already must not keep the loop.
        ready = dict(await poller.poll(max(1, math.ceil(wait_s * 1e3))))
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
                        self._index, self._replica_id, batch, block_size=self.source.block_size
                    )
                case Clear(reason):
                    self._index.clear(self._replica_id)
                    if reason == ClearReason.LOST:
                        _log.warning("kv_events_lost", replica=self._replica_id)
                    elif reason == ClearReason.RESTART:
                        _log.info("kv_feed_restarted", replica=self._replica_id)
                case Replay(start_seq):
                    self._hang_up()
                    self._question = start_seq
                case _:
                    assert_never(action)

    async def _ask(self, start_seq: int) -> None:
        """Asks for a replay on a socket of its own, so that answers to an earlier one are gone."""
        dealer = self._dealer = self._context.socket(zmq.DEALER)
        self._set_up(dealer, self.source.info.replay_port)
        await dealer.send_multipart([b"", pack_seq(start_seq)])
        self._stats.num_replays += 1
        self._due_s = self._clock.monotonic() + self._options.replay_timeout_s

    def _set_up(self, socket: zmq.asyncio.Socket, port: int) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
        socket.setsockopt(zmq.RCVHWM, self._options.max_pending_batches)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        host = self.source.host
        socket.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")

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
        """Reads a numbered batch; one that cannot be read is empty, so that its number counts."""
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

    Returns:
        How many events were skipped because their blocks have another size.
    """
    num_skipped = 0
    for event in batch.events:
        match event:
            case BlockStored():
                tier = TIERS.get(event.medium)
                if tier is None:
                    continue
                if event.block_size != block_size:
                    num_skipped += 1
                    continue
                parent = event.parent_block_hash
                index.store(
                    replica_id,
                    None if parent is None else _index_hash(parent),
                    [_index_hash(block_hash) for block_hash in event.block_hashes],
                    tier=tier,
                )
            case BlockRemoved():
                tier = TIERS.get(event.medium)
                if tier is not None:
                    hashes = [_index_hash(block_hash) for block_hash in event.block_hashes]
                    index.remove(replica_id, hashes, tier=tier)
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
