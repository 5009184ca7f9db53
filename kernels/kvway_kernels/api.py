"""The operations, one public function each.

Shapes use one alphabet: T query rows of a step, Hq query heads, Hkv key/value heads (Hq is a
multiple of Hkv), D head size, P partial results. A cache is [num_blocks, block_size, Hkv, D]; the
slot of a token is `block_id * block_size + offset`. Log-sum-exp (lse) is in nats, float32.

    step = plan(requests, num_blocks=..., block_size=...)       once per step
    write_kv(k_cache, v_cache, k, v, step)                      per layer
    out = paged_attention(q, k_cache, v_cache, step, scale=...) per layer
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvway_kernels import sdpa
from kvway_kernels.plan import PagedPlan, RequestRows, plan

__all__ = ["PagedPlan", "RequestRows", "merge_states", "paged_attention", "plan", "write_kv"]


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, step: PagedPlan) -> None:
    """Store the keys and values of a step's rows in their slots; every other slot is untouched.

    Shapes: k_cache, v_cache [num_blocks, block_size, Hkv, D], contiguous; k, v [>= T, Hkv, D], of
    the caches' dtype and device. Rows behind the first T are ignored.

    Mutates:
        k_cache, v_cache: the slots of `step.slot_mapping`.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    _check_cache(k_cache, v_cache, step)
    for name, rows, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if rows.shape[1:] != cache.shape[2:] or len(rows) < step.num_rows:
            raise ValueError(
                f"{name} is {list(rows.shape)}: expected at least {step.num_rows} rows of "
                f"{list(cache.shape[2:])}"
            )
        if rows.dtype != cache.dtype:
            raise ValueError(f"{name} is {rows.dtype}, its cache {cache.dtype}")
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, step.slot_mapping, k[: step.num_rows])
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, step.slot_mapping, v[: step.num_rows])


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, step: PagedPlan, *, scale: float
) -> Tensor:
    """Attend each row to its request's keys up to its own token, which `write_kv` has stored.

    Prefill chunks, continued prefills and decode rows of any lengths mix in one step. Only slots
    that belong to a request are read for it: what other slots hold, NaN included, has no effect.

    Shapes: q [>= T, Hq, D], of the caches' dtype; k_cache, v_cache [num_blocks, block_size, Hkv,
    D], contiguous.

    Args:
        q: the queries.
        k_cache: one layer's keys.
        v_cache: its values.
        step: who owns which rows, and where their keys are.
        scale: factor on the scores before the softmax.

    Returns:
        [like q]: the attention; rows behind the first T are zero.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    _check_cache(k_cache, v_cache, step)
    num_kv_heads, head_dim = k_cache.shape[2:]
    is_grouped = q.ndim == 3 and q.shape[2] == head_dim and q.shape[1] % num_kv_heads == 0
    if not is_grouped or len(q) < step.num_rows:
        raise ValueError(
            f"q is {list(q.shape)}: expected at least {step.num_rows} rows of a multiple of "
            f"{num_kv_heads} heads of size {head_dim}"
        )
    if q.dtype != k_cache.dtype:
        raise ValueError(f"q is {q.dtype}, the caches {k_cache.dtype}")
    return sdpa.paged_attention(q, k_cache, v_cache, step, scale=scale)


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


def _check_cache(k_cache: Tensor, v_cache: Tensor, step: PagedPlan) -> None:
    if k_cache.shape != v_cache.shape or k_cache.ndim != 4:
        raise ValueError(
            f"the caches are {list(k_cache.shape)} and {list(v_cache.shape)}: expected two of "
            "[num_blocks, block_size, Hkv, D]"
        )
    if tuple(k_cache.shape[:2]) != (step.num_blocks, step.block_size):
        raise ValueError(
            f"the caches hold {k_cache.shape[0]} blocks of {k_cache.shape[1]}, the step was "
            f"planned for {step.num_blocks} of {step.block_size}"
        )
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the caches are not contiguous")
