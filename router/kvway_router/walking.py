"""Walks along a prompt through the tree of runs. They change nothing.

prompt    h0 h1 h2 h3 h4 ...
walk      [h0 h1 h2 h3] --> [h4 h5 h6] --> ...        one comparison for each run

A replica leaves the walk where it holds no more, and the walk ends where the last one does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvway_router.holding import Holding, Tier
from kvway_router.roster import Roster
from kvway_router.run_tree import RunTree
from kvway_router.runs import HASH_BYTES, Node, num_common


def match(tree: RunTree, roster: Roster, hashes: Sequence[int], slowest: Tier) -> dict[str, int]:
    """Counts how many leading blocks of a prompt each replica holds; see `BlockIndex.match`."""
    matched: dict[str, int] = {}
    depth, total = 0, len(hashes)
    node = tree.child(None, hashes[0]) if total else None
    # Bits of devices: each stands for a replica.
    matching = roster.on_tiers(node.held, slowest) if node is not None else 0
    while node is not None and matching:
        held, full = node.held, node.full
        if slowest:
            held, full = roster.on_tiers(held, slowest), roster.on_tiers(full, slowest)
        num = num_common(node, 0, hashes, depth, total)
        if lost := matching & ~full:
            for name in roster.names_of(lost & ~held):
                matched[name] = depth
            if partly := lost & held:
                for name, count in roster.counts(node, partly, slowest):
                    matched[name] = depth + (num if count > num else count)  # noqa: FURB136  faster
            matching ^= lost
        depth += num
        if depth == total or num * HASH_BYTES < len(node.run):
            break
        children = node.children
        node = children.get(hashes[depth]) if children else None
    for name in roster.names_of(matching):
        matched[name] = depth
    return matched


def behind(
    device: Mapping[str, int], host: Mapping[str, int], disk: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """Returns what is on the host, and on a disk, behind what is on the device: of who has any.

    Args:
        device: A match of devices alone.
        host: One of hosts and devices.
        disk: One of all tiers.
    """
    found = {}
    for name, on_disk in disk.items():
        on_device, on_host = device.get(name, 0), host.get(name, 0)
        if on_disk > on_device:
            found[name] = (on_host - on_device, on_disk - on_host)
    return found


def last_uses(tree: RunTree, holding: Holding, hashes: Sequence[int]) -> list[tuple[int, int]]:
    """Returns when a holding last used each part of a prompt; see `BlockIndex.last_uses`."""
    uses: list[tuple[int, int]] = []
    for node, start, num in pieces(tree, hashes) if holding.entries else ():
        entry = holding.entries.get(node)
        if entry is None or not entry.sure or start != (uses[-1][0] if uses else 0):
            break
        uses.append((start + min(num, entry.sure), entry.tick))
    return uses


def pieces(tree: RunTree, hashes: Sequence[int]) -> list[tuple[Node, int, int]]:
    """Lists what there is of a prompt, gaps left out, first block first.

    Returns:
        Of each node that has a part of it: the node, how many blocks of the prompt are before the
        node, how many leading blocks of the node are the prompt's.
    """
    found: list[tuple[Node, int, int]] = []
    end = len(hashes)
    start = 0
    node = tree.child(None, hashes[0]) if hashes else None
    while start < end:
        if node is None:
            # The next one that waits for the block in front of it.
            places = range(max(start, 1), end)
            if tree.tops.keys().isdisjoint(hashes[places.start - 1 : end - 1]):
                break
            start = next((at for at in places if _waits(tree, hashes, at)), end)
            if start == end:
                break
            node = tree.child(hashes[start - 1], hashes[start])
            assert node is not None  # noqa: S101  it was there a line ago
        num = num_common(node, 0, hashes, start, end)
        found.append((node, start, num))
        start += num
        ends_with_it = num == node.size and start < end
        node = tree.child(node, hashes[start]) if ends_with_it else None
    return found


def _waits(tree: RunTree, hashes: Sequence[int], at: int) -> bool:
    return hashes[at - 1] in tree.tops and hashes[at] in tree.tops[hashes[at - 1]]
