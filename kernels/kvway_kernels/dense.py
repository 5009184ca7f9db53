"""Attention of many rows to dense keys, with its log-sum-exp: what shared runs are read with.

    members' rows  q [n, Hq, D]   ->  [1, Hkv, n x G, D]   rows that share a key head, together
    the run        k, v           ->  [1, Hkv, keys, D]    a view of the cache, or one copy

On a CPU torch's own flash operation attends: it is the only one there that returns the
log-sum-exp. It is private to torch, so its promises are checked once before its first use. What
it cannot do (a soft cap) is done in plain tensor operations, in pieces of bounded size.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kvway_kernels.blocks import load, pieces
from kvway_kernels.merging import merge_states
from kvway_kernels.plan import SharedPass
from kvway_kernels.quant import KV

_PIECE = 1 << 22
"""Scores that are kept at once where torch's operation cannot be used: 16 MB."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    is_causal: bool = False,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend rows to keys of the same batch entry and head. There is at least one row and key.

    Shapes: q [N, Hq, rows, D]; k, v [N, Hkv, keys, D], any strides, Hq a multiple of Hkv; mask
    [rows, keys] or [N, 1, 1, keys], added to the scores, of q's dtype.

    Args:
        q: the queries.
        k: the keys.
        v: the values.
        scale: factor on the scores.
        mask: 0 or -inf. No row may be masked whole.
        is_causal: row i sees keys up to i. There are as many keys as rows.
        softcap: scores become softcap * tanh(score / softcap).

    Returns:
        out: [N, Hq, rows, D], like q.
        lse: [N, Hq, rows] float32, nats, strided.
    """
    if q.device.type == "cpu" and softcap is None:
        check_flash()
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
            q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return out, lse
    return _attend_in_pieces(q, k, v, scale=scale, mask=mask, is_causal=is_causal, softcap=softcap)


def shared_pass(
    q: Tensor,
    k_cache: KV,
    v_cache: KV,
    run: SharedPass,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend all rows of a shared run's members to it: its keys and values are read once.

    What cannot be read in place (scattered blocks, quantised ones) is copied, 4,096 keys and their
    values at once, however long the run is; what these give is merged.

    Shapes: q [T, Hq, D]; caches [num_blocks, block_size, Hkv, D].

    Returns:
        out: [n, Hq, D] in the dtype the pass multiplies in, for the rows of `run.rows`.
        lse: [n, Hq] float32, nats.
    """
    rows = q[run.rows] if isinstance(run.rows, slice) else q.index_select(0, run.rows)
    num_rows, num_heads, head_dim = rows.shape
    num_kv_heads = k_cache.shape[2]
    grouped = rows.to(run.dtype).view(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1)
    grouped = grouped.reshape(1, num_kv_heads, -1, head_dim)
    parts = []
    for keys in pieces(k_cache, run.blocks, run.num_keys):
        k = load(k_cache, run.blocks, keys, run.dtype).transpose(0, 1)[None]
        v = load(v_cache, run.blocks, keys, run.dtype).transpose(0, 1)[None]
        parts.append(attend(grouped, k, v, scale=scale, softcap=softcap))
    out, lse = parts[0]
    if len(parts) > 1:
        out, lse = merge_states(
            torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
        )
    group = num_heads // num_kv_heads
    out = out.view(num_kv_heads, num_rows, group, head_dim).transpose(0, 1)
    lse = lse.reshape(num_kv_heads, num_rows, group).transpose(0, 1)
    return out.reshape(rows.shape), lse.reshape(num_rows, num_heads)


@functools.cache
def check_flash() -> None:
    """Check once that torch's flash operation returns the log-sum-exp in nats.

    Raises:
        RuntimeError: it does not.
    """
    q, k = torch.ones(1, 1, 1, 8), torch.full((1, 1, 4, 8), 0.5)
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
        q, k, k, 0.0, False, scale=0.25
    )
    expected = 1.0 + torch.log(torch.tensor(4.0))
    if lse.shape != (1, 1, 1) or abs(float(lse) - float(expected)) > 1e-4:
        raise RuntimeError(
            f"torch {torch.__version__}: the log-sum-exp of its attention is {lse.tolist()}, "
            f"expected {float(expected):.4f}: kvway cannot merge partial results with it"
        )


def _attend_in_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None,
    is_causal: bool,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    num, num_heads, num_rows, head_dim = q.shape
    num_kv_heads, num_keys = k.shape[1:3]
    k, v = k.float().transpose(2, 3)[:, :, None], v.float()[:, :, None]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    size = max(1, _PIECE // (num * num_heads * num_keys))
    for first in range(0, num_rows, size):
        rows = slice(first, min(first + size, num_rows))
        piece = q[:, :, rows].float().reshape(num, num_kv_heads, -1, rows.stop - first, head_dim)
        scores = (piece @ k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            seen = mask[rows] if mask.ndim == 2 else mask[:, :, None]
            scores = scores + seen.float()
        if is_causal:
            row = torch.arange(first, rows.stop, device=q.device)[:, None]
            hidden = torch.arange(num_keys, device=q.device) > row
            scores = scores.masked_fill(hidden, -torch.inf)
        sums = scores.logsumexp(-1)
        weights = torch.exp(scores - sums[..., None])
        out[:, :, rows] = (weights @ v).reshape(num, num_heads, -1, head_dim).to(q.dtype)
        lse[:, :, rows] = sums.reshape(num, num_heads, -1)
    return out, lse
