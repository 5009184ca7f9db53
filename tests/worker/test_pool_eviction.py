"""Which content is given up for other content: scans pass, what is used again stays."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle, islice

import pytest

from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.cache.eviction import PROTECTED_SHARE, FreeBlocks
from kvway_worker.scheduling.block_tables import BlockTables
from tests.worker.batching import Bench, request
from tests.worker.pools import num_found, serve, take

SYSTEM = list(range(12))
"""Three blocks that many prompts begin with."""


def unique(num_prompts: int, length: int = 12) -> Iterator[list[int]]:
    """Yields prompts that share nothing."""
    for index in range(num_prompts):
        yield [1000 + index, *range(100, 99 + length)]


def hit_twice(pool: BlockPool) -> None:
    for _ in range(3):
        serve(pool, SYSTEM)


def test_s7_what_two_requests_hit_is_protected() -> None:
    """S7: as SGLang's SLRU, from the second hit on."""
    pool = BlockPool(20, 4)
    serve(pool, SYSTEM)
    serve(pool, SYSTEM)
    assert pool.tier("protected") == []
    serve(pool, SYSTEM)
    assert pool.tier("protected") == [2, 1, 0], "tail first"
    assert pool.tier("probation") == []


def test_only_the_blocks_that_were_hit_are_protected() -> None:
    pool = BlockPool(20, 4)
    for tail in (50, 60, 70, 80):
        serve(pool, [*SYSTEM[:8], tail, tail, tail, tail])
    assert pool.tier("protected") == [1, 0]
    assert len(pool.tier("probation")) == 4


def test_a_request_that_comes_back_to_its_own_blocks_proves_nothing() -> None:
    """Preempted again and again, a request does not push out what others use."""
    pool = BlockPool(20, 4)
    table = take(pool, SYSTEM)
    for _ in range(5):
        pool.free(table)
        pool.allocate(0, hits=table, again=True)
    pool.free(table)
    assert pool.tier("protected") == []


def test_a_preempted_request_takes_its_blocks_again_without_a_hit() -> None:
    pool = BlockPool(20, 16)
    tables = BlockTables(pool)
    serve(pool, list(range(32)), namespace=request("0", [1]).namespace)
    seq = request("0", range(33))
    for _ in range(5):
        assert tables.open(seq, 100) is not None
        seq.cached_tokens = 32
        tables.close(seq)
    assert pool.tier("protected") == []


def test_new_content_in_a_block_has_no_hits() -> None:
    pool = BlockPool(3, 4)
    hit_twice(pool)
    serve(pool, next(unique(1)))
    serve(pool, SYSTEM)
    assert pool.tier("protected") == []


@pytest.mark.parametrize("num_blocks", [15, 20, 50])
def test_a_scan_of_twice_the_pool_leaves_what_was_hit_twice(num_blocks: int) -> None:
    """Section 6 no 25: unique prompts, together twice the pool, pass through probation."""
    pool = BlockPool(num_blocks, 4)
    hit_twice(pool)
    for prompt in unique(-(-2 * num_blocks // 3)):
        assert serve(pool, prompt) == 0
    assert num_found(pool, [*SYSTEM, 1]) == (3, 0)
    assert pool.evictions["protected"] == 0
    assert pool.evictions["probation"] >= num_blocks


@pytest.mark.parametrize(("num_blocks", "num_left"), [(5, 3), (6, 2), (7, 1), (8, 0), (10, 0)])
def test_a_scan_takes_what_others_that_were_hit_twice_pushed_out(
    num_blocks: int, num_left: int
) -> None:
    """The limit of protection: all that was hit twice shares a fifth, here eight blocks."""
    pool = BlockPool(40, 4)
    for _ in range(7):
        serve(pool, SYSTEM)
    for _ in range(3):
        serve(pool, [500, *range(4 * num_blocks - 1)])
    for prompt in unique(80 // 3):
        serve(pool, prompt)
    assert num_found(pool, [*SYSTEM, 1])[0] == num_left


def test_a_scan_does_evict_what_was_hit_once() -> None:
    """The control: without the second hit the same scan takes it."""
    pool = BlockPool(20, 4)
    serve(pool, SYSTEM)
    serve(pool, SYSTEM)
    for prompt in unique(14):
        serve(pool, prompt)
    assert num_found(pool, SYSTEM) == (0, 0)


def test_a_stream_of_ephemeral_requests_leaves_what_is_there() -> None:
    pool = BlockPool(20, 4)
    serve(pool, SYSTEM)
    for prompt in unique(50):
        serve(pool, prompt, ephemeral=True)
    assert num_found(pool, [*SYSTEM, 1]) == (3, 0)
    assert pool.num_evictions == 0


def test_ephemeral_requests_that_need_all_blocks_leave_what_was_hit_twice() -> None:
    pool = BlockPool(20, 4)
    hit_twice(pool)
    for prompt in unique(20, length=4 * 17):
        serve(pool, prompt, ephemeral=True)
    assert num_found(pool, [*SYSTEM, 1]) == (3, 0)


def test_protected_content_that_nobody_uses_any_more_goes_in_the_end() -> None:
    """What is protected is at most its share: a new working set displaces the old one."""
    pool = BlockPool(20, 4)
    old = list(unique(5))
    new = [[5000 + token for token in prompt] for prompt in unique(5)]
    for prompts in (old, new):
        for prompt in prompts * 3:
            serve(pool, prompt)
    assert len(pool.tier("protected")) <= PROTECTED_SHARE * 20
    assert all(num_found(pool, [*prompt, 1]) == (3, 0) for prompt in new)
    assert sum(num_found(pool, prompt)[0] for prompt in old) <= 5


def test_what_leaves_protected_is_the_youngest_on_probation() -> None:
    free = FreeBlocks(15)  # three of them may be protected
    for _ in range(15):
        free.pop()
    free.put(0, "probation")
    for block in (1, 2, 3):
        free.put(block, "protected")
    assert free.tier("protected") == [1, 2, 3]
    free.take(0)
    free.put(0, "protected")
    assert free.tier("protected") == [2, 3, 0]
    assert free.tier("probation") == [1]
    assert [free.pop() for _ in range(2)] == [(1, "probation"), (2, "protected")]


def test_after_a_reset_blocks_are_given_away_in_the_order_in_which_they_were_used() -> None:
    """P34: the oldest first, and all of them before those that were blank."""
    free = FreeBlocks(6)
    for _ in range(4):
        free.pop()
    free.put(3, "protected")
    for block in (2, 0, 1):
        free.put(block, "probation")
    free.clear()
    assert free.num_cached == 0
    assert [free.pop() for _ in range(6)] == [(block, None) for block in (2, 0, 1, 3, 4, 5)]


def test_p5_nothing_can_be_taken_from_no_free_blocks() -> None:
    free = FreeBlocks(1)
    assert free.pop() == (0, None)
    with pytest.raises(IndexError, match="no block is free"):
        free.pop()
    with pytest.raises(KeyError):
        free.take(0)


def test_s6_blocks_that_are_held_are_never_evicted() -> None:
    """S6: and a chain loses its deepest block first, whatever tiers it is in."""
    pool = BlockPool(15, 4)
    hit_twice(pool)
    table = take(pool, [*SYSTEM, 90, 91, 92, 93])
    pool.allocate(11)
    assert pool.num_free == 0
    assert [pool.content(block) is not None for block in table] == [True] * 4
    pool.free(table)
    for left in (3, 2, 1, 0):
        pool.allocate(1)
        pool.check_invariants()
        assert num_found(pool, [*SYSTEM, 90, 91, 92, 93, 1]) == (left, 0)


def test_p7_at_any_time_what_is_left_of_a_chain_is_its_beginning() -> None:
    """Random chains of few different blocks, hit and evicted in any order."""
    rng = random.Random(5)
    pool = BlockPool(16, 4)
    for index in range(900):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 6)) for _ in range(4)]
        serve(pool, prompt)  # checks that no parent is evicted before its child
        if index % 50 == 49:
            table = pool.allocate(15)
            pool.check_invariants()
            pool.free(table)
    assert min(pool.evictions["probation"], pool.evictions["protected"]) > 0


def num_hits(pool: BlockPool, prompts: list[list[int]], num_requests: int) -> int:
    return sum(serve(pool, prompt) for prompt in islice(cycle(prompts), num_requests))


def test_25_round_robin_over_one_prefix_too_many_finds_what_was_used_before() -> None:
    """Section 6 no 25: a prefix that was in use keeps its hits through a cycle that does not fit.

    Six prefixes of three blocks that take turns in a pool of fifteen would find nothing with LRU.
    """
    pool = BlockPool(15, 4)
    prompts = list(unique(6))
    for _ in range(3):
        serve(pool, prompts[0])
    assert num_hits(pool, prompts, 60) >= 10 * 3


def test_25_round_robin_from_the_start_finds_nothing() -> None:
    """Section 6 no 25, the limit of this order: what is never hit is never protected."""
    pool = BlockPool(15, 4)
    assert num_hits(pool, list(unique(6)), 60) == 0


def test_25_round_robin_with_common_beginnings_keeps_them() -> None:
    """Section 6 no 25, as it is in practice: sessions that share a system prompt."""
    pool = BlockPool(15, 4)
    prompts = [[*SYSTEM[:8], 70 + index, 0, 0, 0, 0, 0, 0, 0] for index in range(8)]
    assert num_hits(pool, prompts, 80) >= 79 * 2


def test_through_the_scheduler_a_scan_leaves_the_system_prompt() -> None:
    bench = Bench(20)
    system = list(range(48))
    for index in range(3):
        bench.finish(request(f"s{index}", [*system, 500 + index], max_tokens=2))
    for index in range(10):
        start = 1000 * (index + 1)
        bench.finish(request(str(index), range(start, start + 60), max_tokens=4))
    last = request("last", [*system, 700], max_tokens=2)
    bench.finish(last)
    assert last.cached_tokens == 48


def test_evictions_are_counted_by_tier() -> None:
    pool = BlockPool(15, 4)
    hit_twice(pool)
    serve(pool, [50, 51, 52, 53])
    pool.allocate(14)
    assert pool.evictions == {"probation": 1, "protected": 2, "pinned": 0}
    assert pool.num_evictions == 3
