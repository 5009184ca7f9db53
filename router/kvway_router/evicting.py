"""What goes when there is too much: the least recently used first, tails before beginnings."""

from __future__ import annotations

from collections.abc import Sequence

from kvway_router.holding import Holding
from kvway_router.run_tree import BLOCK_BYTES, RunTree


def evict(tree: RunTree, holding: Holding, num_blocks: int) -> None:
    """Drops so many blocks of a holding, or all it has; `tree.settle` is to follow."""
    while num_blocks > 0 and (entry := holding.oldest()) is not None:
        num = min(num_blocks, entry.count)
        tree.shrink(holding, entry.node, entry.count - num)
        num_blocks -= num


def keep_budget(tree: RunTree, holdings: Sequence[Holding], *, max_bytes: int) -> None:
    """Evicts from whoever holds most until all together take less, with a little room to spare.

    Looking for the largest costs a step per replica: so not at every call.
    """
    wanted_bytes = max_bytes - (max_bytes >> 10)
    while tree.size_bytes > wanted_bytes:
        largest = max(holdings, key=lambda holding: holding.num_blocks)
        num_kept = largest.num_blocks // 2
        while (surplus := tree.size_bytes - wanted_bytes) > 0 and largest.num_blocks > num_kept:
            entry = largest.oldest()
            assert entry is not None  # noqa: S101  it holds blocks
            evict(tree, largest, min(entry.count, -(-surplus // BLOCK_BYTES)))
        tree.settle()
