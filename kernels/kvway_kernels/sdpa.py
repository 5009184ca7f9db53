"""Paged and cascade attention in torch's own operations: needs no compiler.

Where the plan says `compiled`, decode is left to the module of that name; the rest is the same.

Keys whose blocks follow each other are read in place; others are gathered into a dense copy
first, and quantised ones are dequantised into one: at most 4,096 keys of a request or run at once
(of a group of requests 16,384), and what the pieces give is merged. Grouped-query attention costs
no copy: a decode row's heads that share a key head become rows of one call. Many rows are
multiplied in the dtype that the plan names.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvway_kernels import compiled, native
from kvway_kernels.blocks import load, pieces
from kvway_kernels.dense import attend as attend_dense
from kvway_kernels.dense import shared_pass
from kvway_kernels.merging import merge_states
from kvway_kernels.plan import DecodeGroup, PagedPlan
from kvway_kernels.quant import KV, Quantised
from kvway_kernels.tiles import PrefillRows


def attend(
    q: Tensor,
    k_cache: KV,
    v_cache: KV,
    plan: PagedPlan,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend as `kvway_kernels.api.cascade_attention` promises; arguments already checked."""
    is_compiled = plan.implementation == "compiled"
    if is_compiled and native.can_attend(q, k_cache):
        return _attend_natively(q, k_cache, v_cache, plan, scale=scale, softcap=softcap)
    parts = _shared(q, k_cache, v_cache, plan, scale=scale, softcap=softcap)
    if is_compiled and len(plan.decodes) == 1 and plan.decodes[0].num_requests == len(q):
        return _decode_compiled(
            q, k_cache, v_cache, plan.decodes[0], parts, scale=scale, softcap=softcap
        )
    is_merged = parts is not None or isinstance(k_cache, Quantised)
    out = torch.zeros_like(q, dtype=torch.float32 if is_merged else q.dtype)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    for prefill in plan.prefills:
        _prefill(out, lse, q, k_cache, v_cache, prefill, scale=scale, softcap=softcap)
    for group in () if is_compiled else plan.decodes:
        _decode(out, lse, q, k_cache, v_cache, group, scale=scale, softcap=softcap)
    if parts is not None:
        out, lse = merge_states(torch.cat([parts[0], out[None]]), torch.cat([parts[1], lse[None]]))
    out = out.to(q.dtype)
    for group in plan.decodes if is_compiled else ():
        group_out, group_lse = _decode_compiled(
            q, k_cache, v_cache, group, parts, scale=scale, softcap=softcap
        )
        out.index_copy_(0, group.rows, group_out)
        lse.index_copy_(0, group.rows, group_lse)
    return out, lse


def _attend_natively(
    q: Tensor,
    k_cache: KV,
    v_cache: KV,
    plan: PagedPlan,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Attend in one call; chunks of prompts add their private keys, and are merged, behind it."""
    merged = not plan.prefills
    out, lse = native.attend(
        q, k_cache, v_cache, plan.units, scale=scale, softcap=softcap, merged=merged
    )
    if not merged:
        for prefill in plan.prefills:
            _prefill(out[-1], lse[-1], q, k_cache, v_cache, prefill, scale=scale, softcap=softcap)
        out, lse = merge_states(out, lse)
    return out.to(q.dtype), lse


def _shared(
    q: Tensor,
    k_cache: KV,
    v_cache: KV,
    plan: PagedPlan,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor] | None:
    """Attend to the shared runs: a part per level, absent where a row is in no run of it.

    Shapes: result [levels, T, Hq, D] and [levels, T, Hq], float32; None without shared runs.
    """
    if not plan.passes:
        return None
    out = q.new_empty(plan.num_levels, *q.shape, dtype=torch.float32)
    lse = q.new_full((plan.num_levels, *q.shape[:2]), -torch.inf, dtype=torch.float32)
    for run in plan.passes:
        part_out, part_lse = shared_pass(q, k_cache, v_cache, run, scale=scale, softcap=softcap)
        out[run.level, run.rows] = part_out.float()
        lse[run.level, run.rows] = part_lse
    return out, lse


def _decode_compiled(
    q: Tensor,
    k_cache: KV,
    v_cache: KV,
    group: DecodeGroup,
    parts: tuple[Tensor, Tensor] | None,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    assert isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor)  # noqa: PT018, S101
    return compiled.decode(q, k_cache, v_cache, group, scale=scale, softcap=softcap, parts=parts)


def _prefill(  # noqa: PLR0913
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k_cache: KV,
    v_cache: KV,
    prefill: PrefillRows,
    *,
    scale: float,
    softcap: float | None,
) -> None:
    everything = slice(0, prefill.num_keys)
    parts = (
        pieces(k_cache, prefill.blocks, prefill.num_keys) if prefill.can_split else [everything]
    )
    for keys in parts:
        k = _dense(k_cache, prefill, keys)
        v = _dense(v_cache, prefill, keys)
        end = keys.start + k.shape[2]
        for tile in prefill.tiles:
            first, last = max(tile.keys.start, keys.start), min(tile.keys.stop, end)
            if first >= last:
                continue
            rows = slice(tile.row, tile.row + tile.num_rows)
            tile_q = q[rows].to(prefill.dtype).transpose(0, 1)[None]  # [1, Hq, rows, D]
            if tile.num_pad_rows:
                tile_q = pad(tile_q, (0, 0, 0, tile.num_pad_rows))
            seen = slice(first - keys.start, last - keys.start)
            mask = tile.mask
            if mask is not None:
                mask = mask[:, first - tile.keys.start : last - tile.keys.start]
            tile_out, tile_lse = attend_dense(
                tile_q,
                k[:, :, seen],
                v[:, :, seen],
                mask=mask,
                is_causal=tile.is_causal,
                scale=scale,
                softcap=softcap,
            )
            if len(parts) > 1 and mask is not None:  # a row may see nothing of a piece
                tile_lse = tile_lse.masked_fill(mask.isneginf().all(-1), -torch.inf)
            part_out = tile_out[0, :, : tile.num_rows].transpose(0, 1)
            part_lse = tile_lse[0, :, : tile.num_rows].transpose(0, 1)
            _put(out, lse, rows, part_out, part_lse, is_whole=len(parts) == 1)


def _put(
    out: Tensor,
    lse: Tensor,
    rows: slice | Tensor,
    part_out: Tensor,
    part_lse: Tensor,
    *,
    is_whole: bool,
) -> None:
    """Write what some rows attended to; merge it with what is there unless it is the whole."""
    if not is_whole:
        part_out, part_lse = merge_states(
            torch.stack([out[rows], part_out.to(out.dtype)]), torch.stack([lse[rows], part_lse])
        )
    out[rows] = part_out.to(out.dtype)
    lse[rows] = part_lse


def _dense(cache: KV, prefill: PrefillRows, keys: slice) -> Tensor:
    """Return some of a request's private keys, or values, padded: [1, Hkv, keys, D]."""
    tokens = load(cache, prefill.blocks, keys, prefill.dtype)
    if prefill.num_pad_keys:
        tokens = pad(tokens, (0, 0, 0, 0, 0, prefill.num_pad_keys))
    return tokens.transpose(0, 1)[None]


def _decode(  # noqa: PLR0913
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k_cache: KV,
    v_cache: KV,
    group: DecodeGroup,
    *,
    scale: float,
    softcap: float | None,
) -> None:
    num_requests = len(group.rows)
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = q.index_select(0, group.rows).view(num_requests, num_kv_heads, -1, head_dim)
    everything = slice(0, group.num_keys)
    lone = group.lone_blocks
    parts = [everything] if lone is None else pieces(k_cache, lone, group.num_keys)
    for keys in parts:
        hidden = None if group.is_even else _hidden(group, keys)
        mask = None
        if hidden is not None:
            mask = q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None]
        k = _gathered(k_cache, group, keys, hidden, q.dtype)
        v = _gathered(v_cache, group, keys, hidden, q.dtype)
        part_out, part_lse = attend_dense(heads, k, v, mask=mask, scale=scale, softcap=softcap)
        _put(
            out,
            lse,
            group.rows,
            part_out.reshape(num_requests, -1, head_dim),
            part_lse.reshape(num_requests, -1),
            is_whole=len(parts) == 1,
        )


def _hidden(group: DecodeGroup, keys: slice) -> Tensor:
    """Return which gathered keys are padding, or outside the window: bool [n, keys]."""
    key = torch.arange(keys.start, keys.stop, device=group.tables.device)
    return (key >= group.lengths[:, None]) | (key < group.first_keys[:, None])


def _gathered(
    cache: KV, group: DecodeGroup, keys: slice, hidden: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the members' private keys, or values: [n, Hkv, keys, D]."""
    num_requests = len(group.rows)
    if group.lone_blocks is not None:
        tokens = load(cache, group.lone_blocks, keys, dtype)[None]
    else:
        num_padded = group.tables.numel() * cache.shape[1]
        tokens = load(cache, group.tables.flatten(), slice(0, num_padded), dtype)
        tokens = tokens.view(num_requests, -1, *cache.shape[2:])[:, keys]
        if hidden is not None:  # slots never written may hold anything, and NaN times 0 is NaN
            tokens = tokens.masked_fill(hidden[:, :, None, None], 0)
    return tokens.transpose(1, 2)


def _main() -> None:
    """Print what it costs that blocks do not follow each other: they are copied first."""
    from kvway_kernels.plan import RequestRows, plan

    num_blocks = 256
    k_cache, v_cache = torch.randn(2, num_blocks, 16, 3, 64)
    print("rows x 4096 keys   in place ms   scattered ms   (9 and 3 heads of 64, float32)")  # noqa: T201
    for num_rows in (1, 16, 256):
        q, taken = torch.randn(num_rows, 9, 64), []
        for step_size in (1, 3):  # 3: every third block, until all have been there
            table = [i * step_size % num_blocks for i in range(num_blocks)]
            request = RequestRows(num_rows, 16 * num_blocks, table)
            step = plan([request], num_blocks=num_blocks, block_size=16, implementation="sdpa")
            times = []
            for _ in range(5):
                start = time.perf_counter()
                attend(q, k_cache, v_cache, step, scale=0.125)
                times.append(time.perf_counter() - start)
            taken.append(1e3 * min(times))
        print(f"{num_rows:4}               {taken[0]:11.2f}   {taken[1]:12.2f}")  # noqa: T201


if __name__ == "__main__":
    _main()
