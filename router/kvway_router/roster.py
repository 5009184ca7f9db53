"""The replicas of the index by name, by bit, and by how far they match."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvway_core.errors import InvariantViolated
from kvway_router.holding import Holding, Tier
from kvway_router.runs import Node

_NUM_TIERS: Final = len(Tier)
_MAX_KNOWN_NAMES: Final = 256
_NOBODY: Final = ""
"""Stands for a replica that is forgotten and still has bits."""

Holdings = tuple[Holding, ...]
"""What one replica holds, one for each tier."""


class Roster:
    """Gives each replica a bit for each tier, side by side, and gives them to others later.

    Invariants:
        1. Bit `3 * n + tier` is that of the holding of the n-th replica on that tier.

    Args:
        slots: The holding of each bit; kept up to date here.
        limit: Of each new holding.
    """

    def __init__(self, slots: list[Holding | None], *, limit: int) -> None:
        self._slots = slots
        self._limit = limit
        self._replicas: dict[str, Holdings] = {}
        self._names: list[str | None] = []
        self._device_bits = 0
        # The replicas of masks that were asked for: those of a fleet that shares much are few.
        self._known_names: dict[int, tuple[str, ...]] = {}

    def get(self, name: str) -> Holdings:
        """Returns what a replica holds; nothing, not even tiers, of one that is not known."""
        return self._replicas.get(name, ())

    def items(self) -> Iterator[tuple[str, Holdings]]:
        """Yields all replicas."""
        yield from self._replicas.items()

    def holdings(self) -> list[Holding]:
        """Returns all holdings of all replicas."""
        return [holding for holdings in self._replicas.values() for holding in holdings]

    def has_slower(self) -> bool:
        """Tells whether any replica holds a block on another tier than its device."""
        tiers = self._replicas.values()
        return any(host.num_blocks or disk.num_blocks for _, host, disk in tiers)

    def add(self, name: str) -> Holdings:
        """Returns what a replica holds; it is known from now on."""
        holdings = self._replicas.get(name)
        if holdings is None:
            if None not in self._names:
                self._names.append(None)
                self._slots += [None] * _NUM_TIERS
            number = self._names.index(None)
            first = _NUM_TIERS * number
            holdings = tuple(Holding(1 << (first + tier), self._limit) for tier in Tier)
            self._slots[first : first + _NUM_TIERS] = holdings
            self._names[number] = name
            self._device_bits |= holdings[Tier.DEVICE].bit
            self._replicas[name] = holdings
            self._known_names.clear()
        return holdings

    def retire(self, name: str) -> Holdings:
        """Forgets a replica. What it held is returned, and has its bits until it is released."""
        holdings = self._replicas.pop(name, ())
        if holdings:
            device = holdings[Tier.DEVICE].bit
            self._names[device.bit_length() // _NUM_TIERS] = _NOBODY
            self._device_bits &= ~device
            self._known_names.clear()
        return holdings

    def release(self, holdings: Holdings) -> None:
        """Has the bits of a replica that is forgotten, and holds nothing any more, given again."""
        first = holdings[Tier.DEVICE].bit.bit_length() - 1
        self._slots[first : first + _NUM_TIERS] = [None] * _NUM_TIERS
        self._names[first // _NUM_TIERS] = None
        while self._names and self._names[-1] is None:
            self._names.pop()
        del self._slots[_NUM_TIERS * len(self._names) :]

    def on_tiers(self, bits: int, slowest: Tier) -> int:
        """Returns the device bits of the replicas that have a bit on this tier or a faster one."""
        merged = bits
        for tier in range(1, slowest + 1):
            merged |= bits >> tier
        return merged & self._device_bits

    def names_of(self, bits: int) -> tuple[str, ...]:
        """Returns the replicas of some device bits."""
        names = self._known_names.get(bits)
        if names is None:
            if len(self._known_names) >= _MAX_KNOWN_NAMES:
                self._known_names.clear()
            found = [self._names[slot // _NUM_TIERS] for slot in _slots_of(bits)]
            names = tuple(name for name in found if name is not None)
            self._known_names[bits] = names
        return names

    def counts(self, node: Node, bits: int, slowest: Tier) -> Iterator[tuple[str, int]]:
        """Yields how many leading blocks of a node replicas hold that have a part of it.

        Args:
            node: The node.
            bits: The device bits of the replicas.
            slowest: A block counts when it is on this tier or a faster one.
        """
        slots, names = self._slots, self._names
        for slot in _slots_of(bits):
            count = 0
            for holding in slots[slot : slot + slowest + 1]:
                entry = holding.entries.get(node) if holding is not None else None
                if entry is not None and entry.count > count:
                    count = entry.count
            name = names[slot // _NUM_TIERS]
            if name is not None:
                yield name, count

    def check(self) -> None:
        """Checks its invariant.

        Raises:
            InvariantViolated: It does not hold.
        """
        for name, holdings in self._replicas.items():
            first = holdings[Tier.DEVICE].bit.bit_length() - 1
            if (
                self._names[first // _NUM_TIERS] != name
                or self._slots[first : first + _NUM_TIERS] != list(holdings)
                or [holding.bit for holding in holdings] != [1 << (first + tier) for tier in Tier]
            ):
                raise InvariantViolated(f"roster 1: the bits of {name} are not its own")


def _slots_of(bits: int) -> list[int]:
    """Returns the positions of the bits that are set."""
    if bits and not bits & (bits - 1):  # one, as where one replica parts from the others
        return [bits.bit_length() - 1]
    digits = bin(bits)[:1:-1]
    slots = []
    slot = digits.find("1")
    while slot >= 0:
        slots.append(slot)
        slot = digits.find("1", slot + 1)
    return slots
