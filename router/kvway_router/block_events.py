"""From the KV events of one replica to the index, where its hashes are the index's own.

Of another engine see `rehash.py`; which of the two is right is known before any event is read.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Final, Protocol, assert_never

from kvway_core.blocks import BlockHash, event_hash
from kvway_core.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvway_router.holding import Tier
from kvway_router.index import BlockIndex

TIERS: Final[Mapping[str | None, Tier]] = {
    None: Tier.DEVICE,
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "DISK": Tier.DISK,
    "STORAGE": Tier.DISK,
}
"""Where the index lists the blocks of a medium; others, which a replica shares, are not listed."""

_LOW_64_BITS: Final = 2**64 - 1
STEP_BLOCKS: Final = 1024
"""How many blocks are entered in one step."""
STEP_REMOVED: Final = 128
"""How many are removed in one step: named in any order, each may cost as much as a run."""


class BlockEvents(Protocol):
    """What the events of one replica mean for the index."""

    def steps(self, batch: EventBatch) -> Iterator[int]:
        """Enters the events of a batch into the index, in order.

        Does some milliseconds' work at most between two yields. Nothing else may be entered before
        the last.

        Yields:
            How many events were of no use since the last time.
        """
        ...

    def clearing(self) -> Generator[None, None, None]:
        """Forgets all that the replica held, with as little work between two yields."""
        ...


class OwnBlocks:
    """Events of a replica whose hashes are those that the index looks up.

    Args:
        index: What is kept true.
        replica_id: Whose blocks they are.
        block_size: Tokens per block of the index; events of another size are skipped.
    """

    def __init__(self, index: BlockIndex, replica_id: str, *, block_size: int) -> None:
        """Enter nothing yet."""
        self._index = index
        self._replica_id = replica_id
        self._block_size = block_size

    def steps(self, batch: EventBatch) -> Iterator[int]:
        """Enters a batch; counts the events whose blocks have another size."""
        for event in batch.events:
            match event:
                case BlockStored():
                    yield from self._store(event)
                case BlockRemoved():
                    yield from self._remove(event)
                case AllBlocksCleared():
                    for _ in self.clearing():
                        yield 0
                    yield 0
                case _:
                    assert_never(event)

    def clearing(self) -> Generator[None, None, None]:
        """Forgets all that the replica held."""
        yield from self._index.clearing(self._replica_id)

    def _store(self, event: BlockStored) -> Iterator[int]:
        tier = TIERS.get(event.medium)
        if tier is None:
            return
        if event.block_size != self._block_size:
            yield 1
            return
        before = event.parent_block_hash
        parent = None if before is None else low_64_bits(before)
        for hashes in in_parts(event.block_hashes, STEP_BLOCKS):
            self._index.store(self._replica_id, parent, hashes, tier=tier)
            parent = hashes[-1]
            yield 0

    def _remove(self, event: BlockRemoved) -> Iterator[int]:
        tier = TIERS.get(event.medium)
        if tier is None:
            return
        for hashes in in_parts(event.block_hashes, STEP_REMOVED):
            self._index.remove(self._replica_id, hashes, tier=tier)
            yield 0


def apply(blocks: BlockEvents, batch: EventBatch) -> int:
    """Enters a whole batch at once; returns how many events were of no use."""
    return sum(blocks.steps(batch))


def in_parts(block_hashes: Sequence[int | bytes], num_blocks: int) -> Iterator[list[int]]:
    """Yields the low 64 bits of hashes on the wire, so many at a time."""
    for start in range(0, len(block_hashes), num_blocks):
        yield [low_64_bits(each) for each in block_hashes[start : start + num_blocks]]


def low_64_bits(block_hash: int | bytes) -> int:
    """Returns the low 64 bits of a hash on the wire: bytes, or a number with or without a sign."""
    if isinstance(block_hash, bytes):
        return event_hash(BlockHash(block_hash))
    return block_hash & _LOW_64_BITS
