"""Attention over quantised caches against float64: of the rounded inputs, and of the unrounded.

The first budget is that of any attention: reading quantised blocks adds no error of its own. The
second says what quantising costs, for keys and values of a normal distribution.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvway_kernels import blocks, quant, reference
from kvway_kernels.api import (
    PagedPlan,
    RequestRows,
    SharedRun,
    cascade_attention,
    chosen,
    paged_attention,
    plan,
    write_kv,
)
from kvway_kernels.quant import DTYPES, BlockLayout, Quantised, quantise

SCALE = 0.125
BLOCK_SIZE = 16
ROUNDED = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
UNROUNDED = {torch.int8: 0.012, torch.float8_e4m3fn: 0.05}

each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
each_implementation = pytest.mark.parametrize("implementation", ["reference", "sdpa"])


class World:
    """Requests in scattered blocks, some of which two or more share, in a quantised cache."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        lengths: Sequence[tuple[int, int]],
        prefix: Sequence[int] = (),
        heads: tuple[int, int] = (6, 2),
        head_dim: int = 64,
        q_dtype: torch.dtype = torch.float32,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        """Make requests of (rows, keys); those of `prefix` share their first two blocks."""
        generator = torch.Generator().manual_seed(0)
        counts = [-(-keys // block_size) for _, keys in lengths]
        ids = list(range(1, sum(counts) + 2))
        random.Random(0).shuffle(ids)
        tables = [[ids.pop() for _ in range(count)] for count in counts]
        for member in prefix:
            tables[member][:2] = tables[prefix[0]][:2]
        self.num_blocks = sum(counts) + 3
        self.block_size = block_size
        self.requests = tuple(
            RequestRows(rows, keys, table)
            for (rows, keys), table in zip(lengths, tables, strict=True)
        )
        self.shared = [SharedRun(tuple(prefix), 0, 2)] if prefix else []
        layout = BlockLayout(block_size, heads[1], head_dim, dtype)
        size = (self.num_blocks, block_size, heads[1], head_dim)
        # What is not quantised yet, of the queries' dtype, as a model gives it.
        self.k, self.v = (torch.randn(size, generator=generator).to(q_dtype) for _ in range(2))
        self.k_cache, self.v_cache = (
            layout.allocate(self.num_blocks),
            layout.allocate(self.num_blocks),
        )
        for cache, numbers in ((self.k_cache, self.k), (self.v_cache, self.v)):
            data, scale = quantise(numbers, dtype)
            cache.data.view(torch.int8).copy_(data.view(torch.int8))
            cache.scale.copy_(scale)
        num_rows = sum(rows for rows, _ in lengths)
        self.q = torch.randn(num_rows, heads[0], head_dim, generator=generator).to(q_dtype)

    def planned(self, *, implementation: str = "sdpa", **options: Any) -> PagedPlan:
        return plan(
            self.requests,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            dtype=self.q.dtype,
            implementation=implementation,
            **options,
        )

    def attend(self, *, softcap: float | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        return cascade_attention(
            self.q,
            self.k_cache.data,
            self.v_cache.data,
            self.planned(**options),
            scale=SCALE,
            softcap=softcap,
            k_scale=self.k_cache.scale,
            v_scale=self.v_cache.scale,
        )

    def expected(
        self, *, rounded: bool, softcap: float | None = None, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return attention in float64, by numbers as they are stored or as they were."""
        k: Tensor | Quantised = self.k_cache if rounded else self.k
        v: Tensor | Quantised = self.v_cache if rounded else self.v
        return reference.paged_attention(
            self.q,
            k,
            v,
            self.requests,
            scale=SCALE,
            softcap=softcap,
            window=window,
            dtype=torch.float64,
        )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


MIX = [(1, 90), (33, 70), (1, 40), (7, 60), (1, 88), (2, 2), (16, 16), (1, 1), (1, 33)]


@each_dtype
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("implementation", "fixed_shapes"), [("reference", False), ("sdpa", False), ("sdpa", True)]
)
def test_within_the_error_budgets_of_float64_of_rounded_and_of_unrounded_inputs(
    dtype: torch.dtype, implementation: str, q_dtype: torch.dtype, *, fixed_shapes: bool
) -> None:
    world = World(dtype, lengths=MIX, q_dtype=q_dtype)
    out, lse = world.attend(implementation=implementation, fixed_shapes=fixed_shapes)
    expected, expected_lse = world.expected(rounded=True)
    assert out.dtype == q_dtype
    assert relative_error(out, expected) < ROUNDED[q_dtype]
    assert relative_error(lse, expected_lse) < ROUNDED[q_dtype]
    unrounded, _ = world.expected(rounded=False)
    assert relative_error(out, unrounded) < UNROUNDED[dtype]


@each_dtype
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_heads_and_head_sizes(dtype: torch.dtype, group: int, head_dim: int) -> None:
    lengths = [(1, 33), (5, 40), (1, 31)]
    world = World(dtype, lengths=lengths, heads=(2 * group, 2), head_dim=head_dim)
    out, _ = world.attend()
    assert relative_error(out, world.expected(rounded=True)[0]) < ROUNDED[torch.float32]


@each_dtype
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 50, 20])
def test_shared_runs_soft_caps_and_windows(
    dtype: torch.dtype, softcap: float | None, window: int | None
) -> None:
    world = World(dtype, lengths=MIX, prefix=(0, 1, 2, 3, 4))
    out, lse = world.attend(shared=world.shared, softcap=softcap, window=window)
    expected, expected_lse = world.expected(rounded=True, softcap=softcap, window=window)
    assert relative_error(out, expected) < ROUNDED[torch.float32]
    assert relative_error(lse, expected_lse) < ROUNDED[torch.float32]


@each_dtype
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 30])
def test_long_requests_and_runs_are_attended_to_in_pieces(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, softcap: float | None, window: int | None
) -> None:
    """With pieces of 24 keys, which are no multiple of the block size."""
    monkeypatch.setattr(blocks, "_PIECE_KEYS", 24)
    largest = 0

    def watched(taken: Quantised, dtype: torch.dtype) -> Tensor:
        nonlocal largest
        largest = max(largest, taken.shape[0] * taken.shape[1])
        return quant.dequantise(taken, dtype)

    monkeypatch.setattr(blocks, "dequantise", watched)
    world = World(dtype, lengths=[(1, 95), (20, 90), (5, 61)], prefix=(0, 1))
    runs = world.shared
    for shared in ([], runs):
        out, lse = world.attend(shared=shared, softcap=softcap, window=window)
        expected, expected_lse = world.expected(rounded=True, softcap=softcap, window=window)
        assert relative_error(out, expected) < ROUNDED[torch.float32]
        assert relative_error(lse, expected_lse) < ROUNDED[torch.float32]
    assert 24 <= largest <= 48  # the blocks that 24 keys can lie in


def test_only_what_is_read_in_place_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_PIECE_KEYS", 24)
    quantised = BlockLayout(BLOCK_SIZE, 2, 64, torch.int8).allocate(5)
    plain = torch.zeros(quantised.shape)
    in_pieces = [slice(0, 24), slice(24, 48), slice(48, 70)]
    scattered = torch.tensor([4, 0, 3, 1, 2])
    assert blocks.pieces(plain, slice(0, 5), 70) == [slice(0, 70)]
    assert blocks.pieces(plain, scattered, 70) == in_pieces
    assert blocks.pieces(quantised, slice(0, 5), 70) == in_pieces
    assert blocks.pieces(quantised, scattered, 70) == in_pieces


@each_dtype
def test_writing_stores_the_rows_of_a_step_and_attention_reads_what_was_stored(
    dtype: torch.dtype,
) -> None:
    world = World(dtype, lengths=MIX)
    step = world.planned()
    cache = [BlockLayout(BLOCK_SIZE, 2, 64, dtype).allocate(world.num_blocks) for _ in range(2)]
    rows = [side.flatten(0, 1)[step.slot_mapping] for side in (world.k, world.v)]
    write_kv(
        cache[0].data,
        cache[1].data,
        rows[0],
        rows[1],
        step,
        k_scale=cache[0].scale,
        v_scale=cache[1].scale,
    )
    for written, whole in zip(cache, (world.k_cache, world.v_cache), strict=True):
        for part, expected in zip(written, whole, strict=True):
            part_slots = part.flatten(0, 1).view(torch.uint8)
            expected_slots = expected.flatten(0, 1).view(torch.uint8)
            assert torch.equal(part_slots[step.slot_mapping], expected_slots[step.slot_mapping])
            untouched = torch.ones(len(part_slots), dtype=torch.bool)
            untouched[step.slot_mapping] = False
            assert not part_slots[untouched].any()


@each_dtype
@each_implementation
def test_slots_of_nobody_have_no_effect(dtype: torch.dtype, implementation: str) -> None:
    world = World(dtype, lengths=MIX, prefix=(0, 1, 4))
    expected = world.attend(implementation=implementation, shared=world.shared)
    owned = torch.zeros(world.num_blocks, BLOCK_SIZE, dtype=torch.bool)
    for request in world.requests:
        for position in range(request.num_keys):
            block = request.block_table[position // BLOCK_SIZE]
            owned[block, position % BLOCK_SIZE] = True
    for cache in (world.k_cache, world.v_cache):
        cache.data.view(torch.int8)[~owned] = 0x7F  # NaN in fp8
        cache.scale[~owned] = torch.nan
    out, lse = world.attend(implementation=implementation, shared=world.shared)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def test_scales_that_do_not_fit_are_refused() -> None:
    world = World(torch.int8, lengths=[(1, 4)])
    step, (k, k_scale), (v, v_scale) = world.planned(), world.k_cache, world.v_cache
    plain = torch.zeros(k.shape)

    def attend(k: Tensor, v: Tensor, **scales: Any) -> Tensor:
        return paged_attention(world.q, k, v, step, scale=SCALE, **scales)

    with pytest.raises(ValueError, match=r"k_cache is torch\.int8 and k_scale None"):
        attend(k, v)
    with pytest.raises(ValueError, match=r"v_cache is torch\.int8 and v_scale None"):
        attend(k, v, k_scale=k_scale)
    with pytest.raises(ValueError, match=r"k_cache is torch\.float32 and k_scale torch"):
        attend(plain, plain, k_scale=k_scale, v_scale=v_scale)
    with pytest.raises(ValueError, match=r"v_scale is torch.float32 .*expected torch.bfloat16"):
        attend(k, v, k_scale=k_scale, v_scale=v_scale.float())
    with pytest.raises(ValueError, match=r"k_scale is torch.bfloat16 \[4, 16, 1\]"):
        attend(k, v, k_scale=k_scale[..., :1], v_scale=v_scale)
    with pytest.raises(ValueError, match="a block of k_cache or of k_scale is not contiguous"):
        attend(k.mT.contiguous().mT, v, k_scale=k_scale, v_scale=v_scale)


def test_a_step_planned_for_what_cannot_read_them_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'compiled' does not read quantised blocks .* of 40 .* on cpu"
    ):
        chosen("compiled", is_quantised=True, head_dim=40)
    assert chosen("auto", is_quantised=True, head_dim=40) == ("sdpa", "quantised blocks")
    assert chosen("auto", is_quantised=True, device="cuda") == ("sdpa", "quantised blocks")
    assert chosen("auto", is_quantised=True, head_dim=48) == chosen("auto")
    world = World(torch.int8, lengths=[(1, 4)], head_dim=40)
    step = dataclasses.replace(world.planned(), implementation="compiled")
    with pytest.raises(ValueError, match="planned for 'compiled', which does not read quantised"):
        paged_attention(
            world.q,
            world.k_cache.data,
            world.v_cache.data,
            step,
            scale=SCALE,
            k_scale=world.k_cache.scale,
            v_scale=world.v_cache.scale,
        )
