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

Blocks are entered a few at a time, so that whoever enters many can do something else in between.

Not entered: what depends on more than the tokens (an adapter, a salt, an image), with all that
follows it, so that no other prompt takes it for its own; groups of layers that do not keep the
whole prefix; what is at a peer.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, assert_never

import msgspec

from kvway_core.blocks import BlockHash, block_hashes, event_hash
from kvway_core.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvway_router.block_events import STEP_REMOVED, TIERS, in_parts
from kvway_router.engine_block import EngineBlock
from kvway_router.holding import Tier
from kvway_router.index import BlockIndex
from kvway_router.orphans import Orphans, Run

_WHOLE_PREFIX: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of groups of layers that keep the KV of every token."""
_MAX_GROUPS: Final = 64
_STEP_BLOCKS: Final = 256
_STEP_TOKENS: Final = 4096
"""How much is entered in one step, in blocks and in tokens; one block at least."""
_STEP_FORGOTTEN: Final = 4096
"""How many of the engine's blocks are forgotten in one step."""


@dataclass(frozen=True, slots=True)
class RehashOptions:
    """How much is remembered of one engine's blocks.

    Attributes:
        max_blocks: Engine blocks; the least recently stored go first, and out of the index too.
        max_tokens: Tokens in them, for large blocks.
        max_waiting_blocks: Blocks that wait for their parent; the oldest go first.
        max_waiting_tokens: Tokens in them, which are kept, four bytes each.
    """

    max_blocks: int = 1_000_000
    max_tokens: int = 64_000_000
    max_waiting_blocks: int = 65_536
    max_waiting_tokens: int = 4_000_000


class EngineBlocks:
    """Events of an engine with hashes of its own.

    Invariants:
        1. A block of the index is listed by it on a tier only while all engine blocks that it
           takes tokens of were stored there and not removed.
        2. No more are known and wait than the options say, in blocks and in tokens.
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
        self._root = EngineBlock(None, root, b"", 0)
        self._block_size = block_size
        self._options = options or RehashOptions()
        self._blocks: dict[int, EngineBlock] = {}
        # How many engine blocks on a tier have a part in a block of the index that is not theirs
        # alone. Empty while the sizes are the same.
        self._makers: dict[Tier, Counter[int]] = {tier: Counter() for tier in Tier}
        self._groups: set[int] = set()
        self._num_tokens = 0
        self._orphans = Orphans(
            max_blocks=self._options.max_waiting_blocks,
            max_tokens=self._options.max_waiting_tokens,
        )

    def steps(self, batch: EventBatch) -> Iterator[int]:
        """Enters a batch; counts the events that do not have the tokens of their blocks."""
        for event in batch.events:
            match event:
                case BlockStored():
                    yield from self._on_stored(event)
                case BlockRemoved():
                    yield from self._on_removed(event)
                case AllBlocksCleared():
                    for _ in self.clearing():
                        yield 0
                    yield 0
                case _:
                    assert_never(event)

    def clearing(self) -> Generator[None, None, None]:
        """Forgets all that the replica held."""
        self._orphans.clear()
        self._num_tokens = 0
        yield from self._index.clearing(self._replica_id)
        books: list[dict[int, Any]] = [self._blocks, *self._makers.values()]
        for book in books:
            while book:
                for _ in range(min(_STEP_FORGOTTEN, len(book))):
                    book.popitem()
                yield

    @property
    def num_blocks(self) -> int:
        """Engine blocks that are known."""
        return len(self._blocks)

    @property
    def num_waiting(self) -> int:
        """Engine blocks that wait for their parent."""
        return self._orphans.num_blocks

    # -- stored ---------------------------------------------------------------------------------

    def _on_stored(self, event: BlockStored) -> Iterator[int]:
        tier = TIERS.get(event.medium)
        if tier is None or not _is_local(event) or not self._keeps_prefix(event):
            yield 0
            return
        if not event.token_ids:
            # How vLLM tells that blocks it named before went to a slower tier.
            yield from self._store_known(event.block_hashes, tier)
            return
        self.engine_block_size = event.block_size
        runs = Run.each(event, tier, max_blocks=_STEP_BLOCKS, max_tokens=_STEP_TOKENS)
        num_runs = 0
        try:
            for run in runs:
                num_runs += 1
                yield from self._enter(run)
        except OverflowError:
            num_runs = 0
        yield int(not num_runs)

    def _enter(self, run: Run) -> Iterator[int]:
        """Enters blocks behind their parent, and then what waited for them; or has them wait."""
        ready = [run]
        while ready:
            run = ready.pop()
            if run.parent is not None and run.parent not in self._blocks:
                self._orphans.wait(run)
            else:
                self._chain(run)
                ready += self._orphans.take(run.keys)
                self._evict()
            yield 0

    def _evict(self) -> None:
        options = self._options
        while len(self._blocks) > options.max_blocks or self._num_tokens > options.max_tokens:
            oldest = next(iter(self._blocks))
            for tier in Tier:
                self._remove([oldest], tier)

    def _chain(self, run: Run) -> None:
        """Hashes blocks behind a known one and lists those of the index that they complete."""
        parent = self._root if run.parent is None else self._blocks[run.parent]
        parent_key, size, own_size = run.parent, run.size, self._block_size
        num_plain = 0 if parent.end is None else min(run.num_plain, len(run.keys))
        stream = array("I")
        stream.frombytes(parent.rest)
        num_before = len(stream)
        stream.extend(run.tokens[: num_plain * size])
        chain: list[BlockHash] = []
        if parent.end is not None:
            chain = block_hashes(stream, parent=parent.end, block_size=own_size)
        num_done = 0
        for place, key in enumerate(run.keys):
            block = EngineBlock(parent_key, None, b"", size)
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
        self._list(run.keys, run.tier)

    def _know(self, key: int, block: EngineBlock) -> None:
        """Remembers a block; one that is told of again keeps where it is and what it lent."""
        known = self._blocks.get(key)
        if known is not None:
            if (known.parent, known.end, known.rest) == (block.parent, block.end, block.rest):
                block = known
            else:
                for tier in Tier:
                    self._remove([key], tier)
            if self._blocks.pop(key, None) is not None:
                self._num_tokens -= known.size
        self._blocks[key] = block
        self._num_tokens += block.size

    def _store_known(self, block_hashes: Sequence[int | bytes], tier: Tier) -> Iterator[int]:
        num_known = 0
        for keys in in_parts(block_hashes, _STEP_BLOCKS):
            known = [key for key in keys if key in self._blocks]
            self._list(known, tier)
            num_known += len(known)
            yield 0
        yield int(not num_known)

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

    def _borrow(self, block: EngineBlock, block_hash: int, tier: Tier) -> bool:
        """Notes that the blocks before one have a part in a block of the index; are they there?"""
        lenders = self._lenders(block)
        lent = sum(lender.size for lender in lenders)
        if lent < block.borrowed or not all(lender.tiers >> tier & 1 for lender in lenders):
            return False
        for lender in lenders:
            if block_hash not in lender.lent:
                lender.lent = (*lender.lent, block_hash)
        return True

    def _lenders(self, block: EngineBlock) -> list[EngineBlock]:
        """Returns the blocks before one that its first block of the index begins in, if known."""
        lenders: list[EngineBlock] = []
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

    # -- removed --------------------------------------------------------------------------------

    def _on_removed(self, event: BlockRemoved) -> Iterator[int]:
        tier = TIERS.get(event.medium)
        group = event.group_idx
        # A group that is not listed has removals of its own.
        is_listed = not isinstance(group, int) or group in self._groups
        if tier is not None and event.locality != "REMOTE" and is_listed:
            for keys in in_parts(event.block_hashes, STEP_REMOVED):
                self._remove(keys, tier)
                yield 0
        yield 0

    def _remove(self, keys: Sequence[int], tier: Tier) -> None:
        gone: list[int] = []
        for key in keys:
            self._orphans.cut(key, tier)
            block = self._blocks.get(key)
            if block is None or not block.tiers >> tier & 1:
                continue
            block.tiers &= ~(1 << tier)
            gone += block.lent
            gone += self._unmake(block, tier)
            if not block.tiers:
                del self._blocks[key]
                self._num_tokens -= block.size
                self._end_loans(block)
                self._give_back(block)
        if gone:
            self._index.remove(self._replica_id, gone, tier=tier)

    def _unmake(self, block: EngineBlock, tier: Tier) -> Iterator[int]:
        """Yields the blocks of the index that no engine block on a tier makes any more."""
        shared, makers = block.shared(), self._makers[tier]
        for block_hash in block.made():
            if block_hash in shared:
                makers[block_hash] -= 1
                if makers[block_hash] > 0:
                    continue
                del makers[block_hash]
            yield block_hash

    def _end_loans(self, block: EngineBlock) -> None:
        """Ends what the blocks before one lent together with it: without it, nobody has that."""
        lent, key = set(block.lent), block.parent
        while lent and key is not None and key in self._blocks:
            lender = self._blocks[key]
            lent.intersection_update(lender.lent)
            lender.lent = tuple(h for h in lender.lent if h not in lent)
            key = lender.parent

    def _give_back(self, block: EngineBlock) -> None:
        """Ends what the blocks before one lent to it, unless a sibling of it has that too."""
        if not block.borrowed:
            return
        borrowed = block.made()[0]
        if not any(borrowed in makers for makers in self._makers.values()):
            for lender in self._lenders(block):
                lender.lent = tuple(h for h in lender.lent if h != borrowed)


def _is_local(event: BlockStored) -> bool:
    """Says whether blocks are the replica's own, for all that is understood."""
    return event.locality in (msgspec.UNSET, None, "LOCAL")
