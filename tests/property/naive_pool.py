"""The plainest pool of blocks: lists and dictionaries, nothing clever. What a pool must do.

It knows what is in each block, the pins, and one list of free blocks per tier; who holds blocks is
a `Holder`, with its tokens and its table.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvway_core.blocks import BlockHash, Namespace, block_hashes
from kvway_worker.cache.block_content import Parent, Tokens
from kvway_worker.cache.eviction import TIERS, Tier
from tests.worker.batching import OneHash

SIZE = 3


@dataclass(eq=False)
class Holder:
    """A sequence of the model and every block that it holds."""

    namespace: Namespace
    token_ids: list[int]
    ephemeral: bool
    collides: bool
    table: list[int] = field(default_factory=list)
    num_published: int = 0
    is_computed: bool = False

    @property
    def num_full(self) -> int:
        return len(self.token_ids) // SIZE

    @property
    def hashes(self) -> list[BlockHash]:
        if self.collides:
            chain = OneHash(SIZE)
            chain.extend(self.token_ids)
            return chain.hashes
        return block_hashes(self.token_ids, parent=self.namespace.root(), block_size=SIZE)

    def tokens(self, index: int) -> Tokens:
        return tuple(self.token_ids[index * SIZE : (index + 1) * SIZE])

    def parent(self, index: int) -> Parent:
        return self.table[index - 1] if index else self.namespace


@dataclass
class Kept:
    """What is in a block of the model; a tail has no hash."""

    block_hash: BlockHash | None
    parent: Parent
    tokens: Tokens
    pending: bool
    ephemeral: bool
    hits: int = 0

    @property
    def stays(self) -> bool:
        return not self.pending and not self.ephemeral


class NaivePool:
    """What a pool must do, in the plainest way."""

    def __init__(self, num_blocks: int, max_pinned: int) -> None:
        self.blank = list(range(num_blocks))
        self.tiers: dict[Tier, list[int]] = {tier: [] for tier in TIERS}
        self.max_protected = num_blocks // 5
        self.max_pinned = max_pinned
        self.refs = [0] * num_blocks
        self.kept: dict[int, Kept] = {}
        self.pins: dict[str, tuple[list[BlockHash], float]] = {}

    @property
    def free(self) -> list[int]:
        return self.blank + [block for tier in self.tiers.values() for block in tier]

    def find(self, block_hash: BlockHash) -> int | None:
        return next((b for b, kept in self.kept.items() if kept.block_hash == block_hash), None)

    def match(self, holder: Holder) -> list[int]:
        hits: list[int] = []
        parent: Parent = holder.namespace
        for index, block_hash in enumerate(holder.hashes):
            block = self.find(block_hash)
            if block is None:
                break
            if (self.kept[block].parent, self.kept[block].tokens) != (
                parent,
                holder.tokens(index),
            ):
                break
            hits.append(block)
            parent = block
        return hits

    def sources(self, holder: Holder, hits: list[int]) -> dict[int, int]:
        """Blocks to copy from, and how many tokens."""
        parent = hits[-1] if hits else holder.namespace
        wanted = holder.token_ids[len(hits) * SIZE :][:SIZE]
        most = len(holder.token_ids) - len(hits) * SIZE - 1
        found: dict[int, int] = {}
        for block, kept in self.kept.items():
            if kept.stays and kept.parent == parent:
                shared = 0
                while shared < min(len(wanted), len(kept.tokens)):
                    if wanted[shared] != kept.tokens[shared]:
                        break
                    shared += 1
                found[block] = min(shared, most)
        best = max(found.values(), default=0)
        return {block: shared for block, shared in found.items() if shared == best > 0}

    def hold(self, block: int) -> None:
        for places in (self.blank, *self.tiers.values()):
            if block in places:
                places.remove(block)
        self.refs[block] += 1

    def claim(self, block: int) -> None:
        if block in self.kept and self.kept[block].ephemeral:
            self.kept[block].ephemeral = False
            self.drop_beginnings(block)

    def drop_beginnings(self, block: int) -> None:
        """Empties the tails that hold nothing but a beginning of what is in a block."""
        own = self.kept[block]
        tails = [b for b, kept in self.kept.items() if kept.block_hash is None and b != block]
        for tail in tails:
            kept = self.kept[tail]
            begins = own.tokens[: len(kept.tokens)] == kept.tokens
            if own.stays and kept.parent == own.parent and begins:
                del self.kept[tail]
                for places in self.tiers.values():
                    if tail in places:
                        places.remove(tail)
                self.blank.insert(0, tail)

    def next(self) -> int:
        block = self.free[0]
        self.hold(block)
        self.kept.pop(block, None)
        return block

    def pinned(self) -> set[int]:
        held: set[int] = set()
        for hashes, _ in self.pins.values():
            parent: int | None = None
            for block_hash in hashes:
                block = self.find(block_hash)
                if block is None or self.kept[block].pending:
                    break
                before = self.kept[block].parent
                if (before if isinstance(before, int) else None) != parent:
                    break
                held.add(block)
                parent = block
        return held

    def put(self, block: int) -> None:
        kept = self.kept.get(block)
        if kept is None:
            self.blank.insert(0, block)
        elif block in self.pinned():
            self.tiers["pinned"].append(block)
        elif kept.hits < 2:
            self.tiers["probation"].append(block)
        else:
            self.tiers["protected"].append(block)
            if len(self.tiers["protected"]) > self.max_protected:
                self.tiers["probation"].append(self.tiers["protected"].pop(0))

    def put_again(self, block: int) -> None:
        if not self.refs[block]:
            for places in self.tiers.values():
                if block in places:
                    places.remove(block)
            self.put(block)

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            kept = self.kept.get(block)
            if kept is not None and not kept.stays:
                del self.kept[block]
            self.put(block)

    def keep_tail(self, block: int, parent: Parent, tokens: Tokens) -> None:
        if self.refs[block] != 1 or block in self.kept:
            return
        if isinstance(parent, int) and not (parent in self.kept and self.kept[parent].stays):
            return
        for kept in self.kept.values():
            if kept.stays and kept.parent == parent and kept.tokens[: len(tokens)] == tokens:
                return
        self.kept[block] = Kept(None, parent, tokens, pending=False, ephemeral=False)
        self.drop_beginnings(block)

    def chain_of(self, pin_id: str) -> list[int]:
        """The blocks a pin holds, the deepest first."""
        alone = NaivePool(1, 1)
        alone.kept, alone.pins = self.kept, {pin_id: self.pins[pin_id]}
        held = alone.pinned()
        blocks = [self.find(block_hash) for block_hash in self.pins[pin_id][0]]
        return [block for block in dict.fromkeys(reversed(blocks)) if block in held]

    def unpin(self, pin_id: str) -> None:
        chain = self.chain_of(pin_id)
        del self.pins[pin_id]
        for block in chain:
            if block not in self.pinned():
                self.put_again(block)
