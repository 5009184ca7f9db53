"""Random requests whose tables form trees of shared runs, in a cache of scattered blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from kvway_kernels import reference
from kvway_kernels.api import PagedPlan, RequestRows, SharedRun, cascade_attention, plan
from kvway_kernels.quant import KV, BlockLayout, Quantised, quantise

BLOCK_SIZE = 16

IMPLEMENTATIONS = ("reference", "sdpa", "compiled")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a tree is made of.

    Attributes:
        runs: (members, first block, blocks) each.
        lengths: (rows, keys) of each request.
    """

    runs: tuple[tuple[tuple[int, ...], int, int], ...]
    lengths: tuple[tuple[int, int], ...]


TREES = {
    "nothing shared": Shape((), ((1, 33), (4, 20))),
    "one prefix": Shape((((0, 1, 2), 0, 3),), ((1, 49), (1, 70), (1, 64))),
    "one token behind it": Shape((((0, 1), 0, 2),), ((1, 33), (1, 33))),
    "two groups and a lone one": Shape(
        (((0, 1), 0, 2), ((3, 4), 0, 4)), ((1, 40), (1, 50), (1, 45), (1, 90), (1, 65))
    ),
    "three levels": Shape(
        (((0, 1, 2, 3, 4), 0, 2), ((0, 1, 2), 2, 3), ((3, 4), 2, 1), ((1, 2), 5, 1)),
        ((1, 90), (1, 97), (1, 113), (1, 49), (1, 60)),
    ),
    "a level missing in the middle": Shape(
        (((0, 1, 2), 0, 2), ((0, 2), 4, 2)), ((1, 100), (1, 60), (1, 97))
    ),
    "not from the start": Shape((((0, 1), 1, 2),), ((1, 60), (1, 80))),
    "members apart": Shape((((0, 2, 5), 0, 3), ((1, 4), 0, 1)), ((1, 60),) * 6),
    "chunks, drafts and whole prompts": Shape(
        (((0, 1, 3), 0, 2), ((1, 3), 2, 1)), ((7, 39), (1, 80), (30, 30), (5, 60), (1, 2))
    ),
    "block border -1": Shape((((0, 1), 0, 1),), ((1, 31), (15, 31))),
    "block border": Shape((((0, 1), 0, 1),), ((1, 32), (16, 32))),
    "block border +1": Shape((((0, 1), 0, 2),), ((1, 33), (1, 33))),
}


@dataclass(frozen=True, slots=True)
class Tree:
    """Inputs of one step."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    requests: tuple[RequestRows, ...]
    shared: tuple[SharedRun, ...]
    scale: float
    softcap: float | None = None
    window: int | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @classmethod
    def of(
        cls,
        shape: Shape,
        *,
        heads: tuple[int, int] = (6, 2),
        head_dim: int = 64,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        seed: int = 0,
        poison: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
    ) -> Tree:
        """Make random requests in scattered blocks. Block 0 belongs to nobody.

        Where `poison` is given it fills every slot that no request owns. Where `kv_dtype` is, keys
        and values are quantised.
        """
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-keys // BLOCK_SIZE) for _, keys in shape.lengths]
        num_blocks = sum(counts) + 3
        order = list(range(1, num_blocks))
        random.Random(seed).shuffle(order)
        tables = [[order.pop() for _ in range(count)] for count in counts]
        for members, first, num in shape.runs:
            for member in members[1:]:
                tables[member][first : first + num] = tables[members[0]][first : first + num]
        size = (num_blocks, BLOCK_SIZE, heads[1], head_dim)
        k_cache = torch.randn(size, generator=generator).to(dtype)
        v_cache = torch.randn(size, generator=generator).to(dtype)
        if poison is not None:
            owned = _owned(tables, shape.lengths, num_blocks)
            k_cache[~owned] = v_cache[~owned] = poison
        num_rows = sum(rows for rows, _ in shape.lengths)
        q = torch.randn(num_rows, heads[0], head_dim, generator=generator).to(dtype)
        (k_cache, k_scale), (v_cache, v_scale) = (
            (numbers, None) if kv_dtype is None else _quantised(numbers, kv_dtype)
            for numbers in (k_cache, v_cache)
        )
        return cls(
            q,
            k_cache,
            v_cache,
            tuple(
                RequestRows(rows, keys, table)
                for (rows, keys), table in zip(shape.lengths, tables, strict=True)
            ),
            tuple(SharedRun(*run) for run in shape.runs),
            head_dim**-0.5,
            softcap,
            window,
            k_scale,
            v_scale,
        )

    def planned(self, implementation: str) -> PagedPlan:
        """Plan, with the runs shared."""
        return plan(
            self.requests,
            num_blocks=len(self.k_cache),
            block_size=BLOCK_SIZE,
            dtype=self.q.dtype,
            shared=self.shared,
            implementation=implementation,
            window=self.window,
        )

    def run(self, implementation: str) -> tuple[Tensor, Tensor]:
        """Attend."""
        return cascade_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.planned(implementation),
            scale=self.scale,
            softcap=self.softcap,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )

    def specified(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Return what the reference makes of it, in `dtype`."""
        return reference.paged_attention(
            self.q,
            *self.kv,
            self.requests,
            scale=self.scale,
            softcap=self.softcap,
            window=self.window,
            dtype=dtype,
        )

    @property
    def kv(self) -> tuple[KV, KV]:
        """The caches, with their scales where they are quantised."""
        if self.k_scale is None or self.v_scale is None:
            return self.k_cache, self.v_cache
        return Quantised(self.k_cache, self.k_scale), Quantised(self.v_cache, self.v_scale)

    def check_that_nan_shows(self, run: Callable[[Tree], tuple[Tensor, Tensor]]) -> None:
        """Check that NaN in the last query, or key, of a request is in the results of it alone.

        A mask that is added to scores gives that of a key to all rows of the request.
        """
        clean, clean_lse = run(self)
        ends = list(accumulate(request.num_queries for request in self.requests))
        for request, end in zip(self.requests, ends, strict=True):
            case = replace(self, q=self.q.clone())
            case.q[end - 1, -1] = torch.nan
            keys = self.k_cache if self.k_scale is None else self.k_scale
            marked = keys.clone()
            last = request.num_keys - 1
            marked[request.block_table[last // BLOCK_SIZE], last % BLOCK_SIZE, -1] = torch.nan
            in_keys = replace(self, k_cache=marked)
            if self.k_scale is not None:
                in_keys = replace(self, k_scale=marked)
            for broken in (case, in_keys):
                out, lse = run(broken)
                assert bool(out[end - 1, -1].isnan().all())
                assert bool(lse[end - 1, -1].isnan())
                for found, expected in ((out, clean), (lse, clean_lse)):
                    others = torch.ones(len(found), dtype=torch.bool)
                    others[end - request.num_queries : end] = False
                    torch.testing.assert_close(found[others], expected[others])


def _quantised(numbers: Tensor, dtype: torch.dtype) -> Quantised:
    num_blocks, block_size, num_kv_heads, head_dim = numbers.shape
    cache = BlockLayout(block_size, num_kv_heads, head_dim, dtype).allocate(num_blocks)
    codes = quantise(numbers, dtype)
    cache.data.view(torch.int8).copy_(codes.data.view(torch.int8))
    cache.scale.copy_(codes.scale)
    return cache


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative L2 error."""
    return float((actual.double() - expected).norm() / expected.norm())


def lse_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest error, relative where the lse is above 1."""
    return float(((actual.double() - expected).abs() / expected.abs().clamp(min=1)).max())


def _owned(
    tables: Sequence[Sequence[int]], lengths: Sequence[tuple[int, int]], num_blocks: int
) -> Tensor:
    owned = torch.zeros(num_blocks, BLOCK_SIZE, dtype=torch.bool)
    for table, (_, num_keys) in zip(tables, lengths, strict=True):
        for position in range(num_keys):
            owned[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = True
    return owned
