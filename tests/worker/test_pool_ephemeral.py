"""Ephemeral content: shared while its requests run, and gone with the last of them."""

from __future__ import annotations

from kvway_core.blocks import event_hash
from kvway_core.events import BlockRemoved
from kvway_worker.cache.block_content import BlockContent
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.scheduling.sequence import Status
from tests.worker.batching import COMMON, Bench, Replay, answer, request, run, scheduled
from tests.worker.pools import NAMESPACE, hashes, num_found, serve, take

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def test_ephemeral_content_goes_with_its_last_holder_and_says_so() -> None:
    pool = BlockPool(9, 4)
    table = take(pool, PROMPT, ephemeral=True)
    twin = take(pool, PROMPT, ephemeral=True)
    assert twin == table
    pool.take_events()
    pool.free(table)
    assert num_found(pool, PROMPT) == (2, 0)
    assert pool.take_events() == []
    pool.free(twin)
    pool.check_invariants()
    assert num_found(pool, PROMPT) == (0, 0)
    assert pool.num_cached == 0
    assert pool.take_events() == [
        BlockRemoved([event_hash(block_hash) for block_hash in reversed(hashes(PROMPT))])
    ]


def test_content_that_a_normal_request_has_used_stays() -> None:
    pool = BlockPool(9, 4)
    table = take(pool, PROMPT, ephemeral=True)
    normal = take(pool, PROMPT[:4])
    pool.free(normal)
    pool.free(table)
    pool.check_invariants()
    assert num_found(pool, PROMPT) == (1, 0), "what it has not used is gone"
    assert num_found(pool, PROMPT[:3]) == (0, 2), "and it can be copied from"


def test_content_that_a_normal_request_has_computed_too_stays() -> None:
    """It finds the same content when it publishes, and so claims it."""
    pool = BlockPool(9, 4)
    take(pool, PROMPT[:4], ephemeral=True)
    (own,) = pool.allocate(1)
    content = BlockContent(hashes(PROMPT)[0], NAMESPACE, (1, 2, 3, 4))
    assert pool.publish(own, content) == 0
    pool.free([0])
    pool.check_invariants()
    assert num_found(pool, [*PROMPT[:4], 9]) == (1, 0)


def test_an_ephemeral_request_that_hits_normal_content_leaves_it_there() -> None:
    pool = BlockPool(9, 4)
    serve(pool, PROMPT)
    serve(pool, [*PROMPT, 1, 1, 1, 1], ephemeral=True)
    assert num_found(pool, [*PROMPT, 1, 1, 1, 1]) == (2, 0)


def test_pending_ephemeral_content_goes_without_a_word() -> None:
    pool = BlockPool(9, 4)
    (block,) = pool.allocate(1)
    pool.publish(block, BlockContent(hashes(PROMPT)[0], NAMESPACE, (1, 2, 3, 4)), ephemeral=True)
    pool.free([block])
    pool.commit()
    assert pool.take_events() == []
    assert pool.num_cached == 0
    pool.check_invariants()


def test_a_normal_twin_in_the_same_step_makes_content_stay() -> None:
    pool = BlockPool(9, 4)
    (block,) = pool.allocate(1)
    pool.publish(block, BlockContent(hashes(PROMPT)[0], NAMESPACE, (1, 2, 3, 4)), ephemeral=True)
    pool.allocate(0, hits=[block])
    pool.commit()
    pool.free([block])
    pool.free([block])
    pool.check_invariants()
    assert num_found(pool, [*PROMPT[:4], 9]) == (1, 0)


def test_an_ephemeral_end_does_not_cost_a_tail() -> None:
    """A tail that an ephemeral request has gone on from is still there behind it."""
    pool = BlockPool(9, 4)
    serve(pool, [*PROMPT, 9, 9])
    serve(pool, [*PROMPT, 9, 9, 9, 9], ephemeral=True)
    assert num_found(pool, [*PROMPT, 9, 9, 8]) == (2, 2)


def test_ephemeral_content_is_not_copied_from() -> None:
    """Its rows may be gone before the copy is of use, and it would then be kept after all."""
    pool = BlockPool(9, 4)
    take(pool, PROMPT, ephemeral=True)
    assert num_found(pool, [1, 2, 3, 9]) == (0, 0)


def test_through_the_scheduler_twins_share_and_nothing_is_left() -> None:
    bench, replay = Bench(20), Replay()
    twins = [request(str(i), [*COMMON, 7, 8], max_tokens=3, ephemeral=True) for i in (0, 1)]
    bench.add(*twins)
    plan = bench.scheduler.plan()
    assert scheduled(plan) == {"0": 50, "1": 2}
    bench.scheduler.commit(plan, bench.engine.execute(plan))
    replay.apply(bench.pool.take_events())
    assert len(replay.parents) == 3
    for _ in run(bench.scheduler, bench.engine):
        pass
    assert [seq.output_token_ids for seq in twins] == [answer([*COMMON, 7, 8], 3)] * 2
    assert (bench.pool.num_cached, bench.pool.num_free) == (0, 20)
    replay.apply(bench.pool.take_events())
    assert replay.parents == {}


def test_an_ephemeral_request_leaves_no_tail_behind_normal_content() -> None:
    bench = Bench(20)
    bench.finish(request("0", COMMON))
    cached = bench.pool.num_cached
    bench.finish(request("1", [*COMMON, 7, 8], max_tokens=3, ephemeral=True))
    assert bench.pool.num_cached == cached


def test_an_aborted_ephemeral_request_leaves_nothing() -> None:
    bench = Bench(20)
    seq = request("0", [*COMMON, 7, 8], max_tokens=9, ephemeral=True)
    bench.add(seq)
    bench.step()
    bench.step()
    bench.abort(seq)
    assert seq.status is Status.ABORTED
    assert bench.pool.num_cached == 0
