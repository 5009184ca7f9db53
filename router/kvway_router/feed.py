"""Keeps the index true to one worker's cache by following its KV events.

    PUB    --> live batches -----.
                                 +--> FeedState --> BlockEvents --> index: store, remove, clear
    ROUTER --> replayed batches -'        |
       ^                                  |
       `---------- replay from n ---------'

`FeedState` decides; around it are two sockets and a clock. After a silence the worker is asked
whether something was missed, which also shows that the feed still works. While it gives no answer
the feed is down: entries that nobody uses are dropped after a while instead of lying, and once it
is up again all is replayed from the start.

Batches are read and entered in order, one at a time, a few milliseconds at once: all feeds and
everything else on the loop take turns.

An engine without a replay socket cannot be asked. Its feed is down from the moment that the
connection ends until the next batch comes: its number says whether one was lost.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import TypeVar, assert_never

import structlog
import zmq
import zmq.asyncio

from kvway_core.clock import Clock
from kvway_core.errors import ProtocolError
from kvway_core.events import (
    END_SEQ,
    MAX_BATCH_BYTES,
    EventBatch,
    decode_in_steps,
    unpack_seq,
)
from kvway_router.block_events import BlockEvents
from kvway_router.feed_sockets import ReplayAnswer, drain, has_ended, monitor_of, set_up
from kvway_router.feed_source import FeedSource
from kvway_router.feed_state import (
    Action,
    Apply,
    Clear,
    ClearReason,
    FeedOptions,
    FeedPosition,
    FeedState,
    FeedStats,
    Replay,
)
from kvway_router.index import BlockIndex
from kvway_router.pacing import Pace

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


class ReplicaFeed:
    """Follows one publisher: two sockets around a `FeedState`.

    Args:
        source: The publisher.
        blocks: What its events mean for the index.
        index: Where entries age while the feed is down.
        clock: Tells the time.
        context: Owner of the sockets' thread; the caller destroys it.
        options: Limits and pauses.
        stats: Counted up.
        pace: Shared by all feeds.
        resume: Where the index got to in another life of the router; None to begin anew.
    """

    def __init__(  # noqa: PLR0913  sockets, decisions, index and clock meet here
        self,
        source: FeedSource,
        *,
        blocks: BlockEvents,
        index: BlockIndex,
        clock: Clock,
        context: zmq.asyncio.Context,
        options: FeedOptions,
        stats: FeedStats,
        pace: Pace,
        resume: FeedPosition | None = None,
    ) -> None:
        """Open nothing yet."""
        self.is_up = False
        """Whether what is listed is what the worker said last, as far as anyone can know."""
        self.source = source
        self._blocks = blocks
        self._replica_id = source.replica_id
        self._index = index
        self._clock = clock
        self._context = context
        self._options = options
        self._stats = stats
        self._pace = pace
        self._resume = resume
        self._state = FeedState(options=options, stats=stats, can_replay=source.replay is not None)
        self._topic = source.topic.encode()
        self._question: int | None = None
        self._answer: ReplayAnswer | None = None
        self._is_entering = False
        self._due_s = 0.0
        self._down_mark: int | None = None
        self._expire_s = 0.0
        self._has_expired = False
        self._monitor: zmq.asyncio.Socket | None = None
        self._true_s = clock.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the index was last known to be true to the worker."""
        return self._clock.monotonic() - self._true_s

    @property
    def position(self) -> FeedPosition | None:
        """Where another router can go on from with the same index; None where it cannot."""
        boot_id = self._state.boot_id
        if boot_id is None or self._has_expired or self._state.next_seq == 0:
            return None
        if self._is_entering:
            return None  # a part of a batch may be in the index
        return FeedPosition(boot_id, self._state.next_seq)

    async def run(self) -> None:
        """Keeps the index true until cancelled. Closes its sockets on the way out.

        Ends by itself, with a warning in the log, where an endpoint cannot be used at all.
        """
        subscriber = self._context.socket(zmq.SUB)
        try:
            if self.source.replay is None:
                self._monitor = monitor_of(subscriber)
            set_up(
                subscriber,
                self.source.pub,
                max_batches=self._options.max_pending_batches,
                bind=self.source.bind,
            )
            subscriber.setsockopt(zmq.SUBSCRIBE, self._topic)
            resume = self._resume
            if resume is None:
                await self._perform(self._state.start())
            else:
                await self._perform(self._state.resume(resume.boot_id, resume.next_seq))
            while True:
                await self._turn(subscriber)
        except zmq.ZMQError as exc:
            _log.warning("kv_feed_unusable", replica=self._replica_id, error=str(exc))
        finally:
            if self._monitor is not None:
                subscriber.disable_monitor()
                self._monitor.close(linger=0)
            subscriber.close(linger=0)
            self._hang_up()

    async def _turn(self, subscriber: zmq.asyncio.Socket) -> None:
        """Asks what is to be asked, then waits for one thing to happen and deals with it."""
        if self._question is not None:
            question, self._question = self._question, None
            await self._ask(question)
        ready = await self._wait(subscriber)
        if self._monitor is not None and self._monitor in ready:
            await drain(self._monitor, self._on_connection)
        # Live batches first: those that arrive while the answer to a replay is read are newer.
        if subscriber in ready:
            await drain(subscriber, self._on_live)
        if self._answer is not None and await self._answer.read(ready, self._on_answer):
            await self._on_cut()
        await self._on_time()

    async def _wait(self, subscriber: zmq.asyncio.Socket) -> set[zmq.asyncio.Socket]:
        """Waits for messages or for the next thing that is due; returns what has messages."""
        poller = zmq.asyncio.Poller()
        poller.register(subscriber, zmq.POLLIN)
        for other in self._answer.sockets if self._answer is not None else ():
            poller.register(other, zmq.POLLIN)
        if self._monitor is not None:
            poller.register(self._monitor, zmq.POLLIN)
        due_s = self._due_s if self._monitor is None else math.inf
        if self._down_mark is not None:
            due_s = min(due_s, self._expire_s)
        wait_s = min(self._options.verify_s, max(0.0, due_s - self._clock.monotonic()))
        # A poll of 0 ms would not suspend, and what is here already must not keep the loop.
        return set(dict(await poller.poll(max(1, math.ceil(wait_s * 1e3)))))

    async def _on_live(self, frames: Sequence[bytes]) -> None:
        if len(frames) != 3 or (self._topic and frames[0] != self._topic):
            self._note_bad("a live message is not [topic, seq, batch]")
            return
        if frames[1] == END_SEQ:
            self._note_bad("a live message has the number that ends a replay")
            return
        numbered = await self._decode(frames[1], frames[2])
        if numbered is None:
            return
        state = self._state
        if self._answer is None and not state.replaying:
            self._due_s = self._clock.monotonic() + self._options.verify_s
        was_joining = state.joining
        await self._perform(state.on_batch(*numbered))
        is_true = self.is_up or self._monitor is not None or was_joining
        if is_true and not state.replaying and not state.joining:
            await self._note_up()

    async def _on_connection(self, frames: Sequence[bytes]) -> None:
        """Takes what ZMQ says of the connection to an engine that cannot be asked."""
        if has_ended(frames):
            self._note_down()
        elif self._down_mark is None:
            await self._note_up()  # of a first connection nothing can have been lost

    async def _on_cut(self) -> None:
        """Gives up on an answer whose connection ended."""
        self._hang_up()
        self._note_down()
        self._due_s = self._clock.monotonic() + self._options.retry_s
        await self._perform(self._state.on_replay_cut())

    async def _on_answer(self, frames: Sequence[bytes]) -> None:
        # vLLM before 0.23 leaves out the topic.
        if len(frames) not in (3, 4) or frames[0]:
            self._note_bad("a replayed message is not ['', topic, seq, batch]")
            return
        self._due_s = self._clock.monotonic() + self._options.replay_timeout_s
        if frames[-2] == END_SEQ:
            self._hang_up()
            self._due_s = self._clock.monotonic() + self._options.verify_s
            await self._perform(self._state.on_replay_end())
            await self._note_up()
            return
        numbered = await self._decode(frames[-2], frames[-1])
        if numbered is not None:
            await self._perform(self._state.on_replayed(*numbered))

    async def _on_time(self) -> None:
        """Does what is due: give up on a replay, ask again, let entries go."""
        now = self._clock.monotonic()
        if now >= self._due_s and self._monitor is None:
            if self._answer is not None:
                self._hang_up()
                self._note_down()
                self._due_s = now + self._options.retry_s
            else:
                self._due_s = now + self._options.verify_s
                await self._perform(self._state.resync())
        if self._down_mark is not None and now >= self._expire_s:
            held = self._index.num_blocks(self._replica_id)
            await self._work(self._index.expiring(self._replica_id, before=self._down_mark))
            self._has_expired |= self._index.num_blocks(self._replica_id) < held
            self._down_mark = self._index.tick
            self._expire_s = now + self._options.stale_after_s

    async def _perform(self, actions: Sequence[Action]) -> None:
        self._is_entering = True
        for action in actions:
            match action:
                case Apply(batch):
                    await self._work(self._entering(batch))
                case Clear(reason):
                    await self._work(self._blocks.clearing())
                    self._note_cleared(reason)
                case Replay(start_seq):
                    self._hang_up()
                    self._question = start_seq
                case _:
                    assert_never(action)
        self._is_entering = False

    def _entering(self, batch: EventBatch) -> Generator[None, None, None]:
        for num_bad in self._blocks.steps(batch):
            self._stats.num_bad += num_bad
            yield

    async def _work(self, steps: Generator[None, None, _T]) -> _T:
        """Does what may take long. That time is no silence of the worker's."""
        start_s = self._clock.monotonic()
        result = await self._pace.work(steps)
        self._due_s += self._clock.monotonic() - start_s
        return result

    def _note_cleared(self, reason: ClearReason) -> None:
        match reason:
            case ClearReason.START:
                pass
            case ClearReason.RESTART:
                _log.info("kv_feed_restarted", replica=self._replica_id)
            case ClearReason.LOST:
                _log.warning("kv_events_lost", replica=self._replica_id)
            case ClearReason.UNREPLAYABLE:
                # The next live batch is where it begins anew, not the first that can be replayed.
                self._has_expired = False
                _log.warning(
                    "kv_batch_unreplayable", replica=self._replica_id, limit_bytes=MAX_BATCH_BYTES
                )
            case _:
                assert_never(reason)

    async def _ask(self, start_seq: int) -> None:
        assert self.source.replay is not None  # noqa: S101  else the state asks for no replay
        self._answer = ReplayAnswer(
            self._context, self.source.replay, max_batches=self._options.max_pending_batches
        )
        await self._answer.ask(start_seq)
        self._stats.num_replays += 1
        self._due_s = self._clock.monotonic() + self._options.replay_timeout_s

    def _hang_up(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def _note_down(self) -> None:
        if self._down_mark is not None:
            return
        self.is_up = False
        self._stats.num_outages += 1
        self._down_mark = self._index.tick
        self._expire_s = self._clock.monotonic() + self._options.stale_after_s
        _log.warning("kv_feed_down", replica=self._replica_id)

    async def _note_up(self) -> None:
        if not self.is_up:
            _log.info("kv_feed_up", replica=self._replica_id)
        self.is_up = True
        self._true_s = self._clock.monotonic()
        self._down_mark = None
        if self._has_expired and self._monitor is None:
            self._has_expired = False
            await self._perform(self._state.start())

    async def _decode(self, seq: bytes, payload: bytes) -> tuple[int, EventBatch] | None:
        """Reads a numbered batch; one that cannot be read is empty, so that its number counts."""
        try:
            number = unpack_seq(seq)
        except ProtocolError as exc:
            self._note_bad(exc.message)
            return None
        try:
            return number, await self._work(decode_in_steps(payload))
        except ProtocolError as exc:
            self._note_bad(exc.message)
            return number, EventBatch(ts=0.0, events=(), boot_id=self._state.boot_id)

    def _note_bad(self, problem: str) -> None:
        self._stats.num_bad += 1
        _log.debug("kv_events_skipped", replica=self._replica_id, problem=problem)
