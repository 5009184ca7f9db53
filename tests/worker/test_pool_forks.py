"""Requests that go on from the same computed prompt, on the same blocks until one writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvway_core.errors import InvariantViolated
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.scheduling.block_tables import BlockTables
from kvway_worker.scheduling.sequence import Sequence
from tests.worker.batching import Bench, OneHash, answer, request, run

PROMPT = list(range(10))


def computed(
    pool: BlockPool, prompt: list[int] = PROMPT, *, ephemeral: bool = False
) -> tuple[BlockTables, Sequence]:
    """Returns a request whose prompt is computed, between two steps, and its tables."""
    tables = BlockTables(pool)
    seq = request("leader", prompt, block_size=4, max_tokens=20, ephemeral=ephemeral)
    assert tables.open(seq, 100) is not None
    tables.publish(seq, len(prompt))
    tables.take_shared(seq)
    seq.num_computed_tokens = len(prompt)
    pool.commit()
    return tables, seq


def fork(
    tables: BlockTables, leader: Sequence, name: str = "fork", *, ephemeral: bool = False
) -> Sequence:
    child = request(
        name, leader.prompt_token_ids, block_size=4, max_tokens=20, ephemeral=ephemeral
    )
    tables.fork(leader, child)
    return child


def test_a_fork_shares_every_block_of_the_prompt() -> None:
    pool = BlockPool(9, 4)
    tables, leader = computed(pool)
    child = fork(tables, leader)
    assert child.block_table == leader.block_table == [0, 1, 2]
    assert child.block_table is not leader.block_table
    assert (child.num_computed_tokens, child.num_published_blocks) == (10, 2)
    assert [pool.num_references(block) for block in range(3)] == [2, 2, 2]


def test_a_fork_does_not_get_what_came_behind_the_prompt() -> None:
    pool = BlockPool(9, 4)
    tables, leader = computed(pool)
    for token in range(50, 58):
        leader.append(token)
        assert tables.extend(leader, leader.num_tokens) == ()
        leader.num_computed_tokens = leader.num_tokens
    child = fork(tables, leader)
    assert child.block_table == [0, 1, 2]
    assert child.num_computed_tokens == 10


def test_who_writes_a_shared_block_copies_it_and_the_last_one_does_not() -> None:
    pool = BlockPool(9, 4)
    tables, leader = computed(pool)
    children = [fork(tables, leader, str(index)) for index in range(2)]
    copies = []
    for seq in (leader, *children):
        seq.append(7)
        copies.append(tables.extend(seq, seq.num_tokens))
    assert copies == [((2, 3, 2),), ((2, 4, 2),), ()]
    assert [seq.block_table[2] for seq in (leader, *children)] == [3, 4, 2]
    assert [pool.num_references(block) for block in (2, 3, 4)] == [1, 1, 1]
    pool.check_invariants()


def test_a_full_last_block_needs_no_copy() -> None:
    pool = BlockPool(9, 4)
    tables, leader = computed(pool, list(range(8)))
    child = fork(tables, leader)
    for seq in (leader, child):
        seq.append(7)
        assert tables.extend(seq, seq.num_tokens) == ()
    assert (leader.block_table, child.block_table) == ([0, 1, 2], [0, 1, 3])


def test_a_block_that_can_be_found_is_copied_even_by_its_only_holder() -> None:
    pool = BlockPool(9, 4)
    tables, leader = computed(pool)
    for token in (50, 51):
        leader.append(token)
    tables.extend(leader, 12)
    tables.publish(leader, 12)
    tables.take_shared(leader)
    leader.num_computed_tokens = 12
    pool.commit()
    child = fork(tables, leader)  # its last block is full and published by now
    tables.close(leader)
    child.append(60)
    assert tables.extend(child, 11) == ((2, 3, 2),)
    assert pool.content(2) is not None
    assert num_hits(pool, tables) == 3


def num_hits(pool: BlockPool, tables: BlockTables) -> int:
    again = request("again", [*PROMPT, 50, 51, 1], block_size=4)
    return len(pool.match(again.chain.hashes, again.token_ids, namespace=again.namespace).blocks)


def test_without_room_for_the_copy_nothing_changes() -> None:
    """P13 for a copy on write."""
    pool = BlockPool(3, 4)
    tables, leader = computed(pool)
    child = fork(tables, leader)
    child.append(7)
    assert tables.extend(child, 11) is None
    assert child.block_table == [0, 1, 2]
    assert [pool.num_references(block) for block in range(3)] == [2, 2, 2]


def test_without_prefix_caching_forks_share_all_the_same() -> None:
    pool = BlockPool(9, 4, prefix_caching=False)
    tables, leader = computed(pool)
    child = fork(tables, leader)
    assert child.block_table == leader.block_table
    child.append(7)
    assert tables.extend(child, 11) == ((2, 3, 2),)
    tables.close(leader)
    tables.close(child)
    assert pool.num_free == 9


def _not_computed(leader: Sequence, child: Sequence) -> None:
    leader.num_computed_tokens = 9


def _holds_blocks(leader: Sequence, child: Sequence) -> None:
    child.block_table = [8]


def _in_a_step(leader: Sequence, child: Sequence) -> None:
    leader.shared_blocks = {1: 1}


@pytest.mark.parametrize("damage", [_not_computed, _holds_blocks, _in_a_step])
def test_a_fork_that_cannot_be_is_an_error(damage: Callable[[Sequence, Sequence], None]) -> None:
    pool = BlockPool(9, 4)
    tables, leader = computed(pool)
    child = request("fork", PROMPT, block_size=4)
    damage(leader, child)
    with pytest.raises(InvariantViolated, match="'fork' cannot fork from 'leader'"):
        tables.fork(leader, child)
    assert [pool.num_references(block) for block in range(3)] == [1, 1, 1]


def test_a_fork_is_no_hit() -> None:
    """Eight answers to a prompt that nobody asks again do not protect it from eviction."""
    pool = BlockPool(20, 4)
    tables, leader = computed(pool)
    children = [fork(tables, leader, str(index)) for index in range(8)]
    for seq in (leader, *children):
        tables.close(seq)
    assert pool.tier("protected") == []


def test_forks_that_say_the_same_share_it() -> None:
    """P26: the blocks that two forks fill with the same tokens become one."""
    bench = Bench(40, block_size=4)
    forks = [request(str(index), PROMPT, block_size=4, max_tokens=15) for index in (1, 2)]
    leader = request("0", PROMPT, block_size=4, max_tokens=15, forks=forks)
    bench.add(leader)
    for _ in range(12):
        bench.step()
    assert leader.block_table[:5] == forks[0].block_table[:5] == forks[1].block_table[:5]
    for _ in run(bench.scheduler, bench.engine):
        pass
    for seq in (leader, *forks):
        assert seq.output_token_ids == answer(PROMPT, 15)
    assert bench.pool.num_free == 40


def test_a_fork_publishes_what_its_leader_could_not() -> None:
    """The leader's hash was taken by other content, which is gone by the time the fork grows."""
    pool = BlockPool(9, 4)
    tables = BlockTables(pool)
    taken = request("taken", [9] * 4, block_size=4, chain=OneHash(4))
    leader = request("leader", PROMPT, block_size=4, max_tokens=20, chain=OneHash(4))
    for seq in (taken, leader):
        assert tables.open(seq, 100) is not None
        tables.publish(seq, seq.num_tokens)
        tables.take_shared(seq)
        seq.num_computed_tokens = seq.num_tokens
        pool.commit()
    assert leader.num_published_blocks == 0
    tables.close(taken)
    pool.free(pool.allocate(pool.num_free))
    child = request("fork", PROMPT, block_size=4, max_tokens=20, chain=OneHash(4))
    tables.fork(leader, child)
    for token in (50, 51):
        child.append(token)
    assert tables.extend(child, 12) is not None
    tables.publish(child, 12)
    pool.commit()
    pool.check_invariants()
    assert child.num_published_blocks == 1


def test_a_normal_fork_of_an_ephemeral_request_keeps_the_prompt() -> None:
    pool = BlockPool(9, 4)
    tables, leader = computed(pool, ephemeral=True)
    child = fork(tables, leader)
    tables.close(leader)
    tables.close(child)
    pool.check_invariants()
    assert len(pool.committed()) == 2
