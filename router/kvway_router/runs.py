"""Runs of chained block hashes, packed: eight bytes per block.

Hashes are chained: a hash names its block *and everything before it*. So two runs that agree on
one block agree on all blocks before it, one comparison says whether they are equal, and where they
part is found by bisection.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Sequence
from typing import Final

HASH_BYTES: Final = 8
"""Bytes of a packed hash; packed in the byte order of the machine."""

_HASH: Final = struct.Struct("=Q")
_unpack_from: Final = _HASH.unpack_from
pack_hash: Final = _HASH.pack


class Node:
    """A run of consecutive blocks that no prompt branches off from, except behind its end.

    Attributes:
        run: Its packed hashes.
        before: The node that it follows; for a run that waits for an unknown block the hash of
            that block; None for one that starts a prompt.
        children: The nodes behind it by their first hash; None stands for none.
        held: Bits of the holdings with at least its first block.
        full: Bits of those with all of it.
        node_id: Its name in the locator.
        num_stale: Entries of the locator that say a block were here and are wrong.
    """

    __slots__ = ("before", "children", "full", "held", "node_id", "num_stale", "run")

    def __init__(self, before: Node | int | None, run: bytes) -> None:
        self.run = run
        self.before = before
        self.children: dict[int, Node] | None = None
        self.held = 0
        self.full = 0
        self.node_id = 0
        self.num_stale = 0

    @property
    def size(self) -> int:
        """How many blocks it has."""
        return len(self.run) // HASH_BYTES

    def hash_at(self, position: int) -> int:
        """Returns the hash of a block; the last one's for -1."""
        start = position * HASH_BYTES + (len(self.run) if position < 0 else 0)
        (block_hash,) = _unpack_from(self.run, start)
        return int(block_hash)


def pack(hashes: Sequence[int]) -> bytes:
    """Returns the packed form of hashes.

    Raises:
        OverflowError: One does not fit 64 unsigned bits.
    """
    return array.array("Q", hashes).tobytes()


def unpack(run: bytes) -> list[int]:
    """Returns the hashes of a packed run."""
    return array.array("Q", run).tolist()


def num_common(node: Node, offset: int, hashes: Sequence[int], start: int, end: int) -> int:
    """Counts how many blocks of a node from `offset` on are those of a prompt from `start` on.

    Args:
        node: The run.
        offset: Blocks of it that are passed over.
        hashes: The prompt.
        start: Blocks of the prompt that are passed over.
        end: Blocks of the prompt that are looked at, the passed over ones included.

    Complexity: one comparison if they agree all along, else as many as the run's length has bits.
    """
    run = node.run
    most = len(run) // HASH_BYTES - offset
    if most > end - start:  # noqa: PLR1730  a call of min costs a sixth of this function
        most = end - start
    if most <= 0:
        return 0
    if _unpack_from(run, (offset + most - 1) * HASH_BYTES)[0] == hashes[start + most - 1]:
        return most
    agree, differ = 0, most - 1
    while agree < differ:
        middle = (agree + differ) // 2
        if _unpack_from(run, (offset + middle) * HASH_BYTES)[0] == hashes[start + middle]:
            agree = middle + 1
        else:
            differ = middle
    return agree


def named_together(node: Node, place: int, hashes: Sequence[int], start: int) -> tuple[int, int]:
    """Finds the blocks of a node that are named one by one, in its order or from the end.

    Args:
        node: The run.
        place: Where in it the first that is named is.
        hashes: Names, in any order.
        start: Names that are passed over.

    Returns:
        The first place of them, and how many they are: at least one.
    """
    if start + 1 == len(hashes):
        return place, 1
    names = array.array("Q", hashes[start:])
    last = place + len(names)
    behind = array.array("Q", node.run[place * HASH_BYTES : last * HASH_BYTES])
    num = _num_equal(behind, names)
    if num > 1 or not place:
        return place, num
    first = max(0, place + 1 - len(names))
    before = array.array("Q", node.run[first * HASH_BYTES : (place + 1) * HASH_BYTES])
    before.reverse()
    num = _num_equal(before, names)
    return place + 1 - num, num


def _num_equal(one: array.array[int], other: array.array[int]) -> int:
    """Counts the leading numbers that are equal."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(place for place in range(most) if one[place] != other[place])


def position_in(run: bytes, packed_hash: bytes) -> int:
    """Returns where a hash is in a run, -1 if it is not there. Looks from the end."""
    at = run.rfind(packed_hash)
    while at % HASH_BYTES and at >= 0:
        at = run.rfind(packed_hash, 0, at + HASH_BYTES - 1)
    return at // HASH_BYTES
