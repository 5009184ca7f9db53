"""From the KV events of one replica to the index, where its hashes are the index's own.

Of another engine see `rehash.py`; which of the two is right is known before any event is read.
"""

from __future__ import annotations

from collections.abc import Mapping
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


class BlockEvents(Protocol):
    """What the events of one replica mean for the index."""

    def apply(self, batch: EventBatch) -> int:
        """Enters the events of a batch into the index, in order.

        Returns:
            How many events were of no use.
        """
        ...

    def clear(self) -> None:
        """Forgets all that the replica held."""
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

    def apply(self, batch: EventBatch) -> int:
        """Enters a batch; counts the events whose blocks have another size."""
        num_skipped = 0
        for event in batch.events:
            match event:
                case BlockStored():
                    num_skipped += not self._store(event)
                case BlockRemoved():
                    tier = TIERS.get(event.medium)
                    if tier is not None:
                        hashes = [low_64_bits(block_hash) for block_hash in event.block_hashes]
                        self._index.remove(self._replica_id, hashes, tier=tier)
                case AllBlocksCleared():
                    self._index.clear(self._replica_id)
                case _:
                    assert_never(event)
        return num_skipped

    def clear(self) -> None:
        """Forgets all that the replica held."""
        self._index.clear(self._replica_id)

    def _store(self, event: BlockStored) -> bool:
        tier = TIERS.get(event.medium)
        if tier is None:
            return True
        if event.block_size != self._block_size:
            return False
        parent = event.parent_block_hash
        self._index.store(
            self._replica_id,
            None if parent is None else low_64_bits(parent),
            [low_64_bits(block_hash) for block_hash in event.block_hashes],
            tier=tier,
        )
        return True


def low_64_bits(block_hash: int | bytes) -> int:
    """Returns the low 64 bits of a hash on the wire: bytes, or a number with or without a sign."""
    if isinstance(block_hash, bytes):
        return event_hash(BlockHash(block_hash))
    return block_hash & _LOW_64_BITS
