"""What the index takes: bounded, counted for what it is, and given back."""

from __future__ import annotations

import gc
import random
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from kvway_router.holding import Tier
from kvway_router.index import MIN_BYTES, BlockIndex
from kvway_router.leaving import AT_ONCE, PER_CHANGE
from tests.router.test_index_runs import RNG_SEED, fresh, num_runs

if TYPE_CHECKING:
    from collections.abc import Callable


def traced_bytes(files: str) -> int:
    """Returns the memory that code of these files took since tracing began, and still has."""
    gc.collect()
    own = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, files)])
    return sum(each.size for each in own.traces)


def test_unique_prompts_without_end_grow_nothing() -> None:
    """The whole of it by hand: a million prompts; here enough to go round some times."""
    rng = random.Random(RNG_SEED)
    index = BlockIndex(max_blocks_per_replica=1000, max_bytes=2**20)
    system = fresh(20, rng)
    peak = 0
    for number in range(20_000):
        name = f"r{number % 4}:1"
        promise = index.speculate(name, [*system, *fresh(rng.randrange(1, 12), rng)])
        (index.rollback if rng.random() < 0.1 else index.confirm)(promise)
        if number == 10_000:
            peak = index.size_bytes + 13 * index._tree._locator.num_entries
    assert index.size_bytes + 13 * index._tree._locator.num_entries < 1.2 * peak
    index.check_invariants()
    for number in range(4):
        index.remove_replica(f"r{number}:1")
    assert (len(index), num_runs(index), index.size_bytes) == (0, 0, 0)
    assert index._tree._locator.num_entries == 0


def test_replicas_that_join_and_leave_give_their_memory_back() -> None:
    rng = random.Random(RNG_SEED)
    index = BlockIndex(max_bytes=2**22)
    shared = fresh(64, rng)
    index.store("stays:1", None, shared)

    def generation() -> None:
        for number in range(25):
            name = f"r{number}:1"
            for _ in range(10):
                index.store(name, None, [*shared[: rng.randrange(64)], *fresh(64, rng)])
        for number in range(25):
            index.remove_replica(f"r{number}:1")

    generation()
    tracemalloc.start()
    try:
        for _ in range(4):
            generation()
        left = traced_bytes("*/kvway_router/*")
    finally:
        tracemalloc.stop()
    assert left < 200_000, "of about 1.5 MB that each generation takes"
    assert len(index) == 64
    index.store("stays:1", None, shared)
    assert num_runs(index) == 1


def test_a_replica_with_very_many_runs_is_forgotten_at_once_and_let_go_by_and_by() -> None:
    """Dropping them all at once would stop the event loop; nobody finds them meanwhile."""
    rng = random.Random(RNG_SEED)
    index = BlockIndex(max_blocks_per_replica=4000)
    shared = fresh(64, rng)
    index.store("stays:1", None, shared)
    index.store("goes:1", None, shared)
    index.set_limit("goes:1", 3000)
    runs = fresh(3 * AT_ONCE, rng)
    for run in runs:
        index.store("goes:1", None, [run])
    for forget in (index.clear, index.remove_replica):
        left = index._tree.num_nodes
        forget("goes:1")
        assert (index.num_blocks("goes:1"), index.match(runs[-1:])) == (0, {})
        assert index.match(shared) == {"stays:1": 64}
        assert left - index._tree.num_nodes <= AT_ONCE
        # What comes meanwhile stays, and has nothing of what was.
        for run in runs[-10:]:
            left = index._tree.num_nodes
            index.store("goes:1", None, [run])
            assert left - index._tree.num_nodes <= PER_CHANGE
        assert index.match(runs[-1:]) == {"goes:1": 1}
        while index._leavers:
            index.store("stays:1", None, shared)
        assert index.num_blocks("goes:1") == 10
        assert index._tree.num_nodes == 11
        index.check_invariants()
    index.remove_replica("goes:1")
    assert len(index._roster._names) == 1


def test_a_limit_outlives_what_a_replica_held() -> None:
    index = BlockIndex()
    index.set_limit("a:1", 3)
    index.clear("a:1")
    index.store("a:1", None, [1, 2, 3, 4, 5])
    assert index.num_blocks("a:1") == 3


def test_who_is_forgotten_makes_room_before_anybody_else() -> None:
    rng = random.Random(RNG_SEED)
    index = BlockIndex(max_bytes=400_000)
    for _ in range(3 * AT_ONCE // 2):
        index.store("goes:1", None, fresh(1, rng))
    kept = fresh(1000, rng)
    index.store("stays:1", None, kept)
    index.remove_replica("goes:1")
    assert index._leavers
    more = fresh(28_500, rng)
    index.store("stays:1", kept[-1], more)
    assert index.num_blocks("stays:1") == 1000 + len(more)
    index.check_invariants()


@pytest.mark.parametrize(("size", "shared"), [(128, 0), (512, 384), (16, 8)])
def test_what_is_counted_is_at_least_what_is_taken(size: int, shared: int) -> None:
    rng = random.Random(RNG_SEED)
    head = fresh(shared, rng)
    index = BlockIndex(max_bytes=2**23)
    index.store("r0:1", None, [1])
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(200_000 // size):
            index.store(f"r{number % 8}:1", None, [*head, *fresh(size - shared, rng)])
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken < index.size_bytes + 200_000, "eight replicas and what waits to be located on top"


def orphans(index: BlockIndex, number: int) -> None:
    rng = random.Random(number)
    index.store(f"r{number % 8}:1", rng.getrandbits(64), fresh(2, rng))


def steps(index: BlockIndex, number: int) -> None:
    """One prompt, each time used one block less: a run for each block of it."""
    chain = fresh(700, random.Random(0))
    index.store("r0:1", None, chain[: max(1, 700 - number)])


def shared_by_two_of_many(index: BlockIndex, number: int) -> None:
    head, *tail = fresh(2, random.Random(number))
    index.store("r499:1", None, [head])
    index.store("r498:1", None, [head, *tail])


@pytest.mark.parametrize(
    ("store", "num", "num_replicas"),
    [(orphans, 3000, 8), (steps, 700, 1), (shared_by_two_of_many, 1500, 500)],
)
def test_short_runs_in_great_number_are_counted_as_what_they_take(
    store: Callable[[BlockIndex, int], None], num: int, num_replicas: int
) -> None:
    """Orphans have a list each for who waits, and of many replicas each run has many bits."""
    index = BlockIndex(max_bytes=2**24)
    for number in range(num_replicas):
        index.store(f"r{number}:1", None, [number])
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0] - index.size_bytes
        for number in range(num):
            store(index, number)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken < index.size_bytes + 20_000


def test_at_most_sixteen_bytes_for_a_block_of_a_prompt_that_nobody_shares() -> None:
    rng = random.Random(RNG_SEED)
    index = BlockIndex()
    for number in range(64):
        index.store(f"r{number}:1", None, [number])
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(2000):
            index.store(f"r{number % 64}:1", None, fresh(128, rng))
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken / (2000 * 128) <= 16


def test_the_budget_holds_after_every_call() -> None:
    rng = random.Random(RNG_SEED)
    index = BlockIndex(max_bytes=4 * MIN_BYTES)
    chains = [fresh(rng.randrange(1, 60), rng) for _ in range(20)]
    for number in range(2000):
        chain = rng.choice(chains)
        cut = rng.randrange(len(chain))
        name = f"r{rng.randrange(5)}:1"
        tier = rng.choice(list(Tier))
        match number % 3:
            case 0:
                index.store(name, chain[cut - 1] if cut else None, chain[cut:], tier=tier)
            case 1:
                index.speculate(name, chain[: cut + 1])
            case _:
                index.remove(name, [chain[cut]], tier=tier)
        assert index.size_bytes <= 4 * MIN_BYTES
    index.check_invariants()
