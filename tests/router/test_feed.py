"""A feed over real ZMQ sockets; what it decides is tried in tests/property."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import zmq.asyncio
from structlog.testing import capture_logs

from kvway_core.clock import SystemClock
from kvway_core.events import (
    END_SEQ,
    MAX_BATCH_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    encode_batch,
    pack_seq,
)
from kvway_router.block_events import OwnBlocks, apply
from kvway_router.feed import ReplicaFeed
from kvway_router.feed_source import FeedSource
from kvway_router.feed_state import FeedOptions, FeedPosition, FeedStats
from kvway_router.holding import Tier
from kvway_router.index import BlockIndex
from kvway_router.pacing import Pace
from tests.router.zmq_worker import TOPIC, ZmqWorker, removed, stored

REPLICA = "127.0.0.1:1"
CHAIN = [11, 12, 13, 14]
# Nothing is asked for but at the start and for a gap.
QUIET = FeedOptions(verify_s=60.0, replay_timeout_s=60.0)
# A silence is soon looked into.
CURIOUS = FeedOptions(verify_s=0.01, replay_timeout_s=30.0)
# And no answer is soon taken for an outage.
HASTY = FeedOptions(verify_s=0.01, replay_timeout_s=0.1, retry_s=0.01, stale_after_s=0.05)


class Follower:
    """A feed that runs, and the index that it keeps."""

    def __init__(self, feed: ReplicaFeed, *, index: BlockIndex, stats: FeedStats) -> None:
        self.feed = feed
        self.index = index
        self.stats = stats

    @property
    def matched(self) -> int:
        return self.index.match(CHAIN).get(REPLICA, 0)


async def eventually(condition: Callable[[], bool]) -> None:
    """Let the feed work until a condition holds; the test's time limit ends a wait in vain."""
    while not condition():  # noqa: ASYNC110 - the sockets have their own thread, the index no event
        await asyncio.sleep(0.002)


@asynccontextmanager
async def following(
    worker: ZmqWorker,
    *,
    options: FeedOptions = QUIET,
    index: BlockIndex | None = None,
    resume: FeedPosition | None = None,
) -> AsyncIterator[Follower]:
    index, stats = BlockIndex() if index is None else index, FeedStats()
    context = zmq.asyncio.Context()
    feed = ReplicaFeed(
        FeedSource.of_worker(REPLICA, "127.0.0.1", worker.info),
        blocks=OwnBlocks(index, REPLICA, block_size=16),
        index=index,
        clock=SystemClock(),
        context=context,
        options=options,
        stats=stats,
        pace=Pace(SystemClock(), budget_s=options.turn_s),
        resume=resume,
    )
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(feed.run())
            yield Follower(feed, index=index, stats=stats)
            task.cancel()
    finally:
        context.destroy(linger=0)


@pytest.fixture
async def worker() -> AsyncIterator[ZmqWorker]:
    async with ZmqWorker() as worker:
        yield worker


async def test_what_was_published_before_is_replayed(worker: ZmqWorker) -> None:
    await worker.publish(stored(11, 12))
    await worker.publish(stored(13, parent=12))
    async with following(worker) as follower:
        await eventually(lambda: follower.matched == 3)
        assert worker.replays == [0]
        await eventually(lambda: follower.feed.is_up)


async def test_live_events_are_entered_as_they_come(worker: ZmqWorker) -> None:
    async with following(worker) as follower:
        await worker.subscribed()
        await worker.publish(stored(*CHAIN))
        await eventually(lambda: follower.matched == 4)
        await worker.publish(removed(14), removed(13))
        await eventually(lambda: follower.matched == 2)
        await worker.publish(AllBlocksCleared(), stored(11))
        await eventually(lambda: follower.matched == 1)
        assert worker.replays == [0]
        assert follower.stats.num_batches == 3
        assert follower.stats.num_events == 5


async def test_one_lost_message_is_replayed_once_and_before_the_later_ones(
    worker: ZmqWorker,
) -> None:
    async with following(worker) as follower:
        await worker.subscribed()
        await worker.publish(stored(11))
        await eventually(lambda: follower.matched == 1)
        await worker.publish(stored(12, parent=11), lost=True)
        await worker.publish(removed(12), stored(77))
        await eventually(lambda: follower.index.match([77]) == {REPLICA: 1})
        assert follower.matched == 1
        assert worker.replays == [0, 0]
        assert (follower.stats.num_gaps, follower.stats.num_lost) == (1, 0)


async def test_a_loss_that_nothing_follows_is_found_after_a_silence(worker: ZmqWorker) -> None:
    async with following(worker, options=CURIOUS) as follower:
        await eventually(lambda: follower.feed.is_up)
        await worker.publish(stored(*CHAIN), lost=True)
        await eventually(lambda: follower.matched == 4)
        assert follower.stats.num_gaps == 0


async def test_what_cannot_be_replayed_any_more_clears_the_replica(worker: ZmqWorker) -> None:
    async with following(worker) as follower:
        await worker.subscribed()
        await worker.publish(stored(11, 12))
        await eventually(lambda: follower.matched == 2)
        await worker.publish(removed(12, 11), lost=True)
        await worker.publish(stored(77), lost=True)
        del worker.kept[0], worker.kept[1]
        await worker.publish(stored(88))
        await eventually(lambda: follower.index.match([88]) == {REPLICA: 1})
        assert follower.matched == 0
        assert follower.index.match([77]) == {REPLICA: 1}
        assert follower.stats.num_lost == 1


async def test_another_life_of_the_worker_starts_from_nothing(worker: ZmqWorker) -> None:
    async with following(worker) as follower:
        await worker.subscribed()
        for block_hash in CHAIN:
            await worker.publish(stored(block_hash))
        await eventually(lambda: follower.stats.num_batches == len(CHAIN))
        worker.restart("boot-2")
        await worker.publish(stored(77), lost=True)
        await worker.publish(stored(78, parent=77))
        await eventually(lambda: follower.index.match([77, 78]) == {REPLICA: 2})
        assert follower.matched == 0
        assert follower.stats.num_restarts == 1


async def test_a_worker_that_restarted_and_says_nothing_is_found_out(worker: ZmqWorker) -> None:
    async with following(worker, options=CURIOUS) as follower:
        await worker.publish(stored(*CHAIN))
        await eventually(lambda: follower.matched == 4)
        worker.restart("boot-2")
        await eventually(lambda: follower.matched == 0)
        assert (follower.stats.num_restarts, follower.stats.num_outages) == (1, 0)


async def test_bad_messages_cost_only_themselves(worker: ZmqWorker) -> None:
    async with following(worker) as follower:
        await worker.subscribed()
        await eventually(lambda: follower.feed.is_up)
        await worker.publish(stored(11))
        await worker.publish_raw(b"\xc1 not msgpack")
        await worker.send(TOPIC, b"short", b"")
        await worker.send(TOPIC, b"two frames")
        await worker.send(TOPIC + b"-of-another", pack_seq(0), b"")
        await worker.publish(stored(55, block_size=32), stored(12, parent=11))
        await eventually(lambda: follower.matched == 2)
        assert follower.stats.num_bad == 5
        assert follower.index.match([55]) == {}
        assert worker.replays == [0]


async def test_while_the_feed_is_down_unused_entries_go_and_then_come_back(
    worker: ZmqWorker,
) -> None:
    async with following(worker, options=HASTY) as follower:
        await worker.publish(stored(*CHAIN))
        await eventually(lambda: follower.matched == 4)
        worker.mute = True
        await eventually(lambda: follower.matched == 0)
        assert not follower.feed.is_up
        assert follower.stats.num_outages >= 1
        worker.mute = False
        await eventually(lambda: follower.matched == 4)
        assert follower.feed.is_up


async def test_sockets_that_close_and_open_again_are_found_again(worker: ZmqWorker) -> None:
    async with following(worker, options=HASTY) as follower:
        await worker.publish(stored(11))
        await eventually(lambda: follower.matched == 1)
        await worker.stop()
        await eventually(lambda: not follower.feed.is_up)
        await worker.start()
        await worker.publish(stored(12, parent=11), lost=True)
        await eventually(lambda: follower.matched == 2)


async def test_a_flood_does_not_stop_the_loop(worker: ZmqWorker) -> None:
    """Other work gets its turn between batches, and every batch is entered."""
    async with following(worker) as follower:
        await worker.subscribed()
        turns = 0
        for number in range(2_000):
            await worker.publish(stored(1000 + number))
        while follower.stats.num_batches < 2_000:
            turns += 1
            await asyncio.sleep(0)
        assert turns > 10
        assert follower.index.num_blocks(REPLICA) == 2_000


async def test_a_large_batch_is_entered_in_turns_with_other_work(worker: ZmqWorker) -> None:
    """In order, nothing of what follows in between; a snapshot has no number to go on from."""
    hashes = list(range(1, 20_001))
    async with following(worker, options=FeedOptions(turn_s=1e-9)) as follower:
        await worker.subscribed()
        await worker.publish(stored(7_777_777))
        await eventually(lambda: follower.feed.position is not None)
        await worker.publish(stored(*hashes))
        await worker.publish(removed(*reversed(hashes)))
        seen: list[int] = []
        in_between = set()
        while follower.stats.num_batches < 3 or follower.feed.position is None:
            held = follower.index.num_blocks(REPLICA) - 1
            if not seen or seen[-1] != held:
                seen.append(held)
            if 0 < held < len(hashes):
                in_between.add(follower.feed.position)
            await asyncio.sleep(0)
        top = seen.index(len(hashes))
        assert (len(seen[:top]) > 10, len(seen[top:]) > 10) == (True, True)
        assert seen[:top] == sorted(seen[:top])
        assert seen[top:] == sorted(seen[top:], reverse=True)
        assert in_between == {None}
        assert follower.feed.position == FeedPosition("boot-1", 3)


async def test_what_takes_long_to_enter_is_no_silence_of_the_worker(worker: ZmqWorker) -> None:
    options = FeedOptions(verify_s=60.0, replay_timeout_s=0.02, turn_s=1e-9)
    # The large one is the last that is taken before the feed looks what is due.
    for number in range(63):
        await worker.publish(stored(1_000_000 + number))
    await worker.publish(stored(*range(1, 200_001)))
    await worker.publish(stored(*CHAIN))
    async with following(worker, options=options) as follower:
        await eventually(lambda: follower.feed.is_up)
        assert (follower.stats.num_outages, follower.stats.num_batches) == (0, 65)


@pytest.mark.parametrize("has_replay_behind", [False, True])
async def test_a_batch_too_large_to_be_replayed_is_passed_over(
    worker: ZmqWorker, *, has_replay_behind: bool
) -> None:
    """It would end each connection that it comes by, and the feed for good."""
    options = FeedOptions(verify_s=0.05, replay_timeout_s=30.0, retry_s=0.01)
    with capture_logs() as logs:
        await worker.publish(stored(*CHAIN))
        await worker.publish_raw(bytes(MAX_BATCH_BYTES + 1), lost=True)
        if has_replay_behind:
            await worker.publish(stored(77), lost=True)
        async with following(worker, options=options) as follower:
            await worker.subscribed()
            await eventually(lambda: follower.stats.num_unreplayable == 1)
            assert follower.matched == 0
            assert not follower.feed.is_up
            num_asked = len(worker.replays)
            await worker.publish(stored(88, 89))
            await eventually(lambda: follower.feed.is_up)
            assert follower.index.match([88, 89]) == {REPLICA: 2}
            await worker.publish(removed(89), lost=True)
            await eventually(lambda: follower.index.match([88, 89]) == {REPLICA: 1})
            assert num_asked == 3
            assert min(worker.replays[3:]) >= 2
            assert (follower.stats.num_unreplayable, follower.stats.num_outages) == (1, 1)
    events = [log["event"] for log in logs]
    assert events.count("kv_batch_unreplayable") == 1
    assert events.count("kv_feed_down") == 1


async def test_a_live_message_cannot_have_the_number_that_ends_a_replay(
    worker: ZmqWorker,
) -> None:
    async with following(worker) as follower:
        await worker.subscribed()
        await worker.publish(stored(11))
        await eventually(lambda: follower.matched == 1)
        await worker.send(TOPIC, END_SEQ, encode_batch(EventBatch(0.0, (), boot_id="boot-1")))
        await eventually(lambda: follower.stats.num_bad == 1)
        assert follower.feed.position == FeedPosition("boot-1", 1)


def test_events_enter_under_their_low_64_bits_on_the_tier_of_their_medium() -> None:
    index = BlockIndex()
    whole = bytes(range(16))
    low = int.from_bytes(whole[8:], "big")
    events = (
        BlockStored(block_hashes=[whole], parent_block_hash=None, token_ids=[], block_size=16),
        BlockStored(block_hashes=[-1], parent_block_hash=whole, token_ids=[], block_size=16),
        BlockStored(
            block_hashes=[5], parent_block_hash=None, token_ids=[], block_size=16, medium="CPU"
        ),
        BlockStored(
            block_hashes=[6], parent_block_hash=5, token_ids=[], block_size=16, medium="DISK"
        ),
        BlockStored(
            block_hashes=[7],
            parent_block_hash=None,
            token_ids=[],
            block_size=16,
            medium="CLOUD",
        ),
        BlockRemoved(block_hashes=[whole], medium="CPU"),
    )
    batch = EventBatch(ts=0.0, events=events)
    assert encode_batch(batch)
    assert apply(OwnBlocks(index, REPLICA, block_size=16), batch) == 0
    assert index.match([low, 2**64 - 1]) == {REPLICA: 2}
    assert index.match([5, 6]) == {}
    assert index.match([5, 6], slowest=Tier.HOST) == {REPLICA: 1}
    assert index.match([5, 6], slowest=Tier.DISK) == {REPLICA: 2}
    assert index.match([7], slowest=Tier.DISK) == {}


async def test_a_router_that_restarts_goes_on_from_where_its_index_got_to(
    worker: ZmqWorker,
) -> None:
    index = BlockIndex()
    async with following(worker, index=index) as follower:
        assert [follower.feed.position] == [None]
        await worker.publish(stored(11, 12))
        await worker.publish(stored(13, parent=12))
        await eventually(lambda: follower.matched == 3)
        position = follower.feed.position
    assert position == FeedPosition("boot-1", 2)
    del worker.kept[0]  # by now it could not be replayed from the start
    await worker.publish(removed(13), stored(77), lost=True)
    async with following(worker, index=index, resume=position) as follower:
        await eventually(lambda: follower.index.match([77]) == {REPLICA: 1})
        assert follower.matched == 2
        assert (follower.stats.num_lost, worker.replays) == (0, [0, 1])


async def test_a_router_that_restarts_after_the_worker_did_begins_anew(worker: ZmqWorker) -> None:
    index = BlockIndex()
    index.store(REPLICA, None, CHAIN)
    worker.restart("boot-2")
    await worker.publish(stored(77))
    resume = FeedPosition("boot-1", 5)
    async with following(worker, index=index, resume=resume) as follower:
        await eventually(lambda: follower.index.match([77]) == {REPLICA: 1})
        assert follower.matched == 0


async def test_an_index_that_let_entries_go_is_no_place_to_go_on_from(worker: ZmqWorker) -> None:
    async with following(worker, options=HASTY) as follower:
        await worker.publish(stored(*CHAIN))
        await eventually(lambda: follower.matched == 4)
        assert follower.feed.position is not None
        worker.mute = True
        await eventually(lambda: follower.matched == 0)
        assert follower.feed.position is None
