"""Merging attention over disjoint parts of the keys, exactly, by their log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint parts of the keys into attention over all of them, exactly.

    With m = max lse_p and w_p = exp(lse_p - m): out = sum w_p out_p / sum w_p, lse = m + log sum
    w_p. A part with lse = -inf is absent, whatever its `out` holds, NaN included. Where every part
    is absent the result is (0, -inf). A part whose lse is NaN makes the result NaN.

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
    weights = torch.exp(lse.float() - largest.where(largest != -torch.inf, 0.0))  # 0: absent
    total = weights.sum(dim=0)
    weighted = torch.where(weights[..., None] == 0, 0.0, weights[..., None] * out.float())
    divisor = total.where(total != 0, 1.0)
    merged = weighted.sum(dim=0) / divisor[..., None]
    return merged.to(out.dtype), largest + torch.log(divisor)


def _main() -> None:
    """Print two parts of six keys, a part without keys, and what they make together."""
    scores = torch.tensor([0.5, 2.0, -1.0, 1.0, 3.0, 0.0])
    values = torch.arange(6.0)
    parts = [slice(0, 2), slice(2, 6), slice(6, 6)]
    lse = torch.stack([scores[part].logsumexp(0) for part in parts])
    weights = [torch.exp(scores[part] - lse[i]) for i, part in enumerate(parts)]
    out = torch.stack([(w * values[part]).sum() for w, part in zip(weights, parts, strict=True)])
    merged, merged_lse = merge_states(out.view(-1, 1, 1, 1), lse.view(-1, 1, 1))
    print("keys      out      lse      (values 0 to 5)")  # noqa: T201
    for part, each, its_lse in zip(parts, out.tolist(), lse.tolist(), strict=True):
        print(f"{part.start}..{part.stop}   {each:8.5f} {its_lse:8.5f}")  # noqa: T201
    print(f"merged {float(merged):8.5f} {float(merged_lse):8.5f}")  # noqa: T201
    exact = float((scores.softmax(0) * values).sum()), float(scores.logsumexp(0))
    print(f"0..6   {exact[0]:8.5f} {exact[1]:8.5f}   all at once")  # noqa: T201


if __name__ == "__main__":
    _main()
