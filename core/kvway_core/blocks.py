"""Tokens to chained block hashes.

A block is `block_size` consecutive tokens. Its hash covers the block, every block before it and
the namespace, so that one hash names the whole prefix that ends there:

    h[-1] = xxh3_128(namespace)
    h[i]  = xxh3_128(h[i-1] || tokens of block i, each as uint32 little-endian || its extras)

Extras are what else the KV of a block depends on: of each image in it its tag, its place in the
block, and what names its content. Most blocks have none. Only
full blocks have a hash. A hash finds a block; it never proves what is in it: whoever reuses a
block compares its tokens, so that a collision costs a miss and never an answer.

The scheme is pinned by golden vectors: changing it invalidates every cache in the field.
"""

from __future__ import annotations

import array
import functools
import struct
import sys
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, NewType, cast

import xxhash

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_BLOCK_SIZE = 16
SCHEME = "kvway-1"
HASH_BYTES = 16
_SPLIT_BLOCKS = 32
_IS_LITTLE = sys.byteorder == "little"

BlockHash = NewType("BlockHash", bytes)
"""16 bytes: XXH3-128 in its canonical (big endian) form."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """What the KV of a token depends on besides the tokens before it.

    Two prompts can share blocks only within one namespace.

    Attributes:
        model: Served model name.
        block_size: Tokens per block; part of the namespace because hashes of other sizes mean
            other prefixes.
        adapter: LoRA adapter name, empty for none.
        adapter_version: Content version of the adapter, empty for none.
        cache_salt: Secret that keeps one tenant's blocks from another's, empty for none.
        kv_dtype: What keys and values are kept as, such as "int8"; empty for unknown. The hashes
            are the same for all: a router looks one chain up for replicas of any dtype. That is
            safe because a hash only finds a block, and a hit compares the namespace itself.
    """

    model: str
    block_size: int = DEFAULT_BLOCK_SIZE
    adapter: str = ""
    adapter_version: str = ""
    cache_salt: str = ""
    kv_dtype: str = ""

    def __post_init__(self) -> None:
        """Refuses a block size that is not positive.

        Raises:
            ValueError: If block_size is below one.
        """
        _check_block_size(self.block_size)

    def root(self) -> BlockHash:
        """Returns the parent of every first block in this namespace.

        Each field but `kv_dtype` is written as its tag, its length in bytes as uint32
        little-endian, its value as UTF-8; no two namespaces that differ in one of them have the
        same bytes.
        """
        fields = (
            (b"S", SCHEME),
            (b"B", str(self.block_size)),
            (b"M", self.model),
            (b"A", self.adapter),
            (b"V", self.adapter_version),
            (b"C", self.cache_salt),
        )
        buffer = bytearray()
        for tag, text in fields:
            value = text.encode("utf-8")
            buffer += tag + len(value).to_bytes(4, "little") + value
        return BlockHash(xxhash.xxh3_128_digest(bytes(buffer)))


class Image(NamedTuple):
    """An image in a prompt.

    Attributes:
        place: Tokens before it.
        content: Names what is in it, such as a hash.
    """

    place: int
    content: bytes


def block_hashes(
    token_ids: Sequence[int], *, parent: BlockHash, block_size: int = DEFAULT_BLOCK_SIZE
) -> list[BlockHash]:
    """Returns the hashes of the full blocks of `token_ids`, first block first.

    Args:
        token_ids: Token ids, each within uint32; the tail that fills no block is ignored.
        parent: Hash of the block before the first token: a namespace root or a block hash.
        block_size: Tokens per block.

    Raises:
        ValueError: If a token id does not fit uint32 or block_size is below one.

    Complexity:
        O(tokens), each token hashed once.
    """
    return packed_block_hashes(packed_tokens(token_ids), parent=parent, block_size=block_size)


def packed_block_hashes(
    packed: bytes | memoryview,
    *,
    parent: BlockHash,
    block_size: int = DEFAULT_BLOCK_SIZE,
    images: Sequence[Image] = (),
) -> list[BlockHash]:
    """Returns what `block_hashes` does for tokens that are packed already (`packed_tokens`).

    Args:
        packed: The tokens.
        parent: As for `block_hashes`.
        block_size: Tokens per block.
        images: Images among the tokens, in order; each changes the hash of the block that it
            begins in, and so of all behind it.
    """
    _check_block_size(block_size)
    block_bytes = 4 * block_size
    chain: list[BlockHash] = []
    for number, group in groupby(images, key=lambda image: image.place // block_size):
        start, at = len(chain) * block_bytes, number * block_bytes
        chain += _hash_blocks(packed[start:at], parent=parent, block_bytes=block_bytes)
        block = bytes(packed[at : at + block_bytes])
        if len(block) < block_bytes:
            return chain
        parent = chain[-1] if chain else parent
        extras = b"".join(_extra(image, block_size) for image in group)
        parent = BlockHash(xxhash.xxh3_128_digest(parent + block + extras))
        chain.append(parent)
    rest = packed[len(chain) * block_bytes :]
    return chain + _hash_blocks(rest, parent=parent, block_bytes=block_bytes)


def _extra(image: Image, block_size: int) -> bytes:
    """Returns what stands for an image behind the tokens of its block."""
    sizes = image.place % block_size, len(image.content)
    return b"I%b%b%b" % (*(size.to_bytes(4, "little") for size in sizes), image.content)


def packed_tokens(token_ids: Sequence[int]) -> memoryview:
    """Returns tokens as consecutive uint32, little-endian; an array of such is not copied.

    Raises:
        ValueError: If a token id does not fit uint32.
    """
    tokens = token_ids
    if not isinstance(tokens, array.array) or tokens.typecode != "I" or not _IS_LITTLE:
        try:
            tokens = array.array("I", token_ids)
        except OverflowError as exc:
            raise ValueError("a token id does not fit 32 unsigned bits") from exc
    if not _IS_LITTLE:
        tokens.byteswap()
    return memoryview(tokens).cast("B")


class HashChain:
    """The block hashes of one growing sequence; each token is hashed once, however it grows.

    Invariants:
        1. `hashes` equals `block_hashes` of all tokens given so far.
        2. `num_tokens` is how many tokens were given.
    """

    __slots__ = ("_block_bytes", "_tail", "hashes", "num_tokens", "root")

    def __init__(self, root: BlockHash, block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        _check_block_size(block_size)
        self.root = root
        self.hashes: list[BlockHash] = []
        self.num_tokens = 0
        self._block_bytes = 4 * block_size
        self._tail = b""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens, and the hashes of the blocks that they fill.

        Raises:
            ValueError: If a token id does not fit uint32; nothing is appended then.
        """
        data = self._tail + packed_tokens(token_ids)
        self.num_tokens += len(token_ids)
        if len(data) >= self._block_bytes:  # else nothing to hash: nearly every generated token
            parent = self.hashes[-1] if self.hashes else self.root
            new = _hash_blocks(data, parent=parent, block_bytes=self._block_bytes)
            self.hashes += new
            data = data[len(new) * self._block_bytes :]
        self._tail = data


def event_hash(block_hash: BlockHash) -> int:
    """Returns a block hash as KV events and the router's index have it: its low 64 bits."""
    return int.from_bytes(block_hash[-8:], "big")


def _check_block_size(block_size: int) -> None:
    """Raises ValueError unless a block has room for a token."""
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")


def _hash_blocks(
    data: bytes | memoryview, *, parent: BlockHash, block_bytes: int
) -> list[BlockHash]:
    """Returns the chain over the full blocks of `data`."""
    digest, split = xxhash.xxh3_128_digest, _splitter(block_bytes)
    chain: list[bytes] = []
    append, link = chain.append, cast("bytes", parent)
    end = len(data) - len(data) % block_bytes
    rest = end - end % split.size
    for start in range(0, rest, split.size):
        for block in split.unpack_from(data, start):
            link = digest(link + block)
            append(link)
    tail = bytes(data[rest:end])
    for start in range(0, len(tail), block_bytes):
        link = digest(link + tail[start : start + block_bytes])
        append(link)
    return cast("list[BlockHash]", chain)


@functools.lru_cache(maxsize=8)
def _splitter(block_bytes: int) -> struct.Struct:
    """Returns what splits many blocks at once: half the time of a slice for each."""
    return struct.Struct(f"{block_bytes}s" * _SPLIT_BLOCKS)
