"""What must be true of a block pool, checked as a whole. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from kvway_core.blocks import Namespace
from kvway_worker.cache.block_content import Parent
from kvway_worker.cache.contents import Contents
from kvway_worker.cache.eviction import TIERS, FreeBlocks
from kvway_worker.cache.pins import Pins


@dataclass(frozen=True, slots=True)
class PoolState:
    """The parts of a pool.

    Attributes:
        refs: References on each block.
        hits: Hits of each block's content.
        min_hits: So many make it protected.
        contents: What is in the blocks.
        free: Those that nobody holds.
        pins: What is to stay.
    """

    refs: Sequence[int]
    hits: Sequence[int]
    min_hits: int
    contents: Contents
    free: FreeBlocks
    pins: Pins

    def problem(self) -> str | None:
        """Returns which of the pool's invariants is broken, with its number; None if all hold.

        Complexity:
            O(n log n) for n blocks.
        """
        if broken := self._problem_of_places() or self._problem_of_contents():
            return broken
        for part in (self.contents, self.free, self.pins):
            if broken := part.problem():
                return f"3: {broken}"
        return self._problem_of_tiers() or self._problem_of_order()

    @override
    def __str__(self) -> str:
        """Returns everything there is to see, without tokens and without salts."""
        tiers = {tier: self.free.tier(tier) for tier in TIERS}
        pins = {pin.pin_id: self.pins.blocks(pin.pin_id) for pin in self.pins.infos()}
        parents = {block: _shown(content.parent) for block, content in self.contents}
        tails = {block: _shown(tail.parent) for block, tail in self.contents.tails.items()}
        return (
            f"refs {list(self.refs)}, hits {list(self.hits)}, blank {self.free.blank}, {tiers}, "
            f"parents {parents}, pending {self.contents.pending}, tails {tails}, pins {pins}"
        )

    def _problem_of_places(self) -> str | None:
        held = [block for block, refs in enumerate(self.refs) if refs > 0]
        places = [*self.free.blank, *self.free.cached(), *held]
        if sorted(places) != list(range(len(self.refs))) or min(self.refs) < 0:
            return "1: every block is in exactly one place"
        return None

    def _problem_of_contents(self) -> str | None:
        contents, cached = self.contents, self.free.cached()
        if not all(contents.is_empty(block) for block in self.free.blank):
            return "2: blank blocks have no content"
        if any(contents.is_empty(block) for block in cached):
            return "2: cached blocks have content"
        if any(contents.is_pending(b) or contents.is_ephemeral(b) for b in cached):
            return "2: pending and ephemeral content is in referenced blocks"
        if not contents.tails.keys() <= set(cached):
            return "2: nobody holds a tail"
        return None

    def _problem_of_tiers(self) -> str | None:
        pinned = {block for block in range(len(self.refs)) if block in self.pins}
        if set(self.free.tier("pinned")) != {b for b in pinned if not self.refs[b]}:
            return "4: free blocks that a pin holds are in its tier"
        if any(not self.contents.is_settled(block) for block in pinned):
            return "4: what is pinned stays"
        if any(self.hits[block] < self.min_hits for block in self.free.tier("protected")):
            return "4: what is protected was hit again"
        return None

    def _problem_of_order(self) -> str | None:
        place = {block: index for index, block in enumerate(self.free.cached())}
        parents = [(block, content.parent) for block, content in self.contents]
        parents += [(block, tail.parent) for block, tail in self.contents.tails.items()]
        for block, parent in parents:
            if isinstance(parent, Namespace):
                continue
            # Blocks that somebody holds come after all free ones, parents after their children.
            if place.get(parent, len(place) + 1) <= place.get(block, len(place)):
                return f"5: the parent {parent} of block {block} outlives it"
            if self.hits[parent] < self.hits[block]:
                return f"5: the parent {parent} of block {block} is hit as often"
        return None


def _shown(parent: Parent) -> int | str:
    """Returns a parent to be read by people; a namespace may have a secret salt."""
    return parent if isinstance(parent, int) else "root"
