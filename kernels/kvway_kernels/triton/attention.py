"""Attention over a paged cache by two Triton kernels: partial results of units, then a merge.

    plan -> units (once per plan) -> partial_attention, small tiles -> merge -> out, lse
                                  -> partial_attention, large tiles /

`python -m kvway_kernels.triton.attention` prints the units of a small step.

No part of this has run on a GPU yet. The tests run the kernels in Triton's interpreter, on a CPU
and slowly (set `TRITON_INTERPRET=1` before Python imports triton), and compile them for sm_90.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kvway_kernels.plan import PagedPlan, RequestRows, SharedRun, plan
from kvway_kernels.triton import kernels
from kvway_kernels.triton.units import LARGE_TILE, SMALL_TILE, Units, work_units

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
"""The kernels run in Triton's interpreter, on CPU tensors: for tests."""

_INTERPRETED_SMS = 32
"""Multiprocessors to cut work for where there is no device."""

_MERGED_SLOTS = 8


class Tile(NamedTuple):
    """How the partial kernel is compiled: chosen so that it spills no register on sm_90.

    Attributes:
        num_pairs: pairs of a tile.
        num_keys: keys per iteration.
        num_warps: warps of a program.
        num_stages: loads in flight: depth of the software pipeline.
    """

    num_pairs: int
    num_keys: int
    num_warps: int
    num_stages: int


def large_tile(dtype: torch.dtype) -> int:
    """Return the pairs of the larger tile: in float32 it would not fit into the registers."""
    return SMALL_TILE if dtype == torch.float32 else LARGE_TILE


def tile(num_pairs: int, dtype: torch.dtype, head_dim: int) -> Tile:
    """Return how the partial kernel is compiled.

    Args:
        num_pairs: `SMALL_TILE` or `LARGE_TILE`.
        dtype: the queries'.
        head_dim: numbers per head.
    """
    if dtype == torch.float32:
        return Tile(num_pairs, 32 if head_dim <= 128 else 16, num_warps=4, num_stages=3)
    if num_pairs == LARGE_TILE and head_dim > 128:
        return Tile(num_pairs, 32, num_warps=8, num_stages=3)
    return Tile(num_pairs, 64, num_warps=4, num_stages=3)


def constants(  # noqa: PLR0913
    shape: Tile,
    dtype: torch.dtype,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    has_softcap: bool,
    is_quantised: bool,
) -> dict[str, int | bool]:
    """Return what the partial kernel is compiled for, by parameter."""
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_SIZE": block_size,
        "HAS_SOFTCAP": has_softcap,
        "IS_QUANTISED": is_quantised,
        # The interpreter multiplies bfloat16 as if it were integers.
        "DOT_IN_FLOAT32": dtype == torch.float32 or IS_INTERPRETED,
        "NUM_PAIRS": shape.num_pairs,
        "NUM_KEYS": shape.num_keys,
    }


def attend(  # noqa: PLR0913
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: PagedPlan,
    *,
    scale: float,
    softcap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_sms: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend as `kvway_kernels.api.cascade_attention` promises; arguments already checked.

    Shapes: q [>= T, Hq, D]; k_cache, v_cache [num_blocks, block_size, Hkv, D], of q's dtype or,
    with scales, int8 or float8_e4m3fn; k_scale, v_scale [num_blocks, block_size, Hkv]. The last
    dimension of each is contiguous; the others are strided.

    Args:
        q: the queries.
        k_cache: one layer's keys.
        v_cache: its values.
        plan: the step. Its units are cut at the first call and kept with it.
        scale: factor on the scores before the softmax.
        softcap: scores become softcap * tanh(score / softcap). None: as they are.
        k_scale: what each token's and head's keys are multiplied by.
        v_scale: what its values are multiplied by.
        num_sms: multiprocessors to cut the work for. None: the device's. It changes which keys
            are summed up together, so results by rounding only.

    Returns:
        out: [like q]; rows behind the first T are zero.
        lse: [len(q), Hq] float32, nats; -inf behind the first T.

    Raises:
        ValueError: the tensors are not on a CUDA device, and this is not the interpreter.

    A decode row's result depends on its own request and on the shared runs it is a member of, not
    on the other rows of the step.
    """
    if q.device.type != "cuda" and not IS_INTERPRETED:
        raise ValueError(
            f"the tensors are on {q.device}: the Triton kernels need a CUDA device; on a CPU use "
            "implementation `sdpa` or `compiled`"
        )
    num_heads, head_dim = q.shape[1:]
    sms = num_sms or _num_sms(q.device)
    group = num_heads // k_cache.shape[2]
    units = work_units(
        plan, group=group, num_sms=sms, device=q.device, large_tile=large_tile(q.dtype)
    )
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    if len(q) > plan.num_rows:
        out[plan.num_rows :] = 0.0
        lse[plan.num_rows :] = -torch.inf
    if plan.num_rows:
        part_out = q.new_empty(len(units.slots), num_heads, head_dim, dtype=torch.float32)
        part_lse = q.new_empty(len(units.slots), num_heads, dtype=torch.float32)
        partials = (part_out, part_lse)
        _partial(q, (k_cache, v_cache), (k_scale, v_scale), units, partials, scale, softcap)
        _merge(partials, units, out, lse)
    return out, lse


@functools.cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _partial(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    scales: tuple[Tensor | None, Tensor | None],
    units: Units,
    partials: tuple[Tensor, Tensor],
    scale: float,
    softcap: float | None,
) -> None:
    """Fill the slots of all units: one launch for small tiles, one for large ones."""
    block_size, num_kv_heads, head_dim = caches[0].shape[1:]
    strides = (*q.stride()[:2], *caches[0].stride()[:3], *caches[1].stride()[:3])
    for some in scales:
        strides += (0, 0) if some is None else some.stride()[:2]
    for part, num_pairs in (
        (units.units[: units.num_small], SMALL_TILE),
        (units.units[units.num_small :], units.large_tile),
    ):
        if not len(part):
            continue
        shape = tile(num_pairs, q.dtype, head_dim)
        kernels.partial_attention[(len(part) * num_kv_heads,)](
            q,
            *caches,
            *scales,
            part,
            units.rows,
            units.bounds,
            units.blocks,
            units.slots,
            *partials,
            scale,
            softcap or 1.0,
            *strides,
            **constants(
                shape,
                q.dtype,
                num_heads=q.shape[1],
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                block_size=block_size,
                has_softcap=softcap is not None,
                is_quantised=scales[0] is not None,
            ),
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )


def _merge(partials: tuple[Tensor, Tensor], units: Units, out: Tensor, lse: Tensor) -> None:
    num_heads, head_dim = out.shape[1:]
    kernels.merge[((len(units.row_slots) - 1) * num_heads,)](
        *partials,
        units.row_slots,
        out,
        lse,
        *out.stride()[:2],
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        NUM_SLOTS=_MERGED_SLOTS,
        num_warps=max(1, min(4, head_dim // 32)),
    )


def _main() -> None:
    """Print the units of a step: two requests that share 40 blocks, and a chunk of a prompt."""
    table = list(range(40))
    requests = [
        RequestRows(1, 700, [*table, 50, 51, 52, 53]),
        RequestRows(1, 650, [*table, 60]),
        RequestRows(40, 90, [70, 71, 72, 73, 74, 75]),
    ]
    step = plan(requests, num_blocks=80, block_size=16, shared=[SharedRun((0, 1), 0, 40)])
    units = work_units(step, group=3, num_sms=132, device=torch.device("cpu"))
    print("unit  tile  rows  pairs from  keys")  # noqa: T201
    for index, unit in enumerate(units.units.tolist()):
        row_start, num_rows, pair, _, first, end, _, is_open = unit
        rows = units.rows[row_start : row_start + num_rows].tolist()
        print(  # noqa: T201
            f"{index:4}  {SMALL_TILE if index < units.num_small else LARGE_TILE:4}  "
            f"{rows[0]}..{rows[-1]}  {pair:6}  {first}..{end}"
            f"{'' if is_open else '  each row up to its own'}"
        )
    print(f"{len(units.slots)} partial results for {step.num_rows} rows")  # noqa: T201


if __name__ == "__main__":
    _main()
