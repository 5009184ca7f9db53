"""Matrix products with a model's weights, joined and laid out once, when the model is loaded.

A weight is kept as it came, or in the layout in which oneDNN computes (packed): the same size, and
which one is faster depends on the CPU, the dtype and the shape. In bfloat16 every product with a
plain weight first brings all of it into that layout, which for a few rows is most of the work. In
float32 both are measured.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import linear

Product: TypeAlias = Callable[[Tensor], Tensor]
"""From [T, in] to [T, out]."""

ChoosesPacked: TypeAlias = Callable[[tuple[int, int]], bool]
"""From the shape of a weight, [out, in], to whether it is packed."""

_MEASURED_ROWS: Final = (1, 8, 32)
"""One request alone, and batches: as many rows as products are measured with."""

_MEASURED_BYTES: Final = 64 * 2**20
"""Weights that a measured product goes through, so that they come from memory, as in a model."""

_MIN_BYTES: Final = 4 * 2**20
"""Smaller weights stay plain: there is little to gain, and measuring takes time at the start."""

_MIN_GAIN: Final = 1.1
"""How much faster packed has to be, over all numbers of rows, for a weight to be packed."""


def choice(dtype: torch.dtype, device: torch.device, *, same_bits: bool) -> ChoosesPacked:
    """Return what tells which weights are to be packed.

    Args:
        dtype: of the weights.
        device: where they are.
        same_bits: answers are to be the same on every start: nothing is chosen by measuring.
    """
    if device.type != "cpu" or not _has_packing():
        return lambda _: False
    if dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():  # noqa: SLF001
        return lambda _: True
    if dtype == torch.float32 and not same_bits:
        return is_faster_packed
    return lambda _: False


def joined(parts: Sequence[Any], *, packed: ChoosesPacked) -> Product:
    """Return one product that gives what the parts give, side by side.

    The parts are emptied, so that no weight is in memory twice.

    Args:
        parts: linear modules with the same input; all of them have a bias, or none has.
        packed: tells whether a weight is laid out as oneDNN computes with it.
    """
    weight = torch.cat([part.weight.detach() for part in parts])
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    for part in parts:
        part.weight = part.bias = None
    num_out, num_in = weight.shape
    pack = packed((num_out, num_in))
    return product(weight, torch.cat(biases) if biases else None, pack=pack)


def product(weight: Tensor, bias: Tensor | None, *, pack: bool) -> Product:
    """Return the product with a weight.

    Shapes: weight [out, in]; bias [out].

    Args:
        weight: held as it is, or in another layout of the same size where `pack`.
        bias: added to the result.
        pack: lay the weight out as oneDNN computes with it; see `choice`.
    """
    if not pack:
        return lambda x: linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)  # noqa: SLF001 (it has no public name)
    pointwise = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 (nor has this)

    def multiply(x: Tensor) -> Tensor:
        result: Tensor = pointwise(x, packed, bias, "none", [], "")
        return result

    return multiply


@functools.cache
def is_faster_packed(shape: tuple[int, int]) -> bool:
    """Measure whether products with float32 weights of a shape, [out, in], gain from packing."""
    num_bytes = 4 * math.prod(shape)
    if num_bytes < _MIN_BYTES:
        return False
    copies = [torch.ones(shape) for _ in range(max(2, _MEASURED_BYTES // num_bytes))]
    ways = [[product(weight, None, pack=pack) for weight in copies] for pack in (False, True)]
    with torch.inference_mode():
        gains = [_gain(ways, torch.ones(rows, shape[1])) for rows in _MEASURED_ROWS]
    return math.prod(gains) ** (1 / len(gains)) >= _MIN_GAIN


def _gain(ways: Sequence[Sequence[Product]], x: Tensor, repeats: int = 5) -> float:
    """Return how many times faster the second way is: the best of some turns of each."""
    best = [math.inf, math.inf]
    for _ in range(repeats + 1):
        for way, products in enumerate(ways):
            begun = time.perf_counter()
            for multiply in products:
                multiply(x)
            best[way] = min(best[way], time.perf_counter() - begun)
    return best[0] / best[1]


def _has_packing() -> bool:
    names = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    return all(hasattr(torch.ops.mkldnn, name) for name in names)
