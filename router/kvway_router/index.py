"""One map from block to the replicas that hold it, asked once for all replicas.

Block hashes are chained: a hash names its block *and everything before it*. So a flat map is
enough to find prefixes, and the walk ends at the first block that nobody holds:

    prompt      h0 ---- h1 ---- h2 ---- h3 ---- h4
                 |       |       |       |       |
    replica a    x       x       x       .       x     3   (h4 is an orphan: h3 is missing)
    replica b    x       x       .       .       .     2
    replica c    .       x       x       .       .     0   (its h1, h2 wait for h0)

    holders      {h0: ab, h1: abc, h2: ac, h4: a}      one bit per replica, `&` at each step

Beside the map, each replica has its own books: which blocks it holds, which parent each has, how
many children. Only a block without children can be evicted, the least recently used first, so what
stays is always a usable prefix:

    h0 --- h1 --- h2 --- h3     <- if this branch is the oldest: h3 goes first, then h2
             `--- h5 --- h6     <- h1 and h0 stay as long as one branch needs them

An error of this index can only cost a hit: a block that is listed and not there makes the replica
compute it, and a block that is there and not listed is found by luck.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvway_core.errors import InvariantViolated
from kvway_router.holding import Block, Holding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class Speculation:
    """The promise that a prompt was sent to a replica: `confirm` or `rollback` it, once.

    Holding on to it costs one entry per block that it put in; nothing is owed for a prompt whose
    replica was cleared or removed meanwhile.
    """

    __slots__ = ("_entries", "replica_id")

    def __init__(self, replica_id: str, entries: list[tuple[int, Block]]) -> None:
        self.replica_id = replica_id
        self._entries = entries

    def take(self) -> list[tuple[int, Block]]:
        """Returns what has to be settled, and nothing the second time."""
        entries, self._entries = self._entries, []
        return entries


class BlockIndex:
    """Which replica holds which blocks; answers how much of a prompt each of them has.

    Not thread-safe and without awaits: it belongs to the event loop. A replica is known from its
    first block on and until `remove_replica`.

    Invariants:
        1. The map of holders and the books of the replicas say the same.
        2. No replica holds more than its limit, all together not more than `max_blocks_total`.
        3. Child counts are those of the held blocks.
        4. Every held block without children is a candidate for eviction.
        5. A block is confirmed or speculated on by someone.

    Args:
        max_blocks_per_replica: Limit of a replica for which `set_limit` was not called. Too small
            is ruinous and too large is nearly free: once to twice what it can really hold.
        max_blocks_total: Hard limit over all replicas together.
    """

    def __init__(
        self, *, max_blocks_per_replica: int = 262_144, max_blocks_total: int = 2_097_152
    ) -> None:
        if min(max_blocks_per_replica, max_blocks_total) < 1:
            msg = "an index holds at least one block"
            raise ValueError(msg)
        self._default_limit = max_blocks_per_replica
        self._max_total = max_blocks_total
        self._holders: dict[int, int] = {}
        self._holdings: dict[str, Holding] = {}
        self._names: list[str | None] = []
        self._num_blocks = 0
        self._tick = 0

    # -- questions ------------------------------------------------------------------------------

    def match(self, hashes: Sequence[int]) -> Mapping[str, int]:
        """Counts, for each replica, how many leading blocks of a prompt it holds without a gap.

        Replicas that hold not even the first block are left out. Changes nothing, not even what is
        recently used: only `speculate` and `store` do.

        Complexity: one look-up per block until no replica matches on, whatever their number.
        """
        matched: dict[str, int] = {}
        if not hashes:
            return matched
        holders = self._holders
        matching = holders.get(hashes[0], 0)
        depth = 0
        for block_hash in hashes:
            here = holders.get(block_hash, 0) & matching
            if here != matching:
                for replica_id in self._replicas(matching & ~here):
                    matched[replica_id] = depth
                matching = here
            if not matching:
                break
            depth += 1
        for replica_id in self._replicas(matching):
            matched[replica_id] = depth
        return matched

    def num_blocks(self, replica_id: str) -> int:
        """Counts the blocks listed for a replica; 0 for one that is not known."""
        holding = self._holdings.get(replica_id)
        return len(holding.blocks) if holding else 0

    def __len__(self) -> int:
        """Counts the blocks listed for all replicas together."""
        return self._num_blocks

    @property
    def tick(self) -> int:
        """A mark in time for `expire`: all that was used up to now is before it."""
        return self._tick + 1

    # -- what replicas report -------------------------------------------------------------------

    def store(self, replica_id: str, parent: int | None, hashes: Sequence[int]) -> None:
        """Notes that a replica holds a run of blocks behind `parent` (None: from the start).

        Takes the place of what was speculated on these blocks. Storing again changes nothing but
        the last use. When the parent is not known for this replica the run is kept as an orphan:
        it counts from the moment the parent comes, and until then is evicted like any other.
        """
        if not hashes:
            return
        holding = self._holding(replica_id)
        for _, block in self._put(holding, parent, hashes):
            block.confirmed = True
        self._evict_surplus(holding)

    def remove(self, replica_id: str, hashes: Sequence[int]) -> None:
        """Notes that a replica no longer holds these blocks; unknown ones are ignored.

        Also drops what was speculated on them. Blocks behind a removed one become orphans.
        """
        holding = self._holdings.get(replica_id)
        if holding is None:
            return
        for block_hash in hashes:
            if block_hash in holding.blocks:
                self._drop(holding, block_hash)

    def clear(self, replica_id: str) -> None:
        """Forgets all blocks of a replica. Complexity: what it holds."""
        holding = self._holdings.get(replica_id)
        if holding is None:
            return
        keep = ~holding.bit
        for block_hash in holding.blocks:
            rest = self._holders[block_hash] & keep
            if rest:
                self._holders[block_hash] = rest
            else:
                del self._holders[block_hash]
        self._num_blocks -= len(holding.blocks)
        holding.blocks.clear()
        holding.num_children.clear()
        holding.leaves.clear()
        self._tick += 1

    def remove_replica(self, replica_id: str) -> None:
        """Forgets a replica altogether. Complexity: what it holds."""
        self.clear(replica_id)
        holding = self._holdings.pop(replica_id, None)
        if holding is not None:
            self._names[holding.bit.bit_length() - 1] = None
            while self._names and self._names[-1] is None:
                self._names.pop()

    # -- what the router expects ----------------------------------------------------------------

    def speculate(self, replica_id: str, hashes: Sequence[int]) -> Speculation:
        """Lists a prompt that was just sent to a replica, so that its siblings follow at once.

        Args:
            replica_id: Where it was sent.
            hashes: All blocks of the prompt from its first one on.

        Returns:
            The promise to settle with `confirm` at the first byte of the answer or with `rollback`
            when there is none. Several prompts may speculate on the same block: it stays until the
            last of them is rolled back.
        """
        if not hashes:
            return Speculation(replica_id, [])
        holding = self._holding(replica_id)
        entries = self._put(holding, None, hashes)
        waiting = [(block_hash, block) for block_hash, block in entries if not block.confirmed]
        for _, block in waiting:
            block.num_speculations += 1
        self._evict_surplus(holding)
        return Speculation(replica_id, waiting)

    def confirm(self, speculation: Speculation) -> None:
        """Takes a prompt as held: the replica has computed it. No effect once settled."""
        for _, _, block in self._settle(speculation):
            block.confirmed = True

    def rollback(self, speculation: Speculation) -> None:
        """Drops the blocks of a prompt that never arrived, and that nobody else vouches for.

        No effect once settled.
        """
        for holding, block_hash, block in self._settle(speculation):
            if not block.confirmed and not block.num_speculations:
                self._drop(holding, block_hash)

    # -- bounds ---------------------------------------------------------------------------------

    def set_limit(self, replica_id: str, max_blocks: int) -> None:
        """Sets how many blocks are listed for a replica at most; evicts what is above."""
        holding = self._holding(replica_id)
        holding.limit = max(1, max_blocks)
        self._evict_surplus(holding)

    def expire(self, replica_id: str, *, before: int) -> None:
        """Evicts what was last used before the mark `before` (a former `tick`), tails first."""
        holding = self._holdings.get(replica_id)
        while holding and (leaf := holding.pop_leaf(before=before)) is not None:
            self._drop(holding, leaf)

    def check_invariants(self) -> None:
        """Compares all books with one another. For tests: costs all that is held.

        Raises:
            InvariantViolated: A numbered invariant of the class does not hold.
        """
        holders: dict[int, int] = {}
        for replica_id, holding in self._holdings.items():
            for block_hash in holding.blocks:
                holders[block_hash] = holders.get(block_hash, 0) | holding.bit
            holding.check(replica_id)
            if self._names[holding.bit.bit_length() - 1] != replica_id:
                msg = f"1: the bit of {replica_id} names another replica"
                raise InvariantViolated(msg)
        if holders != self._holders:
            msg = "1: the map of holders differs from the books of the replicas"
            raise InvariantViolated(msg)
        total = sum(len(holding.blocks) for holding in self._holdings.values())
        if total != self._num_blocks or total > self._max_total:
            msg = f"2: {total} blocks held, {self._num_blocks} counted, {self._max_total} allowed"
            raise InvariantViolated(msg)

    # -- inside ---------------------------------------------------------------------------------

    def _replicas(self, bits: int) -> Iterator[str]:
        while bits:
            lowest = bits & -bits
            name = self._names[lowest.bit_length() - 1]
            if name is not None:
                yield name
            bits ^= lowest

    def _holding(self, replica_id: str) -> Holding:
        holding = self._holdings.get(replica_id)
        if holding is None:
            if None in self._names:
                position = self._names.index(None)
                self._names[position] = replica_id
            else:
                position = len(self._names)
                self._names.append(replica_id)
            holding = self._holdings[replica_id] = Holding(1 << position, self._default_limit)
        return holding

    def _put(
        self, holding: Holding, parent: int | None, hashes: Sequence[int]
    ) -> list[tuple[int, Block]]:
        """Enters a run and marks it used now. What cannot fit anyway is left off its tail."""
        self._tick += 1
        blocks, holders, num_children = holding.blocks, self._holders, holding.num_children
        entries = []
        for block_hash in hashes[: min(holding.limit, self._max_total)]:
            block = blocks.get(block_hash)
            if block is None:
                block = blocks[block_hash] = Block(parent)
                holders[block_hash] = holders.get(block_hash, 0) | holding.bit
                self._num_blocks += 1
                if parent is not None:
                    num_children[parent] = num_children.get(parent, 0) + 1
            block.used = self._tick
            entries.append((block_hash, block))
            parent = block_hash
        for block_hash, block in entries:
            if block_hash not in num_children:
                holding.push_leaf(block_hash, block.used)
        return entries

    def _drop(self, holding: Holding, block_hash: int) -> None:
        block = holding.blocks.pop(block_hash)
        rest = self._holders[block_hash] & ~holding.bit
        if rest:
            self._holders[block_hash] = rest
        else:
            del self._holders[block_hash]
        self._num_blocks -= 1
        self._tick += 1
        if block.parent is None:
            return
        siblings = holding.num_children[block.parent] - 1
        if siblings:
            holding.num_children[block.parent] = siblings
            return
        del holding.num_children[block.parent]
        parent = holding.blocks.get(block.parent)
        if parent is not None:
            parent.used = max(parent.used, block.used)
            holding.push_leaf(block.parent, parent.used)

    def _evict_one(self, holding: Holding) -> None:
        leaf = holding.pop_leaf()
        # No leaf at all: parents that form a ring, which only a broken replica can report.
        self._drop(holding, next(iter(holding.blocks)) if leaf is None else leaf)

    def _evict_surplus(self, holding: Holding) -> None:
        while len(holding.blocks) > holding.limit:
            self._evict_one(holding)
        while self._num_blocks > self._max_total:
            fair_share = self._max_total // len(self._holdings)
            if len(holding.blocks) <= fair_share:
                holding = max(self._holdings.values(), key=lambda other: len(other.blocks))
            self._evict_one(holding)

    def _settle(self, speculation: Speculation) -> Iterator[tuple[Holding, int, Block]]:
        """Yields the entries of a promise that are still its own, tail first."""
        holding = self._holdings.get(speculation.replica_id)
        for block_hash, block in reversed(speculation.take()):
            if holding is not None and holding.blocks.get(block_hash) is block:
                block.num_speculations -= 1
                yield holding, block_hash, block
