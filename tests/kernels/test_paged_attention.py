"""Paged attention and its parts against the specification, and the specification against float64.

Error budgets are relative L2 errors against float64, computed from the rounded inputs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvway_kernels import reference
from kvway_kernels.api import RequestRows, merge_states, paged_attention, plan, write_kv

BLOCK_SIZE = 16
SCALE = 0.125
BUDGET = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


@dataclass(frozen=True, slots=True)
class Case:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    requests: tuple[RequestRows, ...]

    @property
    def num_blocks(self) -> int:
        return len(self.k_cache)


def make_case(
    lengths: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    contiguous: bool = False,
    poison: float | None = None,
) -> Case:
    """Make random requests of (rows, keys) in scattered or contiguous blocks.

    Where `poison` is given it fills every slot that no request owns. Block 0 belongs to nobody.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-keys // BLOCK_SIZE) for _, keys in lengths]
    num_blocks = sum(counts) + 3
    order = list(range(1, num_blocks))
    if not contiguous:
        random.Random(seed).shuffle(order)
    shape = (num_blocks, BLOCK_SIZE, heads[1], head_dim)
    caches = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    q = torch.randn(sum(n for n, _ in lengths), heads[0], head_dim, generator=generator).to(dtype)
    requests = []
    owned = torch.zeros(num_blocks, BLOCK_SIZE, dtype=torch.bool)
    for (num_queries, num_keys), count in zip(lengths, counts, strict=True):
        blocks, order = order[:count], order[count:]
        requests.append(RequestRows(num_queries, num_keys, blocks))
        for position in range(num_keys):
            owned[blocks[position // BLOCK_SIZE], position % BLOCK_SIZE] = True
    if poison is not None:
        for cache in caches:
            cache[~owned] = poison
    return Case(q, caches[0], caches[1], tuple(requests))


def run(case: Case, *, fixed_shapes: bool = False) -> Tensor:
    step = plan(
        case.requests,
        num_blocks=case.num_blocks,
        block_size=BLOCK_SIZE,
        dtype=case.q.dtype,
        fixed_shapes=fixed_shapes,
        implementation="sdpa",
    )
    return paged_attention(case.q, case.k_cache, case.v_cache, step, scale=SCALE)


def specified(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return reference.paged_attention(
        case.q, case.k_cache, case.v_cache, case.requests, scale=SCALE, dtype=dtype
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


MIXES = {
    "one token": [(1, 1)],
    "whole prompt": [(40, 40)],
    "chunk after a prefix": [(20, 100)],
    "block border -1": [(1, 15), (15, 15), (15, 31)],
    "block border": [(1, 16), (16, 16), (16, 32)],
    "block border +1": [(1, 17), (17, 17), (17, 33)],
    "decode, even lengths": [(1, 70)] * 5,
    "decode, uneven lengths": [(1, n) for n in (3, 200, 17, 64, 180, 1)],
    "everything": [(1, 90), (33, 33), (1, 5), (7, 60), (1, 88), (2, 2)],
    "mask in two tiles": [(600, 610)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fixed_shapes", [False, True], ids=["default", "fixed"])
@pytest.mark.parametrize("mix", MIXES)
def test_within_the_error_budget_of_float64(
    *, mix: str, fixed_shapes: bool, dtype: torch.dtype
) -> None:
    case = make_case(MIXES[mix], dtype=dtype)
    expected, _ = specified(case, torch.float64)
    assert relative_error(run(case, fixed_shapes=fixed_shapes), expected) < BUDGET[dtype]


@pytest.mark.parametrize("has_matrix_unit", [False, True])
def test_within_the_error_budget_with_and_without_a_matrix_unit_for_bfloat16(
    monkeypatch: pytest.MonkeyPatch, *, has_matrix_unit: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_matrix_unit)
    case = make_case([(33, 33), (300, 310), (15, 60), (1, 20)], dtype=torch.bfloat16)
    step = plan(
        case.requests,
        num_blocks=case.num_blocks,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
        implementation="sdpa",
    )
    many = torch.bfloat16 if has_matrix_unit else torch.float32
    assert [rows.dtype for rows in step.prefills] == [many, many, torch.bfloat16]
    expected, _ = specified(case, torch.float64)
    assert relative_error(run(case), expected) < BUDGET[torch.bfloat16]


def test_a_step_planned_for_another_dtype_is_right() -> None:
    case = make_case(MIXES["everything"], dtype=torch.bfloat16)
    step = plan(
        case.requests,
        num_blocks=case.num_blocks,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        implementation="sdpa",
    )
    found = paged_attention(case.q, case.k_cache, case.v_cache, step, scale=SCALE)
    expected, _ = specified(case, torch.float64)
    assert relative_error(found, expected) < BUDGET[torch.bfloat16]


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 2), (8, 1)])
def test_every_grouping_of_heads(heads: tuple[int, int], head_dim: int) -> None:
    case = make_case(MIXES["everything"], heads=heads, head_dim=head_dim)
    expected, _ = specified(case, torch.float64)
    assert relative_error(run(case), expected) < BUDGET[torch.float32]


def test_specification_agrees_with_textbook_attention() -> None:
    """The specification itself: a dense softmax in float64 over one request's keys."""
    case = make_case([(5, 20)], contiguous=True, heads=(2, 2))
    keys = case.k_cache.flatten(0, 1)[16:36].double()  # blocks 1 and 2
    values = case.v_cache.flatten(0, 1)[16:36].double()
    scores = torch.einsum("qhd,khd->hqk", case.q.double(), keys) * SCALE
    hidden = torch.ones(5, 20, dtype=torch.bool).triu(16)
    scores = scores.masked_fill(hidden, -torch.inf)
    dense = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    out, lse = specified(case)
    assert relative_error(out, dense) < 1e-6
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1).T, atol=1e-5, rtol=0)


@pytest.mark.parametrize("fixed_shapes", [False, True], ids=["default", "fixed"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_other_slots_have_no_effect(*, poison: float, fixed_shapes: bool) -> None:
    mix = [*MIXES["everything"], *MIXES["decode, uneven lengths"]]
    clean = run(make_case(mix, poison=0.0), fixed_shapes=fixed_shapes)
    assert torch.equal(run(make_case(mix, poison=poison), fixed_shapes=fixed_shapes), clean)


def test_where_the_blocks_lie_has_no_effect() -> None:
    """The same tokens in contiguous blocks, read in place, and in scattered ones, gathered."""
    mix = MIXES["everything"]
    contiguous = make_case(mix, contiguous=True)
    order = torch.randperm(contiguous.num_blocks, generator=torch.Generator().manual_seed(1))
    place = order.argsort().tolist()
    scattered = Case(
        contiguous.q,
        contiguous.k_cache[order],
        contiguous.v_cache[order],
        tuple(
            RequestRows(r.num_queries, r.num_keys, [place[b] for b in r.block_table])
            for r in contiguous.requests
        ),
    )
    torch.testing.assert_close(run(scattered), run(contiguous), atol=2e-6, rtol=2e-6)


def test_blocks_that_only_begin_and_end_like_a_run_are_no_run() -> None:
    case = make_case([(64, 64), (1, 64)], contiguous=True)
    requests = tuple(
        RequestRows(r.num_queries, r.num_keys, [r.block_table[i] for i in (0, 2, 1, 3)])
        for r in case.requests
    )
    swapped = Case(case.q, case.k_cache, case.v_cache, requests)
    expected, _ = specified(swapped, torch.float64)
    assert relative_error(run(swapped), expected) < BUDGET[torch.float32]


def test_fixed_shapes_make_a_row_independent_of_its_company_bit_for_bit() -> None:
    """Alone or with others, whole or in chunks, prefilled or decoded: the same bits."""
    case = make_case([(700, 700), (1, 40), (30, 90)], heads=(9, 3))
    together = run(case, fixed_shapes=True)
    table = case.requests[0].block_table
    start = 0
    for size in (1, 16, 100, 3, 395, 1, 184):
        chunk = Case(
            case.q[start : start + size],
            case.k_cache,
            case.v_cache,
            (RequestRows(size, start + size, table),),
        )
        assert torch.equal(run(chunk, fixed_shapes=True), together[start : start + size])
        start += size
    assert start == 700


def test_rows_behind_the_step_are_zero() -> None:
    case = make_case([(1, 5), (3, 9)])
    padded = Case(
        torch.cat([case.q, torch.full_like(case.q, float("nan"))]),
        case.k_cache,
        case.v_cache,
        case.requests,
    )
    out = run(padded)
    assert torch.equal(out[:4], run(case))
    assert not out[4:].any()


def test_an_empty_step_attends_to_nothing() -> None:
    case = make_case([(2, 2)])
    step = plan([], num_blocks=case.num_blocks, block_size=BLOCK_SIZE)
    out = paged_attention(case.q, case.k_cache, case.v_cache, step, scale=SCALE)
    assert not out.any()


def test_extreme_scores_stay_finite() -> None:
    case = make_case(MIXES["everything"])
    loud = Case(case.q * 3e4, case.k_cache, case.v_cache, case.requests)
    expected, _ = specified(loud, torch.float64)
    assert relative_error(run(loud), expected) < 1e-2


def test_write_kv_stores_each_row_in_its_slot_and_nothing_else() -> None:
    case = make_case([(1, 18), (5, 33), (16, 16)])
    before = case.k_cache.clone(), case.v_cache.clone()
    step = plan(case.requests, num_blocks=case.num_blocks, block_size=BLOCK_SIZE)
    k = torch.randn(24, 2, 64)  # two rows more than the step has
    v = torch.randn(24, 2, 64)
    write_kv(case.k_cache, case.v_cache, k, v, step)
    row = 0
    for request in case.requests:
        for position in range(request.num_keys - request.num_queries, request.num_keys):
            block, offset = request.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE
            for cache, rows, old in zip((case.k_cache, case.v_cache), (k, v), before, strict=True):
                assert torch.equal(cache[block, offset], rows[row])
                cache[block, offset] = old[block, offset]
            row += 1
    assert row == 22
    assert torch.equal(case.k_cache, before[0])
    assert torch.equal(case.v_cache, before[1])


def test_decode_groups_bound_their_padding() -> None:
    """A long request does not make a crowd of short ones as long as itself."""
    lengths = [8000] + [20] * 40
    case_requests = [
        RequestRows(1, n, list(range(i * 500, i * 500 + -(-n // BLOCK_SIZE))))
        for i, n in enumerate(lengths)
    ]
    step = plan(case_requests, num_blocks=41 * 500, block_size=BLOCK_SIZE)
    padded = [len(group.rows) * group.num_keys for group in step.decodes]
    assert sum(len(group.rows) for group in step.decodes) == 41
    assert sum(padded) <= sum(lengths) / 0.75
    assert max(padded) <= 16_384


@pytest.mark.parametrize(
    ("request_rows", "problem"),
    [
        (RequestRows(0, 4, [0]), "at least 1 row"),
        (RequestRows(5, 4, [0]), "no more rows than keys"),
        (RequestRows(1, 17, [0]), "expected 2 blocks"),
        (RequestRows(1, 4, [9]), "outside"),
        (RequestRows(1, 4, [-1]), "outside"),
    ],
)
def test_plan_refuses_what_cannot_be(request_rows: RequestRows, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        plan([request_rows], num_blocks=9, block_size=BLOCK_SIZE)


def test_operations_refuse_shapes_that_do_not_fit() -> None:
    case = make_case([(3, 9)])
    step = plan(case.requests, num_blocks=case.num_blocks, block_size=BLOCK_SIZE)
    rows = torch.zeros(3, 2, 64)
    caches = case.k_cache, case.v_cache
    with pytest.raises(ValueError, match="expected at least 3 rows"):
        write_kv(*caches, rows[:2], rows, step)
    with pytest.raises(ValueError, match="bfloat16"):
        write_kv(*caches, rows.bfloat16(), rows, step)
    with pytest.raises(ValueError, match="planned for"):
        write_kv(case.k_cache[1:], case.v_cache[1:], rows, rows, step)
    strided = case.v_cache.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="contiguous"):
        write_kv(case.k_cache, strided, rows, rows, step)
    with pytest.raises(ValueError, match="expected two of"):
        write_kv(case.k_cache, case.v_cache[1:], rows, rows, step)
    with pytest.raises(ValueError, match="multiple of 2 heads"):
        paged_attention(torch.zeros(3, 5, 64), *caches, step, scale=1.0)
    with pytest.raises(ValueError, match="bfloat16"):
        paged_attention(case.q.bfloat16(), *caches, step, scale=1.0)


def partial_states(case: Case, parts: Sequence[slice]) -> tuple[Tensor, Tensor]:
    keys, values = case.k_cache.flatten(0, 1), case.v_cache.flatten(0, 1)
    states = [
        [reference.attention(row, keys[part], values[part], SCALE) for row in case.q]
        for part in parts
    ]
    out = torch.stack([torch.stack([o for o, _ in part]) for part in states])
    lse = torch.stack([torch.stack([s for _, s in part]) for part in states])
    return out, lse


def test_merged_parts_equal_the_whole() -> None:
    case = make_case([(4, 4), (1, 90)], contiguous=True)
    whole = partial_states(case, [slice(0, 90)])
    parts = partial_states(case, [slice(0, 16), slice(16, 17), slice(17, 17), slice(17, 90)])
    out, lse = merge_states(*parts)
    assert relative_error(out, whole[0][0].double()) < 1e-6
    torch.testing.assert_close(lse, whole[1][0], atol=2e-6, rtol=2e-6)


def test_merge_is_associative_and_commutative_within_the_budget() -> None:
    case = make_case([(4, 64)], contiguous=True)
    out, lse = partial_states(case, [slice(0, 9), slice(9, 30), slice(30, 64)])
    first = merge_states(out[:2], lse[:2])
    nested = merge_states(torch.stack([first[0], out[2]]), torch.stack([first[1], lse[2]]))
    for other in (nested, merge_states(out.flip(0), lse.flip(0))):
        torch.testing.assert_close(other, merge_states(out, lse), atol=1e-6, rtol=1e-6)


def test_absent_parts_change_no_bit_whatever_they_hold() -> None:
    out, lse = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2) * 50
    absent = torch.full_like(out, float("nan")), torch.full_like(lse, -torch.inf)
    merged = merge_states(torch.cat([absent[0], out]), torch.cat([absent[1], lse]))
    assert torch.equal(merged[0], out[0])
    assert torch.equal(merged[1], lse[0])
    nothing = merge_states(*absent)
    assert not nothing[0].any()
    assert torch.equal(nothing[1], absent[1][0])


def test_a_part_that_is_no_number_makes_the_whole_none() -> None:
    for other in (0.0, -torch.inf):
        parts = torch.tensor([other, torch.nan]).view(2, 1, 1)
        out, lse = merge_states(torch.ones(2, 1, 1, 4), parts)
        assert bool(out.isnan().all())
        assert bool(lse.isnan().all())


def test_merge_bridges_any_gap_between_parts() -> None:
    out = torch.tensor([1.0, 2.0]).view(2, 1, 1, 1)
    lse = torch.tensor([-46340.0, 145.0]).view(2, 1, 1)
    merged, merged_lse = merge_states(out, lse)
    assert merged.item() == 2.0
    assert merged_lse.item() == 145.0


def test_merge_keeps_the_dtype_and_computes_in_float32() -> None:
    out = torch.tensor([1.0, 2.0], dtype=torch.bfloat16).view(2, 1, 1, 1)
    merged, lse = merge_states(out, torch.zeros(2, 1, 1))
    assert merged.dtype is torch.bfloat16
    assert merged.item() == 1.5
    assert lse.dtype is torch.float32


@pytest.mark.parametrize(
    ("out", "lse"), [((2, 3, 1, 4), (2, 3)), ((0, 3, 1, 4), (0, 3, 1)), ((3, 1, 4), (3, 1))]
)
def test_merge_refuses_shapes_that_do_not_fit(out: tuple[int, ...], lse: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="with P at least 1"):
        merge_states(torch.zeros(out), torch.zeros(lse))
