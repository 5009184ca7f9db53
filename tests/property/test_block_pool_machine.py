"""The block pool against a naive one: lists and dictionaries, nothing clever.

The model knows sequences (their tokens and tables), which prefixes can be found, and one list of
free blocks. Every answer of the pool, and the order in which it gives blocks away, must be the
same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from kvway_core.blocks import Namespace, block_hashes, event_hash
from kvway_core.errors import OutOfBlocks
from kvway_worker.block_content import BlockContent
from kvway_worker.block_pool import BlockPool
from tests.worker.batching import Replay

pytestmark = pytest.mark.property

SIZE = 2
NAMESPACES = (Namespace("m", block_size=SIZE), Namespace("m", block_size=SIZE, cache_salt="s"))
Prefix = tuple[int, ...]
"""The namespace's number and all tokens up to the end of a block."""


@dataclass(eq=False)
class Holder:
    """A sequence of the model: every block that it holds, and what is in the first ones."""

    namespace: int
    token_ids: list[int]
    table: list[int] = field(default_factory=list)

    def prefix(self, num_blocks: int) -> Prefix:
        return (self.namespace, *self.token_ids[: num_blocks * SIZE])

    @property
    def num_full(self) -> int:
        return len(self.token_ids) // SIZE


class NaivePool:
    """What a pool must do, in the plainest way."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))
        self.found: dict[Prefix, int] = {}
        self.holders: list[Holder] = []

    def is_held(self, block: int) -> bool:
        return any(block in holder.table for holder in self.holders)

    def has_content(self, block: int) -> bool:
        return block in self.found.values()

    def match(self, holder: Holder) -> list[int]:
        hits: list[int] = []
        for count in range(1, holder.num_full + 1):
            block = self.found.get(holder.prefix(count))
            if block is None:
                break
            hits.append(block)
        return hits

    def allocate(self, num_new: int, hits: list[int]) -> list[int] | None:
        free = [block for block in self.free if block not in hits]
        if num_new > len(free):
            return None
        new, self.free = free[:num_new], free[num_new:]
        self.found = {prefix: block for prefix, block in self.found.items() if block not in new}
        return new

    def release(self, holder: Holder, pending: set[int]) -> None:
        self.holders.remove(holder)
        for block in reversed(holder.table):
            if self.is_held(block):
                continue
            if block in pending:
                self.found = {p: b for p, b in self.found.items() if b != block}
            if self.has_content(block):
                self.free.append(block)
            else:
                self.free.insert(0, block)


class PoolMachine(RuleBasedStateMachine):
    """A pool and its model over their life."""

    holders: Bundle[Holder] = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.replay = Replay()
        self.pending: set[int] = set()

    @initialize(num_blocks=st.integers(1, 9))
    def make(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.model = NaivePool(num_blocks)

    def find(self, holder: Holder) -> list[int]:
        namespace = NAMESPACES[holder.namespace]
        keys = block_hashes(holder.token_ids, parent=namespace.root(), block_size=SIZE)
        return list(self.pool.match(keys, holder.token_ids, namespace=namespace).blocks)

    @rule(
        target=holders,
        namespace=st.integers(0, 1),
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=9),
    )
    def open(self, namespace: int, token_ids: list[int]) -> Holder:
        """Looks a prompt up, takes its blocks and publishes the new ones."""
        holder = Holder(namespace, token_ids)
        hits = self.find(holder)
        assert hits == self.model.match(holder)
        num_new = -(-len(token_ids) // SIZE) - len(hits)
        new = self.model.allocate(num_new, hits)
        assert self.pool.can_allocate(num_new, hits=hits) == (new is not None)
        if new is None:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(num_new, hits=hits)
            return holder  # it holds nothing
        assert self.pool.allocate(num_new, hits=hits) == new
        self.model.free = [block for block in self.model.free if block not in hits]
        holder.table = hits + new
        self.model.holders.append(holder)
        self.publish(holder, len(hits))
        return holder

    def publish(self, holder: Holder, start: int) -> None:
        namespace = NAMESPACES[holder.namespace]
        keys = block_hashes(holder.token_ids, parent=namespace.root(), block_size=SIZE)
        for index in range(start, holder.num_full):
            block = holder.table[index]
            content = BlockContent(
                keys[index],
                holder.table[index - 1] if index else namespace,
                tuple(holder.token_ids[index * SIZE : (index + 1) * SIZE]),
            )
            assert self.pool.publish(block, content) == block
            self.model.found[holder.prefix(index + 1)] = block
            self.pending.add(block)

    @rule(holder=consumes(holders))
    def close(self, holder: Holder) -> None:
        """Gives the blocks back, in the middle of a step or after it."""
        if holder in self.model.holders:
            self.model.release(holder, self.pending)
            self.pool.free(holder.table)
            self.pending = {block for block in self.pending if self.model.is_held(block)}

    @rule()
    def commit(self) -> None:
        self.pool.commit()
        self.pending.clear()

    @rule()
    def reset(self) -> None:
        idle = not any(holder.table for holder in self.model.holders)
        assert self.pool.reset() == idle
        if idle:
            self.model.found.clear()
            # In which order blank blocks are given away is the pool's business.
            assert sorted(self.pool.free_order()) == sorted(self.model.free)
            self.model.free = self.pool.free_order()

    @invariant()
    def pool_and_model_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, model = self.pool, self.model
        pool.check_invariants()
        assert pool.free_order() == model.free
        held = [block for holder in model.holders for block in holder.table]
        for block in range(pool.num_blocks):
            assert pool.num_references(block) == held.count(block)
            assert (pool.content(block) is not None) == model.has_content(block)
            assert pool.is_pending(block) == (block in self.pending)
        assert len(held) == 0 or pool.num_referenced == len(set(held))
        committed = {block for block in model.found.values() if block not in self.pending}
        assert set(pool.committed().values()) == committed

    @invariant()
    def events_replay_to_what_is_committed(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.replay.apply(self.pool.take_events())
        expected = {
            event_hash(key): list(content.token_ids)
            for key, block in self.pool.committed().items()
            if (content := self.pool.content(block)) is not None
        }
        assert self.replay.tokens == expected


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(
    max_examples=max(200, settings().max_examples), stateful_step_count=40
)
