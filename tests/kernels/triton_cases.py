"""What the tests of the Triton kernels compute, in the process that may run them.

Triton decides at its import whether kernels are compiled or interpreted, and torch.compile
imports it too. So the interpreter gets a process of its own: `interpret` is called there first,
and nothing here imports triton before a function needs it.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvway_kernels.api import cascade_attention
from kvway_kernels.merging import merge_states
from kvway_kernels.plan import RequestRows, plan
from kvway_kernels.quant import BlockLayout, Quantised, dequantise, quantise
from tests.kernels.trees import BLOCK_SIZE, TREES, Shape, Tree, lse_error, relative_error

LONG = Shape(
    (((0, 1, 2), 0, 17), ((0, 1), 17, 2)),
    ((1, 310), (1, 305), (3, 290), (1, 530), (9, 33)),
)
"""Two levels; runs and private keys of several chunks; a prompt; more pairs than a small tile."""


class Errors(NamedTuple):
    """Against the reference in float64."""

    out: float
    lse: float


def interpret() -> None:
    """Make this process interpret kernels, and fill what is allocated but not written with NaN."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    _patch_once()


def _patch_once() -> None:
    """Let the interpreter replace Triton's functions once, not at each call of a kernel's helper.

    Half of its time goes into that, and this process never compiles anything.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    scopes: dict[str, Any] = {}

    def once(function: Any) -> Any:
        if function.__module__ not in scopes:
            scopes[function.__module__] = patch(function)
            scopes[function.__module__].restore = lambda: None
        return scopes[function.__module__]

    interpreter._patch_lang = once


def attended(
    case: Tree,
    *,
    device: str = "cpu",
    num_sms: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what the kernels make of a case."""
    from kvway_kernels.triton.attention import attend

    step = plan(
        case.requests,
        num_blocks=len(case.k_cache),
        block_size=BLOCK_SIZE,
        device=device,
        shared=case.shared,
        implementation="sdpa",  # the kernels use only what every plan holds
        window=case.window,
    )
    out, lse = attend(
        case.q.to(device),
        case.k_cache.to(device),
        case.v_cache.to(device),
        step,
        scale=case.scale,
        softcap=case.softcap,
        k_scale=k_scale,
        v_scale=v_scale,
        num_sms=num_sms,
    )
    return out.cpu(), lse.cpu()


def errors(
    shape: Shape,
    *,
    heads: tuple[int, int] = (3, 1),
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    softcap: float | None = None,
    poison: float | None = None,
    loudness: float = 1.0,
    device: str = "cpu",
    num_sms: int | None = None,
) -> Errors:
    """Attend to a random tree and compare."""
    case = Tree.of(
        shape,
        heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        window=window,
        softcap=softcap,
        poison=poison,
    )
    case = replace(case, q=case.q * loudness)
    return compared(attended(case, device=device, num_sms=num_sms), case)


def compared(found: tuple[Tensor, Tensor], case: Tree) -> Errors:
    """Return how far a result is from what is specified."""
    out, lse = case.specified()
    return Errors(relative_error(found[0], out), lse_error(found[1], lse))


def quantised_errors(dtype: torch.dtype, *, device: str = "cpu") -> Errors:
    """Attend to quantised blocks, scales inside, NaN where nothing was written; compare."""
    case = Tree.of(LONG, heads=(3, 1), poison=0.0)
    layout = BlockLayout(BLOCK_SIZE, 1, 64, dtype)
    read, given, scales = [], [], []
    for cache in (case.k_cache, case.v_cache):
        blocks = layout.allocate(len(cache), device)
        codes, scale = quantise(cache, dtype)
        blocks.data.copy_(codes)
        blocks.scale.copy_(scale)
        blocks.scale[scale == 0] = torch.nan
        read.append(blocks.data)
        scales.append(blocks.scale)
        given.append(dequantise(Quantised(codes, scale)))
    found = attended(
        replace(case, k_cache=read[0], v_cache=read[1]),
        device=device,
        k_scale=scales[0],
        v_scale=scales[1],
    )
    return compared(found, replace(case, k_cache=given[0], v_cache=given[1]))


def is_what_the_api_calls() -> bool:
    """Tell whether `cascade_attention` gives the kernels' bits for a plan made for triton."""
    case = Tree.of(TREES["one prefix"], heads=(2, 1), head_dim=16, softcap=3.0)
    step = plan(case.requests, num_blocks=len(case.k_cache), block_size=16, shared=case.shared)
    step = replace(step, implementation="triton")  # which `plan` refuses on a CPU
    found = cascade_attention(
        case.q, case.k_cache, case.v_cache, step, scale=case.scale, softcap=case.softcap
    )
    return all(torch.equal(a, b) for a, b in zip(found, attended(case), strict=True))


def is_moved_without_a_trace() -> bool:
    """Tell whether blocks in another order give the same bits."""
    case = Tree.of(TREES["three levels"], heads=(2, 1), head_dim=16)
    order = torch.randperm(len(case.k_cache), generator=torch.Generator().manual_seed(1))
    place = order.argsort().tolist()
    moved = replace(
        case,
        k_cache=case.k_cache[order],
        v_cache=case.v_cache[order],
        requests=tuple(
            RequestRows(r.num_queries, r.num_keys, [place[b] for b in r.block_table])
            for r in case.requests
        ),
    )
    pairs = zip(attended(case), attended(moved), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def is_a_decode_row_alone_the_same() -> bool:
    """Tell whether a decode row that shares nothing gets the same bits with and without others."""
    shape = Shape((((0, 1), 0, 2),), ((1, 40), (1, 50), (1, 530), (3, 20)))
    together = Tree.of(shape, heads=(2, 1), head_dim=16)
    alone = replace(together, q=together.q[2:3], requests=together.requests[2:3], shared=())
    found, expected = attended(alone), attended(together)
    return all(torch.equal(a[0], b[2]) for a, b in zip(found, expected, strict=True))


def check_that_nan_shows() -> None:
    """Check that what is no number is not merged away."""
    Tree.of(TREES["one prefix"], heads=(2, 1), head_dim=16).check_that_nan_shows(attended)


def padded(device: str = "cpu") -> tuple[list[bool], list[bool]]:
    """Return where (out is zero, lse is -inf) for q with three rows, in a step of one."""
    case = Tree.of(Shape((), ((1, 5),)), heads=(2, 1), head_dim=16)
    case = replace(case, q=torch.cat([case.q, torch.full((2, 2, 16), torch.nan)]))
    return _nothing(*attended(case, device=device))


def empty(device: str = "cpu") -> tuple[list[bool], list[bool]]:
    """Return the same for q with two rows, in a step of none."""
    case = Tree.of(Shape((), ((2, 5),)), heads=(2, 1), head_dim=16)
    return _nothing(*attended(replace(case, requests=()), device=device))


def _nothing(out: Tensor, lse: Tensor) -> tuple[list[bool], list[bool]]:
    return (out == 0).flatten(1).all(1).tolist(), (lse == -torch.inf).all(1).tolist()


class Merged(NamedTuple):
    """Differences of merged rows from what `merge_states` makes of their slots."""

    out: list[float]
    lse: list[float]


def merged() -> Merged:
    """Merge four rows of two heads: nothing there; one of three; nine, one absent; far apart."""
    from kvway_kernels.triton import kernels

    generator = torch.Generator().manual_seed(0)
    row_slots = [0, 2, 5, 14, 16]
    part_out = torch.randn(16, 2, 48, generator=generator)
    part_lse = torch.randn(16, 2, generator=generator) * 20
    for slot in (0, 1, 2, 4, 9):
        part_out[slot] = torch.nan
        part_lse[slot] = -torch.inf
    part_lse[14], part_lse[15] = -46340.0, 145.0
    out, lse = torch.full((4, 2, 48), torch.nan), torch.full((4, 2), torch.nan)
    kernels.merge[(8,)](
        part_out,
        part_lse,
        torch.tensor(row_slots, dtype=torch.int32),
        out,
        lse,
        *out.stride()[:2],
        NUM_HEADS=2,
        HEAD_DIM=48,
        PADDED_DIM=64,
        NUM_SLOTS=4,
    )
    differences = Merged([], [])
    for row, (first, end) in enumerate(itertools.pairwise(row_slots)):
        expected = merge_states(part_out[first:end, None], part_lse[first:end, None])
        differences.out.append(float((out[row] - expected[0][0]).abs().max()))
        is_same = lse[row] == expected[1][0]  # also where both are -inf
        differences.lse.append(float((lse[row] - expected[1][0]).abs().where(~is_same, 0.0).max()))
    return differences
