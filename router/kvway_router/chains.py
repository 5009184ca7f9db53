"""Block hashes of prompts whose beginnings were hashed before: what is known is looked up.

A turn of a conversation begins with all the turns before it. Its tokens are taken in spans of 1024
and of 128 blocks, and what names a span is one fast hash of all tokens up to its end:

    tokens   [------------ 1024 blocks ------------][- 128 -][- 128 -][ rest ]
    known?            found: 1024 hashes at once       found   no: hashed and kept

A span is kept with the hashes of its blocks and the link that the next one goes on from. The name
is no proof of content: a collision gives wrong hashes, which cost a hit and never an answer.

Behind each span the last rest is kept that was seen there, tokens and all. As much of it as a
prompt has in common with it is not hashed again, wherever they part.

From the first image on nothing is kept: tokens do not name what is in it.
"""

from __future__ import annotations

import array
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import xxhash

from kvway_core.blocks import (
    HASH_BYTES,
    BlockHash,
    Image,
    Namespace,
    packed_block_hashes,
    packed_tokens,
)

SPAN_BLOCKS: Final = 128
LONG_BLOCKS: Final = 1024
MIN_REST_BLOCKS: Final = 8
"""A shorter rest is hashed as fast as it is looked up."""
_TOKEN_BYTES: Final = 4


class _Span(NamedTuple):
    hashes: array.array[int]
    link: bytes


class _Rest(NamedTuple):
    tokens: bytes
    chain: bytes


class ChainCache:
    """Spans of the prompts that were hashed last, for one namespace. Safe for threads.

    Invariants:
        1. Spans and rests of at most `max_blocks` blocks are kept; the least recently used go
           first.

    Args:
        namespace: What block hashes start from.
        max_blocks: Blocks that are kept: about 10 bytes each in spans (a block is in two), about
            six times its tokens' number of bytes in rests, which are shorter than a span.
    """

    def __init__(self, namespace: Namespace, *, max_blocks: int = 2**18) -> None:
        """Starts with nothing known."""
        self.root = namespace.root()
        self.block_bytes = _TOKEN_BYTES * namespace.block_size
        self.block_size = namespace.block_size
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._kept: OrderedDict[tuple[int, bytes], tuple[int, _Span | _Rest]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_blocks(self) -> int:
        """Blocks that are kept."""
        return self._num_blocks

    def span(self, num_blocks: int, name: bytes) -> _Span | None:
        """Returns a span of so many blocks, None if it is not known."""
        found = self._get((num_blocks, name))
        return found if isinstance(found, _Span) else None

    def rest(self, name: bytes) -> _Rest | None:
        """Returns the last rest that was seen behind what a name stands for."""
        found = self._get((0, name))
        return found if isinstance(found, _Rest) else None

    def put(self, name: bytes, kept: _Span | _Rest) -> None:
        """Keeps a span, or a rest in the place of the one before."""
        if isinstance(kept, _Span):
            num_blocks = len(kept.hashes)
            key = (num_blocks, name)
        else:
            num_blocks = len(kept.chain) // HASH_BYTES
            key = (0, name)
        with self._lock:
            before = self._kept.pop(key, None)
            self._num_blocks += num_blocks - (before[0] if before is not None else 0)
            self._kept[key] = num_blocks, kept
            while self._num_blocks > self._max_blocks:
                _, (num_lost, _) = self._kept.popitem(last=False)
                self._num_blocks -= num_lost

    def _get(self, key: tuple[int, bytes]) -> _Span | _Rest | None:
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[1]


class EventChain:
    """The event hashes of one growing prompt. Not safe for threads.

    Invariants:
        1. `hashes` is `event_hash` of each of `packed_block_hashes` of all tokens and images
           given so far.
        2. `num_tokens` is how many tokens were given.
    """

    def __init__(self, cache: ChainCache) -> None:
        """Starts without tokens."""
        self.hashes = array.array("Q")
        self.num_tokens = 0
        self._cache = cache
        self._link: bytes = cache.root
        """Hash of the last whole block."""
        self._data = b""
        """Tokens behind the last whole span."""
        self._chain = b""
        """Hashes of the whole blocks in there."""
        self._num_spanned = 0
        """Blocks in whole spans."""
        self._named = xxhash.xxh3_128(cache.root)
        self._has_images = False
        self._images: list[Image] = []
        """Those that begin in no full block yet."""

    def extend(self, token_ids: Sequence[int], *, images: Sequence[Image] = ()) -> None:
        """Appends tokens, and the hashes of the blocks that they fill.

        Args:
            token_ids: The tokens.
            images: Images that begin at one of them, by their place in the whole prompt.

        Raises:
            ValueError: A token id does not fit 32 unsigned bits; nothing is appended then.

        Complexity: of known spans one fast pass over the bytes; of others a digest per block.
        """
        if images and not self._has_images:
            num_plain = images[0].place - self.num_tokens
            self.extend(token_ids[:num_plain])
            token_ids, self._has_images = token_ids[num_plain:], True
            self._data = self._data[len(self._chain) // HASH_BYTES * self._cache.block_bytes :]
        new = packed_tokens(token_ids)
        view = memoryview(self._data + new) if self._data else new
        if self._has_images:
            self._hash_with(images, view)
            self.num_tokens += len(token_ids)
            return
        self.num_tokens += len(token_ids)
        start, block_bytes, is_new = 0, self._cache.block_bytes, False
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
                # Nobody has had what follows: a span is named by all that is before it. Some at a
                # time, as no other thread runs while the hashes of very many are put together.
                unknown = view[start : start + long_bytes]
                is_new |= self._hash_on(unknown)
                first = 0
                while len(unknown) >= span_bytes:
                    first += SPAN_BLOCKS * HASH_BYTES
                    link = self._chain[first - HASH_BYTES : first]
                    self._keep_span(unknown[:span_bytes], link)
                    unknown = unknown[span_bytes:]
                    start += span_bytes
                self._chain = self._chain[first:]
        rest = view[start:]
        is_new |= self._hash_on(rest)
        if is_new and len(self._chain) >= MIN_REST_BLOCKS * HASH_BYTES:
            whole = len(rest) - len(rest) % block_bytes
            self._cache.put(self._named.digest(), _Rest(bytes(rest[:whole]), self._chain))
        self._data = bytes(rest)

    def _hash_with(self, images: Sequence[Image], tokens: memoryview) -> None:
        """Hashes the full blocks of what is not hashed yet, with the images in it."""
        block_size = self._cache.block_size
        done = len(self.hashes) * block_size
        self._images += images
        chain = packed_block_hashes(
            tokens,
            parent=BlockHash(self._link),
            block_size=block_size,
            images=[Image(image.place - done, image.content) for image in self._images],
        )
        if chain:
            self._append(b"".join(chain))
        done += len(chain) * block_size
        self._images = [image for image in self._images if image.place >= done]
        self._data = bytes(tokens[len(chain) * self._cache.block_bytes :])

    def _find(self, num_blocks: int, tokens: memoryview) -> bool:
        """Takes a span from the cache, if it is there."""
        named = self._named.copy()
        named.update(tokens)
        span = self._cache.span(num_blocks, named.digest())
        if span is None:
            return False
        self.hashes[self._num_spanned :] = span.hashes
        self._link, self._chain = span.link, b""
        self._num_spanned += num_blocks
        self._named = named
        return True

    def _keep_span(self, tokens: memoryview, link: bytes) -> None:
        """Keeps a span that was hashed, `link` being the hash of its last block."""
        self._named.update(tokens)
        self._num_spanned += SPAN_BLOCKS
        name = self._named.digest()
        for size in (SPAN_BLOCKS, LONG_BLOCKS):
            if self._num_spanned % size == 0:
                hashes = self.hashes[self._num_spanned - size : self._num_spanned]
                self._cache.put(name, _Span(hashes, link))

    def _hash_on(self, tokens: memoryview) -> bool:
        """Hashes the full blocks behind the last whole span, as far as that was not done.

        Returns:
            Whether there was one that was not known.
        """
        block_bytes = self._cache.block_bytes
        end = len(tokens) // block_bytes
        if not self._chain and end >= MIN_REST_BLOCKS:
            self._recall(tokens)
        done = len(self._chain) // HASH_BYTES
        if done >= end:
            return False
        chain = packed_block_hashes(
            tokens[done * block_bytes : end * block_bytes],
            parent=BlockHash(self._link),
            block_size=self._cache.block_size,
        )
        self._append(b"".join(chain))
        return True

    def _recall(self, tokens: memoryview) -> None:
        """Takes what begins like the last rest that was seen here."""
        rest = self._cache.rest(self._named.digest())
        if rest is None:
            return
        block_bytes, known = self._cache.block_bytes, rest.tokens
        same, differ = 0, min(len(known), len(tokens)) // block_bytes
        # As bytes: a view is compared number by number.
        given = bytes(tokens[: differ * block_bytes])
        if known.startswith(given):
            same = differ
        while same < differ:
            middle = (same + differ + 1) // 2
            if known.startswith(given[: middle * block_bytes]):
                same = middle
            else:
                differ = middle - 1
        if same:
            self._append(rest.chain[: same * HASH_BYTES])

    def _append(self, chain: bytes) -> None:
        """Appends the hashes of blocks."""
        self._chain += chain
        self._link = chain[-HASH_BYTES:]
        # The low halves of all at once, which are big-endian.
        halves = np.frombuffer(chain, ">u8")[1::2].astype(np.uint64)
        self.hashes.frombytes(halves.tobytes())
