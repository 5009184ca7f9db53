"""From a block hash to the run that it is in, for four bytes per block.

A dictionary would need a hundred. This one keeps no hashes, since the runs have them:

    hash * odd number =  segment | tag | (the rest is not kept)
                            |       |
    segments[segment]  =  [tag, node id] [tag, node id] [tag, node id] ...     4 bytes each

Whoever asks gets the nodes whose tag fits and looks into their runs: about one in 256 others fits
by chance. New blocks wait in a buffer, where they are found as well, and are spread over the
segments some thousands at once.

Nothing is taken out when a block goes. Entries that name a node that is gone are dropped as the
segments are cleaned, a few at each turn; a node that lost more blocks than it has gets a new name.
So at most a bounded share is waste.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from typing import Final

import numpy as np
import numpy.typing as npt

from kvway_core.errors import InvariantViolated
from kvway_router.runs import HASH_BYTES, Node, pack_hash, position_in

MAX_NODES: Final = 2**23
"""Most nodes that may live at once; those whose names are still being cleaned up come on top."""

_ID_BITS: Final = 24
_ID_MASK: Final = np.uint32(2**_ID_BITS - 1)
_TAG_BITS: Final = 8
_TAG_MASK: Final = np.uint64(2**_TAG_BITS - 1)
_MASK: Final = 2**64 - 1
_BLOCKS_PER_SEGMENT: Final = 8192
_MAX_SEGMENTS: Final = 4096
_MIN_WAITING: Final = 2048
_MAX_WAITING: Final = 8192
_WAITING_PER_SEGMENT: Final = 8
_CLEANED_PER_TURN: Final = 1 / 32
_STALE_SLACK: Final = 64


class Locator:
    """Finds the node whose run has a block.

    Invariants:
        1. Every block of every node that was added and not dropped is found.
        2. No two nodes have the same name.

    Args:
        max_blocks: How many blocks it is laid out for; more work, and are slower.
    """

    def __init__(self, *, max_blocks: int) -> None:
        wanted = max_blocks // _BLOCKS_PER_SEGMENT
        self._num_bits = max(1, min(wanted, _MAX_SEGMENTS).bit_length() - 1)
        wanted = _WAITING_PER_SEGMENT * 2**self._num_bits
        self._max_waiting = min(max(wanted, _MIN_WAITING), _MAX_WAITING)
        # So that nobody who chooses hashes chooses their segment.
        self._factor = secrets.randbits(64) | 1
        self._reset()

    def _reset(self) -> None:
        """Starts anew, with nothing."""
        self._segments = [bytearray() for _ in range(2**self._num_bits)]
        self._nodes: list[Node | None] = []
        self._is_alive: npt.NDArray[np.bool_] = np.zeros(1024, np.bool_)
        self._num_alive = 0
        self._waiting = bytearray()
        self._waiting_starts: list[int] = []
        self._waiting_ids: list[int] = []
        self._num_dropped = 0
        self._cleaned_to = 0
        # A name is used again once every segment was cleaned since its node went.
        self._free: list[int] = []
        self._gone: list[int] = []
        self._gone_before: list[int] = []

    def find(self, block_hash: int) -> tuple[Node, int] | None:
        """Returns the node that has a block, and where in its run; None if there is none."""
        packed = pack_hash(block_hash)
        key = block_hash * self._factor & _MASK
        segment = self._segments[key >> (64 - self._num_bits)]
        candidates: list[int] = []
        if segment:
            entries = np.frombuffer(segment, np.uint32)
            tag = key >> (64 - self._num_bits - _TAG_BITS) & int(_TAG_MASK)
            fits = entries[(entries >> np.uint32(_ID_BITS)) == np.uint32(tag)] & _ID_MASK
            candidates = fits.tolist()
        if self._waiting:
            waiting = np.frombuffer(self._waiting, np.uint64)
            places = np.flatnonzero(waiting == np.uint64(block_hash)).tolist()
            candidates += [
                self._waiting_ids[bisect_right(self._waiting_starts, place) - 1]
                for place in places
            ]
        for node_id in reversed(candidates):
            node = self._nodes[node_id]
            if node is not None and (position := position_in(node.run, packed)) >= 0:
                return node, position
        return None

    def add(self, node: Node) -> None:
        """Makes the blocks of a new node findable."""
        if self._free:
            node.node_id = self._free.pop()
            self._nodes[node.node_id] = node
        else:
            node.node_id = len(self._nodes)
            self._nodes.append(node)
            if node.node_id == len(self._is_alive):
                self._is_alive = np.concatenate([self._is_alive, np.zeros_like(self._is_alive)])
        self._is_alive[node.node_id] = True
        self._num_alive += 1
        node.num_stale = 0
        self.extend(node, node.run)

    def extend(self, node: Node, run: bytes) -> None:
        """Makes further blocks of a node findable."""
        self._waiting_starts.append(len(self._waiting) // HASH_BYTES)
        self._waiting_ids.append(node.node_id)
        self._waiting += run
        if len(self._waiting) >= HASH_BYTES * self._max_waiting:
            self._spread()
            self._clean()

    def drop(self, node: Node) -> None:
        """Forgets a node."""
        self._nodes[node.node_id] = None
        self._is_alive[node.node_id] = False
        self._num_alive -= 1
        if not self._num_alive:
            self._reset()
            return
        self._gone.append(node.node_id)
        self._num_dropped += node.size + node.num_stale + 1
        if self._num_dropped >= self._max_waiting:
            self._num_dropped = 0
            self._clean()

    def note_stale(self, node: Node, num_blocks: int) -> None:
        """Notes that a node no longer has blocks that it had."""
        node.num_stale += num_blocks
        if node.num_stale > node.size + _STALE_SLACK:
            self.drop(node)
            self.add(node)

    def swap(self, one: Node, other: Node) -> None:
        """Exchanges the names of two nodes, of which one may have none yet."""
        one.node_id, other.node_id = other.node_id, one.node_id
        one.num_stale, other.num_stale = other.num_stale, one.num_stale
        self._nodes[one.node_id] = one
        self._nodes[other.node_id] = other

    def take_name(self, heir: Node, node: Node) -> None:
        """Gives the name of a node to one that has none; the other has none then."""
        heir.node_id = node.node_id
        heir.num_stale = node.num_stale
        self._nodes[heir.node_id] = heir

    @property
    def num_entries(self) -> int:
        """How many entries are kept, with those that are waste."""
        return sum(map(len, self._segments)) // 4 + len(self._waiting) // HASH_BYTES

    def check(self, node: Node) -> None:
        """Checks invariants 1 and 2 for a node.

        Raises:
            InvariantViolated: One does not hold.
        """
        if (
            node not in self._nodes[node.node_id : node.node_id + 1]
            or not self._is_alive[node.node_id]
        ):
            raise InvariantViolated("locator 2: a node has another one's name")
        for position in range(node.size):
            found = self.find(node.hash_at(position))
            if found is None:
                raise InvariantViolated("locator 1: a block is not found")

    def _spread(self) -> None:
        """Moves what waits into the segments."""
        keys = np.frombuffer(self._waiting, np.uint64) * np.uint64(self._factor)
        lengths = np.diff([*self._waiting_starts, len(keys)])
        entries = np.repeat(np.array(self._waiting_ids, np.uint32), lengths)
        tags = keys >> np.uint64(64 - self._num_bits - _TAG_BITS) & _TAG_MASK
        entries |= (tags << np.uint64(_ID_BITS)).astype(np.uint32)
        numbers = (keys >> np.uint64(64 - self._num_bits)).astype(np.uint16)
        order = np.argsort(numbers, kind="stable")
        numbers = numbers[order]
        starts = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] ^ np.uint16(1)))
        ends = [*starts[1:].tolist(), len(keys)]
        view = memoryview(entries[order].tobytes())
        segments = self._segments
        for number, start, end in zip(
            numbers[starts].tolist(), starts.tolist(), ends, strict=True
        ):
            segments[number] += view[4 * start : 4 * end]
        self._waiting = bytearray()
        self._waiting_starts = []
        self._waiting_ids = []

    def _clean(self) -> None:
        """Drops what names nodes that are gone, from the next few segments."""
        if not self._gone and not self._gone_before:
            return
        for _ in range(1 + int(_CLEANED_PER_TURN * len(self._segments))):
            self._segments[self._cleaned_to] = self._alive_of(self._segments[self._cleaned_to])
            self._cleaned_to += 1
            if self._cleaned_to == len(self._segments):
                self._cleaned_to = 0
                if self._waiting:
                    self._spread()
                self._free += self._gone_before
                self._gone_before, self._gone = self._gone, []

    def _alive_of(self, segment: bytearray) -> bytearray:
        """Returns a segment without the entries that name nodes that are gone."""
        entries = np.frombuffer(segment, np.uint32)
        alive = self._is_alive[entries & _ID_MASK]
        return segment if alive.all() else bytearray(entries[alive].tobytes())
