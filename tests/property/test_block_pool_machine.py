"""The block pool against a naive one (`naive_pool`).

Every answer of the pool, and the order in which it gives blocks away, must be the same.
"""

from __future__ import annotations

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
from kvway_core.errors import OutOfBlocks, PinQuotaExceeded
from kvway_worker.cache.block_content import BlockContent, TailContent
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.cache.eviction import TIERS
from tests.property.naive_pool import SIZE, Holder, Kept, NaivePool
from tests.worker.batching import Replay

pytestmark = pytest.mark.property

NAMESPACES = (Namespace("m", block_size=SIZE), Namespace("m", block_size=SIZE, cache_salt="s"))

namespaces = st.sampled_from([NAMESPACES[0], NAMESPACES[0], NAMESPACES[0], NAMESPACES[1]])


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """One of two documents, cut anywhere, often with a short tail of its own."""
    length = draw(st.integers(0, 9))
    tail = draw(st.lists(st.integers(0, 1), max_size=4))
    return [draw(st.integers(0, 1))] * length + tail or [0]


class PoolMachine(RuleBasedStateMachine):
    """A pool and its model over their life."""

    holders: Bundle[Holder] = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.replay = Replay()
        self.live: list[Holder] = []
        self.now_s = 0.0

    @initialize(num_blocks=st.integers(1, 16), quota=st.sampled_from([0.0, 0.5, 1.0]))
    def make(self, num_blocks: int, quota: float) -> None:
        self.pool = BlockPool(num_blocks, SIZE, pin_quota=quota)
        self.model = NaivePool(num_blocks, int(num_blocks * quota))

    @rule(
        target=holders,
        namespace=namespaces,
        token_ids=prompts(),
        ephemeral=st.sampled_from([False, False, True]),
        collides=st.sampled_from([False, False, False, True]),
        again=st.booleans(),
    )
    def open(
        self,
        namespace: Namespace,
        token_ids: list[int],
        ephemeral: bool,  # noqa: FBT001 - hypothesis passes it by name
        collides: bool,  # noqa: FBT001
        again: bool,  # noqa: FBT001
    ) -> Holder:
        """Looks a prompt up, takes its blocks and publishes the new ones."""
        return self.begin(Holder(namespace, token_ids, ephemeral, collides), again)

    def begin(self, holder: Holder, again: bool) -> Holder:  # noqa: FBT001 - as the rule's
        namespace, token_ids, ephemeral = holder.namespace, holder.token_ids, holder.ephemeral
        found = self.pool.match(holder.hashes, token_ids, namespace=namespace)
        hits = list(found.blocks)
        assert hits == self.model.match(holder)
        sources = self.model.sources(holder, hits)
        if found.tail is None:
            assert sources == {}
        else:
            assert sources[found.tail.block_id] == found.tail.num_tokens
        source = found.tail.block_id if found.tail else None
        num_new = -(-len(token_ids) // SIZE) - len(hits)
        if not self.fits(num_new, hits, source):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(num_new, hits=hits, source=source)
            source = None
            if not self.fits(num_new, hits, None):
                return holder  # it holds nothing
        new = self.pool.allocate(
            num_new, hits=hits, source=source, ephemeral=ephemeral, again=again
        )
        for block in hits:
            self.model.hold(block)
            self.model.kept[block].hits += not again
            if not ephemeral:
                self.model.claim(block)
        if source is not None:
            self.model.hold(source)
        assert new == [self.model.next() for _ in range(num_new)]
        if source is not None:
            self.model.release([source])
        holder.table = hits + new
        holder.num_published = len(hits)
        self.live.append(holder)
        self.publish(holder)
        return holder

    def fits(self, num_new: int, hits: list[int], source: int | None) -> bool:
        needed = [*hits, *([] if source is None else [source])]
        num_needed = num_new + sum(not self.model.refs[block] for block in needed)
        assert self.pool.can_allocate(num_new, hits=needed) == (num_needed <= self.pool.num_free)
        return num_needed <= len(self.model.free)

    def publish(self, holder: Holder) -> None:
        holder.is_computed = False
        for index in range(holder.num_published, holder.num_full):
            own, key = holder.table[index], holder.hashes[index]
            parent, tokens = holder.parent(index), holder.tokens(index)
            content = BlockContent(key, parent, tokens)
            found = self.pool.publish(own, content, ephemeral=holder.ephemeral)
            known = self.model.find(key)
            if known is None:
                assert found == own
                self.model.kept[own] = Kept(
                    key, parent, tokens, pending=True, ephemeral=holder.ephemeral
                )
            elif (self.model.kept[known].parent, self.model.kept[known].tokens) == (
                parent,
                tokens,
            ):
                assert found == known
                if not holder.ephemeral:
                    self.model.claim(known)
            else:
                assert found is None
                return
            if found != own:  # somebody else has computed the same
                assert found is not None
                self.pool.touch(found, ephemeral=holder.ephemeral)
                self.model.hold(found)
                self.pool.free([own])
                self.model.release([own])
                holder.table[index] = found
            holder.num_published = index + 1

    @rule(target=holders, parent=holders, ephemeral=st.booleans())
    def fork(self, parent: Holder, ephemeral: bool) -> Holder:  # noqa: FBT001 - by name
        """Shares every block of another holder."""
        child = Holder(parent.namespace, list(parent.token_ids), ephemeral, parent.collides)
        if parent not in self.live:
            return child
        child.table = list(parent.table)
        child.num_published = parent.num_published
        child.is_computed = parent.is_computed
        for block in child.table:
            self.pool.touch(block, ephemeral=ephemeral)
            self.model.hold(block)
            if not ephemeral:
                self.model.claim(block)
        self.live.append(child)
        return child

    @rule(holder=holders, token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, holder: Holder, token_ids: list[int]) -> None:
        """Appends tokens; a partly filled block that others hold is copied first."""
        if holder not in self.live:
            return
        at, num_rows = divmod(len(holder.token_ids), SIZE)
        copies = bool(num_rows) and self.model.refs[holder.table[at]] > 1
        num_new = -(-(len(holder.token_ids) + len(token_ids)) // SIZE) - len(holder.table) + copies
        if not self.fits(num_new, [], None):
            return
        new = self.pool.allocate(num_new)
        assert new == [self.model.next() for _ in range(num_new)]
        if copies:
            shared, holder.table[at] = holder.table[at], new.pop(0)
            self.pool.free([shared])
            self.model.release([shared])
        holder.table += new
        holder.token_ids += token_ids
        self.publish(holder)

    @rule(holder=consumes(holders))
    def close(self, holder: Holder) -> None:
        """Gives the blocks back, in the middle of a step or after it."""
        self.end(holder)

    @rule(namespace=namespaces, token_ids=prompts(), again=st.sampled_from([False, False, True]))
    def serve(self, namespace: Namespace, token_ids: list[int], again: bool) -> None:  # noqa: FBT001 - by name
        """A whole request, so that many of them come by."""
        holder = self.begin(Holder(namespace, token_ids, ephemeral=False, collides=False), again)
        self.commit()
        self.end(holder)

    def end(self, holder: Holder) -> None:
        if holder not in self.live:
            return
        self.live.remove(holder)
        if holder.is_computed and not holder.ephemeral and len(holder.token_ids) % SIZE:
            block, at = holder.table[-1], len(holder.table) - 1
            if holder.num_published == at:
                content = TailContent(holder.parent(at), holder.tokens(at))
                self.pool.keep_tail(block, content)
                self.model.keep_tail(block, *content)
        self.pool.free(holder.table)
        self.model.release(holder.table)

    @rule()
    def commit(self) -> None:
        self.pool.commit()
        pending = [block for block, kept in self.model.kept.items() if kept.pending]
        for block in pending:
            self.model.kept[block].pending = False
            self.model.drop_beginnings(block)
            if block in self.model.pinned():
                self.model.claim(block)
        for holder in self.live:
            holder.is_computed = True

    @rule()
    def reset(self) -> None:
        idle = not self.live
        assert self.pool.reset() == idle
        if idle:
            self.model.kept.clear()
            # In which order blank blocks are given away is the pool's business.
            assert sorted(self.pool.free_order()) == sorted(self.model.free)
            self.model.blank = self.pool.free_order()
            self.model.tiers = {tier: [] for tier in TIERS}

    @rule(
        pin_id=st.sampled_from("ab"),
        namespace=namespaces,
        token_ids=prompts(),
        lasts_s=st.integers(1, 3),
    )
    def pin(self, pin_id: str, namespace: Namespace, token_ids: list[int], lasts_s: int) -> None:
        keys = block_hashes(token_ids, parent=namespace.root(), block_size=SIZE)
        others = [hashes for other, (hashes, _) in self.model.pins.items() if other != pin_id]
        named = {key for hashes in (*others, keys) for key in hashes}
        if len(named) > self.model.max_pinned:
            with pytest.raises(PinQuotaExceeded):
                self.pool.pin(pin_id, keys, expires_s=self.now_s + lasts_s)
            return
        info = self.pool.pin(pin_id, keys, expires_s=self.now_s + lasts_s)
        if pin_id in self.model.pins:
            self.model.unpin(pin_id)
        self.model.pins[pin_id] = (keys, self.now_s + lasts_s)
        chain = self.model.chain_of(pin_id)
        assert (info.num_blocks, info.num_cached_blocks) == (len(keys), len(chain))
        for block in reversed(chain):
            self.model.claim(block)
        for block in chain:
            self.model.put_again(block)

    @rule(pin_id=st.sampled_from("ab"))
    def unpin(self, pin_id: str) -> None:
        assert self.pool.unpin(pin_id) == (pin_id in self.model.pins)
        if pin_id in self.model.pins:
            self.model.unpin(pin_id)

    @rule()
    def expire(self) -> None:
        self.now_s += 1
        over = [pin for pin, (_, until) in self.model.pins.items() if until <= self.now_s]
        assert self.pool.expire_pins(self.now_s) == over
        for pin_id in over:
            self.model.unpin(pin_id)

    @invariant()
    def pool_and_model_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, model = self.pool, self.model
        pool.check_invariants()
        assert {tier: pool.tier(tier) for tier in TIERS} == model.tiers
        assert pool.free_order() == model.free
        assert pool.num_pinned == len(model.pinned())
        assert [pin.pin_id for pin in pool.pins()] == list(model.pins)
        assert set(pool.stats._lives) == set(pool.committed())
        held = [block for holder in self.live for block in holder.table]
        for block in range(pool.num_blocks):
            assert pool.num_references(block) == held.count(block) == model.refs[block]
            kept = model.kept.get(block)
            content, tail = pool.content(block), pool.tail(block)
            if kept is None:
                assert (content, tail) == (None, None)
            elif kept.block_hash is None:
                assert (content, tail) == (None, (kept.parent, kept.tokens))
            else:
                assert content == (kept.block_hash, kept.parent, kept.tokens)
                assert (tail, pool.is_pending(block)) == (None, kept.pending)

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
    max_examples=max(100, settings().max_examples), stateful_step_count=50
)
