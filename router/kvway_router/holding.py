"""The books of one replica on one tier: the runs that it holds, and which may go first.

The entries form a ring from the least to the most recently used:

    ring <-> [run, first 12 blocks, tick 3] <-> [run, all blocks, tick 3] <-> [.., tick 9] <-> ring
             least recently used                                         most recently used

Whoever uses a run uses all that is before it, and the run comes before (is older than) what it
follows. So the least recently used entry never has a held run right behind it, and evicting from
its end leaves a usable prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum

from kvway_core.errors import InvariantViolated
from kvway_router.runs import Node


class Tier(IntEnum):
    """Where a replica keeps a block, fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Speculation:
    """The promise that a prompt was sent to a replica: `confirm` or `rollback` it, once.

    Nothing is owed for a prompt whose replica was cleared or removed meanwhile.
    """

    __slots__ = ("_hashes", "_num_blocks", "replica_id")

    def __init__(self, replica_id: str, hashes: Sequence[int], num_blocks: int) -> None:
        self.replica_id = replica_id
        self._hashes = hashes
        self._num_blocks = num_blocks

    def expected(self) -> Sequence[int]:
        """Returns the blocks that are promised."""
        return self._hashes[: self._num_blocks]

    def num_shared(self, other: Speculation) -> int:
        """Counts the leading blocks that both promise."""
        most = min(self._num_blocks, other._num_blocks)
        agree, differ = 0, most
        while agree < differ:
            middle = (agree + differ) // 2
            if self._hashes[middle] == other._hashes[middle]:
                agree = middle + 1
            else:
                differ = middle
        return agree


class Entry:
    """A run as one replica holds it on one tier.

    Attributes:
        node: The run.
        count: How many of its leading blocks are held, at least one.
        sure: How many of these are confirmed; those behind are only expected.
        tick: When it was last used.
        older: The entry used before it.
        newer: The entry used after it.
    """

    __slots__ = ("count", "newer", "node", "older", "sure", "tick")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.count = 0
        self.sure = 0
        self.tick = 0
        self.older = self
        self.newer = self


class Holding:
    """The books of one replica on one tier.

    Attributes:
        bit: Its bit in the nodes.
        limit: Most blocks it may hold here.
        num_blocks: How many it holds.
        entries: Every run of which it holds the first block.
        hint: The node that was last looked into.
        open: Promises on it that are not settled.
    """

    __slots__ = ("_ring", "bit", "entries", "hint", "limit", "num_blocks", "open")

    def __init__(self, bit: int, limit: int) -> None:
        self.bit = bit
        self.limit = limit
        self.num_blocks = 0
        self.entries: dict[Node, Entry] = {}
        self.hint: Node | None = None
        self.open: set[Speculation] = set()
        self._ring = Entry(Node(None, b""))

    def oldest(self) -> Entry | None:
        """Returns the least recently used entry."""
        entry = self._ring.newer
        return None if entry is self._ring else entry

    def walk(self) -> Iterator[Entry]:
        """Yields the entries, the least recently used first; nothing may change meanwhile."""
        entry = self._ring.newer
        while entry is not self._ring:
            yield entry
            entry = entry.newer

    def add(self, node: Node) -> Entry:
        """Enters a run, as the most recently used."""
        entry = self.entries[node] = Entry(node)
        self._link(entry, older=self._ring.older)
        return entry

    def drop(self, entry: Entry) -> None:
        """Takes an entry out."""
        del self.entries[entry.node]
        _unlink(entry)

    def touch(self, entry: Entry, tick: int) -> None:
        """Makes an entry the most recently used."""
        entry.tick = tick
        newest = self._ring.older
        if newest is not entry:
            _unlink(entry)
            self._link(entry, older=self._ring.older)

    def rename(self, entry: Entry, node: Node) -> None:
        """Moves an entry, as it is, to another node."""
        del self.entries[entry.node]
        self.entries[node] = entry
        entry.node = node

    def split(self, entry: Entry, upper: Node) -> None:
        """Cuts an entry where its node was cut; what was in front becomes an entry of its own."""
        front = self.entries[upper] = Entry(upper)
        front.count = upper.size
        front.sure = min(entry.sure, front.count)
        front.tick = entry.tick
        entry.count -= front.count
        entry.sure -= front.sure
        self._link(front, older=entry)

    def check(self) -> None:
        """Checks invariants 2, 5 and 6 of `BlockIndex`.

        Raises:
            InvariantViolated: One does not hold.
        """
        ring = list(self.walk())
        if {id(entry) for entry in ring} != {id(entry) for entry in self.entries.values()}:
            raise InvariantViolated("5: the ring and the entries differ")
        if [entry.tick for entry in ring] != sorted(entry.tick for entry in ring):
            raise InvariantViolated("5: the ring is out of order")
        total = sum(entry.count for entry in ring)
        if total != self.num_blocks or total > self.limit:
            raise InvariantViolated(
                f"2: {total} blocks held, {self.num_blocks} counted, {self.limit} allowed"
            )
        places = {entry.node: place for place, entry in enumerate(ring)}
        for place, entry in enumerate(ring):
            before = entry.node.before
            if isinstance(before, Node) and before.full & self.bit and places[before] < place:
                raise InvariantViolated("5: a run outlives what it follows")
        self._check_sure(ring)

    def _check_sure(self, ring: list[Entry]) -> None:
        expected = {h for promise in self.open for h in promise.expected()}
        for entry in ring:
            unsure = {entry.node.hash_at(place) for place in range(entry.sure, entry.count)}
            if not 0 <= entry.sure <= entry.count or not unsure <= expected:
                raise InvariantViolated("6: nobody vouches for a block")

    def _link(self, entry: Entry, *, older: Entry) -> None:
        entry.older = older
        entry.newer = older.newer
        older.newer.older = entry
        older.newer = entry


def _unlink(entry: Entry) -> None:
    entry.older.newer = entry.newer
    entry.newer.older = entry.older
