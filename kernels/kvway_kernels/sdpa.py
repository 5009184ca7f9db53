"""Paged attention by `torch.nn.functional.scaled_dot_product_attention`: the default.

Keys of a request whose blocks follow each other are read in place; others are gathered into a
dense copy first. Grouped-query attention costs no copy: a decode row's heads that share a key head
become rows of one call. Many rows are multiplied in the dtype that the plan names.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from kvway_kernels.plan import DecodeGroup, PagedPlan, PrefillRows


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: PagedPlan, *, scale: float
) -> Tensor:
    """Attend as `kvway_kernels.api.paged_attention` promises; arguments already checked."""
    k_slots, v_slots = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    out = torch.zeros_like(q) if len(q) > plan.num_rows else torch.empty_like(q)
    for prefill in plan.prefills:
        _prefill(out, q, k_slots, v_slots, prefill, scale=scale)
    for group in plan.decodes:
        _decode(out, q, k_slots, v_slots, group, scale=scale)
    return out


def _taken(slots_of_cache: Tensor, slots: slice | Tensor) -> Tensor:
    if isinstance(slots, slice):
        return slots_of_cache[slots]
    return slots_of_cache.index_select(0, slots)


def _prefill(
    out: Tensor, q: Tensor, k_slots: Tensor, v_slots: Tensor, prefill: PrefillRows, *, scale: float
) -> None:
    # [1, Hkv, num_keys, D]
    k = _taken(k_slots, prefill.slots).to(prefill.dtype).transpose(0, 1)[None]
    v = _taken(v_slots, prefill.slots).to(prefill.dtype).transpose(0, 1)[None]
    for tile in prefill.tiles:
        rows = slice(tile.row, tile.row + tile.num_rows)
        tile_q = q[rows].to(prefill.dtype).transpose(0, 1)[None]  # [1, Hq, rows, D]
        if tile.num_pad_rows:
            tile_q = pad(tile_q, (0, 0, 0, tile.num_pad_rows))
        tile_out = scaled_dot_product_attention(
            tile_q,
            k[:, :, : tile.num_keys],
            v[:, :, : tile.num_keys],
            attn_mask=tile.mask,
            is_causal=tile.is_causal,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        out[rows] = tile_out[0, :, : tile.num_rows].transpose(0, 1)


def _decode(
    out: Tensor, q: Tensor, k_slots: Tensor, v_slots: Tensor, group: DecodeGroup, *, scale: float
) -> None:
    num_requests = len(group.rows)
    num_kv_heads, head_dim = k_slots.shape[1:]
    shape = (num_requests, -1, num_kv_heads, head_dim)
    k = _taken(k_slots, group.slots).view(shape).transpose(1, 2)
    v = _taken(v_slots, group.slots).view(shape).transpose(1, 2)
    mask = None if group.mask is None else group.mask.to(q.dtype)
    heads = q.index_select(0, group.rows).view(num_requests, num_kv_heads, -1, head_dim)
    group_out = scaled_dot_product_attention(heads, k, v, attn_mask=mask, scale=scale)
    out.index_copy_(0, group.rows, group_out.reshape(num_requests, -1, head_dim))
