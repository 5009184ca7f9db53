"""From the KV events of another engine to the index: blocks are hashed again from their tokens.

What an engine calls a block says nothing to anybody else: hashes depend on its version, its
settings and often on a number that it drew when it started. Tokens do not. So each of its blocks
gets the hash that a prompt with these tokens has here, and the engine's own is kept only to know
which block a later event means:

    engine, 24 tokens a block     A ............ B ............ C ............
    index, 16 tokens a block      h0 ..... h1 ..... h2 ..... h3 .....  4 tokens more
                                  of A     of A     of B     of B C
                                           and B

    A  stored behind nothing    h0 is whole; 8 tokens wait for what comes behind A
    B  stored behind A          h1, h2 are whole; h1 needs A too
    A  removed                  h0 and h1 are gone; h2 follows a gap, so nobody finds it

A block of the index is listed on a tier while every engine block that it takes a part of is there.
The sizes need not divide each other, and the engine's is learned from each event.

Not entered: what depends on more than the tokens (an adapter, a salt, an image), with all that
follows it, so that no other prompt takes it for its own; groups of layers that do not keep the
whole prefix; what is at a peer.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from kvway_core.blocks import BlockHash, block_hashes, event_hash
from kvway_core.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvway_router.block_events import TIERS, low_64_bits
from kvway_router.holding import Tier
from kvway_router.index import BlockIndex

_WHOLE_PREFIX: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of groups of layers that keep the KV of every token."""
_MAX_GROUPS: Final = 64


@dataclass(frozen=True, slots=True)
class RehashOptions:
    """How much is remembered of one engine's blocks.

    Attributes:
        max_blocks: Engine blocks; the least recently stored go first, and out of the index too.
        max_waiting_blocks: Blocks that wait for their parent; the oldest go first.
    """

    max_blocks: int = 1_000_000
    max_waiting_blocks: int = 65_536


class _Block:
    """One block of the engine.

    Attributes:
        parent: What the engine calls the block before it; None behind nothing.
        end: Hash of the last whole block of the index that ends in it or before it; None for a
            block that depends on more than tokens.
        rest: Tokens behind that, packed; fewer than a block of the index.
        size: Its tokens.
        inner: Hashes of the blocks of the index that end in it, without `end`.
        makes: Whether `end` ends in it.
        borrowed: Tokens of the first of them that are of blocks before it.
        lent: Blocks of the index that end behind it and take a part of it.
        tiers: A bit for each tier that it is on.
    """

    __slots__ = ("borrowed", "end", "inner", "lent", "makes", "parent", "rest", "size", "tiers")

    def __init__(self, parent: int | None, end: BlockHash | None, rest: bytes, size: int) -> None:
        self.parent = parent
        self.end = end
        self.rest = rest
        self.size = size
        self.inner: tuple[int, ...] = ()
        self.makes = False
        self.borrowed = 0
        self.lent: tuple[int, ...] = ()
        self.tiers = 0

    def made(self) -> tuple[int, ...]:
        """Returns the blocks of the index that end in it."""
        if not self.makes or self.end is None:
            return ()
        return (*self.inner, event_hash(self.end))

    def shared(self) -> tuple[int, ...]:
        """Returns those of them that end before it does: its siblings may begin alike."""
        return self.made() if self.rest else self.inner


class _Waiting:
    """An event whose parent is not known; the blocks from `num_blocks` on are gone meanwhile."""

    __slots__ = ("event", "num_blocks")

    def __init__(self, event: BlockStored) -> None:
        self.event = event
        self.num_blocks = len(event.block_hashes)


class EngineBlocks:
    """Events of an engine with hashes of its own.

    Invariants:
        1. A block of the index is listed by it on a tier only while all engine blocks that it
           takes tokens of were stored there and not removed.
        2. At most `max_blocks` are known and `max_waiting_blocks` wait.
        3. What depends on more than tokens is never listed.

    Args:
        index: What is kept true.
        replica_id: Whose blocks they are.
        root: What the hashes of prompts start from here.
        block_size: Tokens per block of the index.
        options: Bounds.

    Attributes:
        engine_block_size: Tokens per block as the last event had it; None before one.
    """

    def __init__(
        self,
        index: BlockIndex,
        replica_id: str,
        *,
        root: BlockHash,
        block_size: int,
        options: RehashOptions | None = None,
    ) -> None:
        """Know nothing."""
        self.engine_block_size: int | None = None
        self._index = index
        self._replica_id = replica_id
        self._root = _Block(None, root, b"", 0)
        self._block_size = block_size
        self._options = options or RehashOptions()
        self._blocks: dict[int, _Block] = {}
        # How many engine blocks on a tier have a part in a block of the index that is not theirs
        # alone. Empty while the sizes are the same.
        self._makers: dict[Tier, Counter[int]] = {tier: Counter() for tier in Tier}
        self._groups: set[int] = set()
        self._waiting: dict[int, list[_Waiting]] = {}
        self._waits_in: dict[int, _Waiting] = {}

    def apply(self, batch: EventBatch) -> int:
        """Enters a batch; counts the events that do not have the tokens of their blocks."""
        num_skipped = 0
        for event in batch.events:
            match event:
                case BlockStored():
                    num_skipped += not self._on_stored(event)
                case BlockRemoved():
                    self._on_removed(event)
                case AllBlocksCleared():
                    self.clear()
                case _:
                    assert_never(event)
        return num_skipped

    def clear(self) -> None:
        """Forgets all that the replica held."""
        self._blocks.clear()
        for makers in self._makers.values():
            makers.clear()
        self._waiting.clear()
        self._waits_in.clear()
        self._index.clear(self._replica_id)

    @property
    def num_blocks(self) -> int:
        """Engine blocks that are known."""
        return len(self._blocks)

    @property
    def num_waiting(self) -> int:
        """Engine blocks that wait for their parent."""
        return len(self._waits_in)

    # -- stored ---------------------------------------------------------------------------------

    def _on_stored(self, event: BlockStored) -> bool:
        tier = TIERS.get(event.medium)
        if tier is None or event.locality == "REMOTE" or not self._keeps_prefix(event):
            return True
        if not event.token_ids:
            # How vLLM tells that blocks it named before went to a slower tier.
            return self._store_known([low_64_bits(h) for h in event.block_hashes], tier)
        if _tokens_per_block(event) is None or not _are_tokens(event.token_ids):
            return False
        self.engine_block_size = event.block_size
        ready = [_Waiting(event)]
        while ready:
            ready += self._enter(ready.pop())
        while len(self._blocks) > self._options.max_blocks:
            oldest = next(iter(self._blocks))
            for each in Tier:
                self._remove([oldest], each)
        return True

    def _enter(self, item: _Waiting) -> list[_Waiting]:
        """Enters blocks behind their parent, or has them wait for it.

        Returns:
            Events that waited for one of them.
        """
        event = item.event
        tier = TIERS[event.medium]
        parent_key = None
        parent = self._root
        if event.parent_block_hash is not None:
            parent_key = low_64_bits(event.parent_block_hash)
            known = self._blocks.get(parent_key)
            if known is None:
                self._wait(parent_key, item)
                return []
            parent = known
        keys = [low_64_bits(h) for h in event.block_hashes[: item.num_blocks]]
        self._chain(event, keys, parent_key=parent_key, parent=parent, tier=tier)
        if not self._waiting:
            return []
        ready = [item for key in keys for item in self._waiting.pop(key, ())]
        for each in ready:
            for block_hash in each.event.block_hashes:
                self._waits_in.pop(low_64_bits(block_hash), None)
        return ready

    def _chain(
        self,
        event: BlockStored,
        keys: Sequence[int],
        *,
        parent_key: int | None,
        parent: _Block,
        tier: Tier,
    ) -> None:
        """Hashes the blocks of an event and lists those of the index that they complete."""
        size = _tokens_per_block(event) or 0
        own_size = self._block_size
        num_plain = 0 if parent.end is None else min(event.num_plain(), len(keys))
        stream = array("I")
        stream.frombytes(parent.rest)
        num_before = len(stream)
        stream.extend(event.token_ids[: num_plain * size])
        chain: list[BlockHash] = []
        if parent.end is not None:
            chain = block_hashes(stream, parent=parent.end, block_size=own_size)
        num_done = 0
        for place, key in enumerate(keys):
            block = _Block(parent_key, None, b"", size)
            if place < num_plain:
                start = num_before + place * size
                num_whole = (start + size) // own_size
                block.end = chain[num_whole - 1] if num_whole else parent.end
                block.rest = stream[num_whole * own_size : start + size].tobytes()
                if num_whole > num_done:
                    block.makes = True
                    block.inner = tuple(map(event_hash, chain[num_done : num_whole - 1]))
                    block.borrowed = start - num_done * own_size
                    num_done = num_whole
            self._know(key, block)
            parent_key = key
        self._list(keys, tier)

    def _know(self, key: int, block: _Block) -> None:
        """Remembers a block; one that is told of again keeps where it is and what it lent."""
        known = self._blocks.get(key)
        if known is not None:
            if (known.parent, known.end, known.rest) == (block.parent, block.end, block.rest):
                block = known
            else:
                for tier in Tier:
                    self._remove([key], tier)
            self._blocks.pop(key, None)
        self._blocks[key] = block

    def _store_known(self, keys: Sequence[int], tier: Tier) -> bool:
        known = [key for key in keys if key in self._blocks]
        self._list(known, tier)
        return bool(known)

    def _list(self, keys: Sequence[int], tier: Tier) -> None:
        """Puts known blocks on a tier, and lists there what is whole then, run by run."""
        run: list[int] = []
        before: int | None = None
        for key in keys:
            block = self._blocks[key]
            if not block.tiers >> tier & 1:
                block.tiers |= 1 << tier
                self._makers[tier].update(block.shared())
            made = block.made()
            if not made:
                continue
            parent = self._root if block.parent is None else self._blocks.get(block.parent)
            if parent is None or parent.end is None:
                continue  # what is before it is not known any more, so nobody can find it
            start = None if parent.end == self._root.end else event_hash(parent.end)
            if not run or run[-1] != start:
                self._store(before, run, tier)
                before, run = start, []
            if block.borrowed and not self._borrow(block, made[0], tier):
                self._store(before, run, tier)
                before, made, run = made[0], made[1:], []
            run += made
        self._store(before, run, tier)

    def _store(self, before: int | None, run: list[int], tier: Tier) -> None:
        if run:
            self._index.store(self._replica_id, before, run, tier=tier)

    def _borrow(self, block: _Block, block_hash: int, tier: Tier) -> bool:
        """Notes that the blocks before one have a part in a block of the index; are they there?"""
        lenders = self._lenders(block)
        lent = sum(lender.size for lender in lenders)
        if lent < block.borrowed or not all(lender.tiers >> tier & 1 for lender in lenders):
            return False
        for lender in lenders:
            if block_hash not in lender.lent:
                lender.lent = (*lender.lent, block_hash)
        return True

    def _lenders(self, block: _Block) -> list[_Block]:
        """Returns the blocks before one that its first block of the index begins in, if known."""
        lenders: list[_Block] = []
        missing, key = block.borrowed, block.parent
        while missing > 0 and key is not None and key in self._blocks:
            lender = self._blocks[key]
            lenders.append(lender)
            missing -= lender.size
            key = lender.parent
        return lenders

    def _keeps_prefix(self, event: BlockStored) -> bool:
        """Says whether a group of layers keeps every token; where nobody says, the first does."""
        group, kind = event.group_idx, event.kv_cache_spec_kind
        is_number = isinstance(group, int)
        keeps = kind in _WHOLE_PREFIX if isinstance(kind, str) else not is_number or group == 0
        if isinstance(group, int) and keeps and len(self._groups) < _MAX_GROUPS:
            self._groups.add(group)
        return keeps

    # -- waiting --------------------------------------------------------------------------------

    def _wait(self, parent_key: int, item: _Waiting) -> None:
        for block_hash in item.event.block_hashes:
            self._waits_in[low_64_bits(block_hash)] = item
        self._waiting.setdefault(parent_key, []).append(item)
        while len(self._waits_in) > self._options.max_waiting_blocks:
            for dropped in self._waiting.pop(next(iter(self._waiting))):
                for block_hash in dropped.event.block_hashes:
                    self._waits_in.pop(low_64_bits(block_hash), None)

    def _cut(self, key: int, tier: Tier) -> None:
        """Takes a block that waits, and those behind it, out of its event."""
        item = self._waits_in.get(key)
        if item is None or TIERS[item.event.medium] is not tier:
            return
        keys = [low_64_bits(block_hash) for block_hash in item.event.block_hashes]
        item.num_blocks = min(item.num_blocks, keys.index(key))

    # -- removed --------------------------------------------------------------------------------

    def _on_removed(self, event: BlockRemoved) -> None:
        tier = TIERS.get(event.medium)
        group = event.group_idx
        if tier is None or event.locality == "REMOTE":
            return
        if isinstance(group, int) and group not in self._groups:
            return  # of layers that are not listed
        self._remove([low_64_bits(block_hash) for block_hash in event.block_hashes], tier)

    def _remove(self, keys: Sequence[int], tier: Tier) -> None:
        gone: list[int] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                self._cut(key, tier)
                continue
            if not block.tiers >> tier & 1:
                continue
            block.tiers &= ~(1 << tier)
            gone += block.lent
            gone += self._unmake(block, tier)
            if not block.tiers:
                del self._blocks[key]
                self._give_back(block)
        if gone:
            self._index.remove(self._replica_id, gone, tier=tier)

    def _unmake(self, block: _Block, tier: Tier) -> Iterator[int]:
        """Yields the blocks of the index that no engine block on a tier makes any more."""
        shared, makers = block.shared(), self._makers[tier]
        for block_hash in block.made():
            if block_hash in shared:
                makers[block_hash] -= 1
                if makers[block_hash] > 0:
                    continue
                del makers[block_hash]
            yield block_hash

    def _give_back(self, block: _Block) -> None:
        """Ends what the blocks before one lent to it, unless a sibling of it has that too."""
        if not block.borrowed:
            return
        borrowed = block.made()[0]
        if not any(borrowed in makers for makers in self._makers.values()):
            for lender in self._lenders(block):
                lender.lent = tuple(h for h in lender.lent if h != borrowed)


def _tokens_per_block(event: BlockStored) -> int | None:
    """Returns how many tokens each block has; None where the event does not tell.

    The last page of SGLang may be short, and then it comes alone.
    """
    num_tokens, num_blocks = len(event.token_ids), len(event.block_hashes)
    if num_blocks and num_tokens == num_blocks * event.block_size:
        return event.block_size
    return num_tokens if num_blocks == 1 and 0 < num_tokens < event.block_size else None


def _are_tokens(token_ids: Sequence[int]) -> bool:
    return min(token_ids) >= 0 and max(token_ids) < 2**32
