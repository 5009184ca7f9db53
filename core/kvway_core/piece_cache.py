"""Pieces of text and the token ids that they became, the most recently used ones."""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from typing import Final

DEFAULT_CACHE_BYTES: Final = 64 * 1024 * 1024

_ENTRY_BYTES: Final = 256
"""What an entry takes beside its text and its ids."""


class PieceCache:
    """Token ids by text, bounded in bytes. All methods may be called from several threads.

    A piece is found by its hash and compared as a whole: a collision never gives other ids.

    Invariants:
        1. `size_bytes` is at most `max_bytes` whenever a call has returned.

    Args:
        max_bytes: Texts, ids and what it takes to keep them, together.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, text: str) -> array[int] | None:
        """Returns the ids of a text, not to be changed, or None if they are not here."""
        with self._lock:
            ids = self._entries.get(text)
            if ids is not None:
                self._entries.move_to_end(text)
            return ids

    def put(self, text: str, ids: array[int]) -> None:
        """Keeps the ids of a text; drops what was not used for longest to make room.

        What is larger than a quarter of the cache is not kept: it would drop all the others.
        """
        size = _size(text, ids)
        if size > self._max_bytes // 4:
            return
        with self._lock:
            if text in self._entries:
                return
            self._entries[text] = ids
            self.size_bytes += size
            while self.size_bytes > self._max_bytes:
                self.size_bytes -= _size(*self._entries.popitem(last=False))


def _size(text: str, ids: array[int]) -> int:
    return sys.getsizeof(text) + ids.itemsize * len(ids) + _ENTRY_BYTES
