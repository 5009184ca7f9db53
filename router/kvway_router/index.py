r"""Which replica holds which blocks, asked once for all replicas: a radix tree of runs.

Block hashes are chained: a hash names its block *and everything before it*. So a run of blocks is
one comparison, whatever its length, and a walk visits runs, not blocks. Each run knows how many of
its leading blocks each replica holds:

    prompt    h0 h1 h2 h3 h4 h5 h6 h7 h8 ...

    start --> [ h0 h1 h2 h3 ] --> [ h4 h5 h6 ] --> [ h7 h8 h9 ]
    a          4 all      \         3 all            2 of 3       holds 9 of the prompt's blocks
    b          4 all       \        1 of 3           -            5
    c          2 of 4       \       -                3 all        2   (its h7 waits for what is
                             \                                         between: an orphan)
    d          4 all          `--> [ k4 k5 ]                       4
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

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Final

from kvway_core.errors import InvariantViolated
from kvway_router import walking
from kvway_router.entering import enter
from kvway_router.evicting import evict, expiring, keep_budget
from kvway_router.holding import Holding, Speculation, Tier
from kvway_router.leaving import Leavers
from kvway_router.locator import MAX_NODES
from kvway_router.roster import Roster
from kvway_router.run_tree import BLOCK_BYTES, ENTRY_BYTES, NODE_BYTES, RunTree
from kvway_router.runs import Node, named_together
from kvway_router.saving import saved_runs, snapshot_of
from kvway_router.snapshots import Snapshot

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
        self._leavers = Leavers(self._tree, self._roster)
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
        matched = walking.match(self._tree, self._roster, hashes, slowest)
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
        host, disk = (self.match(hashes, slowest=tier) for tier in (Tier.HOST, Tier.DISK))
        return walking.behind(matches, host, disk)

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
        """Counts the different blocks listed, with those of the forgotten that are not let go."""
        return self._tree.num_blocks

    def last_uses(self, replica_id: str, hashes: Sequence[int]) -> list[tuple[int, int]]:
        """Returns when a replica's device last used each part of a prompt that it holds for sure.

        Returns:
            Of each part, from the first block on: how many blocks of the prompt end with it, and
            the mark in time (`tick`) of its last use. Never later than that of the part before.
        """
        holdings = self._roster.get(replica_id)
        return walking.last_uses(self._tree, holdings[Tier.DEVICE], hashes) if holdings else []

    def parts(self) -> tuple[RunTree, Roster]:
        """Returns the tree and the replicas in it, to be looked at and not changed."""
        return self._tree, self._roster

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
        start = 0
        while start < len(hashes):
            found = tree.find(holding, hashes[start])
            entry = holding.entries.get(found[0]) if found is not None else None
            if found is None or entry is None or entry.count <= found[1]:
                start += 1
                continue
            node = found[0]
            # Those that are next to it in the run, and named next to it, go at once.
            first, num = named_together(*found, hashes, start)
            start += num
            if first + num < entry.count:
                node = tree.split(node, first + num)
            tree.shrink(holding, node, first)
        tree.settle()
        self._leavers.let_go()
        self._keep_budget()

    def clear(self, replica_id: str) -> None:
        """Forgets all blocks of a replica; what they took goes as `leaving.py` says."""
        if before := self._roster.get(replica_id):
            self._leavers.leave(replica_id)
            self._roster.add(replica_id)[Tier.DEVICE].limit = before[Tier.DEVICE].limit

    def clearing(self, replica_id: str) -> Generator[None, None, None]:
        """Does what `clear` does in steps of some runs, to the end; what comes meanwhile stays."""
        for holding in self._roster.get(replica_id):
            holding.open.clear()
        return self.expiring(replica_id, before=self.tick)

    def remove_replica(self, replica_id: str) -> None:
        """Forgets a replica altogether, as `clear`."""
        self._leavers.leave(replica_id)
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
        pieces = walking.pieces(self._tree, speculation.expected())
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
        for node, start, num in reversed(walking.pieces(self._tree, speculation.expected())):
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
        for _ in self.expiring(replica_id, before=before):
            pass

    def expiring(self, replica_id: str, *, before: int) -> Generator[None, None, None]:
        """Does what `expire` does in steps of some runs; what is used meanwhile stays."""
        return expiring(self._tree, self._roster.get(replica_id), before=before)

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
        return snapshot_of(self._tree, self._roster, boot_ids, next_seqs or {})

    def restore(self, snapshot: Snapshot, replica_id: str) -> str | None:
        """Enters what a replica held when a snapshot was taken, as if it had just reported it.

        Returns:
            The life it was in then. If it turns out to be in another one, it is to be cleared.
        """
        saved = snapshot.replicas.get(replica_id)
        if saved is None:
            return None
        for tier, parent, hashes in saved_runs(snapshot, saved):
            self.store(replica_id, parent, hashes, tier=tier)
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
        node = enter(self._tree, holding, parent, hashes)
        holding.hint = node
        self._touch(holding, node, sure=sure)
        self._leavers.let_go()
        self._evict_surplus(holding)

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

    def _evict_surplus(self, holding: Holding) -> None:
        evict(self._tree, holding, holding.num_blocks - holding.limit)
        self._tree.settle()
        self._keep_budget()

    def _keep_budget(self) -> None:
        """Keeps the budget, also after a removal: it may have cut a run in two."""
        if self._tree.size_bytes > self._max_bytes:
            keep_budget(self._tree, self._roster, self._leavers, max_bytes=self._max_bytes)

    def _settle(self, speculation: Speculation) -> Holding | None:
        """Returns where a promise is still open, and closes it."""
        holdings = self._roster.get(speculation.replica_id)
        if not holdings or speculation not in holdings[Tier.DEVICE].open:
            return None
        holdings[Tier.DEVICE].open.remove(speculation)
        return holdings[Tier.DEVICE]
