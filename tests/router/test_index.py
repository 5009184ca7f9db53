"""What the block index promises, one case each; the machine in tests/property tries the rest."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvway_core.errors import InvariantViolated
from kvway_router.holding import Entry, Tier
from kvway_router.index import MAX_BYTES, MIN_BYTES, BlockIndex
from kvway_router.runs import Node

CHAIN = [11, 12, 13, 14]


@pytest.fixture
def index() -> BlockIndex:
    return BlockIndex()


def test_one_walk_counts_leading_blocks_of_every_replica(index: BlockIndex) -> None:
    index.store("a:1", None, [11, 12, 13])
    index.store("b:1", None, [11, 12, 13, 14, 15])
    index.store("c:1", None, [11])
    index.store("d:1", None, [99])
    assert index.match(CHAIN) == {"a:1": 3, "b:1": 4, "c:1": 1}


@pytest.mark.parametrize("prompt", [[], [77]])
def test_nothing_matches_an_empty_or_unknown_prompt(index: BlockIndex, prompt: list[int]) -> None:
    index.store("a:1", None, CHAIN)
    assert index.match(prompt) == {}


def test_a_gap_ends_the_match(index: BlockIndex) -> None:
    index.store("a:1", None, CHAIN)
    index.remove("a:1", [12])
    assert index.match(CHAIN) == {"a:1": 1}
    index.store("a:1", 11, [12])
    assert index.match(CHAIN) == {"a:1": 4}


def test_an_orphan_counts_once_its_parent_comes(index: BlockIndex) -> None:
    index.store("a:1", 12, [13, 14])
    assert index.match(CHAIN) == {}
    index.store("a:1", None, [11, 12])
    assert index.match(CHAIN) == {"a:1": 4}


def test_what_one_replica_has_does_not_carry_another_over_its_gap(index: BlockIndex) -> None:
    index.store("a:1", None, CHAIN)
    index.store("b:1", 11, [12, 13, 14])
    index.store("c:1", None, [11])
    index.store("c:1", 12, [13, 14])
    assert index.match(CHAIN) == {"a:1": 4, "c:1": 1}


def test_an_orphan_in_a_run_of_which_a_replica_has_the_beginning_is_an_orphan(
    index: BlockIndex,
) -> None:
    index.store("a:1", None, CHAIN)
    index.store("b:1", None, CHAIN[:1])
    index.store("b:1", 12, CHAIN[2:])
    assert index.match(CHAIN) == {"a:1": 4, "b:1": 1}
    index.store("b:1", 11, [12])
    assert index.match(CHAIN) == {"a:1": 4, "b:1": 4}


def test_a_beginning_is_as_recently_used_as_what_was_removed_behind_it() -> None:
    index = BlockIndex(max_blocks_per_replica=3)
    index.store("a:1", None, [1])
    index.store("a:1", None, [7])
    index.store("a:1", 1, [2])
    index.remove("a:1", [2])
    index.store("a:1", None, [8, 9])
    assert index.match([1]) == {"a:1": 1}
    assert index.match([7]) == {}


def test_orphans_are_bounded_like_any_block() -> None:
    index = BlockIndex(max_blocks_per_replica=100)
    for number in range(10_000):
        index.store("a:1", 2 * number + 1_000_000, [2 * number])
    assert index.num_blocks("a:1") == 100
    index.check_invariants()


def test_hashes_use_all_64_bits(index: BlockIndex) -> None:
    index.store("a:1", None, [2**64 - 1, 2**63])
    assert index.match([2**64 - 1, 2**63]) == {"a:1": 2}


def test_a_burst_of_siblings_follows_the_first(index: BlockIndex) -> None:
    index.speculate("a:1", CHAIN)
    assert index.match([11, 12, 13, 99]) == {"a:1": 3}


def test_what_two_prompts_expect_stays_until_both_are_rolled_back(index: BlockIndex) -> None:
    first = index.speculate("a:1", CHAIN)
    second = index.speculate("a:1", [11, 12])
    index.rollback(first)
    assert index.match(CHAIN) == {"a:1": 2}
    index.rollback(first)
    assert index.match(CHAIN) == {"a:1": 2}
    index.rollback(second)
    assert index.match(CHAIN) == {}
    assert len(index) == 0


def test_a_confirmed_prompt_stays(index: BlockIndex) -> None:
    speculation = index.speculate("a:1", CHAIN)
    index.confirm(speculation)
    index.rollback(speculation)
    assert index.match(CHAIN) == {"a:1": 4}


def test_what_is_confirmed_stays_when_what_was_expected_before_it_goes(index: BlockIndex) -> None:
    index.store("a:1", 12, [13, 14])
    promise = index.speculate("a:1", CHAIN)
    assert index.match(CHAIN) == {"a:1": 4}
    index.rollback(promise)
    assert sorted(index.blocks("a:1")) == [13, 14]
    index.check_invariants()


def test_an_event_takes_the_place_of_what_was_expected(index: BlockIndex) -> None:
    stored = index.speculate("a:1", CHAIN)
    index.store("a:1", None, [11, 12])
    index.rollback(stored)
    assert index.match(CHAIN) == {"a:1": 2}
    index.speculate("a:1", [21])
    index.remove("a:1", [21])
    assert index.match([21]) == {}


def test_a_promise_from_before_a_restart_moves_nothing_after_it(index: BlockIndex) -> None:
    before = index.speculate("a:1", CHAIN)
    index.clear("a:1")
    after = index.speculate("a:1", CHAIN)
    index.rollback(before)
    assert index.match(CHAIN) == {"a:1": 4}
    index.rollback(after)
    assert len(index) == 0


def test_the_tail_of_the_least_recently_used_goes_first() -> None:
    index = BlockIndex(max_blocks_per_replica=6)
    index.store("a:1", None, [1, 2, 3])
    index.store("a:1", 1, [4, 5])
    index.speculate("a:1", [1, 2, 3])
    index.store("a:1", None, [6, 7])
    assert index.match([1, 2, 3]) == {"a:1": 3}
    assert index.match([1, 4, 5]) == {"a:1": 2}
    index.store("a:1", 7, [8])
    assert index.match([1, 4, 5]) == {"a:1": 1}
    assert index.match([1, 2, 3]) == {"a:1": 3}


def test_a_prompt_longer_than_the_limit_keeps_its_beginning() -> None:
    index = BlockIndex(max_blocks_per_replica=3)
    index.store("a:1", None, [91, 92])
    index.confirm(index.speculate("a:1", [1, 2, 3, 4, 5]))
    assert index.match([1, 2, 3, 4, 5]) == {"a:1": 3}
    index.check_invariants()


def test_a_beginning_that_others_extended_outlives_their_ends() -> None:
    index = BlockIndex(max_blocks_per_replica=8)
    for user in range(100, 200):
        index.confirm(index.speculate("a:1", [1, 2, user, user + 1000]))
    assert index.match([1, 2, 5]) == {"a:1": 2}


def test_the_budget_is_kept_and_the_largest_gives_way() -> None:
    index = BlockIndex(max_bytes=MIN_BYTES)
    index.store("a:1", None, list(range(700)))
    assert index.num_blocks("a:1") == 700
    index.store("b:1", None, list(range(1000, 1030)))
    assert index.size_bytes <= MIN_BYTES
    assert index.num_blocks("b:1") == 30
    assert 650 < index.match(list(range(700)))["a:1"] < 700
    index.check_invariants()


def test_a_smaller_limit_evicts_at_once(index: BlockIndex) -> None:
    index.store("a:1", None, CHAIN)
    index.set_limit("a:1", 2)
    assert index.match(CHAIN) == {"a:1": 2}
    index.set_limit("a:1", 0)
    assert index.match(CHAIN) == {"a:1": 1}


def test_parents_in_a_ring_do_not_escape_the_limit() -> None:
    index = BlockIndex(max_blocks_per_replica=2)
    index.store("a:1", 2, [1])
    index.store("a:1", 1, [2])
    index.store("a:1", 3, [3])
    assert index.num_blocks("a:1") == 2
    index.store("a:1", None, [4, 4, 5])
    assert index.num_blocks("a:1") == 2
    index.check_invariants()


def test_what_was_not_used_since_a_mark_expires(index: BlockIndex) -> None:
    index.store("a:1", None, [1, 2])
    index.store("a:1", None, [7, 8])
    index.store("b:1", None, [1])
    mark = index.tick
    index.speculate("a:1", [7])
    index.expire("a:1", before=mark)
    assert index.match([1, 2]) == {"b:1": 1}
    assert index.match([7, 8]) == {"a:1": 1}


def test_replicas_that_come_and_go_leave_nothing_behind() -> None:
    index = BlockIndex(max_blocks_per_replica=50)
    rng = random.Random(1)
    index.store("stays:1", None, [1, 2, 3])
    for generation in range(500):
        replica_id = f"r{generation}:1"
        index.set_limit(replica_id, 40)
        for _ in range(5):
            index.speculate(replica_id, [1, 2, *(rng.getrandbits(64) for _ in range(6))])
        index.remove_replica(replica_id)
    assert index.match([1, 2, 3]) == {"stays:1": 3}
    assert len(index) == 3
    assert index._tree.num_nodes == 1
    assert len(index._roster._names) == 1
    index.check_invariants()


def test_a_hot_prompt_does_not_grow_the_books() -> None:
    index = BlockIndex()
    index.confirm(index.speculate("a:1", CHAIN))
    before = index.size_bytes
    for _ in range(5_000):
        index.confirm(index.speculate("a:1", CHAIN))
    assert index.size_bytes == before
    index.check_invariants()


@pytest.mark.parametrize("max_bytes", [0, MIN_BYTES - 1, MAX_BYTES + 1])
def test_a_budget_without_sense_is_refused(max_bytes: int) -> None:
    with pytest.raises(ValueError, match="max_bytes must be"):
        BlockIndex(max_bytes=max_bytes)


def test_a_limit_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockIndex(max_blocks_per_replica=0)


def test_unknown_replicas_are_no_error(index: BlockIndex) -> None:
    index.remove("x:1", [1])
    index.clear("x:1")
    index.remove_replica("x:1")
    index.expire("x:1", before=9)
    index.store("x:1", None, [])
    assert index.num_blocks("x:1") == 0


def first_node(index: BlockIndex) -> Node:
    return index._tree.tops[None][11]


def entry(index: BlockIndex) -> Entry:
    return index._roster.get("a:1")[Tier.DEVICE].entries[first_node(index)]


DAMAGES: dict[str, Callable[[BlockIndex], object]] = {
    "held": lambda index: setattr(first_node(index), "held", 3),
    "full": lambda index: setattr(first_node(index), "full", 0),
    "place": lambda index: index._tree.tops[None].clear(),
    "count": lambda index: setattr(index._tree, "num_blocks", 3),
    "located": lambda index: index._tree._locator.drop(first_node(index)),
    "entry": lambda index: setattr(entry(index), "count", 3),
    "limit": lambda index: setattr(index._roster.get("a:1")[0], "limit", 1),
    "ring": lambda index: setattr(entry(index).older, "newer", entry(index).older),
    "voucher": lambda index: setattr(entry(index), "sure", 0),
    "name": lambda index: index._roster._names.__setitem__(0, None),
    "budget": lambda index: setattr(index, "_max_bytes", 1),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_the_check_finds_books_that_differ(
    index: BlockIndex, damage: Callable[[BlockIndex], object]
) -> None:
    index.store("a:1", None, CHAIN)
    index.check_invariants()
    damage(index)
    with pytest.raises(InvariantViolated):
        index.check_invariants()


def test_what_follows_on_slower_tiers_is_counted_apart(index: BlockIndex) -> None:
    """a: two on the device, one on the host, two on a disk; b has nothing slow; c a gap."""
    index.store("a", None, [1, 2])
    index.store("a", 2, [3], tier=Tier.HOST)
    index.store("a", 3, [4, 5], tier=Tier.DISK)
    index.store("b", None, [1, 2, 3])
    index.store("c", None, [1])
    index.store("c", 2, [3], tier=Tier.HOST)
    prompt = [1, 2, 3, 4, 5, 6]
    matches = index.match(prompt)
    assert matches == {"a": 2, "b": 3, "c": 1}
    assert index.match_slower(prompt, matches) == {"a": (1, 2)}
    index.clear("a")
    assert index.match_slower(prompt, index.match(prompt)) == {}
