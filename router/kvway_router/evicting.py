"""What goes when there is too much: the least recently used first, tails before beginnings."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final

from kvway_router.holding import Holding
from kvway_router.leaving import Leavers
from kvway_router.roster import Roster
from kvway_router.run_tree import BLOCK_BYTES, RunTree

STEP_RUNS: Final = 256
"""Runs that are dropped at once, where that is done in steps: a millisecond or two."""


def evict(tree: RunTree, holding: Holding, num_blocks: int) -> None:
    """Drops so many blocks of a holding, or all it has; `tree.settle` is to follow."""
    while num_blocks > 0 and (entry := holding.oldest()) is not None:
        num = min(num_blocks, entry.count)
        tree.shrink(holding, entry.node, entry.count - num)
        num_blocks -= num


def expiring(
    tree: RunTree, holdings: Sequence[Holding], *, before: int
) -> Generator[None, None, None]:
    """Drops what was last used before a mark in time, yielding after each `STEP_RUNS` runs."""
    num = 0
    for holding in holdings:
        while (entry := holding.oldest()) is not None and entry.tick < before:
            tree.shrink(holding, entry.node, 0)
            num += 1
            if num % STEP_RUNS == 0:
                tree.settle()
                yield
    tree.settle()


def keep_budget(tree: RunTree, roster: Roster, leavers: Leavers, *, max_bytes: int) -> None:
    """Evicts from whoever holds most until all together take less, with a little room to spare.

    What is of no use any more goes first.

    Looking for the largest costs a step per replica: so not at every call.
    """
    wanted_bytes = max_bytes - (max_bytes >> 10)
    while leavers and tree.size_bytes > wanted_bytes:
        leavers.let_go()
    while tree.size_bytes > wanted_bytes:
        largest = max(roster.holdings(), key=lambda holding: holding.num_blocks)
        num_kept = largest.num_blocks // 2
        while (surplus := tree.size_bytes - wanted_bytes) > 0 and largest.num_blocks > num_kept:
            entry = largest.oldest()
            assert entry is not None  # noqa: S101  it holds blocks
            evict(tree, largest, min(entry.count, -(-surplus // BLOCK_BYTES)))
        tree.settle()
