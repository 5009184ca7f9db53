"""The KV tensors: the only place where keys and values of tokens are kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from kvway_core.errors import ConfigError
from kvway_core.sizing import KVDtype, KVSize
from kvway_kernels.memory import zeros
from kvway_kernels.quant import DTYPES, SCALE_DTYPE, BlockLayout, Quantised
from kvway_worker.settings import MAX_NUM_BLOCKS

DEFAULT_KV_CACHE_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class KVShape:
    """What the KV of one block looks like.

    Attributes:
        num_layers: layers that attend.
        block_size: tokens per block.
        num_kv_heads: key and value heads per layer.
        head_dim: size of each.
        dtype: of keys and values; one of `kvway_kernels.quant.DTYPES` where they are quantised.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def quantised(self) -> BlockLayout | None:
        """How a block is laid out where keys and values are quantised, else None."""
        if self.dtype not in DTYPES.values():
            return None
        return BlockLayout(self.block_size, self.num_kv_heads, self.head_dim, self.dtype)

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of one block over all layers, with their scales if they have any."""
        scale_bytes = 0 if self.quantised is None else SCALE_DTYPE.itemsize
        return KVSize(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=KVDtype(self.dtype.itemsize, scale_bytes),
            block_size=self.block_size,
        ).bytes_per_block


def kv_dtype_of(name: str, model_dtype: torch.dtype) -> tuple[torch.dtype, str]:
    """Return the dtype of keys and values by its name, and the name with `auto` resolved.

    Args:
        name: "auto" for the model's own, or one of `kvway_kernels.quant.DTYPES`.
        model_dtype: what the model computes in.

    Raises:
        ConfigError: another name.
    """
    if name == "auto":
        return model_dtype, str(model_dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError([f"--kv-dtype {name} is not one of auto, {', '.join(DTYPES)}"])
    return DTYPES[name], name


def blocks_to_allocate(
    shape: KVShape,
    *,
    num_blocks: int | None,
    kv_cache_bytes: int | None,
    max_model_len: int | None,
) -> int:
    """Return how many blocks the cache gets: as told, or what fits into 1 GiB.

    Args:
        shape: one block.
        num_blocks: the number itself; excludes `kv_cache_bytes`.
        kv_cache_bytes: memory for the cache, bytes.
        max_model_len: tokens of the longest request, which must fit; None asks for one block.

    Raises:
        ConfigError: both are given, the memory is for more blocks than a pool may have, or the
            longest request does not fit.
    """
    if num_blocks is not None and kv_cache_bytes is not None:
        raise ConfigError(["give either the number of KV blocks or their memory, not both"])
    if num_blocks is None:
        budget = DEFAULT_KV_CACHE_BYTES if kv_cache_bytes is None else kv_cache_bytes
        num_blocks = budget // shape.bytes_per_block
        if num_blocks > MAX_NUM_BLOCKS and kv_cache_bytes is not None:
            problem = (
                f"--kv-cache-gib: {budget / 2**30:.6g} GiB are {num_blocks} KV blocks, and a pool "
                f"has at most {MAX_NUM_BLOCKS}: give --num-blocks {MAX_NUM_BLOCKS}, or less"
            )
            raise ConfigError([problem])
        num_blocks = min(num_blocks, MAX_NUM_BLOCKS)
    needed = -(-(max_model_len or 1) // shape.block_size)
    if num_blocks < needed:
        mib = needed * shape.bytes_per_block / 2**20
        problem = (
            f"the KV cache has {num_blocks} blocks of {shape.block_size} tokens, but a request of "
            f"{max_model_len or 1} tokens needs {needed}: give it --num-blocks {needed} or more "
            f"({mib:.1f} MiB), or a smaller --max-model-len"
        )
        raise ConfigError([problem])
    return num_blocks


class Scales(TypedDict):
    """Scales of a layer's keys and values: None where these are not quantised."""

    k_scale: Tensor | None
    v_scale: Tensor | None


class PagedKVCache:
    """Keys and values of every layer, in blocks.

    Shapes: `k[layer]` and `v[layer]` are [num_blocks, block_size, num_kv_heads, head_dim], zero at
    first, contiguous. Where they are quantised `k_scale[layer]` and `v_scale[layer]` are
    [num_blocks, block_size, num_kv_heads]; a layer's codes and scales of a block lie together, and
    only one block of either is contiguous. Else they are None. On a CPU memory of blocks never
    written is not touched.

    Raises:
        ConfigError: the device cannot hold them.
    """

    __slots__ = ("k", "k_scale", "num_blocks", "shape", "v", "v_scale")

    def __init__(self, shape: KVShape, *, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        self.k_scale: list[Tensor | None] = []
        self.v_scale: list[Tensor | None] = []
        sides = ((self.k, self.k_scale), (self.v, self.v_scale))
        try:
            for _ in range(shape.num_layers):
                for data, scales in sides:
                    layer, scale = _zeros(shape, num_blocks, device)
                    data.append(layer)
                    scales.append(scale)
        except (RuntimeError, MemoryError) as error:
            gib = num_blocks * shape.bytes_per_block / 2**30
            problem = (
                f"{num_blocks} KV blocks take {gib:.1f} GiB, and {device} has no such memory: "
                "give less by --num-blocks or --kv-cache-gib"
            )
            raise ConfigError([problem]) from error

    def scales(self, layer: int) -> Scales:
        """Return the scales of a layer, as the kernels take them."""
        return {"k_scale": self.k_scale[layer], "v_scale": self.v_scale[layer]}

    def copy(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """Copy leading tokens from block to block, in order.

        Args:
            copies: (source block, destination block, number of tokens) each.
        """
        for source, destination, num_tokens in copies:
            for tensor in self._tensors():
                tensor[destination, :num_tokens] = tensor[source, :num_tokens]

    def clear(self, blocks: Iterable[int]) -> None:
        """Make blocks zero again."""
        for block in blocks:
            for tensor in self._tensors():
                tensor[block].zero_()

    def _tensors(self) -> Iterator[Tensor]:
        """Yield all that blocks consist of."""
        for tensor in (*self.k, *self.v, *self.k_scale, *self.v_scale):
            if tensor is not None:
                yield tensor


def _zeros(
    shape: KVShape, num_blocks: int, device: torch.device
) -> tuple[Tensor, None] | Quantised:
    """Return one layer's keys or values, and their scales."""
    if shape.quantised is not None:
        return shape.quantised.allocate(num_blocks, device)
    size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    num_bytes = math.prod(size) * shape.dtype.itemsize
    return zeros(num_bytes, device).view(shape.dtype).view(size), None
