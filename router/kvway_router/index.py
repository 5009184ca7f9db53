r"""Which replica holds which blocks, asked once for all replicas: a radix tree of runs.

Block hashes are chained: a hash names its block *and everything before it*. So a run of blocks is
one comparison, whatever its length, and a walk visits runs, not blocks. Each run knows how many of
its leading blocks each replica holds:

    prompt    h0 h1 h2 h3 h4 h5 h6 h7 h8 ...

    start --> [ h0 h1 h2 h3 ] --> [ h4 h5 h6 ] --> [ h7 h8 h9 ]
    a          4 all       \\        3 all            2 of 3       holds 9 of the prompt's blocks
    b          4 all        \\       1 of 3           -            5
    c          2 of 4        \\      -                3 all        2   (its h7 waits for what is
                              \\                                        between: an orphan)
    d          4 all           `-> [ k4 k5 ]                       4
                                    2 all
    [ h20 h21 ]  waits for h19, which nobody has: an orphan of the tree

A run is split where prompts part, where one replica has used only the beginning, or where it holds
only the end; two runs are one again when nothing keeps them apart. What is not held is not there.

Beside the tree each replica has its own books, per tier: its runs in the order of their last use
(`holding.py`). The least recently used goes first, tails before beginnings, so what stays is
always a usable prefix.

An error of this index can only cost a hit: a block that is listed and not there makes the replica
compute it, and a block that is there and not listed is found by luck.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kvway_core.errors import InvariantViolated
from kvway_router.holding import Holding, Speculation, Tier
from kvway_router.locator import MAX_NODES
from kvway_router.roster import Roster
from kvway_router.run_tree import BLOCK_BYTES, ENTRY_BYTES, NODE_BYTES, RunTree
from kvway_router.runs import Node, num_common, unpack
from kvway_router.snapshots import VERSION, SavedReplica, SavedRun, Snapshot

MIN_BYTES: Final = 16 * (BLOCK_BYTES + NODE_BYTES + ENTRY_BYTES)
"""Smallest budget."""
MAX_BYTES: Final = MAX_NODES * (NODE_BYTES + ENTRY_BYTES)
"""Largest budget: what the names of all nodes allow."""


class BlockIndex:
    """Which replica holds which blocks; answers how much of a prompt each of them has.

    Not thread-safe and without awaits: it belongs to the event loop. A replica is known from its
    first block on and until `remove_replica`. Hashes are integers of 64 unsigned bits.

    Invariants:
        1. The tree and the books of the replicas say the same (those of `RunTree`).
        2. No replica holds more than its limit on a tier.
        3. `size_bytes` is at most `max_bytes` whenever a call has returned.
        4. Something keeps every two runs apart: no two could be one.
        5. The books of each holding are in order of use, a run's beginning never before its end.
        6. A block is confirmed, or expected by a promise that is not settled.

    Args:
        max_blocks_per_replica: Limit, on each tier, of a replica for which `set_limit` was not
            called. Too small is ruinous and too large is nearly free: once to twice what it can
            really hold.
        max_bytes: Hard limit of memory for all together, by `size_bytes`. 128 MiB are about seven
            million blocks in runs of 128.
    """

    def __init__(
        self, *, max_blocks_per_replica: int = 262_144, max_bytes: int = 128 * 2**20
    ) -> None:
        if max_blocks_per_replica < 1:
            raise ValueError("an index holds at least one block")
        if not MIN_BYTES <= max_bytes <= MAX_BYTES:
            raise ValueError(
                f"max_bytes must be {MIN_BYTES} to {MAX_BYTES} for an index, got {max_bytes}"
            )
        self._max_bytes = max_bytes
        self._tree = RunTree(max_blocks=max_bytes // BLOCK_BYTES)
        self._roster = Roster(self._tree.slots, limit=max_blocks_per_replica)
        self._tick = 0
        self._parts: dict[str, str] = {}

    # -- questions ------------------------------------------------------------------------------

    def match(self, hashes: Sequence[int], *, slowest: Tier = Tier.DEVICE) -> Mapping[str, int]:
        """Counts, for each replica, how many leading blocks of a prompt it holds without a gap.

        Replicas that hold not even the first block are left out. Changes nothing, not even what is
        recently used: only `speculate` and `store` do.

        Args:
            hashes: The prompt.
            slowest: A block counts when it is on this tier or a faster one.

        Complexity: for each run on the way until no replica matches on, one comparison and one
            operation on bits; one step more for each replica. Not the length of the prompt.
        """
        matched: dict[str, int] = {}
        depth = 0
        total = len(hashes)
        node = self._tree.child(None, hashes[0]) if total else None
        matching = self._roster.on_tiers(node.held, slowest) if node is not None else 0
        while node is not None and matching:
            num = num_common(node, 0, hashes, depth, total)
            # What matches are bits of devices already.
            full = self._roster.on_tiers(node.full, slowest) if slowest else node.full
            full &= matching
            if lost := matching ^ full:
                matched.update(self._roster.counts(node, lost, slowest, depth=depth, most=num))
            matching = full
            depth += num
            goes_on = num == node.size and depth < total
            node = self._tree.child(node, hashes[depth]) if goes_on else None
        matched.update(dict.fromkeys(self._roster.names_of(matching), depth))
        for part, replica_id in self._parts.items():
            if num := matched.pop(part, 0):
                matched[replica_id] = max(num, matched.get(replica_id, 0))
        return matched

    def match_slower(
        self, hashes: Sequence[int], matches: Mapping[str, int]
    ) -> Mapping[str, tuple[int, int]]:
        """Counts what follows on slower tiers behind what replicas hold on their devices.

        Args:
            hashes: The prompt.
            matches: The answer of `match` for it.

        Returns:
            Blocks on the host, and behind them on a disk, of those replicas that have any.
        """
        if not self._roster.has_slower():
            return {}
        host = self.match(hashes, slowest=Tier.HOST)
        found = {}
        for name, on_disk in self.match(hashes, slowest=Tier.DISK).items():
            on_device = matches.get(name, 0)
            if on_disk > on_device:
                on_host = host.get(name, 0)
                found[name] = (on_host - on_device, on_disk - on_host)
        return found

    def num_blocks(self, replica_id: str, tier: Tier = Tier.DEVICE) -> int:
        """Counts the blocks listed for a replica on a tier; 0 for one that is not known."""
        holdings = self._roster.get(replica_id)
        return holdings[tier].num_blocks if holdings else 0

    def blocks(self, replica_id: str, tier: Tier = Tier.DEVICE) -> Iterator[int]:
        """Yields every block listed for a replica on a tier. Costs what it holds."""
        holdings = self._roster.get(replica_id)
        for entry in list(holdings[tier].entries.values()) if holdings else ():
            yield from map(entry.node.hash_at, range(entry.count))

    def __len__(self) -> int:
        """Counts the different blocks listed."""
        return self._tree.num_blocks

    def last_uses(self, replica_id: str, hashes: Sequence[int]) -> list[tuple[int, int]]:
        """Returns when a replica's device last used each part of a prompt that it holds for sure.

        Returns:
            Of each part, from the first block on: how many blocks of the prompt end with it, and
            the mark in time (`tick`) of its last use. Never later than that of the part before.
        """
        uses: list[tuple[int, int]] = []
        holdings = self._roster.get(replica_id)
        entries = holdings[Tier.DEVICE].entries if holdings else {}
        for node, start, num in self._tree.pieces(hashes) if entries else ():
            entry = entries.get(node)
            if entry is None or not entry.sure or start != (uses[-1][0] if uses else 0):
                break
            uses.append((start + min(num, entry.sure), entry.tick))
        return uses

    @property
    def size_bytes(self) -> int:
        """What all blocks, runs and books together are counted as: at least what they take.

        Not counted: some megabytes at most that are there however little is held.
        """
        return self._tree.size_bytes

    @property
    def tick(self) -> int:
        """A mark in time for `expire`: all that was used up to now is before it."""
        return self._tick + 1

    # -- what replicas report -------------------------------------------------------------------

    def count_for(self, part: str, replica_id: str) -> None:
        """Has what `part` holds count as held by a replica: a part of it with a cache of its own.

        A prompt is matched by one of the parts, not by several together. It ends with
        `remove_replica` of the part.
        """
        self._parts[part] = replica_id

    def store(
        self,
        replica_id: str,
        parent: int | None,
        hashes: Sequence[int],
        *,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        """Notes that a replica holds a run of blocks behind `parent` (None: from the start).

        Takes the place of what was expected of these blocks and of those before them. Storing
        again changes nothing but the last use. When the parent is not known the run is kept as an
        orphan: it counts from the moment the parent comes, and until then is evicted like any
        other.
        """
        if hashes:
            holding = self._roster.add(replica_id)[tier]
            self._put(holding, parent, hashes[: holding.limit], sure=True)

    def remove(self, replica_id: str, hashes: Sequence[int], *, tier: Tier = Tier.DEVICE) -> None:
        """Notes that a replica no longer holds these blocks on a tier; unknown ones are ignored.

        Also drops what was expected of them. Blocks behind a removed one become orphans.
        """
        holdings = self._roster.get(replica_id)
        if not holdings:
            return
        tree, holding = self._tree, holdings[tier]
        for block_hash in hashes:
            found = tree.find(holding, block_hash)
            if found is None:
                continue
            node, place = found
            entry = holding.entries.get(node)
            if entry is None or entry.count <= place:
                continue
            if place < entry.count - 1:
                node = tree.split(node, place + 1)
            tree.shrink(holding, node, place)
        tree.settle()
        self._keep_budget()

    def clear(self, replica_id: str) -> None:
        """Forgets all blocks of a replica on all tiers. Complexity: what it holds."""
        for holding in self._roster.get(replica_id):
            holding.open.clear()
            self._evict(holding, holding.num_blocks)
        self._tree.settle()

    def remove_replica(self, replica_id: str) -> None:
        """Forgets a replica altogether. Complexity: what it holds."""
        self.clear(replica_id)
        self._roster.remove(replica_id)
        self._parts.pop(replica_id, None)

    # -- what the router expects ----------------------------------------------------------------

    def speculate(self, replica_id: str, hashes: Sequence[int]) -> Speculation:
        """Lists a prompt that was just sent to a replica, so that its siblings follow at once.

        Args:
            replica_id: Where it was sent.
            hashes: All blocks of the prompt from its first one on. Kept, so not to be changed.

        Returns:
            The promise to settle with `confirm` at the first byte of the answer or with `rollback`
            when there is none. Several prompts may expect the same block: it stays until the last
            of them is rolled back.
        """
        if not hashes:
            return Speculation(replica_id, (), 0)
        holding = self._roster.add(replica_id)[Tier.DEVICE]
        num_blocks = min(len(hashes), holding.limit)
        speculation = Speculation(replica_id, hashes, num_blocks)
        holding.open.add(speculation)
        self._put(holding, None, hashes[:num_blocks], sure=False)
        return speculation

    def confirm(self, speculation: Speculation) -> None:
        """Takes a prompt as held: the replica has computed it. No effect once settled."""
        holding = self._settle(speculation)
        if holding is None:
            return
        pieces = self._tree.pieces(speculation.expected())
        for node, _, num in pieces:
            entry = holding.entries.get(node)
            if entry is not None:
                entry.sure = max(entry.sure, min(entry.count, num))
        self._tree.loosen([node for node, _, _ in pieces])
        self._tree.settle()

    def rollback(self, speculation: Speculation) -> None:
        """Drops the blocks of a prompt that never arrived, and that nobody else vouches for.

        No effect once settled.
        """
        holding = self._settle(speculation)
        if holding is None:
            return
        num_kept = max(map(speculation.num_shared, holding.open), default=0)
        for node, start, num in reversed(self._tree.pieces(speculation.expected())):
            entry = holding.entries.get(node)
            if entry is not None:
                # Who expects blocks behind this prompt's expects all of it.
                kept = max(entry.sure, num_kept - start)
                if kept < min(entry.count, num):
                    self._tree.shrink(holding, node, kept)
        self._tree.settle()

    # -- bounds ---------------------------------------------------------------------------------

    def set_limit(self, replica_id: str, max_blocks: int) -> None:
        """Sets how many blocks of a replica's device are listed at most; evicts what is above."""
        holding = self._roster.add(replica_id)[Tier.DEVICE]
        holding.limit = max(1, max_blocks)
        self._evict_surplus(holding)

    def expire(self, replica_id: str, *, before: int) -> None:
        """Evicts what was last used before the mark `before` (a former `tick`), tails first."""
        for holding in self._roster.get(replica_id):
            while (entry := holding.oldest()) is not None and entry.tick < before:
                self._tree.shrink(holding, entry.node, 0)
        self._tree.settle()

    # -- across a restart -----------------------------------------------------------------------

    def snapshot(
        self, boot_ids: Mapping[str, str | None], next_seqs: Mapping[str, int] | None = None
    ) -> Snapshot:
        """Returns what is held now, by those replicas that are named with the life they are in.

        What is only expected is left out.

        Args:
            boot_ids: The replicas and their lives.
            next_seqs: For those that KV events are followed of: the number of the next batch.

        Copies no hashes. Complexity: a step for each run, and for each replica that holds it.
        """
        numbers: dict[Node, int] = {}
        runs: list[SavedRun] = []
        for node in self._tree.nodes():
            numbers[node] = len(runs)
            before = node.before
            runs.append(
                SavedRun(numbers[before], None, node.run)
                if isinstance(before, Node)
                else SavedRun(-1, before, node.run)
            )
        replicas = {}
        for name, holdings in self._roster.items():
            if name in boot_ids:
                tiers: list[list[int]] = []
                for holding in holdings:
                    tiers.append([])
                    for entry in holding.walk():
                        if entry.sure:
                            tiers[-1] += numbers[entry.node], entry.sure
                next_seq = next_seqs.get(name) if next_seqs else None
                replicas[name] = SavedReplica(boot_ids[name], tiers, next_seq)
        return Snapshot(VERSION, sys.byteorder, runs, replicas)

    def restore(self, snapshot: Snapshot, replica_id: str) -> str | None:
        """Enters what a replica held when a snapshot was taken, as if it had just reported it.

        Returns:
            The life it was in then. If it turns out to be in another one, it is to be cleared.
        """
        saved = snapshot.replicas.get(replica_id)
        if saved is None:
            return None
        for tier, parts in zip(Tier, saved.tiers, strict=False):
            for number, count in zip(parts[::2], parts[1::2], strict=True):
                hashes = unpack(snapshot.runs[number].hashes)[:count]
                self.store(replica_id, snapshot.parent_of(number), hashes, tier=tier)
        return saved.boot_id

    def check_invariants(self) -> None:
        """Compares all books with one another. For tests: costs all that is held.

        Raises:
            InvariantViolated: A numbered invariant of the class does not hold.
        """
        self._tree.check()
        self._roster.check()
        for holding in self._roster.holdings():
            holding.check()
        if self.size_bytes > self._max_bytes:
            raise InvariantViolated(f"3: {self.size_bytes} bytes of {self._max_bytes} allowed")

    # -- inside ---------------------------------------------------------------------------------

    def _put(
        self, holding: Holding, parent: int | None, hashes: Sequence[int], *, sure: bool
    ) -> None:
        """Enters a run, marks it used now, and evicts what is too much then."""
        tree = self._tree
        before: Node | int | None = parent
        found = None if parent is None else tree.find(holding, parent)
        start = 0
        if found is not None:
            before, start = self._enter(holding, found[0], found[1] + 1, hashes)
        while start < len(hashes):
            child = tree.child(before, hashes[start])
            if child is None:
                before, num = tree.grow(holding, before, hashes[start:] if start else hashes)
                start += num
            else:
                before, start = self._take(holding, child, 0, hashes, start)
        assert isinstance(before, Node)  # noqa: S101  at least one block was entered
        holding.hint = before
        self._touch(holding, before, sure=sure)
        self._evict_surplus(holding)

    def _enter(
        self, holding: Holding, node: Node, offset: int, hashes: Sequence[int]
    ) -> tuple[Node, int]:
        """Starts a run behind a block, which may be in the middle of a node.

        Returns:
            The node that the rest goes behind, and how many blocks are entered.
        """
        if offset == node.size:
            return node, 0
        if not num_common(node, offset, hashes, 0, len(hashes)):
            return self._tree.split(node, offset), 0
        entry = holding.entries.get(node)
        if entry is None or entry.count < offset:
            # It does not have what is before: these blocks are no beginning of the node for it.
            self._tree.split(node, offset)
            offset = 0
        return self._take(holding, node, offset, hashes, 0)

    def _take(
        self, holding: Holding, node: Node, offset: int, hashes: Sequence[int], start: int
    ) -> tuple[Node, int]:
        """Enters those blocks that a node has already.

        Returns:
            As `_enter`.
        """
        end = offset + num_common(node, offset, hashes, start, len(hashes))
        start += end - offset
        if end < node.size:
            entry = holding.entries.get(node)
            # A node branches behind its end only, and what is behind was not used now.
            if start < len(hashes) or (entry is not None and entry.count > end):
                node = self._tree.split(node, end)
        self._tree.hold(holding, node, end)
        return node, start

    def _touch(self, holding: Holding, node: Node, *, sure: bool) -> None:
        """Marks a node and what the holding has before it as used now, and confirmed if `sure`."""
        self._tick += 1
        chain = [node]
        while isinstance(node.before, Node) and node.before.full & holding.bit:
            node = node.before
            chain.append(node)
        for node in chain:
            entry = holding.entries[node]
            holding.touch(entry, self._tick)
            if sure:
                entry.sure = entry.count
        self._tree.loosen(chain)

    def _evict(self, holding: Holding, num_blocks: int) -> None:
        while num_blocks > 0 and (entry := holding.oldest()) is not None:
            num = min(num_blocks, entry.count)
            self._tree.shrink(holding, entry.node, entry.count - num)
            num_blocks -= num

    def _evict_surplus(self, holding: Holding) -> None:
        self._evict(holding, holding.num_blocks - holding.limit)
        self._tree.settle()
        self._keep_budget()

    def _keep_budget(self) -> None:
        """Evicts from whoever holds most until the budget is kept, with a little room to spare.

        Also after a removal: it may have cut a run in two.
        """
        tree = self._tree
        if tree.size_bytes <= self._max_bytes:
            return
        # Looking for the largest costs a step per replica: not at every call.
        wanted_bytes = self._max_bytes - (self._max_bytes >> 10)
        while tree.size_bytes > wanted_bytes:
            largest = max(self._roster.holdings(), key=lambda holding: holding.num_blocks)
            num_kept = largest.num_blocks // 2
            while (
                surplus := tree.size_bytes - wanted_bytes
            ) > 0 and largest.num_blocks > num_kept:
                entry = largest.oldest()
                assert entry is not None  # noqa: S101  it holds blocks
                self._evict(largest, min(entry.count, -(-surplus // BLOCK_BYTES)))
            tree.settle()

    def _settle(self, speculation: Speculation) -> Holding | None:
        """Returns where a promise is still open, and closes it."""
        holdings = self._roster.get(speculation.replica_id)
        if not holdings or speculation not in holdings[Tier.DEVICE].open:
            return None
        holdings[Tier.DEVICE].open.remove(speculation)
        return holdings[Tier.DEVICE]
