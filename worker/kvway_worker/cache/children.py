"""Which blocks follow a block, in the order of their tokens. Pure.

A full block that holds the prompt's next tokens is found by its hash. This finds the rest: a block
that holds only the first few of them, which can be copied. In lexicographic order everything that
shares a beginning with a query lies next to it, so the best candidate is one of its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from sortedcontainers import SortedList

from kvway_worker.cache.block_content import Parent, Tokens

Child: TypeAlias = tuple[Tokens, int]
"""The tokens of a block and its id."""


class Children:
    """The blocks behind each block.

    Invariants:
        1. A parent without children has no entry.
        2. The only child of a parent is kept bare, several are in a sorted list: chains, where
           nearly every block has one child, cost a dictionary entry and no more.

    Complexity:
        Every operation is O(log n) of the children of one parent.
    """

    __slots__ = ("_of",)

    def __init__(self) -> None:
        self._of: dict[Parent, Child | SortedList] = {}

    def __iter__(self) -> Iterator[tuple[Parent, Tokens, int]]:
        """Yields parent, tokens and block of every child."""
        for parent in self._of:
            for tokens, block in self._list(parent):
                yield parent, tokens, block

    def add(self, parent: Parent, tokens: Tokens, block: int) -> None:
        """Adds a block that is not there."""
        known = self._of.get(parent)
        if known is None:
            self._of[parent] = (tokens, block)
        elif isinstance(known, tuple):
            self._of[parent] = SortedList([known, (tokens, block)])
        else:
            known.add((tokens, block))

    def remove(self, parent: Parent, tokens: Tokens, block: int) -> None:
        """Takes a block out that is there."""
        known = self._of[parent]
        if isinstance(known, tuple):
            del self._of[parent]
            return
        known.remove((tokens, block))
        if len(known) == 1:
            self._of[parent] = known[0]

    def clear(self) -> None:
        """Forgets all."""
        self._of.clear()

    def nearest(self, parent: Parent, tokens: Tokens) -> tuple[int, int] | None:
        """Returns the child that shares the longest beginning with `tokens`.

        Returns:
            Its id and the number of shared tokens; None when no child shares one.
        """
        best = None
        for theirs, block in self._neighbours(parent, tokens):
            shared = _num_shared(theirs, tokens)
            if shared and (best is None or shared > best[1]):
                best = block, shared
        return best

    def extends(self, parent: Parent, tokens: Tokens) -> bool:
        """Says whether a child begins with all of `tokens`, or is just them."""
        return any(
            theirs[: len(tokens)] == tokens for theirs, _ in self._neighbours(parent, tokens)
        )

    def beginning(self, parent: Parent, tokens: Tokens) -> int | None:
        """Returns the child whose tokens, fewer than `tokens`, are their beginning.

        Only right while no child is a beginning of another child: whatever sorts between a
        beginning and `tokens` has that beginning too, so it is the neighbour in front.
        """
        for theirs, block in self._neighbours(parent, tokens):
            if len(theirs) < len(tokens) and tokens[: len(theirs)] == theirs:
                return block
        return None

    def _neighbours(self, parent: Parent, tokens: Tokens) -> list[Child]:
        """Returns the child just in front of where `tokens` belongs, and the one just behind."""
        known = self._of.get(parent)
        if known is None:
            return []
        if isinstance(known, tuple):
            return [known]
        at = known.bisect_left((tokens,))
        return list(known[max(0, at - 1) : at + 1])

    def _list(self, parent: Parent) -> list[Child]:
        known = self._of[parent]
        return [known] if isinstance(known, tuple) else list(known)


def _num_shared(left: Tokens, right: Tokens) -> int:
    """Returns the length of the longest common beginning."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
