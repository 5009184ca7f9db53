"""What the checks of a pool see: each of its invariants is broken once, by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvway_core.blocks import BlockHash
from kvway_core.errors import InvariantViolated
from kvway_worker.cache.block_content import BlockContent, TailContent
from kvway_worker.cache.block_pool import BlockPool
from tests.worker.pools import hashes, take

PROMPT = list(range(12))
"""Three blocks; a tail is behind them."""


def _lose_a_block(pool: BlockPool) -> None:
    pool._free._blank.pop()


def _hold_a_free_block(pool: BlockPool) -> None:
    pool._refs[pool.free_order()[0]] = 1


def _forget_content(pool: BlockPool) -> None:
    pool._contents.forget(3)


def _forget_in_map(pool: BlockPool) -> None:
    pool._contents._map.popitem()


def _pending_nobody_holds(pool: BlockPool) -> None:
    pool._contents._pending[2] = None


def _ephemeral_nobody_holds(pool: BlockPool) -> None:
    pool._contents._ephemeral.add(2)


def _hold_a_tail(pool: BlockPool) -> None:
    pool._hold(3)


def _lose_a_child(pool: BlockPool) -> None:
    pool._contents._children.remove(1, tuple(PROMPT[8:]), 2)


def _keep_what_is_there(pool: BlockPool) -> None:
    pool._contents.tails[4] = TailContent(2, (50,))
    pool._contents._children.add(2, (50,), 4)
    pool._free._blank.remove(4)
    pool._free.put(4, "probation")


def _protect_without_hits(pool: BlockPool) -> None:
    pool._free.take(0)
    pool._free.put(0, "protected")


def _pin_without_a_pin(pool: BlockPool) -> None:
    pool._free.take(0)
    pool._free.put(0, "pinned")


def _hit_a_child_alone(pool: BlockPool) -> None:
    pool._hits[2] = 1


def _forget_who_waits(pool: BlockPool) -> None:
    pool.pin("p", hashes([*PROMPT, 1, 1, 1, 1])[3:], expires_s=1.0)
    pool._pins._waiting.clear()


def _pin_over_quota(pool: BlockPool) -> None:
    pool._pins.add("p", hashes(range(100)), 1.0)


def _evict_head_first(pool: BlockPool) -> None:
    pool._free._tiers["probation"].move_to_end(0, last=False)


def _leave_content_in_a_blank_block(pool: BlockPool) -> None:
    pool._contents.keep_tail(5, TailContent(2, (60,)))


def _drop_the_tail(pool: BlockPool) -> None:
    pool._free.take(3)
    pool._contents.forget(3)
    pool._free.put_blank(3)


def _pin_what_does_not_stay(pool: BlockPool) -> None:
    _drop_the_tail(pool)
    pool.pin("p", hashes(PROMPT)[:1], expires_s=1.0)
    pool._pins._by_block[2] = pool._pins._by_block.pop(0)
    pool._pins._by_block[2][0].blocks[:] = [2]
    for block in (0, 1, 2):
        pool.touch(block)
    _lose_a_child(pool)
    pool._contents._ephemeral.add(2)


def _fill_a_tail(pool: BlockPool) -> None:
    content = BlockContent(BlockHash(b"another one's 16"), 2, (50, 51, 52, 53))
    pool._contents._contents[3] = content
    pool._contents._map[content.block_hash] = 3


def _full_tail(pool: BlockPool) -> None:
    _drop_the_tail(pool)
    pool._free._blank.remove(3)
    pool._contents.keep_tail(3, TailContent(2, (50, 51, 52, 53)))
    pool._free.put(3, "probation")


def _pending_without_content(pool: BlockPool) -> None:
    pool._contents._pending[5] = None


def _ephemeral_without_content(pool: BlockPool) -> None:
    pool._contents._ephemeral.add(5)


def _lose_the_parent_of_a_tail(pool: BlockPool) -> None:
    contents = pool._contents
    contents._children.remove(2, (50, 51), 3)
    contents._children.add(5, (50, 51), 3)
    contents.tails[3] = TailContent(5, (50, 51))


def _lose_a_parent(pool: BlockPool) -> None:
    contents = pool._contents
    _lose_a_child(pool)
    contents._children.add(5, tuple(PROMPT[8:]), 2)
    contents._contents[2] = contents.of(2)._replace(parent=5)


def _protect_too_many(pool: BlockPool) -> None:
    for block in (1, 0):
        pool._hits[block] = 2
        pool._free.take(block)
        pool._free._tiers["protected"][block] = None


def _forget_what_is_named(pool: BlockPool) -> None:
    pool.pin("p", hashes(PROMPT)[:1], expires_s=1.0)
    pool._pins._named.clear()


def _forget_who_pins(pool: BlockPool) -> None:
    pool.pin("p", hashes(PROMPT)[:1], expires_s=1.0)
    pool.touch(0)
    pool._pins._by_block.clear()


@pytest.mark.parametrize(
    ("damage", "invariant"),
    [
        (_leave_content_in_a_blank_block, "2: blank blocks have no content"),
        (_pin_what_does_not_stay, "4: what is pinned stays"),
        (_fill_a_tail, "3: a tail has no other content"),
        (_full_tail, "3: a tail is partly filled"),
        (_pending_without_content, "3: what is pending or ephemeral has content"),
        (_ephemeral_without_content, "3: what is pending or ephemeral has content"),
        (_lose_the_parent_of_a_tail, "3: the parent 5 of tail 3 is committed"),
        (_lose_a_parent, "3: the parent 5 of block 2 has such content too"),
        (_protect_too_many, "3: more than 1 blocks are protected"),
        (_forget_what_is_named, "3: the quota counts what pins name"),
        (_forget_who_pins, "3: the pins of each block are known"),
        (_lose_a_block, "1: every block is in exactly one place"),
        (_hold_a_free_block, "1: every block is in exactly one place"),
        (_forget_content, "2: cached blocks have content"),
        (_forget_in_map, "3: the map holds exactly"),
        (_pending_nobody_holds, "2: pending and ephemeral content is in"),
        (_evict_head_first, "5: the parent 0 of block 1 outlives it"),
        (_ephemeral_nobody_holds, "2: pending and ephemeral content is in"),
        (_hold_a_tail, "2: nobody holds a tail"),
        (_lose_a_child, "3: the children are what is committed, and the tails"),
        (_keep_what_is_there, "3: no tail is the beginning of another child"),
        (_protect_without_hits, "4: what is protected was hit again"),
        (_pin_without_a_pin, "4: free blocks that a pin holds are in its tier"),
        (_hit_a_child_alone, "5: the parent 1 of block 2 is hit as often"),
        (_forget_who_waits, "3: pins wait for the first block that is not there"),
        (_pin_over_quota, "3: pins keep to their quota"),
    ],
)
def test_check_invariants_names_what_is_broken(
    damage: Callable[[BlockPool], None], invariant: str
) -> None:
    pool = BlockPool(6, 4)
    table = take(pool, [*PROMPT, 50, 51])
    pool.keep_tail(table[3], TailContent(table[2], (50, 51)))
    pool.free(table)
    pool.check_invariants()
    damage(pool)
    with pytest.raises(InvariantViolated, match=invariant) as raised:
        pool.check_invariants()
    assert all(word in str(raised.value) for word in ("refs", "hits", "blank", "pins", "tails"))
