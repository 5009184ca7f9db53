"""Reading whole blocks of a cache: in place where they follow each other, else as one copy."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from kvway_kernels.quant import KV, Quantised, dequantise

BlockIds: TypeAlias = slice | Tensor
"""Blocks of a cache in order: a slice where they follow each other, else int64 ids."""

_PIECE_KEYS = 4096
"""Keys of one request or run that are copied at once. In float32 keys and values of 8 heads of 128
then take 32 MB, however long the request is."""


def block_ids(blocks: Sequence[int], device: torch.device) -> BlockIds:
    """Return the blocks as a slice where they follow each other, else as ids on the device."""
    first = blocks[0]
    if blocks[-1] - first + 1 == len(blocks):
        run = range(first, first + len(blocks))
        if blocks == run or list(blocks) == list(run):
            return slice(first, first + len(blocks))
    return int64(blocks).to(device)


def int64(values: Sequence[int]) -> Tensor:
    """Return a tensor of the values: several times faster than `torch.tensor` of a list."""
    return torch.frombuffer(array("q", values), dtype=torch.int64)


def pieces(cache: KV, blocks: BlockIds, num_keys: int) -> list[slice]:
    """Return which keys to attend to at once: as many as may be copied, or all where none is."""
    in_place = isinstance(blocks, slice) and not isinstance(cache, Quantised)
    step = num_keys if in_place else _PIECE_KEYS
    return [slice(start, min(start + step, num_keys)) for start in range(0, num_keys, step)]


def load(cache: KV, blocks: BlockIds, keys: slice, dtype: torch.dtype) -> Tensor:
    """Return keys, or values, that some blocks hold.

    A view where the blocks follow each other and the dtype is the cache's, else a copy.

    Shapes: cache [num_blocks, block_size, Hkv, D]; result [keys, Hkv, D].

    Args:
        cache: where they are.
        blocks: the blocks.
        keys: which of the keys in these blocks.
        dtype: of the result.
    """
    block_size = cache.shape[1]
    first, end = keys.start // block_size, -(-keys.stop // block_size)
    if isinstance(blocks, slice):
        blocks = slice(blocks.start + first, blocks.start + end)
    else:
        blocks = blocks[first:end]
    if isinstance(cache, Quantised):
        taken = dequantise(cache.taken(blocks), dtype)
    elif isinstance(blocks, slice):
        taken = cache[blocks]
    else:
        taken = cache.index_select(0, blocks)
    offset = first * block_size
    return taken.flatten(0, 1)[keys.start - offset : keys.stop - offset].to(dtype)
