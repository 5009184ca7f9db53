"""Paged decode by torch.compile: keys and values are read where they lie, never copied.

On a GPU, in bfloat16, and for odd sizes of heads; in float32 on a CPU native.py does it.

    slots [n, keys]  ->  scores = sum over D of q x K[slot]      one pass over the keys
                         weights = exp(score - largest)          small: a number per key and head
                         sum over keys of weights x V[slot]      one pass over the values

The compiler fuses the look-up of a slot into both sums, so that nothing as large as the keys is
ever written. Values are summed up in chunks of 32 keys, and these then: a chunk's values stay in
the processor's nearest cache while all heads read them, and sums of sums round less. Partial
results of shared runs are merged in the same graph. One graph serves any number of requests, keys,
levels and blocks: these sizes are marked as unknown when it is made.
"""

from __future__ import annotations

import functools
import importlib
import time
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from kvway_kernels.plan import DecodeGroup

_LOG2_E: Final = 1.4426950408889634
_LN2_HIGH: Final = 0.693359375
_LN2_LOW: Final = -2.12194440e-4
_POLYNOMIAL: Final = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
"""Of (exp(r) - 1 - r) / r^2 for |r| <= ln(2) / 2, from r^5 down: Cephes' expf."""

_OPTIONS: Final[dict[str, str | int | Callable[..., Any]]] = {
    # Products and sums in one instruction: that rounds once less.
    "cpp.enable_floating_point_contract_flag": "fast",
    # To compile torch's headers first takes longer than two graphs save by it, and needs openssl.
    "cpp_cache_precompile_headers": False,
}


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    group: DecodeGroup,
    *,
    scale: float,
    softcap: float | None = None,
    parts: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend the rows of a group to their private keys, and merge that with parts.

    Shapes: q [T, Hq, D]; caches [num_blocks, block_size, Hkv, D], contiguous; parts [P, T, Hq, D]
    and [P, T, Hq] as for `merge_states`.

    Args:
        q: the queries.
        k_cache: the keys.
        v_cache: the values.
        group: the requests.
        scale: factor on the scores.
        softcap: scores become softcap * tanh(score / softcap).
        parts: what shared runs gave; out and lse, float32. Rows of other groups are not read.

    Returns:
        out: [n, Hq, D], like q.
        lse: [n, Hq] float32, nats.
    """
    with torch.no_grad():
        part_out, part_lse = parts or (None, None)
        if group.is_whole_step and group.num_requests == len(q):
            # A tensor of its own: marks stay inside, and strides are the same in every step. A
            # graph depends on strides, also of a lone row, which `contiguous` would leave alone.
            rows = q.clone(memory_format=torch.contiguous_format)
        else:
            rows = q.index_select(0, group.rows)
            if part_out is not None and part_lse is not None:
                part_out = part_out.index_select(1, group.rows)
                part_lse = part_lse.index_select(1, group.rows)
        keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        _mark_unknown(rows, keys, values, group.lengths, group.first_keys, dims=1)
        _mark_unknown(group.slots, part_out, part_lse, dims=2)
        out, lse = _compiled()(
            rows,
            keys,
            values,
            group.slots,
            group.lengths,
            group.first_keys,
            _scalar(scale),
            None if softcap is None else _scalar(softcap),
            part_out,
            part_lse,
        )
        return out, lse


def _decode(  # noqa: PLR0913, PLR0917
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    first_keys: Tensor,
    scale: Tensor,
    softcap: Tensor | None,
    part_out: Tensor | None,
    part_lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return out [n, Hq, D] and lse [n, Hq]. The graph; all sizes but heads' are unknown to it."""
    num_kv_heads, head_dim = keys.shape[1:]
    group = q.shape[1] // num_kv_heads
    grouped = q.float().view(-1, 1, 1, num_kv_heads, group, head_dim)
    # [n, chunks, keys of a chunk, Hkv, G]
    scores = (grouped * _taken(keys, slots)[..., None, :]).sum(-1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    num_chunks, size = slots.shape[1:]
    chunk = torch.arange(num_chunks, device=slots.device)[:, None]
    key = chunk * size + torch.arange(size, device=slots.device)
    is_seen = (key < lengths[:, None, None]) & (key >= first_keys[:, None, None])
    scores = torch.where(is_seen[..., None, None], scores, -torch.inf)
    largest = scores.amax((1, 2), keepdim=True)
    weights = _exp(scores - largest)
    total = weights.sum(2).sum(1).flatten(1)
    # Slots of keys that are not seen are other keys of the request: finite, times zero.
    weighted = weights[..., None] * _taken(values, slots)[..., None, :]
    summed = weighted.sum(2).sum(1).flatten(1, 2)
    largest = largest[:, 0, 0].flatten(1)
    if part_out is not None and part_lse is not None:
        highest = torch.maximum(largest, part_lse.amax(0))
        own = torch.exp(largest - highest)
        others = torch.exp(part_lse - highest)
        merged = torch.where(others[..., None] == 0, 0.0, others[..., None] * part_out).sum(0)
        summed = summed * own[..., None] + merged
        total = total * own + others.sum(0)
        largest = highest
    out = (summed / total[..., None]).to(q.dtype)
    return out, largest + torch.log(total)


def _taken(tokens: Tensor, slots: Tensor) -> Tensor:
    """Return tokens by their slots, which the plan has checked: float32 [*slots, Hkv, D]."""
    taken: Tensor = torch.ops.aten._unsafe_index(tokens, [slots])  # noqa: SLF001
    return taken.float()


def _exp(x: Tensor) -> Tensor:
    """Return exp(x) for x <= 0, with a relative error below 2e-7; below -87: zero.

    x = n ln(2) + r; the power of two is put together from its bits. Only operations that the
    vectors of any CPU have.
    """
    n = torch.round(torch.clamp(x, min=-88.0) * _LOG2_E)
    r = (torch.clamp(x, min=-88.0) - n * _LN2_HIGH) - n * _LN2_LOW
    p = r * _POLYNOMIAL[0] + _POLYNOMIAL[1]
    for coefficient in _POLYNOMIAL[2:]:
        p = p * r + coefficient
    power = ((n + 127.0) * 2.0**23).to(torch.int32).view(torch.float32)
    return torch.where(x < -87.0, 0.0, (p * r * r + r + 1.0) * power)


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the compiled graph; it is made at its first call, and once per dtype and heads."""
    with warnings.catch_warnings():
        # To import the compiler warns of what torch itself should not use any more.
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._inductor.compile_fx")
    return torch.compile(_decode, fullgraph=True, dynamic=False, options=dict(_OPTIONS))


def _mark_unknown(*tensors: Tensor | None, dims: int) -> None:
    """Tell the compiler that leading sizes say nothing about the next call's."""
    mark: Any = torch._dynamo.decorators.mark_unbacked  # noqa: SLF001 (no public name)
    for tensor in tensors:
        if tensor is not None and not hasattr(tensor, "_dynamo_unbacked_indices"):
            mark(tensor, list(range(dims)))


@functools.lru_cache(maxsize=64)
def _scalar(value: float) -> Tensor:
    """Return a number as a tensor: a graph is not made anew for another one."""
    with torch.inference_mode(mode=False):
        return torch.tensor(value, dtype=torch.float32)


def _main() -> None:
    """Print how long a layer's decode takes, gathered and compiled."""
    from kvway_kernels.api import cascade_attention, plan
    from kvway_kernels.rows import RequestRows

    print("requests x keys   sdpa ms   compiled ms   (9 and 3 heads of 64, bfloat16, best of 10)")  # noqa: T201
    for num_requests, num_blocks in ((1, 64), (8, 64), (16, 16)):
        total = num_requests * num_blocks
        order = torch.randperm(total).tolist()
        tables = [order[i * num_blocks : (i + 1) * num_blocks] for i in range(num_requests)]
        k_cache, v_cache = torch.randn(2, total, 16, 3, 64).bfloat16()
        q = torch.randn(num_requests, 9, 64).bfloat16()
        times = []
        for name in ("sdpa", "compiled"):
            requests = [RequestRows(1, 16 * num_blocks, table) for table in tables]
            step = plan(requests, num_blocks=total, block_size=16, implementation=name)
            cascade_attention(q, k_cache, v_cache, step, scale=0.125)
            taken = []
            for _ in range(10):
                start = time.perf_counter()
                cascade_attention(q, k_cache, v_cache, step, scale=0.125)
                taken.append(time.perf_counter() - start)
            times.append(1e3 * min(taken))
        print(f"{num_requests:8} x {16 * num_blocks:4}   {times[0]:7.2f}   {times[1]:11.2f}")  # noqa: T201


if __name__ == "__main__":
    _main()
