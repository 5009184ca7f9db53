"""Merging attention over disjoint parts of the keys, exactly, by their log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint parts of the keys into attention over all of them, exactly.

    With m = max lse_p and w_p = exp(lse_p - m): out = sum w_p out_p / sum w_p, lse = m + log sum
    w_p. A part with lse = -inf is absent, whatever its `out` holds, NaN included. Where every part
    is absent the result is (0, -inf).

    Shapes: out [P, T, Hq, D]; lse [P, T, Hq] float32, nats.

    Returns:
        out: [T, Hq, D], in the dtype of `out`; computed in float32.
        lse: [T, Hq] float32.

    Raises:
        ValueError: the shapes do not belong together, or there is no part.
    """
    if out.ndim != 4 or out.shape[:3] != lse.shape or not len(out):
        raise ValueError(
            f"out is {list(out.shape)} and lse {list(lse.shape)}: expected [P, T, Hq, D] and "
            "[P, T, Hq] with P at least 1"
        )
    largest = lse.float().amax(dim=0)
    weights = torch.exp(lse.float() - largest.where(largest > -torch.inf, 0.0))  # 0 where absent
    total = weights.sum(dim=0)
    weighted = torch.where(weights[..., None] > 0, weights[..., None] * out.float(), 0.0)
    merged = weighted.sum(dim=0) / total.where(total > 0, 1.0)[..., None]
    return merged.to(out.dtype), largest + torch.log(total.where(total > 0, 1.0))
