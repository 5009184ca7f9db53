"""Quantised KV blocks: 8 bits per number, and a scale per token and head, all in the block.

    one block    | codes: block_size x Hkv x D, 1 byte | scales: block_size x Hkv, 2 bytes |

A number is its code times the scale of its token and head. The scale is the largest magnitude
there, divided by the largest code, and rounded to bfloat16 before the codes are chosen: so its
rounding costs nothing, and it takes 2 bytes per D numbers instead of 4. Nothing is calibrated,
and what a token's codes are depends on the token alone: a block can be copied, shared and reused
as any other.

    int8       127 steps on either side, of the same size      |error| <= 0.502 x largest / 127
    fp8_e4m3   4 bits of exponent, 3 of mantissa: finer        |error| <= max(|x| / 16,
               where numbers are small                                     largest / 448 / 1,000)

See docs/decisions/0014-quantised-blocks.md for the choice of the scheme.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kvway_kernels.memory import zeros

DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
)
"""What a number can be stored as, by name."""

SCALE_DTYPE: Final = torch.bfloat16
"""Of the scales: the range of float32 in half the bytes."""

_LARGEST: Final[Mapping[torch.dtype, float]] = MappingProxyType(
    {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
)

_ALIGNMENT: Final = 16
"""Bytes of a block are a multiple of it: GPUs load 16 bytes at once."""

_FP8_MASK: Final = 0x87F00000 - 2**32
"""Sign, exponent and mantissa of a float8_e4m3fn in the places that they have in a float32."""


class Quantised(NamedTuple):
    """One layer's keys or values: codes and their scales, which lie in the same blocks.

    Attributes:
        data: codes, [num_blocks, block_size, Hkv, D] of int8 or float8_e4m3fn; the three inner
            dimensions are contiguous.
        scale: bfloat16 [num_blocks, block_size, Hkv].
    """

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the codes."""
        return self.data.shape

    def taken(self, blocks: slice | Tensor) -> Quantised:
        """Return some blocks: views where they follow each other, else copies by int64 ids."""
        if isinstance(blocks, slice):
            return Quantised(self.data[blocks], self.scale[blocks])
        # Their bytes: not every operation is there for float8 on a CPU.
        codes = self.data.view(torch.int8).index_select(0, blocks).view(self.data.dtype)
        return Quantised(codes, self.scale.index_select(0, blocks))


KV: TypeAlias = Tensor | Quantised
"""One layer's keys or values: numbers as they are, or quantised."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where codes and scales are in a block's bytes.

    Attributes:
        block_size: tokens per block.
        num_kv_heads: heads per token.
        head_dim: numbers per head.
        dtype: of the codes, one of `DTYPES`.
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def scale_start(self) -> int:
        """Bytes in front of the scales: the codes, and one more where they are odd."""
        num_codes = self.block_size * self.num_kv_heads * self.head_dim
        return _up(num_codes, SCALE_DTYPE.itemsize)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: codes, scales, and what fills the last 16."""
        scales = self.block_size * self.num_kv_heads * SCALE_DTYPE.itemsize
        return _up(self.scale_start + scales, _ALIGNMENT)

    def allocate(self, num_blocks: int, device: torch.device | str = "cpu") -> Quantised:
        """Return zeros: two views of one tensor of num_blocks x block_bytes bytes.

        Memory of blocks never written is not touched, on a CPU.
        """
        size = self.block_bytes
        storage = zeros(num_blocks * size, device)
        tokens = (self.block_size, self.num_kv_heads)
        data = storage.view(self.dtype).as_strided(
            (num_blocks, *tokens, self.head_dim),
            (size, self.num_kv_heads * self.head_dim, self.head_dim, 1),
        )
        scale = storage.view(SCALE_DTYPE).as_strided(
            (num_blocks, *tokens),
            (size // SCALE_DTYPE.itemsize, self.num_kv_heads, 1),
            self.scale_start // SCALE_DTYPE.itemsize,
        )
        return Quantised(data, scale)


def quantise(rows: Tensor, dtype: torch.dtype) -> Quantised:
    """Return codes and scales of rows, computed in float32.

    A row of zeros has the scale zero. A row with an infinity or a NaN has none that is finite, so
    that it is no number afterwards either.

    Shapes: rows [..., D]; result: data [..., D], scale [...].

    Args:
        rows: of any floating dtype.
        dtype: of the codes, one of `DTYPES`.

    Raises:
        ValueError: another dtype.
    """
    if dtype not in _LARGEST:
        raise ValueError(f"{dtype} is not one of {', '.join(map(str, _LARGEST))}")
    largest = _LARGEST[dtype]
    rows = rows.float()
    scale = (rows.abs().amax(-1) / largest).to(SCALE_DTYPE)
    divisor = scale.float()
    codes = rows / divisor.where(divisor != 0, 1.0)[..., None]
    if dtype == torch.int8:
        codes = codes.round_()
    return Quantised(codes.clamp_(-largest, largest).to(dtype), scale)


def dequantise(quantised: Quantised, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers: codes times scales in float32, rounded to `dtype`.

    Shapes: data [..., D], scale [...]; result [..., D].
    """
    data, scale = quantised
    return decoded(data).mul_(scale.float()[..., None]).to(dtype)


def decoded(data: Tensor) -> Tensor:
    """Return codes as float32 numbers, exactly.

    The bits of a float8_e4m3fn are put where they belong in a float32, whose exponent is then too
    small by 120: on a CPU that is more than ten times faster than torch's own conversion. NaN,
    which `quantise` gives only where the scale is not finite either, becomes 480.
    """
    if data.dtype == torch.int8:
        return data.float()
    bits = data.view(torch.int8).to(torch.int32)
    return bits.bitwise_left_shift_(20).bitwise_and_(_FP8_MASK).view(torch.float32).mul_(2.0**120)


def store(cache: Quantised, rows: Tensor, slots: Tensor) -> None:
    """Quantise rows and write them into slots; every other slot is untouched.

    Shapes: rows [T, Hkv, D]; slots int64 [T], block_id * block_size + offset each.

    Mutates:
        cache: the slots.
    """
    codes, scale = quantise(rows, cache.data.dtype)
    place = (slots // cache.shape[1], slots % cache.shape[1])
    # An indexed write of float8 numbers is not there on a CPU; their bytes are the same.
    cache.data.view(torch.int8).index_put_(place, codes.view(torch.int8))
    cache.scale.index_put_(place, scale)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _main() -> None:
    """Print what a block takes and what numbers lose, for each kind of codes."""
    rows = torch.randn(4096, 3, 64, generator=torch.Generator().manual_seed(0))
    plain = 16 * 3 * 64 * 2
    print("16 tokens, 3 heads of 64   bytes of a block   of bfloat16's   relative error")  # noqa: T201
    for name, dtype in DTYPES.items():
        size = BlockLayout(16, 3, 64, dtype).block_bytes
        error = float((dequantise(quantise(rows, dtype)) - rows).norm() / rows.norm())
        print(f"{name:24}   {size:16}   {size / plain:14.1%}   {error:14.3%}")  # noqa: T201


if __name__ == "__main__":
    _main()
