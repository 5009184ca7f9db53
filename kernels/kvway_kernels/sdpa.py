"""Paged and cascade attention in torch's own operations: needs no compiler.

Keys whose blocks follow each other are read in place; others are gathered into a dense copy
first. Grouped-query attention costs no copy: a decode row's heads that share a key head become
rows of one call. Many rows are multiplied in the dtype that the plan names.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvway_kernels.blocks import load
from kvway_kernels.dense import attend as attend_dense
from kvway_kernels.dense import shared_pass
from kvway_kernels.merging import merge_states
from kvway_kernels.plan import DecodeGroup, PagedPlan
from kvway_kernels.tiles import PrefillRows


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: PagedPlan,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend as `kvway_kernels.api.cascade_attention` promises; arguments already checked."""
    num_parts = plan.num_levels + 1
    dtype = q.dtype if num_parts == 1 else torch.float32
    out = q.new_zeros(num_parts, *q.shape, dtype=dtype)
    lse = q.new_full((num_parts, *q.shape[:2]), -torch.inf, dtype=torch.float32)
    for prefill in plan.prefills:
        _prefill(out[-1], lse[-1], q, k_cache, v_cache, prefill, scale=scale, softcap=softcap)
    for group in plan.decodes:
        _decode(out[-1], lse[-1], q, k_cache, v_cache, group, scale=scale, softcap=softcap)
    for run in plan.passes:
        part_out, part_lse = shared_pass(q, k_cache, v_cache, run, scale=scale, softcap=softcap)
        out[run.level, run.rows] = part_out.to(dtype)
        lse[run.level, run.rows] = part_lse
    if num_parts == 1:
        return out[0], lse[0]
    merged, merged_lse = merge_states(out, lse)
    return merged.to(q.dtype), merged_lse


def _prefill(  # noqa: PLR0913
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefill: PrefillRows,
    *,
    scale: float,
    softcap: float | None,
) -> None:
    k = _dense(k_cache, prefill)
    v = _dense(v_cache, prefill)
    for tile in prefill.tiles:
        rows = slice(tile.row, tile.row + tile.num_rows)
        tile_q = q[rows].to(prefill.dtype).transpose(0, 1)[None]  # [1, Hq, rows, D]
        if tile.num_pad_rows:
            tile_q = pad(tile_q, (0, 0, 0, tile.num_pad_rows))
        tile_out, tile_lse = attend_dense(
            tile_q,
            k[:, :, tile.keys],
            v[:, :, tile.keys],
            mask=tile.mask,
            is_causal=tile.is_causal,
            scale=scale,
            softcap=softcap,
        )
        out[rows] = tile_out[0, :, : tile.num_rows].transpose(0, 1)
        lse[rows] = tile_lse[0, :, : tile.num_rows].transpose(0, 1)


def _dense(cache: Tensor, prefill: PrefillRows) -> Tensor:
    """Return a request's private keys, or values: [1, Hkv, keys, D]."""
    tokens = load(cache, prefill.blocks)[: prefill.num_keys].to(prefill.dtype)
    if prefill.num_pad_keys:
        tokens = pad(tokens, (0, 0, 0, 0, 0, prefill.num_pad_keys))
    return tokens.transpose(0, 1)[None]


def _decode(  # noqa: PLR0913
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    group: DecodeGroup,
    *,
    scale: float,
    softcap: float | None,
) -> None:
    num_requests = len(group.rows)
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = q.index_select(0, group.rows).view(num_requests, num_kv_heads, -1, head_dim)
    hidden = None if group.is_even else _hidden(group)
    mask = None
    if hidden is not None:
        mask = q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None]
    k = _gathered(k_cache, group, hidden)
    v = _gathered(v_cache, group, hidden)
    group_out, group_lse = attend_dense(heads, k, v, mask=mask, scale=scale, softcap=softcap)
    out[group.rows] = group_out.reshape(num_requests, -1, head_dim).to(out.dtype)
    lse[group.rows] = group_lse.reshape(num_requests, -1)


def _hidden(group: DecodeGroup) -> Tensor:
    """Return which gathered keys are padding, or outside the window: bool [n, num_keys]."""
    key = torch.arange(group.num_keys, device=group.tables.device)
    return (key >= group.lengths[:, None]) | (key < group.first_keys[:, None])


def _gathered(cache: Tensor, group: DecodeGroup, hidden: Tensor | None) -> Tensor:
    """Return the members' private keys, or values: [n, Hkv, num_keys, D]."""
    num_requests = len(group.rows)
    if group.lone_blocks is not None:
        tokens = load(cache, group.lone_blocks)[None, : group.num_keys]
    else:
        tokens = load(cache, group.tables.flatten())
        tokens = tokens.view(num_requests, -1, *cache.shape[2:])[:, : group.num_keys]
        if hidden is not None:  # slots never written may hold anything, and NaN times 0 is NaN
            tokens = tokens.masked_fill(hidden[:, :, None, None], 0)
    return tokens.transpose(1, 2)
