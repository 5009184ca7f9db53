"""How runs split and become one again, what they cost, and how a block is found among them."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from kvway_router.index import BlockIndex
from kvway_router.locator import Locator
from kvway_router.run_tree import MAX_RUN
from kvway_router.runs import Node, named_together, num_common, pack, position_in, unpack

RNG_SEED = 7


def fresh(num_blocks: int, rng: random.Random) -> list[int]:
    return [rng.getrandbits(64) for _ in range(num_blocks)]


def num_runs(index: BlockIndex) -> int:
    index.check_invariants()
    return index._tree.num_nodes


# -- splitting and joining ----------------------------------------------------------------------


def test_a_prompt_that_branches_off_splits_a_run_and_one_that_leaves_joins_it() -> None:
    index = BlockIndex()
    index.store("a:1", None, [1, 2, 3, 4])
    assert num_runs(index) == 1
    index.store("a:1", 2, [8])
    assert num_runs(index) == 3
    index.store("a:1", None, [1, 2, 3, 4])
    index.remove("a:1", [8])
    assert num_runs(index) == 1
    assert index.match([1, 2, 3, 4]) == {"a:1": 4}


def test_chunks_of_a_prompt_and_what_is_decoded_behind_it_become_one_run() -> None:
    index = BlockIndex()
    chain = list(range(1, 301))
    for start in range(0, 256, 64):
        parent = chain[start - 1] if start else None
        index.store("a:1", parent, chain[start : start + 64])
    for place in range(256, 300):
        index.store("a:1", chain[place - 1], [chain[place]])
    assert num_runs(index) == 1
    assert index.match(chain) == {"a:1": 300}


def test_an_expected_prompt_that_is_confirmed_piece_by_piece_is_one_run_in_the_end() -> None:
    index = BlockIndex()
    chain = list(range(1, 97))
    index.store("a:1", None, chain[:32])
    expected = index.speculate("a:1", chain)
    for start in range(32, 96, 16):
        index.store("a:1", chain[start - 1], chain[start : start + 16])
    index.confirm(expected)
    assert num_runs(index) == 1


def test_replicas_that_evict_each_at_its_own_pace_split_nothing() -> None:
    index = BlockIndex()
    chain = list(range(1, 101))
    names = [f"r{number}:1" for number in range(8)]
    for name in names:
        index.store(name, None, chain)
    for number, name in enumerate(names):
        for block in reversed(chain[100 - 9 * number :]):
            index.remove(name, [block])
    assert num_runs(index) == 1
    assert index.match(chain) == {name: 100 - 9 * number for number, name in enumerate(names)}


def test_orphans_of_one_run_become_one_again_in_whatever_order_it_comes_back() -> None:
    chain = list(range(1, 6))
    for order in itertools.permutations(range(5)):
        index = BlockIndex()
        for place in order:
            index.store("a:1", chain[place - 1] if place else None, [chain[place]])
        assert index.match(chain) == {"a:1": 5}
        index.store("a:1", None, chain)
        assert num_runs(index) == 1


def test_a_block_removed_from_the_middle_makes_an_orphan_that_comes_back() -> None:
    index = BlockIndex()
    chain = list(range(1, 10))
    for middle in chain:
        index.store("a:1", None, chain)
        index.remove("a:1", [middle])
        assert len(index) == 8
        assert index.match(chain).get("a:1", 0) == middle - 1
        index.store("a:1", middle - 1 or None, [middle])
        assert index.match(chain) == {"a:1": 9}


def test_the_rest_of_a_split_run_becomes_one_with_what_is_behind_it() -> None:
    index = BlockIndex()
    index.store("a:1", None, [1, 2, 3, 4, 5])
    index.store("b:1", None, [1, 2, 3, 6])
    index.remove("b:1", [6, 3])
    assert num_runs(index) == 2
    index.store("b:1", 2, [7])
    assert num_runs(index) == 3
    assert index.match([1, 2, 3, 4, 5]) == {"a:1": 5, "b:1": 2}


def test_a_long_prompt_is_several_runs() -> None:
    index = BlockIndex()
    chain = fresh(2 * MAX_RUN + 5, random.Random(RNG_SEED))
    index.confirm(index.speculate("a:1", chain))
    index.store("a:1", chain[-1], [3])
    assert num_runs(index) == 3
    assert index.match([*chain, 3]) == {"a:1": len(chain) + 1}


# -- finding ------------------------------------------------------------------------------------


def test_where_two_runs_part_is_found_by_halves() -> None:
    rng = random.Random(RNG_SEED)
    for size in range(1, 20):
        chain = fresh(size, rng)
        node = Node(None, pack(chain))
        assert unpack(node.run) == chain
        for agree in range(size + 1):
            prompt = chain[:agree] + fresh(size - agree, rng)
            assert num_common(node, 0, prompt, 0, size) == agree
            if agree:
                assert num_common(node, 1, [0, 0, *prompt[1:]], 2, size + 1) == agree - 1


@given(
    names=st.lists(st.integers(0, 12), min_size=1, max_size=14),
    size=st.integers(1, 10),
    data=st.data(),
)
def test_what_is_named_together_is_next_to_one_another(
    names: list[int], size: int, data: st.DataObject
) -> None:
    """In either order, and no further than each is named: names come in any order."""
    node = Node(None, pack(range(size)))
    start = data.draw(st.integers(0, len(names) - 1))
    names[start] %= size
    first, num = named_together(node, names[start], names, start)
    found, named = list(range(first, first + num)), names[start : start + num]
    assert named in (found, found[::-1])
    assert 0 <= first < first + num <= size
    more = names[start + num : start + num + 1]
    onwards = {2: [2 * names[start + num - 1] - names[start + num - 2]]}.get(min(num, 2))
    expected = onwards or [names[start] - 1, names[start] + 1]
    assert not more or more[0] not in expected or more[0] not in range(size)


def test_what_is_removed_together_leaves_what_single_removals_leave() -> None:
    rng = random.Random(RNG_SEED)
    chain = fresh(60, rng)
    for order in (chain[10:40], chain[40:10:-1], chain[::3], rng.sample(chain, 30)):
        together, single = BlockIndex(), BlockIndex()
        for index in (together, single):
            index.store("a:1", None, chain)
            index.store("b:1", None, chain[:25])
        together.remove("a:1", [*order, 5])
        for block in order:
            single.remove("a:1", [block])
        together.check_invariants()
        assert together.match(chain) == single.match(chain)
        assert sorted(together.blocks("a:1")) == sorted(single.blocks("a:1"))


def test_a_hash_is_found_at_its_place_only() -> None:
    chain = [0, 2**64 - 1, 256, 1, 0x0100000000000000]
    run = pack(chain)
    assert [position_in(run, pack([block])) for block in chain] == [0, 1, 2, 3, 4]
    assert position_in(run, pack([2])) == -1
    assert position_in(b"", pack([2])) == -1
    # Its bytes are there, across two hashes.
    assert position_in(pack([1 << 32, 1]), pack([1 << 32 | 1])) == -1
    assert position_in(pack([7, 1 << 56, 0]), pack([1 << 48])) == -1


def test_every_block_is_found_whatever_was_dropped_renamed_or_waits() -> None:
    rng = random.Random(RNG_SEED)
    locator = Locator(max_blocks=10_000)
    locator._max_waiting = 64
    nodes: list[Node] = []
    for _ in range(3000):
        choice = rng.random()
        if choice < 0.5 or not nodes:
            nodes.append(Node(None, pack(fresh(rng.randrange(1, 30), rng))))
            locator.add(nodes[-1])
        elif choice < 0.9:
            locator.drop(nodes.pop(rng.randrange(len(nodes))))
        else:
            node = rng.choice(nodes)
            lost = rng.randrange(node.size)
            node.run = node.run[: len(node.run) - 8 * lost]
            locator.note_stale(node, lost)
    for node in nodes:
        locator.check(node)
    held = sum(node.size for node in nodes)
    assert locator.num_entries < 3 * held
    assert len(locator._nodes) < 4 * len(nodes)
    assert locator.find(1) is None


def test_a_run_whose_end_comes_and_goes_leaves_little_waste() -> None:
    rng = random.Random(RNG_SEED)
    index = BlockIndex(max_bytes=2**16)
    index.store("a:1", None, [1, 2, 3])
    for _ in range(20_000):
        (end,) = fresh(1, rng)
        index.store("a:1", 3, [end])
        index.remove("a:1", [end])
    assert num_runs(index) == 1
    assert index._tree._locator.num_entries < 10_000


def test_names_that_are_used_again_leave_no_waste_behind() -> None:
    rng = random.Random(RNG_SEED)
    locator = Locator(max_blocks=1)
    locator._max_waiting = 64
    nodes: list[Node] = []
    for _ in range(5000):
        nodes.append(Node(None, pack(fresh(8, rng))))
        locator.add(nodes[-1])
        if len(nodes) > 50:
            locator.drop(nodes.pop(rng.randrange(50)))
    assert locator.num_entries < 3 * 8 * len(nodes)


def test_a_name_that_is_used_again_never_leads_to_what_it_named_before() -> None:
    rng = random.Random(RNG_SEED)
    locator = Locator(max_blocks=1)
    locator._max_waiting = 16
    gone: list[int] = []
    for _ in range(500):
        node = Node(None, pack(fresh(8, rng)))
        locator.add(node)
        locator.drop(node)
        gone.append(node.hash_at(0))
    assert len(locator._nodes) < 200
    assert not any(map(locator.find, gone))
