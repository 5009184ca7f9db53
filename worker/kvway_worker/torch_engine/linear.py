"""Matrix products with a model's weights, joined and laid out once, when the model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import linear

Product: TypeAlias = Callable[[Tensor], Tensor]
"""From [T, in] to [T, out]."""


def joined(parts: Sequence[Any], *, pack: bool) -> Product:
    """Return one product that gives what the parts give, side by side.

    The parts are emptied, so that no weight is in memory twice.

    Args:
        parts: linear modules with the same input; all of them have a bias, or none has.
        pack: lay the weight out as oneDNN computes with it; see `can_pack`.
    """
    weight = torch.cat([part.weight.detach() for part in parts])
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    for part in parts:
        part.weight = part.bias = None
    return product(weight, torch.cat(biases) if biases else None, pack=pack)


def product(weight: Tensor, bias: Tensor | None, *, pack: bool) -> Product:
    """Return the product with a weight.

    Shapes: weight [out, in]; bias [out].

    Args:
        weight: held as it is, or in another layout of the same size where `pack`.
        bias: added to the result.
        pack: lay the weight out as oneDNN computes with it; see `can_pack`.
    """
    if not pack:
        return lambda x: linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)  # noqa: SLF001 (it has no public name)
    pointwise = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 (nor has this)

    def multiply(x: Tensor) -> Tensor:
        result: Tensor = pointwise(x, packed, bias, "none", [], "")
        return result

    return multiply


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether weights may be laid out as oneDNN computes with them.

    In bfloat16 on a CPU every product with a plain weight brings all of it into that layout first,
    which for a few rows is most of the work. In float32 the plain layout is as fast, and it is the
    one of the deterministic mode, so nothing is packed there.
    """
    if dtype != torch.bfloat16 or device.type != "cpu":
        return False
    names = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    if not all(hasattr(torch.ops.mkldnn, name) for name in names):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 (nor has this)
