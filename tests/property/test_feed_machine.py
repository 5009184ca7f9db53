"""A feed over a channel that loses, repeats and reorders, from a worker that restarts.

Whatever happened: once a replay has been answered and nothing is under way, the index holds what
the worker holds, or less if the worker could no longer replay everything. Never more.
"""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from typing_extensions import override

from kvway_core.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEvent
from kvway_router.block_events import OwnBlocks, apply
from kvway_router.feed_state import (
    Action,
    Apply,
    Clear,
    FeedOptions,
    FeedState,
    FeedStats,
    Replay,
)
from kvway_router.index import BlockIndex

REPLICA = "a:1"
BLOCK_SIZE = 16

Message = tuple[int, EventBatch]


class Worker:
    """Holds chains of blocks, numbers its batches, remembers the last few of them."""

    def __init__(self, boot_id: str | None, *, num_kept: int, start_s: float = 0.0) -> None:
        self.boot_id = boot_id
        self.start_s = start_s
        self.num_kept = num_kept
        self.num_published = 0
        self.held: dict[int, int | None] = {}
        self.kept: list[Message] = []

    def publish(self, *events: KVEvent) -> Message:
        ts = self.start_s + self.num_published
        message = self.num_published, EventBatch(ts=ts, events=events, boot_id=self.boot_id)
        self.num_published += 1
        self.kept = [*self.kept, message][-self.num_kept :]
        return message

    def store(self, parent: int | None, run: list[int]) -> Message:
        before = parent
        for block_hash in run:
            self.held[block_hash] = before
            before = block_hash
        stored = BlockStored(
            block_hashes=list(run), parent_block_hash=parent, token_ids=[], block_size=BLOCK_SIZE
        )
        return self.publish(stored)

    def remove(self, block_hash: int) -> Message:
        del self.held[block_hash]
        return self.publish(BlockRemoved(block_hashes=[block_hash]))

    def clear(self) -> Message:
        self.held.clear()
        return self.publish(AllBlocksCleared())


class FeedMachine(RuleBasedStateMachine):
    num_kept = 10_000
    is_forgetful = False
    is_named = True
    can_replay = True
    options = FeedOptions(max_pending_batches=4)

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex()
        self.blocks = OwnBlocks(self.index, REPLICA, block_size=BLOCK_SIZE)
        self.stats = FeedStats()
        self.state = FeedState(options=self.options, stats=self.stats, can_replay=self.can_replay)
        self.num_boots = 0
        self.worker = self.boot()
        self.wire: list[Message] = []
        self.question: int | None = None
        self.answer: Iterator[Message] | None = None

    def boot(self) -> Worker:
        self.num_boots += 1
        return Worker(
            f"boot-{self.num_boots}" if self.is_named else None,
            num_kept=self.num_kept,
            start_s=1e6 * self.num_boots,
        )

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Apply(batch):
                    assert apply(self.blocks, batch) == 0
                case Clear():
                    self.index.clear(REPLICA)
                case Replay(start_seq):
                    self.question, self.answer = start_seq, None

    @initialize()
    def start(self) -> None:
        self.perform(self.state.start())

    # -- the worker -----------------------------------------------------------------------------

    @rule(parent=st.integers(0, 8), length=st.integers(1, 3))
    def store(self, parent: int, length: int) -> None:
        """Chains of a binary tree: block n has the parent n // 2, block 1 none."""
        if parent and parent not in self.worker.held:
            return
        run = [1] if parent == 0 else []
        while len(run) < length:
            run.append(2 * (run[-1] if run else parent))
        self.wire.append(self.worker.store(parent or None, run))

    @rule(data=st.data())
    @precondition(lambda self: self.worker.held)
    def remove(self, data: st.DataObject) -> None:
        self.wire.append(self.worker.remove(data.draw(st.sampled_from(sorted(self.worker.held)))))

    @rule()
    def clear(self) -> None:
        self.wire.append(self.worker.clear())

    @rule()
    def restart(self) -> None:
        """What is still on the wire may arrive behind what the new life sends."""
        self.worker = self.boot()

    # -- the channel ----------------------------------------------------------------------------

    @rule(number=st.integers(0, 20), repeat=st.booleans())
    @precondition(lambda self: self.wire)
    def deliver(self, number: int, *, repeat: bool) -> None:
        number %= len(self.wire)
        message = self.wire[number] if repeat else self.wire.pop(number)
        self.perform(self.state.on_batch(*message))

    @rule()
    @precondition(lambda self: self.wire)
    def deliver_next(self) -> None:
        self.perform(self.state.on_batch(*self.wire.pop(0)))

    @rule(number=st.integers(0, 20))
    @precondition(lambda self: self.wire)
    def lose(self, number: int) -> None:
        self.wire.pop(number % len(self.wire))

    # -- the replay -----------------------------------------------------------------------------

    @rule()
    @precondition(lambda self: self.question is not None)
    def begin_answer(self) -> None:
        start = self.question or 0
        self.question = None
        self.answer = iter([message for message in self.worker.kept if message[0] >= start])

    @rule()
    @precondition(lambda self: self.answer is not None)
    def continue_answer(self) -> None:
        answer = self.answer
        message = next(answer, None) if answer is not None else None
        if message is not None:
            self.perform(self.state.on_replayed(*message))
        else:
            self.answer = None
            self.perform(self.state.on_replay_end())

    @rule()
    @precondition(lambda self: self.answer is not None)
    def fail_answer(self) -> None:
        self.answer = None
        self.perform(self.state.resync())

    @rule()
    def settle(self) -> None:
        """All that is on the wire is lost; then the worker is asked and answers in full."""
        self.wire.clear()
        self.finish_answers()
        self.perform(self.state.resync())
        self.finish_answers()
        self.compare()

    def finish_answers(self) -> None:
        while self.state.replaying:
            if self.question is not None:
                self.begin_answer()
            self.continue_answer()

    def compare(self) -> None:
        here, there = self.held_here(), set(self.worker.held)
        assert here <= there if self.is_forgetful else here == there

    def held_here(self) -> set[int]:
        return set(self.index.blocks(REPLICA))

    @invariant()
    def is_bounded(self) -> None:
        self.index.check_invariants()
        assert len(self.state._pending) <= self.options.max_pending_batches
        assert self.state.replaying == (self.question is not None or self.answer is not None)


class ForgetfulFeedMachine(FeedMachine):
    """The worker remembers three batches: what it cannot replay may be missing, never made up."""

    num_kept = 3
    is_forgetful = True

    @rule(times=st.integers(1, 3))
    @precondition(lambda self: self.state.replaying)
    def cut_answers(self, times: int) -> None:
        """The connection ends, and ends again: is there a batch that is too large?"""
        for _ in range(times):
            self.question = self.answer = None
            self.perform(self.state.on_replay_cut())
            if self.question is None:
                self.perform(self.state.resync())


class InOrderFeedMachine(FeedMachine):
    """Without loss nothing is ever replayed twice or lost."""

    options = FeedOptions()
    deliver = lose = None  # type: ignore[assignment]
    fail_answer = restart = settle = None  # type: ignore[assignment]

    @invariant()
    def loses_nothing(self) -> None:
        assert self.stats.num_lost == self.stats.num_restarts == self.stats.num_gaps == 0


class AnonymousFeedMachine(FeedMachine):
    """An engine without boot ids, over a connection that loses but keeps order, as ZMQ's do."""

    is_named = False
    deliver = None  # type: ignore[assignment]


class DeafFeedMachine(FeedMachine):
    """One that cannot be asked either: true again as soon as a batch comes, or less than true."""

    is_named = False
    can_replay = False
    is_forgetful = True
    deliver = None  # type: ignore[assignment]

    @override
    @rule()
    def restart(self) -> None:
        """Its first batch arrives: else nobody could tell it from one that went on."""
        self.wire.clear()
        self.worker = self.boot()
        self.perform(self.state.on_batch(*self.worker.clear()))

    @override
    @rule()
    def settle(self) -> None:
        self.wire.clear()
        self.perform(self.state.on_batch(*self.worker.store(None, [1])))
        self.compare()


_MORE = settings(max_examples=60, stateful_step_count=40, deadline=None)

TestFeed = FeedMachine.TestCase
TestForgetfulFeed = ForgetfulFeedMachine.TestCase
TestInOrderFeed = InOrderFeedMachine.TestCase
TestAnonymousFeed = AnonymousFeedMachine.TestCase
TestDeafFeed = DeafFeedMachine.TestCase
TestFeed.settings = _MORE
TestForgetfulFeed.settings = _MORE
TestInOrderFeed.settings = _MORE
TestAnonymousFeed.settings = _MORE
TestDeafFeed.settings = _MORE
