"""Prefixes that are to stay cached: which blocks they keep, for how long, within a quota. Pure.

    hashes of a pin   h0    h1    h2    h3
    blocks found       7     4     9     -      <- waits for h3, stored behind block 9

A pin holds the blocks that are there, from the first on, each behind the one before. So whoever
pins a block pins its parent, and a pinned block is never given away after its parent. What is not
there is pinned when it is stored; what is given away all the same, when nothing else is left, is
waited for again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvway_core.blocks import BlockHash
from kvway_core.errors import PinQuotaExceeded

MAX_PINS: Final = 256
"""Pins there may be at a time."""


@dataclass(frozen=True, slots=True)
class PinInfo:
    """What is known of a pin.

    Attributes:
        pin_id: Its name.
        num_blocks: Blocks that it is to keep.
        num_cached_blocks: Those of them that are there now.
        expires_s: When it ends, seconds on the caller's clock.
    """

    pin_id: str
    num_blocks: int
    num_cached_blocks: int
    expires_s: float


@dataclass(eq=False, slots=True)
class _Pin:
    pin_id: str
    hashes: tuple[BlockHash, ...]
    expires_s: float
    blocks: list[int] = field(default_factory=list)

    @property
    def awaited(self) -> BlockHash | None:
        """The hash of the first block that is not there."""
        known = len(self.blocks)
        return self.hashes[known] if known < len(self.hashes) else None

    @property
    def last(self) -> int | None:
        """The block behind which that one belongs, None for a first block."""
        return self.blocks[-1] if self.blocks else None

    def info(self) -> PinInfo:
        """Returns what others may know."""
        return PinInfo(self.pin_id, len(self.hashes), len(self.blocks), self.expires_s)


class Pins:
    """The pins of a pool.

    Args:
        max_blocks: Distinct blocks that all pins together may keep, there or not.

    Invariants:
        1. The pins name at most `max_blocks` distinct hashes; there are at most MAX_PINS pins.
        2. Each pin waits for the first of its hashes that has no block.
        3. `_by_block` has the pins of each block that a pin holds.

    Complexity:
        Adding and removing a pin is O(its blocks); a block that is stored or given away costs
        O(1) and O(pins it concerns).
    """

    __slots__ = ("_by_block", "_named", "_pins", "_waiting", "max_blocks")

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._pins: dict[str, _Pin] = {}
        self._named: Counter[BlockHash] = Counter()
        self._waiting: dict[BlockHash, list[_Pin]] = {}
        self._by_block: dict[int, list[_Pin]] = {}

    def __contains__(self, block: int) -> bool:
        """Says whether a pin holds a block."""
        return block in self._by_block

    def __len__(self) -> int:
        """Returns how many blocks pins hold."""
        return len(self._by_block)

    def infos(self) -> list[PinInfo]:
        """Returns every pin, the oldest first."""
        return [pin.info() for pin in self._pins.values()]

    def blocks(self, pin_id: str) -> list[int]:
        """Returns the blocks that a pin holds, the first one first; none for an unknown pin."""
        pin = self._pins.get(pin_id)
        return list(pin.blocks) if pin is not None else []

    def expired(self, now_s: float) -> list[str]:
        """Returns the pins whose time is over."""
        return [pin.pin_id for pin in self._pins.values() if pin.expires_s <= now_s]

    def check_quota(self, pin_id: str, hashes: Sequence[BlockHash]) -> None:
        """Refuses a pin that `add` has no room for, instead of the one of the same id.

        Raises:
            PinQuotaExceeded: If it is one pin or some blocks too many.
        """
        old = self._pins.get(pin_id)
        if old is None and len(self._pins) >= MAX_PINS:
            raise PinQuotaExceeded(
                f"There are {MAX_PINS} pins already, as many as there may be; remove one first."
            )
        freed = {key for key in set(old.hashes) if self._named[key] == 1} if old else set()
        added = {key for key in hashes if key not in self._named or key in freed}
        wanted = len(self._named) - len(freed) + len(added)
        if wanted > self.max_blocks:
            raise PinQuotaExceeded(
                f"The pin has {len(set(hashes))} blocks; together with the other pins these are "
                f"{wanted}, and {self.max_blocks} may be pinned. Pin a shorter prefix, or remove "
                f"a pin."
            )

    def add(self, pin_id: str, hashes: Sequence[BlockHash], expires_s: float) -> PinInfo:
        """Adds a pin of a new id that holds nothing yet; see `check_quota`."""
        pin = _Pin(pin_id, tuple(hashes), expires_s)
        self._pins[pin_id] = pin
        self._named.update(set(hashes))
        self._wait(pin)
        return pin.info()

    def remove(self, pin_id: str) -> list[int] | None:
        """Removes a pin.

        Returns:
            The blocks that no pin holds any more, the deepest first; None for an unknown pin.
        """
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return None
        self._stop_waiting(pin)
        for key in set(pin.hashes):
            self._named[key] -= 1
            if not self._named[key]:
                del self._named[key]
        return [block for block in reversed(pin.blocks) if self._let_go(pin, block)]

    def stored(self, block: int, block_hash: BlockHash, parent: int | None) -> bool:
        """Takes note of a block with committed content; says whether a pin holds it now.

        Args:
            block: The block.
            block_hash: Its hash.
            parent: The block before it, None for a first block.
        """
        waiting = self._waiting.get(block_hash)
        if waiting is None:
            return False
        for pin in [pin for pin in waiting if pin.last == parent]:
            self._stop_waiting(pin)
            pin.blocks.append(block)
            self._by_block.setdefault(block, []).append(pin)
            self._wait(pin)
        return block in self._by_block

    def evicted(self, block: int) -> None:
        """Takes note of a block that is given away; the pins that hold it hold none behind it."""
        for pin in self._by_block.pop(block, ()):
            self._stop_waiting(pin)
            pin.blocks.pop()
            self._wait(pin)

    def cleared(self) -> None:
        """Takes note that no block has content any more."""
        self._by_block.clear()
        self._waiting.clear()
        for pin in self._pins.values():
            pin.blocks.clear()
            self._wait(pin)

    def problem(self) -> str | None:
        """Returns which invariant is broken, None when all hold."""
        pins = self._pins.values()
        if self._named != Counter(key for pin in pins for key in set(pin.hashes)):
            return "the quota counts what pins name"
        if len(self._named) > self.max_blocks or len(pins) > MAX_PINS:
            return "pins keep to their quota"
        waiting = {(key, pin.pin_id) for key, those in self._waiting.items() for pin in those}
        if waiting != {(pin.awaited, pin.pin_id) for pin in pins if pin.awaited is not None}:
            return "pins wait for the first block that is not there"
        held = {(block, pin.pin_id) for block, those in self._by_block.items() for pin in those}
        if held != {(block, pin.pin_id) for pin in pins for block in pin.blocks}:
            return "the pins of each block are known"
        return None

    def _wait(self, pin: _Pin) -> None:
        if pin.awaited is not None:
            self._waiting.setdefault(pin.awaited, []).append(pin)

    def _stop_waiting(self, pin: _Pin) -> None:
        if pin.awaited is not None:
            waiting = self._waiting[pin.awaited]
            waiting.remove(pin)
            if not waiting:
                del self._waiting[pin.awaited]

    def _let_go(self, pin: _Pin, block: int) -> bool:
        """Ends a pin's hold on a block; says whether no pin holds it any more."""
        pins = self._by_block[block]
        pins.remove(pin)
        if not pins:
            del self._by_block[block]
        return not pins
