"""Which prompt had a passage last: a table of a fixed size, read and written in whole arrays.

    key  ->  slot: its upper bits  ->  [ key | owner ]      who comes later has the slot

It is laid out whole at the start, and asks for no more memory however many prompts come. Two keys
that meet in a slot cost the older one: a prompt has hundreds, and a few of them tell it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvway_router.prefixes.seen import Keys

NUM_SLOTS: Final = 2**18
"""Eight times the passages of 512 prompts of a thousand tokens; 4 MiB."""

_SHIFT: Final = np.uint64(64 - (NUM_SLOTS.bit_length() - 1))


class Owners:
    """The last owner of each key, as long as no other key took its slot. Not safe for threads.

    Invariants:
        1. It takes `NUM_SLOTS` slots, always.
        2. What it says of a key was put for that very key, and nothing later was.
    """

    def __init__(self) -> None:
        """Nobody owns anything."""
        self._keys = np.zeros(NUM_SLOTS, np.uint64)
        self._owners = np.zeros(NUM_SLOTS, np.int64)

    def __len__(self) -> int:
        """Counts the slots that are taken."""
        return int(np.count_nonzero(self._owners))

    def put(self, keys: Keys, owner: int) -> None:
        """Gives keys, whose bits are as good as random, to an owner, a number above 0."""
        slots = keys >> _SHIFT
        self._keys[slots] = keys
        self._owners[slots] = owner

    def of(self, keys: Keys) -> NDArray[np.int64]:
        """Returns the owner of each key, 0 for those that nobody has."""
        slots = keys >> _SHIFT
        owners: NDArray[np.int64] = np.where(self._keys[slots] == keys, self._owners[slots], 0)
        return owners
