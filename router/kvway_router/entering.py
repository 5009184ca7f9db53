"""Blocks that a replica holds are put into the tree: along what is there, and on from its end.

held:      [h0 h1 h2 h3]
enter      h0 h1 k2 k3
after:     [h0 h1] --> [h2 h3]
                  `--> [k2 k3]
"""

from __future__ import annotations

from collections.abc import Sequence

from kvway_router.holding import Holding
from kvway_router.run_tree import RunTree
from kvway_router.runs import Node, num_common


def enter(tree: RunTree, holding: Holding, parent: int | None, hashes: Sequence[int]) -> Node:
    """Enters a run of at least one block behind `parent` (None: from the start).

    Returns:
        The node that ends with its last block.
    """
    before: Node | int | None = parent
    found = None if parent is None else tree.find(holding, parent)
    start = 0
    if found is not None:
        before, start = _enter_behind(tree, holding, *found, hashes)
    while start < len(hashes):
        child = tree.child(before, hashes[start])
        if child is None:
            before, num = tree.grow(holding, before, hashes[start:] if start else hashes)
            start += num
        else:
            before, start = _take(tree, holding, child, 0, hashes, start)
    assert isinstance(before, Node)  # noqa: S101  at least one block was entered
    return before


def _enter_behind(
    tree: RunTree, holding: Holding, node: Node, place: int, hashes: Sequence[int]
) -> tuple[Node, int]:
    """Starts a run behind a block, which may be in the middle of a node.

    Returns:
        The node that the rest goes behind, and how many blocks are entered.
    """
    offset = place + 1
    if offset == node.size:
        return node, 0
    if not num_common(node, offset, hashes, 0, len(hashes)):
        return tree.split(node, offset), 0
    entry = holding.entries.get(node)
    if entry is None or entry.count < offset:
        # It does not have what is before: these blocks are no beginning of the node for it.
        tree.split(node, offset)
        offset = 0
    return _take(tree, holding, node, offset, hashes, 0)


def _take(
    tree: RunTree, holding: Holding, node: Node, offset: int, hashes: Sequence[int], start: int
) -> tuple[Node, int]:
    """Enters those blocks that a node has already, from `offset` there, `start` in the prompt.

    Returns:
        As `_enter_behind`.
    """
    end = offset + num_common(node, offset, hashes, start, len(hashes))
    start += end - offset
    if end < node.size:
        entry = holding.entries.get(node)
        # A node branches behind its end only, and what is behind was not used now.
        if start < len(hashes) or (entry is not None and entry.count > end):
            node = tree.split(node, end)
    tree.hold(holding, node, end)
    return node, start
