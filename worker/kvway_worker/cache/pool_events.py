"""What a pool tells of its committed content, in order. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvway_core.blocks import BlockHash, event_hash
from kvway_core.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvway_worker.cache.block_content import BlockContent


class PoolEvents:
    """KV events that nobody has taken yet.

    Args:
        block_size: Tokens per block.
        kv_dtype: What keys and values are kept as; None for unknown.
    """

    __slots__ = ("_block_size", "_events", "_kv_dtype")

    def __init__(self, block_size: int, kv_dtype: str | None = None) -> None:
        self._block_size = block_size
        self._kv_dtype = kv_dtype or msgspec.UNSET
        self._events: list[KVEvent] = []

    def stored(self, contents: Sequence[BlockContent], parent: BlockHash | None) -> None:
        """Tells of consecutive blocks of one chain behind `parent`, None for first blocks."""
        self._events.append(
            BlockStored(
                block_hashes=[event_hash(content.block_hash) for content in contents],
                parent_block_hash=None if parent is None else event_hash(parent),
                token_ids=[token for content in contents for token in content.token_ids],
                block_size=self._block_size,
                kv_dtype=self._kv_dtype,
            )
        )

    def removed(self, block_hash: BlockHash) -> None:
        """Tells of a block that is gone, in the same event as those just before."""
        removed = event_hash(block_hash)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(removed)
        else:
            self._events.append(BlockRemoved([removed]))

    def cleared(self) -> None:
        """Tells that nothing is left."""
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """Returns what was told since the last call."""
        events, self._events = self._events, []
        return events
