"""Requests that bring several rows, cut into tiles: what one call attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvway_kernels.blocks import BlockIds, block_ids
from kvway_kernels.rows import PrivateRows

_TILE_ROWS = 256
"""Rows per call where a mask is needed: bounds the mask to 256 x num_keys, and what is computed of
keys behind a row's own. With fewer than 192 rows torch attends in smaller pieces, slower."""

_FLOAT32_ROWS = 16
"""From so many rows on, float32 is faster than bfloat16 on a CPU without a matrix unit for it: by
a quarter at 100 rows, conversion of all keys and values included."""

_FIXED_ROWS = 16
_FIXED_KEYS = 512
"""In fixed shapes: rows of each call, and what its number of keys is a multiple of."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of one request that one call attends with.

    Attributes:
        row: first row in the packed step.
        num_rows: rows in the tile.
        num_pad_rows: rows to add behind them, whose results are dropped.
        keys: the request's private keys to attend to.
        mask: added to the scores, 0 where a row sees a key and -inf elsewhere: [num_rows +
            num_pad_rows, keys]. None: each row sees every key, or the keys up to its own where
            `is_causal`.
        is_causal: the rows are the keys' own, and see all before them.
    """

    row: int
    num_rows: int
    num_pad_rows: int
    keys: slice
    mask: Tensor | None
    is_causal: bool


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """A request with several rows: where its private keys are, and the tiles of its rows.

    Attributes:
        blocks: the keys' blocks, in order.
        num_keys: keys in them; what lies behind is not read.
        num_pad_keys: zeros to add behind the keys, which no row sees.
        tiles: its rows, in order.
        dtype: what queries, keys and values are multiplied in.
        can_split: whether the keys may be attended to in pieces: not where they are no more than
            the rows, nor in fixed shapes.
    """

    blocks: BlockIds
    num_keys: int
    num_pad_keys: int
    tiles: tuple[Tile, ...]
    dtype: torch.dtype
    can_split: bool


def prefill_rows(rows: PrivateRows, *, like: Tensor) -> PrefillRows:
    """Cut a request into tiles of at most 256 rows, or none where no mask is needed.

    Args:
        rows: the request.
        like: a tensor of the caches' dtype and device.
    """
    dtype = compute_dtype(rows.num_rows, like.dtype, like.device)
    like = like.to(dtype)
    num_rows, num_keys = rows.num_rows, rows.num_keys
    if num_rows == num_keys and rows.first_key + num_rows <= 1:
        tiles = [Tile(rows.row, num_rows, 0, slice(0, num_keys), mask=None, is_causal=True)]
    else:
        tiles = []
        for first in range(0, num_rows, _TILE_ROWS):
            size = min(_TILE_ROWS, num_rows - first)
            keys = slice(max(0, rows.first_key + first), num_keys - num_rows + first + size)
            mask = _mask(_sees(rows, first, size, keys), like)
            tiles.append(Tile(rows.row + first, size, 0, keys, mask=mask, is_causal=False))
    blocks = block_ids(rows.blocks, like.device)
    can_split = tiles[0].mask is not None
    return PrefillRows(blocks, num_keys, 0, tuple(tiles), dtype, can_split=can_split)


def fixed_rows(rows: PrivateRows, *, like: Tensor) -> PrefillRows:
    """Cut a request into tiles of exactly 16 rows that see a multiple of 512 keys."""
    num_rows, num_keys = rows.num_rows, rows.num_keys
    tiles = []
    for first in range(0, num_rows, _FIXED_ROWS):
        size = min(_FIXED_ROWS, num_rows - first)
        seen = num_keys - num_rows + first + size
        keys = slice(0, -(-seen // _FIXED_KEYS) * _FIXED_KEYS)
        sees = torch.zeros(_FIXED_ROWS, keys.stop, dtype=torch.bool)
        sees[:size] = _sees(rows, first, size, keys)
        sees[size:, 0] = True  # a row that sees nothing is undefined
        pad = _FIXED_ROWS - size
        mask = _mask(sees, like)
        tiles.append(Tile(rows.row + first, size, pad, keys, mask, is_causal=False))
    pad_keys = -num_keys % _FIXED_KEYS
    blocks = block_ids(rows.blocks, like.device)
    return PrefillRows(blocks, num_keys, pad_keys, tuple(tiles), like.dtype, can_split=False)


def compute_dtype(num_rows: int, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return what so many rows are multiplied in: the faster, and never the less exact."""
    is_slow = dtype == torch.bfloat16 and device.type == "cpu" and num_rows >= _FLOAT32_ROWS
    if is_slow and not torch.cpu._is_amx_tile_supported():  # noqa: SLF001 (no public name)
        return torch.float32
    return dtype


def _sees(rows: PrivateRows, first: int, size: int, keys: slice) -> Tensor:
    """Return which of the keys `size` rows from `first` on see: bool [size, keys]."""
    row = torch.arange(first, first + size)[:, None]
    key = torch.arange(keys.start, keys.stop)
    return (key <= rows.num_keys - rows.num_rows + row) & (key >= rows.first_key + row)


def _mask(sees: Tensor, like: Tensor) -> Tensor:
    """Return what to add to the scores: torch would make the same of `sees`, in every layer."""
    mask = torch.zeros(sees.shape, dtype=like.dtype).masked_fill_(~sees, -torch.inf)
    return mask.to(like.device)
