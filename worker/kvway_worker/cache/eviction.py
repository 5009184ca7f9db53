"""The free blocks, in the order in which they are given away. Pure.

    given away first                                                             last
    ┌─────────┐  ┌────────────────────────┐  ┌────────────────────────┐  ┌──────────┐
    │  blank  │  │ probation   old ─> new │  │ protected   old ─> new │  │  pinned  │
    └─────────┘  └────────────────────────┘  └────────────────────────┘  └──────────┘
                                         ▲     │
                                         └─────┘ what is more than protected may hold

Segmented LRU (Karedla, Love, Wherry: Caching strategies to improve disk system performance, 1994):
what is not hit again passes through probation and cannot push out what is protected, however much
of it there is. What is protected is only pushed out by more of the kind, the oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Literal, TypeAlias, get_args

Tier: TypeAlias = Literal["probation", "protected", "pinned"]

TIERS: Final[tuple[Tier, ...]] = get_args(Tier)
"""In the order in which they are given away."""

HITS_TO_PROTECT: Final = 2
"""Requests that hit a block, after the one that computed it, before it is protected."""

PROTECTED_SHARE: Final = 0.2
"""Of all blocks, how many may be in `protected`.

More is worse than plain LRU on real traces: what is protected and not used any more keeps out what
could be (docs/decisions/0008).
"""


class FreeBlocks:
    """Blocks that nobody holds.

    Args:
        num_blocks: Blocks of the pool.

    Invariants:
        1. A block is in one place.
        2. `protected` has at most PROTECTED_SHARE of all blocks.
        3. If a block that is put back after another never goes into an earlier tier than that
           one, it is given away after it: tiers are in that order, within a tier the older goes
           first, and what leaves `protected` does so oldest first, to the young end.

    Complexity:
        Every operation on a block is O(1).
    """

    __slots__ = ("_blank", "_max_protected", "_tiers")

    def __init__(self, num_blocks: int) -> None:
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._max_protected = int(PROTECTED_SHARE * num_blocks)
        self._tiers: dict[Tier, OrderedDict[int, None]] = {tier: OrderedDict() for tier in TIERS}

    def __len__(self) -> int:
        """Returns how many there are, in all places."""
        return len(self._blank) + self.num_cached

    @property
    def num_blank(self) -> int:
        """Those without content."""
        return len(self._blank)

    @property
    def num_cached(self) -> int:
        """Those with content."""
        return sum(map(len, self._tiers.values()))

    @property
    def blank(self) -> list[int]:
        """Those without content, in the order in which they are given away."""
        return self._blank[::-1]

    def tier(self, tier: Tier) -> list[int]:
        """Returns the blocks of a tier, oldest first."""
        return list(self._tiers[tier])

    def cached(self) -> list[int]:
        """Returns those with content in the order in which they are given away."""
        return [block for blocks in self._tiers.values() for block in blocks]

    def put_blank(self, block: int) -> None:
        """Takes a block without content; it is the next to be given away."""
        self._blank.append(block)

    def put(self, block: int, tier: Tier) -> None:
        """Takes a block with content, at the young end of its tier."""
        self._tiers[tier][block] = None
        protected = self._tiers["protected"]
        if len(protected) > self._max_protected:
            oldest, _ = protected.popitem(last=False)
            self._tiers["probation"][oldest] = None

    def take(self, block: int) -> None:
        """Takes a block with content out of its tier.

        Raises:
            KeyError: If it is in none.
        """
        for blocks in self._tiers.values():
            if block in blocks:
                del blocks[block]
                return
        raise KeyError(block)

    def pop(self) -> tuple[int, Tier | None]:
        """Gives away the next block, and says which tier it was in; None for a blank one.

        Raises:
            IndexError: If there is none.
        """
        if self._blank:
            return self._blank.pop(), None
        for tier, blocks in self._tiers.items():
            if blocks:
                return blocks.popitem(last=False)[0], tier
        raise IndexError("no block is free")

    def clear(self) -> None:
        """Makes every block blank; the oldest is the next to be given away."""
        self._blank += reversed(self.cached())
        for blocks in self._tiers.values():
            blocks.clear()

    def problem(self) -> str | None:
        """Returns which invariant is broken, None when all hold."""
        places = self._blank + self.cached()
        if len(set(places)) != len(places):
            return "a block is in two places"
        if len(self._tiers["protected"]) > self._max_protected:
            return f"more than {self._max_protected} blocks are protected"
        return None
