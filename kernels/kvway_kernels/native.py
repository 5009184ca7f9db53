"""Shared runs and decode rows in one call on a CPU: native.cpp, compiled at first use.

    unit    rows x keys -> part      a shared run with all rows of its members, or a decode row
                                     with its private keys; or a piece of either
    part    [T, Hq, D] and lse       no row is in two units of a part; merged in the same call

Blocks are read where they are, wherever that is and however their numbers are stored: float32,
bfloat16, or codes with scales (see `quant`), which become float32 in registers. A run's keys stay
in the processor's cache while all rows attend to them. Beside the queries and results of the rows
of a unit, a thread keeps one tile of at most 128 keys and their values, and scores of at most 96
rows for it: below 256 KB up to heads of 1024, however long a run is.

Torch's compiler cannot be told to do so: it knows no product whose factors stay in registers, and
its products of matrices are calls that copy one factor each time. It is asked for the compiler and
its options, and keeps what they make.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import time
import warnings
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from kvway_kernels.blocks import int64
from kvway_kernels.choice import is_native
from kvway_kernels.quant import KV, SCALE_DTYPE, Quantised

_SOURCES: Final = tuple(Path(__file__).with_name(f"native.{kind}") for kind in ("hpp", "cpp"))

_ARGUMENTS: Final = (
    "const float*",  # q
    *("const void*",) * 4,  # k, v and their scales
    *("const int64_t*",) * 3,  # rows, blocks, units
    *("float*",) * 2,  # out, lse
    *("const float",) * 2,  # scale, softcap
    *("const int64_t",) * 12,
)

_KINDS: Final = {
    torch.float32: "Float32",
    torch.bfloat16: "BFloat16",
    torch.int8: "Int8",
    torch.float8_e4m3fn: "Float8",
}
"""What keys and values may be stored as, and its name in native.cpp."""

_PIECE_KEYS: Final = 512
"""Units of fewer keys are not divided among threads: each piece gives a part to be merged."""

_PIECES_PER_THREAD: Final = 4
"""A unit that is more than such a share of a thread's work is divided."""


class Work(NamedTuple):
    """Rows and the keys that all of them attend to.

    Attributes:
        rows: of the step.
        first_block: where its blocks begin among those of the step.
        first_key: first key in its blocks.
        end_key: behind its last key.
        level: no row is in two of one level. The last one is that of private keys.
    """

    rows: Sequence[int]
    first_block: int
    first_key: int
    end_key: int
    level: int

    @property
    def cost(self) -> int:
        """Share of a step's time: each key is read once, and meets every row."""
        return (self.end_key - self.first_key) * (1 + len(self.rows))


@dataclass(frozen=True, slots=True)
class Units:
    """What one call attends to.

    Attributes:
        rows: of all units, one after the other: int64.
        blocks: those of the step: int64.
        table: of each unit: first of its rows and how many, first of its blocks, first key and
            end of the keys in its blocks, part: int64 [units, 6].
        num_parts: the last is of private keys.
    """

    rows: Tensor
    blocks: Tensor
    table: Tensor
    num_parts: int


def units(work: Sequence[Work], blocks: Tensor, *, num_levels: int) -> Units:
    """List what is to do, the large first, and divided where threads would wait for it.

    Args:
        work: of the step.
        blocks: of the step, one after the other: int64.
        num_levels: of the work.
    """
    num_threads = torch.get_num_threads()
    share = sum(each.cost for each in work) / (_PIECES_PER_THREAD * num_threads)
    sizes = [_piece_keys(each, share, num_threads) for each in work]
    num_pieces = [1] * num_levels
    for each, size in zip(work, sizes, strict=True):
        pieces = -(-(each.end_key - each.first_key) // size)
        num_pieces[each.level] = max(num_pieces[each.level], pieces)
    first_parts = [0, *itertools.accumulate(num_pieces)]
    rows, table = array("q"), array("q")
    for size, each in sorted(zip(sizes, work, strict=True), key=lambda pair: -pair[1].cost):
        for part, first in enumerate(
            range(each.first_key, each.end_key, size), first_parts[each.level]
        ):
            end = min(first + size, each.end_key)
            table.extend((len(rows), len(each.rows), each.first_block, first, end, part))
        rows.extend(each.rows)
    return Units(_tensor(rows), blocks, _tensor(table).view(-1, 6), first_parts[-1])


def _piece_keys(work: Work, share: float, num_threads: int) -> int:
    """Return how many keys of some work are a unit."""
    num_keys = work.end_key - work.first_key
    pieces = min(math.ceil(work.cost / share), num_threads, num_keys // _PIECE_KEYS)
    return -(-num_keys // pieces) if pieces > 1 and num_threads > 1 else num_keys


def can_attend(q: Tensor, k_cache: KV) -> bool:
    """Return whether queries, and what is in the caches, are of a kind that `attend` is for."""
    is_quantised = isinstance(k_cache, Quantised)
    return is_native(q.dtype, device=q.device, is_quantised=is_quantised, head_dim=q.shape[2])


def attend(
    q: Tensor,
    k_cache: KV,
    v_cache: KV,
    step: Units,
    *,
    scale: float,
    softcap: float | None = None,
    merged: bool,
) -> tuple[Tensor, Tensor]:
    """Attend as the units say.

    Shapes: q [T, Hq, D]; caches [num_blocks, block_size, Hkv, D], of which a block is contiguous.

    Args:
        q: the queries.
        k_cache: the keys, float32, bfloat16 or quantised.
        v_cache: the values, likewise.
        step: the units. Their rows and blocks have been checked.
        scale: factor on the scores.
        softcap: scores become softcap * tanh(score / softcap).
        merged: merge the parts; else they are returned, the last for the caller to add to.

    Returns:
        out: float32 [T, Hq, D], or [parts, T, Hq, D], undefined where lse is -inf; merged ones
            are zero there.
        lse: float32 [T, Hq], or [parts, T, Hq]; nats; -inf where a row is in no unit.
    """
    num_rows, num_heads, head_dim = q.shape
    out = q.new_empty(step.num_parts, *q.shape, dtype=torch.float32)
    lse = q.new_full((step.num_parts, num_rows, num_heads), -torch.inf, dtype=torch.float32)
    (k, k_scale), (v, v_scale) = (
        cache if isinstance(cache, Quantised) else (cache, _NO_SCALES)
        for cache in (k_cache, v_cache)
    )
    if num_rows:
        _kernel(head_dim, _KINDS[k.dtype], is_bfloat16=q.dtype == torch.bfloat16)(
            q.float().contiguous(),
            k,
            v,
            k_scale,
            v_scale,
            step.rows,
            step.blocks,
            step.table,
            out,
            lse,
            scale,
            0.0 if softcap is None else softcap,
            k.stride(0),
            v.stride(0),
            k_scale.stride(0),
            v_scale.stride(0),
            len(step.table),
            step.num_parts,
            num_rows,
            num_heads,
            k.shape[2],
            k.shape[1],
            int(merged),
            torch.get_num_threads(),
        )
    return (out[0], lse[0]) if merged else (out, lse)


_NO_SCALES: Final = torch.zeros(0, dtype=SCALE_DTYPE)


def _tensor(values: array[int]) -> Tensor:
    return int64(values) if values else torch.zeros(0, dtype=torch.int64)


@functools.cache
def _kernel(head_dim: int, kind: str, *, is_bfloat16: bool) -> Callable[..., None]:
    """Compile for heads, a kind of keys and of queries, or find what was compiled before."""
    with warnings.catch_warnings():
        # To import the compiler warns of what torch itself should not use any more.
        warnings.simplefilter("ignore", DeprecationWarning)
        codecache: Any = importlib.import_module("torch._inductor.codecache")
    config: Any = importlib.import_module("torch._inductor.config")
    source = "".join(path.read_text(encoding="utf-8") for path in _SOURCES)
    source = source.replace("HEAD_DIM", str(head_dim)).replace("KV_KIND", kind)
    source = source.replace("QUERIES_ARE_BFLOAT16", str(is_bfloat16).lower())
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
