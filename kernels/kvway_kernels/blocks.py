"""Reading whole blocks of a cache: in place where they follow each other, else as one copy."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

BlockIds: TypeAlias = slice | Tensor
"""Blocks of a cache in order: a slice where they follow each other, else int64 ids."""


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


def load(cache: Tensor, blocks: BlockIds) -> Tensor:
    """Return the tokens of some blocks: a view where the blocks follow each other.

    Shapes: cache [num_blocks, block_size, Hkv, D]; result [blocks x block_size, Hkv, D].
    """
    taken = cache[blocks] if isinstance(blocks, slice) else cache.index_select(0, blocks)
    return taken.flatten(0, 1)
