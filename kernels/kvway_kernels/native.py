"""Shared runs and decode rows in one call, float32 on a CPU: native.cpp, compiled at first use.

    unit    rows x blocks -> part      a shared run with all rows of its members,
                                       or a decode row with its private keys
    part    [T, Hq, D] and lse         no row is in two units of a part; merged in the same call

Blocks are read where they are, wherever that is, and a run's keys stay in the processor's cache
while all rows attend to them. Torch's compiler cannot be told to do so: it knows no product whose
factors stay in registers, and its products of matrices are calls that copy one factor each time.
It is asked for the compiler and its options, and keeps what they make.
"""

from __future__ import annotations

import functools
import importlib
import time
import warnings
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from kvway_kernels.blocks import int64
from kvway_kernels.rows import PrivateRows

_SOURCE: Final = Path(__file__).with_name("native.cpp")

_ARGUMENTS: Final = (
    *("const float*",) * 3,  # q, k, v
    *("const int64_t*",) * 3,  # rows, blocks, units
    *("const float*", "float*", "float*"),  # numbers, out, lse
    *("const int64_t",) * 8,
)

_HEAD_STEP: Final = 16
"""Head sizes are a multiple of it: two vectors of 32 bytes."""

_LARGEST_HEAD: Final = 1024

_SPLIT_ROWS: Final = 16
"""A unit is divided among threads only into ones of so many rows: each copies all of its keys."""


@dataclass(frozen=True, slots=True)
class Units:
    """What one call attends to.

    Attributes:
        rows: of all units, one after the other: int64.
        blocks: likewise.
        table: of each unit: first of its rows and how many, first of its blocks, first key and
            end of the keys in its blocks, part: int64 [units, 6].
        num_parts: the last is the private keys.
    """

    rows: Tensor
    blocks: Tensor
    table: Tensor
    num_parts: int


def units(
    runs: Iterable[tuple[Sequence[int], Sequence[int], int]],
    singles: Iterable[PrivateRows],
    *,
    num_runs_parts: int,
    block_size: int,
) -> Units:
    """List the units of a step, the large ones first.

    Args:
        runs: rows, blocks and part of each shared run.
        singles: requests of one row, with their private keys.
        num_runs_parts: parts of the runs: 0 to this number.
        block_size: tokens per block.
    """
    rows, blocks, table = array("q"), array("q"), array("q")
    num_threads = torch.get_num_threads()
    for run_rows, run_blocks, part in runs:
        size = max(_SPLIT_ROWS, -(-len(run_rows) // num_threads))
        for first in range(0, len(run_rows), size):
            own = run_rows[first : first + size]
            end = len(run_blocks) * block_size
            table.extend((len(rows) + first, len(own), len(blocks), 0, end, part))
        rows.extend(run_rows)
        blocks.extend(run_blocks)
    for single in sorted(singles, key=lambda single: -single.num_keys):
        first_key = max(0, single.first_key)
        table.extend((len(rows), 1, len(blocks), first_key, single.num_keys, num_runs_parts))
        rows.append(single.row)
        blocks.extend(single.blocks)
    return Units(
        rows=_tensor(rows),
        blocks=_tensor(blocks),
        table=_tensor(table).view(-1, 6),
        num_parts=num_runs_parts + 1,
    )


def can_attend(q: Tensor) -> bool:
    """Return whether queries are of a kind that `attend` is for."""
    head_dim = q.shape[2]
    is_step = head_dim % _HEAD_STEP == 0 and 0 < head_dim <= _LARGEST_HEAD
    return is_step and q.dtype == torch.float32 and q.device.type == "cpu"


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: Units,
    *,
    scale: float,
    softcap: float | None = None,
    merged: bool,
) -> tuple[Tensor, Tensor]:
    """Attend as the units say.

    Shapes: q [T, Hq, D]; caches [num_blocks, block_size, Hkv, D], contiguous.

    Args:
        q: the queries, float32.
        k_cache: the keys.
        v_cache: the values.
        step: the units. Their rows and blocks have been checked.
        scale: factor on the scores.
        softcap: scores become softcap * tanh(score / softcap).
        merged: merge the parts; else they are returned, the last for the caller to add to.

    Returns:
        out: [T, Hq, D], or [parts, T, Hq, D], undefined where lse is -inf; merged ones are zero.
        lse: [T, Hq], or [parts, T, Hq]; nats; -inf where a row is in no unit.
    """
    num_rows, num_heads, head_dim = q.shape
    out = q.new_empty(step.num_parts, *q.shape)
    lse = q.new_full((step.num_parts, num_rows, num_heads), -torch.inf)
    if num_rows:
        _kernel(head_dim)(
            q.contiguous(),
            k_cache,
            v_cache,
            step.rows,
            step.blocks,
            step.table,
            _numbers(scale, 0.0 if softcap is None else softcap),
            out,
            lse,
            len(step.table),
            step.num_parts,
            num_rows,
            num_heads,
            k_cache.shape[2],
            k_cache.shape[1],
            int(merged),
            torch.get_num_threads(),
        )
    return (out[0], lse[0]) if merged else (out, lse)


@functools.lru_cache(maxsize=64)
def _numbers(scale: float, softcap: float) -> Tensor:
    return torch.tensor([scale, softcap])


def _tensor(values: array[int]) -> Tensor:
    return int64(values) if values else torch.zeros(0, dtype=torch.int64)


@functools.cache
def _kernel(head_dim: int) -> Callable[..., None]:
    """Compile for a size of heads, or find what was compiled before."""
    with warnings.catch_warnings():
        # To import the compiler warns of what torch itself should not use any more.
        warnings.simplefilter("ignore", DeprecationWarning)
        codecache: Any = importlib.import_module("torch._inductor.codecache")
    config: Any = importlib.import_module("torch._inductor.config")
    source = _SOURCE.read_text(encoding="utf-8").replace("HEAD_DIM", str(head_dim))
    settings = {
        # Products and sums in one instruction: that rounds once less.
        "cpp.enable_floating_point_contract_flag": "fast",
        "cpp_cache_precompile_headers": False,  # the source has none of torch's
    }
    with config.patch(settings):
        # Torch need not find out by a program of its own which vectors there are: the compiler is
        # asked for what this processor has.
        kernel: Callable[..., None] = codecache.CppPythonBindingsCodeCache.load_pybinding(
            _ARGUMENTS, source, needs_vec_isa=False
        )
    return kernel


def _main() -> None:
    """Print times of a step with a shared run and without, and by torch's own operations."""
    from kvway_kernels.api import RequestRows, SharedRun, cascade_attention, plan

    torch.set_num_threads(1)
    print("requests x shared + own   sdpa, once ms   once ms   each ms   (9 and 3 heads of 64)")  # noqa: T201
    for n, blocks in ((2, 32), (8, 64), (32, 256)):
        tables = [[*range(blocks), blocks + 2 * i, blocks + 2 * i + 1] for i in range(n)]
        requests = [RequestRows(1, 16 * len(table), table) for table in tables]
        total = blocks + 2 * n
        k_cache, v_cache = torch.randn(2, total, 16, 3, 64)
        q = torch.randn(n, 9, 64)
        run = SharedRun(tuple(range(n)), 0, blocks)
        best = []
        for name, shared in (("sdpa", (run,)), ("compiled", (run,)), ("compiled", ())):
            step = plan(
                requests, num_blocks=total, block_size=16, shared=shared, implementation=name
            )
            taken = []
            for _ in range(10):
                start = time.perf_counter()
                cascade_attention(q, k_cache, v_cache, step, scale=0.125)
                taken.append(time.perf_counter() - start)
            best.append(1e3 * min(taken))
        columns = "   ".join(f"{ms:9.2f}" for ms in best)
        print(f"{n:8} x {16 * blocks:6} + 32   {columns}")  # noqa: T201


if __name__ == "__main__":
    _main()
