"""What replicas held that are forgotten: it is in the tree until it is let go, some at a time.

A replica may hold tens of thousands of runs. Dropping all of them at once would stop the event
loop for as long as that takes. So who is forgotten has another set of bits, if it comes back, and
nobody finds what its old bits stand for; the runs go with the changes that follow.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from kvway_router.roster import Holdings, Roster
from kvway_router.run_tree import RunTree

AT_ONCE: Final = 256
"""Runs that are dropped when a replica is forgotten: a few milliseconds."""
PER_CHANGE: Final = 64
"""Runs that are dropped with each later change: less than a millisecond."""


class Leavers:
    """What is let go by and by. True while there is something.

    Attributes:
        at_once: See `AT_ONCE`.
        per_change: See `PER_CHANGE`.
    """

    def __init__(self, tree: RunTree, roster: Roster) -> None:
        """Nobody was forgotten."""
        self.at_once = AT_ONCE
        self.per_change = PER_CHANGE
        self._tree = tree
        self._roster = roster
        self._left: deque[Holdings] = deque()

    def __bool__(self) -> bool:
        return bool(self._left)

    def leave(self, replica_id: str) -> None:
        """Has a replica forgotten."""
        if holdings := self._roster.retire(replica_id):
            self._left.append(holdings)
            self.let_go(self.at_once)

    def let_go(self, num_runs: int | None = None) -> None:
        """Drops so many runs; without a number as many as with each change."""
        if not self._left:
            return
        if num_runs is None:
            num_runs = self.per_change
        while self._left and num_runs:
            holding = next((each for each in self._left[0] if each.entries), None)
            if holding is None:
                self._roster.release(self._left.popleft())
                continue
            while num_runs and (entry := holding.oldest()) is not None:
                self._tree.shrink(holding, entry.node, 0)
                num_runs -= 1
        self._tree.settle()
