"""Block hashes of prompts whose beginnings were hashed before: what is known is looked up.

A turn of a conversation begins with all the turns before it. Its tokens are taken in spans of 1024
and of 128 blocks, and what names a span is one fast hash of all tokens up to its end:

    tokens   [------------ 1024 blocks ------------][- 128 -][- 128 -][ rest ]
    known?            found: 1024 hashes at once       found   no: hashed and kept

A span is kept with the hashes of its blocks and the link that the next one goes on from. The name
is no proof of content: a collision gives wrong hashes, which cost a hit and never an answer.
"""

from __future__ import annotations

import array
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

import xxhash

from kvway_core.blocks import BlockHash, Namespace, block_hashes

SPAN_BLOCKS: Final = 128
LONG_BLOCKS: Final = 1024
_TOKEN_BYTES: Final = 4


class _Span(NamedTuple):
    hashes: tuple[int, ...]
    link: BlockHash


class ChainCache:
    """Spans of the prompts that were hashed last, for one namespace. Safe for threads.

    Invariants:
        1. Spans of at most `max_blocks` blocks are kept; the least recently used go first.

    Args:
        namespace: What block hashes start from.
        max_blocks: Blocks whose hashes are kept, about 45 bytes each.
    """

    def __init__(self, namespace: Namespace, *, max_blocks: int = 2**18) -> None:
        """Starts with nothing known."""
        self.root = namespace.root()
        self.block_bytes = _TOKEN_BYTES * namespace.block_size
        self.block_size = namespace.block_size
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._spans: OrderedDict[tuple[int, bytes], _Span] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_blocks(self) -> int:
        """Blocks whose hashes are kept."""
        return self._num_blocks

    def get(self, num_blocks: int, name: bytes) -> _Span | None:
        """Returns a span of so many blocks, None if it is not known."""
        key = (num_blocks, name)
        with self._lock:
            span = self._spans.get(key)
            if span is not None:
                self._spans.move_to_end(key)
            return span

    def put(self, num_blocks: int, name: bytes, span: _Span) -> None:
        """Keeps a span."""
        with self._lock:
            if (num_blocks, name) in self._spans:
                return
            self._spans[num_blocks, name] = span
            self._num_blocks += num_blocks
            while self._num_blocks > self._max_blocks:
                (size, _), _ = self._spans.popitem(last=False)
                self._num_blocks -= size


class EventChain:
    """The event hashes of one growing prompt. Not safe for threads.

    Invariants:
        1. `hashes` is `event_hash` of each of `block_hashes` of all tokens given so far.
        2. `num_tokens` is how many tokens were given.
    """

    def __init__(self, cache: ChainCache) -> None:
        """Starts without tokens."""
        self.hashes: list[int] = []
        self.num_tokens = 0
        self._cache = cache
        self._link = cache.root
        self._data = b""
        """Tokens behind the last whole span."""
        self._num_spanned = 0
        """Blocks in whole spans."""
        self._links: dict[int, BlockHash] = {}
        """Of the blocks that were hashed last: the hash of each that ends a span."""
        self._named = xxhash.xxh3_128(cache.root)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens, and the hashes of the blocks that they fill.

        Raises:
            ValueError: A token id does not fit 32 unsigned bits; nothing is appended then.

        Complexity: of known spans one fast pass over the bytes; of others a digest per block.
        """
        view = self._view(token_ids)
        self.num_tokens += len(token_ids)
        start, block_bytes = 0, self._cache.block_bytes
        long_bytes, span_bytes = LONG_BLOCKS * block_bytes, SPAN_BLOCKS * block_bytes
        while len(view) - start >= span_bytes:
            if (
                self._num_spanned % LONG_BLOCKS == 0
                and len(view) - start >= long_bytes
                and self._find(LONG_BLOCKS, view[start : start + long_bytes])
            ):
                start += long_bytes
            elif self._find(SPAN_BLOCKS, view[start : start + span_bytes]):
                start += span_bytes
            else:
                # Nobody has had what follows: a span is named by all that is before it.
                self._hash_on(view[start:])
                while len(view) - start >= span_bytes:
                    self._keep_span(view[start : start + span_bytes])
                    start += span_bytes
        self._hash_on(view[start:])
        self._data = bytes(view[start:])

    def _view(self, token_ids: Sequence[int]) -> memoryview:
        """Returns the bytes behind the last whole span; those of an array are not copied."""
        if isinstance(token_ids, array.array) and token_ids.typecode == "I":
            new = memoryview(token_ids).cast("B")
        else:
            try:
                new = memoryview(array.array("I", token_ids)).cast("B")
            except OverflowError as exc:
                raise ValueError("a token id does not fit 32 unsigned bits") from exc
        return memoryview(self._data + new) if self._data else new

    def _find(self, num_blocks: int, tokens: memoryview) -> bool:
        """Takes a span from the cache, if it is there."""
        named = self._named.copy()
        named.update(tokens)
        span = self._cache.get(num_blocks, named.digest())
        if span is None:
            return False
        self.hashes[self._num_spanned :] = span.hashes
        self._link = span.link
        self._num_spanned += num_blocks
        self._named = named
        return True

    def _keep_span(self, tokens: memoryview) -> None:
        """Keeps a span that was hashed."""
        self._named.update(tokens)
        self._num_spanned += SPAN_BLOCKS
        name = self._named.digest()
        for size in (SPAN_BLOCKS, LONG_BLOCKS):
            if self._num_spanned % size == 0:
                hashes = tuple(self.hashes[self._num_spanned - size : self._num_spanned])
                self._cache.put(size, name, _Span(hashes, self._links[self._num_spanned]))

    def _hash_on(self, tokens: memoryview) -> None:
        """Hashes the full blocks behind the last whole span, as far as that was not done."""
        block_bytes = self._cache.block_bytes
        done = (len(self.hashes) - self._num_spanned) * block_bytes
        end = len(tokens) - len(tokens) % block_bytes
        if done >= end:
            return
        missing = array.array("I", bytes(tokens[done:end]))
        chain = block_hashes(missing, parent=self._link, block_size=self._cache.block_size)
        first = len(self.hashes)
        last = first + len(chain)
        edges = range(first + SPAN_BLOCKS - first % SPAN_BLOCKS, last + 1, SPAN_BLOCKS)
        self._links = {edge: chain[edge - first - 1] for edge in edges}
        self._link = chain[-1]
        # The low halves of all at once, which are big-endian.
        halves = array.array("Q", b"".join(chain))
        if _IS_LITTLE:
            halves.byteswap()
        self.hashes += halves[1::2]


_IS_LITTLE: Final = array.array("H", [1]).tobytes() == b"\1\0"
