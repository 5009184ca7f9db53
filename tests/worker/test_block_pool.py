"""The block pool, rule by rule; P numbers are those of the list of rules the pool is built on.

P1-P9 free blocks and their order, P11-P15 taking blocks, P18-P27 content and lookup, P32-P34
publishing and reset. There is no null block, so ids and counts start at 0 and N.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvway_core.blocks import BlockHash, Namespace, block_hashes, event_hash
from kvway_core.errors import InvariantViolated, OutOfBlocks
from kvway_core.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvway_worker.cache.block_content import BlockContent, Match
from kvway_worker.cache.block_pool import BlockPool

NAMESPACE = Namespace("m", block_size=4)
PROMPT = list(range(12))


def hashes(tokens: Sequence[int], namespace: Namespace = NAMESPACE) -> list[BlockHash]:
    return block_hashes(tokens, parent=namespace.root(), block_size=4)


def publish(pool: BlockPool, table: Sequence[int], tokens: Sequence[int]) -> list[int | None]:
    """Publishes the full blocks of a prompt that a table holds; returns what is found for each."""
    found: list[int | None] = []
    parent: int | Namespace = NAMESPACE
    for index, block_hash in enumerate(hashes(tokens)):
        content = BlockContent(block_hash, parent, tuple(tokens[4 * index : 4 * index + 4]))
        found.append(pool.publish(table[index], content))
        parent = table[index]
    return found


def match(pool: BlockPool, tokens: Sequence[int], namespace: Namespace = NAMESPACE) -> list[int]:
    found = pool.match(hashes(tokens, namespace), tokens, namespace=namespace)
    return list(found.blocks)


def holding(num_blocks: int, tokens: Sequence[int]) -> tuple[BlockPool, list[int]]:
    """Returns a pool, and the table of a prompt that it holds and has committed."""
    pool = BlockPool(num_blocks, 4)
    table = pool.allocate(-(-len(tokens) // 4))
    publish(pool, table, tokens)
    pool.commit()
    return pool, table


def test_p1_a_new_pool_hands_out_blocks_in_order_of_their_ids() -> None:
    pool = BlockPool(5, 4)
    assert pool.free_order() == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (5, 0, 0)
    assert pool.allocate(2) == [0, 1]


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4)])
def test_p1_a_pool_without_blocks_or_tokens_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="needs blocks"):
        BlockPool(num_blocks, block_size)


def test_p2_cached_blocks_count_as_free() -> None:
    pool, table = holding(4, PROMPT)
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (1, 0, 3)
    pool.free(table)
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (4, 3, 0)


def test_p4_a_block_is_free_when_its_last_reference_is_gone() -> None:
    pool, table = holding(4, PROMPT)
    pool.allocate(0, hits=table[:1])
    pool.free(table)
    assert [pool.num_references(block) for block in table] == [1, 0, 0]
    pool.free(table[:1])
    assert pool.num_free == 4


def test_p4_a_block_nobody_holds_cannot_be_freed() -> None:
    pool, table = holding(4, PROMPT)
    pool.free(table)
    with pytest.raises(InvariantViolated, match="nobody holds it"):
        pool.free(table[2:])


def test_p5_p13_asking_for_too_much_changes_nothing() -> None:
    pool, table = holding(4, PROMPT)
    pool.free(table)
    order = pool.free_order()
    with pytest.raises(OutOfBlocks, match="3 new blocks and 2 hits do not fit in 4 free"):
        pool.allocate(3, hits=table[:2])
    assert pool.free_order() == order
    assert match(pool, PROMPT) == table
    assert pool.take_events()[1:] == []


def test_p7_p8_freed_blocks_queue_tail_first_and_those_without_content_in_front() -> None:
    pool = BlockPool(6, 4)
    table = pool.allocate(4)
    publish(pool, table, PROMPT)
    pool.commit()
    pool.free(table)
    # 3 is the partial tail: first. 4 and 5 were never used. 2, 1, 0: deep end first.
    assert pool.free_order() == [3, 4, 5, 2, 1, 0]


def test_p9_blank_blocks_are_used_up_before_anything_is_evicted() -> None:
    pool, table = holding(5, PROMPT)
    pool.free(table)
    pool.allocate(2)
    assert pool.num_evictions == 0
    assert match(pool, PROMPT) == table
    pool.allocate(1)
    assert pool.num_evictions == 1
    assert match(pool, PROMPT) == table[:2]


def test_p9_blocks_evicted_in_the_order_they_were_last_held() -> None:
    pool, first = holding(4, PROMPT[:8])
    second = pool.allocate(2)
    publish(pool, second, [50 + token for token in PROMPT[:8]])
    pool.commit()
    pool.free(first)
    pool.free(second)
    pool.allocate(0, hits=first)  # used again, so it is the newest
    pool.free(first)
    assert pool.free_order() == [*reversed(second), *reversed(first)]


def test_p11_a_hit_takes_a_cached_block_out_of_the_middle_of_the_queue() -> None:
    pool, table = holding(5, PROMPT)
    pool.free(table)
    pool.allocate(0, hits=[1])
    assert pool.free_order() == [3, 4, 2, 0]
    assert pool.num_references(1) == 1


def test_p12_an_evicted_block_loses_its_content_and_says_so() -> None:
    pool, table = holding(3, PROMPT)
    pool.free(table)
    pool.take_events()
    assert pool.allocate(2) == [2, 1]
    assert pool.content(2) is None
    assert pool.take_events() == [BlockRemoved([event_hash(h) for h in hashes(PROMPT)[:0:-1]])]
    assert match(pool, PROMPT) == [0]


def test_p14_hits_that_nobody_holds_use_up_free_blocks() -> None:
    pool, table = holding(4, PROMPT)
    pool.free(table)
    assert pool.can_allocate(1, hits=table)
    assert not pool.can_allocate(2, hits=table)
    pool.allocate(0, hits=table)
    assert pool.can_allocate(1, hits=table), "held hits cost nothing"


def test_p15_a_request_never_evicts_its_own_prefix() -> None:
    pool, table = holding(2, PROMPT[:4])
    other = pool.allocate(1)
    publish(pool, other, [9, 9, 9, 9])
    pool.commit()
    pool.free(table)
    pool.free(other)
    assert pool.free_order() == [*table, *other], "the hit is the next to be evicted"
    assert pool.allocate(1, hits=table) == other


def test_p18_the_same_block_at_another_place_is_another_block() -> None:
    pool, table = holding(4, [1, 2, 3, 4, 1, 2, 3, 4])
    assert table[0] != table[1]
    assert match(pool, [1, 2, 3, 4]) == table[:1]
    assert match(pool, [0, 0, 0, 0, 1, 2, 3, 4]) == []


def test_p25_the_lookup_stops_at_the_first_miss() -> None:
    pool, table = holding(4, PROMPT)
    assert match(pool, [*PROMPT[:4], 99, *PROMPT[5:]]) == table[:1]
    assert match(pool, PROMPT[:7]) == table[:1], "only full blocks"
    assert match(pool, []) == []


def test_p26_the_same_content_is_never_there_twice() -> None:
    pool, table = holding(8, PROMPT)
    twin = pool.allocate(3)
    assert publish(pool, twin[:1], PROMPT[:4]) == table[:1]
    assert pool.content(twin[0]) is None


def test_p27_a_lookup_changes_nothing() -> None:
    pool, table = holding(4, PROMPT)
    pool.free(table)
    order = pool.free_order()
    match(pool, PROMPT)
    assert pool.free_order() == order


def forged(
    block_hash: BlockHash, parent: int | Namespace, tokens: tuple[int, ...]
) -> BlockContent:
    return BlockContent(block_hash, parent, tokens)


def test_a_hash_that_is_equal_for_other_tokens_is_a_miss() -> None:
    pool, _ = holding(4, PROMPT)
    key = hashes(PROMPT)
    assert pool.match(key, [7, *PROMPT[1:]], namespace=NAMESPACE) == Match()
    assert pool.match(key, [*PROMPT[:4], 7, *PROMPT[5:]], namespace=NAMESPACE) == Match((0,))


def test_a_hash_that_is_equal_in_another_namespace_is_a_miss() -> None:
    pool, _ = holding(4, PROMPT)
    other = Namespace("m", block_size=4, cache_salt="tenant b")
    assert pool.match(hashes(PROMPT), PROMPT, namespace=other) == Match()


def test_a_hash_that_is_equal_after_another_parent_is_a_miss() -> None:
    pool, table = holding(4, PROMPT[:8])
    (other,) = pool.allocate(1)
    other_hash = BlockHash(b"another prefix..")
    pool.publish(other, forged(other_hash, NAMESPACE, (5, 5, 5, 5)))
    pool.commit()
    keys = [other_hash, hashes(PROMPT)[1]]
    found = pool.match(keys, [5, 5, 5, 5, *PROMPT[4:8]], namespace=NAMESPACE)
    assert found == Match((other,)) != Match(tuple(table))


def test_content_whose_hash_is_taken_by_other_content_is_not_published() -> None:
    pool, _ = holding(4, PROMPT)
    (block,) = pool.allocate(1)
    assert pool.publish(block, forged(hashes(PROMPT)[0], NAMESPACE, (5, 5, 5, 5))) is None
    assert pool.content(block) is None
    assert match(pool, PROMPT) == [0, 1, 2]


def test_p32_pending_blocks_are_found_before_they_are_committed() -> None:
    pool = BlockPool(4, 4)
    table = pool.allocate(3)
    publish(pool, table, PROMPT)
    assert match(pool, PROMPT) == table
    assert all(pool.is_pending(block) for block in table)
    assert pool.committed() == {}
    assert pool.take_events() == [], "nobody outside may count on them"
    pool.commit()
    assert pool.num_pending == 0
    assert pool.committed() == dict(zip(hashes(PROMPT), table, strict=True))


def test_p33_pending_content_goes_with_its_last_reference() -> None:
    pool = BlockPool(4, 4)
    table = pool.allocate(3)
    publish(pool, table, PROMPT)
    pool.allocate(0, hits=table[:2])
    pool.free(table)  # the writer is gone; who shares its first two blocks is not
    assert match(pool, PROMPT) == table[:2]
    pool.free(table[:2])
    assert match(pool, PROMPT) == []
    pool.commit()
    assert pool.take_events() == []
    assert pool.num_cached == 0
    pool.check_invariants()


def test_p34_reset_refuses_while_a_block_is_held() -> None:
    pool, table = holding(4, PROMPT)
    pool.take_events()
    assert not pool.reset()
    assert match(pool, PROMPT) == table
    assert pool.take_events() == []
    pool.free(table)
    assert pool.reset()
    assert match(pool, PROMPT) == []
    assert (pool.num_free, pool.num_cached) == (4, 0)
    assert pool.take_events() == [AllBlocksCleared()]
    pool.check_invariants()


def test_without_prefix_caching_nothing_is_published() -> None:
    pool = BlockPool(4, 4, prefix_caching=False)
    table = pool.allocate(3)
    assert publish(pool, table, PROMPT) == [None, None, None]
    pool.commit()
    assert match(pool, PROMPT) == []
    pool.free(table)
    assert pool.num_cached == 0


@pytest.mark.parametrize("num_blocks", [2, 3, 10])
def test_events_of_a_pool_that_is_filled_twice(num_blocks: int) -> None:
    """Replays vLLM's test_kv_cache_events: stored, then removed and stored, then cleared."""
    pool = BlockPool(num_blocks, 4)
    first = list(range(4 * num_blocks))
    second = [1000 + token for token in first]
    for tokens in (first, second):
        table = pool.allocate(num_blocks)
        publish(pool, table, tokens)
        pool.commit()
        pool.free(table)
    keys = [[event_hash(h) for h in hashes(tokens)] for tokens in (first, second)]
    assert pool.take_events() == [
        BlockStored(list(keys[0]), None, first, 4),
        BlockRemoved(list(reversed(keys[0]))),
        BlockStored(list(keys[1]), None, second, 4),
    ]
    assert pool.reset()
    assert pool.take_events() == [AllBlocksCleared()]


def test_a_stored_event_continues_from_its_parent() -> None:
    pool, table = holding(5, PROMPT[:4])
    pool.take_events()
    table += pool.allocate(2)
    parent: int = table[0]
    for index in (1, 2):
        tokens = tuple(PROMPT[4 * index : 4 * index + 4])
        pool.publish(table[index], BlockContent(hashes(PROMPT)[index], parent, tokens))
        parent = table[index]
    (side,) = pool.allocate(1)
    branch = [*PROMPT[:4], 8, 8, 8, 8]
    pool.publish(side, BlockContent(hashes(branch)[1], table[0], (8, 8, 8, 8)))
    pool.commit()
    root, *rest = [event_hash(h) for h in hashes(PROMPT)]
    assert pool.take_events() == [
        BlockStored([*rest], root, PROMPT[4:], 4),
        BlockStored([event_hash(hashes(branch)[1])], root, [8, 8, 8, 8], 4),
    ]
