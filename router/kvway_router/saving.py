"""From the index to a snapshot, which `snapshots.py` writes to a file and reads, and back."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from kvway_router.holding import Tier
from kvway_router.roster import Roster
from kvway_router.run_tree import RunTree
from kvway_router.runs import Node, unpack
from kvway_router.snapshots import VERSION, SavedReplica, SavedRun, Snapshot


def snapshot_of(
    tree: RunTree,
    roster: Roster,
    boot_ids: Mapping[str, str | None],
    next_seqs: Mapping[str, int],
) -> Snapshot:
    """Returns what replicas hold for sure; see `BlockIndex.snapshot`."""
    numbers: dict[Node, int] = {}
    runs: list[SavedRun] = []
    for node in tree.nodes():
        numbers[node] = len(runs)
        before = node.before
        runs.append(
            SavedRun(numbers[before], None, node.run)
            if isinstance(before, Node)
            else SavedRun(-1, before, node.run)
        )
    replicas = {}
    for name, holdings in roster.items():
        if name in boot_ids:
            tiers: list[list[int]] = []
            for holding in holdings:
                tiers.append([])
                for entry in holding.walk():
                    if entry.sure:
                        tiers[-1] += numbers[entry.node], entry.sure
            replicas[name] = SavedReplica(boot_ids[name], tiers, next_seqs.get(name))
    return Snapshot(VERSION, sys.byteorder, runs, replicas)


def saved_runs(
    snapshot: Snapshot, saved: SavedReplica
) -> Iterator[tuple[Tier, int | None, list[int]]]:
    """Yields what a replica held: the tier, the block before (None: none), the blocks."""
    for tier, parts in zip(Tier, saved.tiers, strict=False):
        for number, count in zip(parts[::2], parts[1::2], strict=True):
            yield tier, snapshot.parent_of(number), unpack(snapshot.runs[number].hashes)[:count]
