"""The books of one replica: which blocks the router believes it holds, and which may go first."""

from __future__ import annotations

import heapq
import math
from typing import Final

from kvway_core.errors import InvariantViolated

_COMPACT_SLACK: Final = 64


class Block:
    """One block as one replica holds it."""

    __slots__ = ("confirmed", "num_speculations", "parent", "used")

    def __init__(self, parent: int | None) -> None:
        self.parent = parent
        self.used = 0
        self.confirmed = False
        self.num_speculations = 0


class Holding:
    """The books of one replica.

    Attributes:
        bit: Its bit in the map of holders.
        limit: Most blocks it may hold here.
        blocks: Every block it holds, orphans included.
        num_children: For each hash that is a parent of a held block, how many. The hash itself may
            be unknown: then its children are orphans, and are its children again once it comes.
        leaves: Heap of (last use, hash) with an entry for each block without children; entries
            that are no longer true are skipped when met.
    """

    __slots__ = ("bit", "blocks", "leaves", "limit", "num_children")

    def __init__(self, bit: int, limit: int) -> None:
        self.bit = bit
        self.limit = limit
        self.blocks: dict[int, Block] = {}
        self.num_children: dict[int, int] = {}
        self.leaves: list[tuple[int, int]] = []

    def push_leaf(self, block_hash: int, used: int) -> None:
        """Notes a block without children as a candidate for eviction."""
        heapq.heappush(self.leaves, (used, block_hash))
        if len(self.leaves) > 2 * len(self.blocks) + _COMPACT_SLACK:
            self.leaves = [
                (block.used, held)
                for held, block in self.blocks.items()
                if held not in self.num_children
            ]
            heapq.heapify(self.leaves)

    def pop_leaf(self, *, before: float = math.inf) -> int | None:
        """Takes the block without children that was used least recently, if before that mark."""
        while self.leaves and self.leaves[0][0] < before:
            used, block_hash = heapq.heappop(self.leaves)
            block = self.blocks.get(block_hash)
            if block is not None and block.used == used and block_hash not in self.num_children:
                return block_hash
        return None

    def check(self, replica_id: str) -> None:
        """Checks invariants 2 to 5 of `BlockIndex` for this replica.

        Raises:
            InvariantViolated: One does not hold.
        """
        num_children: dict[int, int] = {}
        for block in self.blocks.values():
            if block.parent is not None:
                num_children[block.parent] = num_children.get(block.parent, 0) + 1
        if len(self.blocks) > self.limit:
            msg = f"2: {replica_id} holds {len(self.blocks)} blocks of {self.limit} allowed"
            raise InvariantViolated(msg)
        if num_children != self.num_children:
            msg = f"3: child counts of {replica_id} differ from its blocks"
            raise InvariantViolated(msg)
        candidates = set(self.leaves)
        for block_hash, block in self.blocks.items():
            if block_hash not in num_children and (block.used, block_hash) not in candidates:
                msg = f"4: a block of {replica_id} without children is not up for eviction"
                raise InvariantViolated(msg)
            if not block.confirmed and block.num_speculations < 1:
                msg = f"5: nobody vouches for a block of {replica_id}"
                raise InvariantViolated(msg)
