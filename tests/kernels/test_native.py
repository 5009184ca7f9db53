"""Shared runs and decode rows on a CPU: right, wherever and however they are stored.

Skipped where torch finds no compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import codecache

from kvway_kernels import choice, native
from kvway_kernels.api import chosen
from tests.kernels.trees import TREES, Shape, Tree, lse_error, relative_error

_NAME, _REASON = chosen("auto")

pytestmark = [
    pytest.mark.skipif(_NAME != "compiled", reason=_REASON),
    pytest.mark.timeout(300),  # it compiles
]

LONG = Shape(
    (((0, 1, 2, 3), 0, 40), ((1, 3), 40, 20)),
    ((1, 641), (1, 1_300), (9, 700), (1, 961)),
)
"""Several tiles of keys in each unit."""

LONGER = Shape((((0, 1, 2, 3), 0, 90),), ((1, 1_460),) * 4)
"""A run that is worth dividing among threads."""


@pytest.fixture(autouse=True)
def no_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has one, the C++ would not be taken for bfloat16."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


KINDS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.float32, torch.int8),
    "fp8": (torch.float32, torch.float8_e4m3fn),
    "int8 for bfloat16": (torch.bfloat16, torch.int8),
    "fp8 for bfloat16": (torch.bfloat16, torch.float8_e4m3fn),
}
"""Of queries, and of keys and values where these are quantised."""

BUDGET = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
LSE_BUDGET = {torch.float32: 2e-6, torch.bfloat16: 1e-4}

each_kind = pytest.mark.parametrize("kind", KINDS)


def check(case: Tree) -> None:
    """Compare with the reference in float64, which reads the same cache."""
    assert native.can_attend(case.q, case.kv[0])
    out, lse = case.run("compiled")
    expected, expected_lse = case.specified()
    assert out.dtype == case.q.dtype
    assert relative_error(out, expected) < BUDGET[out.dtype]
    # Chunks are attended to by torch, which in bfloat16 rounds what it dequantises.
    is_rounded = out.dtype == torch.bfloat16 and case.k_scale is not None
    budgets = [
        1e-2 if is_rounded and request.num_queries > 1 else LSE_BUDGET[out.dtype]
        for request in case.requests
        for _ in range(request.num_queries)
    ]
    for row, budget in enumerate(budgets):
        assert lse_error(lse[row], expected_lse[row]) < budget


@each_kind
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 60])
@pytest.mark.parametrize("tree", TREES)
def test_trees_windows_and_soft_caps(
    tree: str, window: int | None, softcap: float | None, kind: str
) -> None:
    dtype, kv_dtype = KINDS[kind]
    check(Tree.of(TREES[tree], window=window, softcap=softcap, dtype=dtype, kv_dtype=kv_dtype))


@each_kind
def test_bfloat16_loses_little_more_than_rounding_the_result(kind: str) -> None:
    """The independent low-precision reference: the exact result, rounded to bfloat16 once."""
    dtype, kv_dtype = KINDS[kind]
    if dtype == torch.float32:
        pytest.skip("its budget is far below that")
    for shape in (*TREES.values(), LONG):
        case = Tree.of(shape, dtype=dtype, kv_dtype=kv_dtype)
        expected, _ = case.specified()
        rounded = relative_error(expected.bfloat16(), expected)
        assert relative_error(case.run("compiled")[0], expected) < 3 * rounded + 1e-4


@each_kind
@pytest.mark.parametrize("heads", [(3, 3), (4, 2), (9, 3), (8, 2), (5, 1), (8, 1)])
def test_every_grouping_of_heads(heads: tuple[int, int], kind: str) -> None:
    dtype, kv_dtype = KINDS[kind]
    for shape in (TREES["three levels"], TREES["chunks, drafts and whole prompts"], LONG):
        check(Tree.of(shape, heads=heads, dtype=dtype, kv_dtype=kv_dtype))


@pytest.mark.parametrize("head_dim", [16, 80, 128, 256])
def test_sizes_of_heads(head_dim: int) -> None:
    for shape in (TREES["three levels"], LONG):
        check(Tree.of(shape, head_dim=head_dim))


@pytest.mark.parametrize("head_dim", [80, 128])
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_sizes_of_heads_and_kinds(head_dim: int, kind: str) -> None:
    dtype, kv_dtype = KINDS[kind]
    for shape in (TREES["three levels"], LONG):
        check(Tree.of(shape, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype))


@pytest.mark.parametrize("num_rows", [*range(1, 14), 16, 17, 31, 32, 33, 47, 95, 96, 97, 200])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_every_number_of_rows(num_rows: int, kind: str) -> None:
    """Rows fill vectors, products, and bands of 96, or fall short of them."""
    dtype, kv_dtype = KINDS[kind]
    members = tuple(range(num_rows))
    lengths = tuple((1, 145 + row % 3) for row in members)
    shape = Shape(((members, 0, 9),) if num_rows > 1 else (), lengths)
    check(Tree.of(shape, heads=(1, 1), dtype=dtype, kv_dtype=kv_dtype))


@pytest.mark.usefixtures("two_threads")
@each_kind
def test_two_threads_give_what_one_gives(kind: str) -> None:
    dtype, kv_dtype = KINDS[kind]
    alone = Shape((), ((1, 2_001), (20, 30)))
    for shape in (LONG, alone, Shape((((*range(40),), 0, 9),), ((1, 150),) * 40), LONGER):
        case = Tree.of(shape, dtype=dtype, kv_dtype=kv_dtype)
        torch.set_num_threads(1)
        expected = case.run("compiled")
        torch.set_num_threads(2)
        check(case)
        for found, each in zip(case.run("compiled"), expected, strict=True):
            torch.testing.assert_close(found, each, atol=BUDGET[dtype], rtol=BUDGET[dtype])


@pytest.mark.usefixtures("two_threads")
def test_threads_share_a_long_run_and_a_lone_request_but_no_small_one() -> None:
    parts = {}
    for name, shape in (("long run", LONGER), ("lone", Shape((), ((1, 2_001),))), ("small", LONG)):
        step = Tree.of(shape).planned("compiled").units
        parts[name] = step.num_parts
        num_rows = sum(rows for rows, _ in shape.lengths)
        covered = torch.zeros(step.num_parts, num_rows, dtype=torch.int64)
        num_pairs = 0
        for first, num, _, key, end, part in step.table.tolist():
            covered[part, step.rows[first : first + num]] += 1
            num_pairs += num * (end - key)
        assert int(covered.max()) == 1, "no row is in two units of a part"
        sizes = [(end - key) * (1 + num) for _, num, _, key, end, _ in step.table.tolist()]
        assert sizes == sorted(sizes, reverse=True), "the large come first"
        chunk_keys = 16 * 40  # of a chunk only what it shares is here
        assert num_pairs == sum(
            keys if rows == 1 else rows * chunk_keys for rows, keys in shape.lengths
        )
    assert parts == {"long run": 3, "lone": 2, "small": 3}
    torch.set_num_threads(1)
    assert Tree.of(LONGER).planned("compiled").units.num_parts == 2


@each_kind
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_slots_of_nobody_have_no_effect(poison: float, kind: str) -> None:
    dtype, kv_dtype = KINDS[kind]
    for name, shape in TREES.items():
        clean = Tree.of(shape, poison=0.0, dtype=dtype, kv_dtype=kv_dtype).run("compiled")
        found = Tree.of(shape, poison=poison, dtype=dtype, kv_dtype=kv_dtype).run("compiled")
        assert torch.equal(found[0], clean[0]), name
        assert torch.equal(found[1], clean[1]), name


def test_small_codes_of_fp8_count() -> None:
    """Those below the least normal number of the format, beside one large one."""
    case = Tree.of(TREES["one prefix"], kv_dtype=torch.float8_e4m3fn)
    assert case.k_scale is not None
    assert case.v_scale is not None
    for codes, scale in ((case.k_cache, case.k_scale), (case.v_cache, case.v_scale)):
        small = torch.randint(0, 8, codes.shape, generator=torch.Generator().manual_seed(1))
        codes.view(torch.int8).copy_(small)
        scale.fill_(64.0)
    check(case)


def test_weights_are_rounded_to_bfloat16_without_bias() -> None:
    """Cut off in place of rounded, they would add up to a value that rounds to less than one."""
    case = Tree.of(
        Shape((((0, 1, 2, 3, 4), 0, 40),), ((1, 641),) * 5), heads=(6, 1), dtype=torch.bfloat16
    )
    out, _ = replace(case, v_cache=torch.ones_like(case.v_cache)).run("compiled")
    assert bool((out == 1).all())


def test_scores_that_rise_and_scores_that_are_extreme() -> None:
    case = Tree.of(LONG)
    rising = replace(case, k_cache=case.k_cache.clone())
    for place, block in enumerate(case.requests[1].block_table):  # each tile's largest is larger
        rising.k_cache[block] *= 1 + place / 10
    check(rising)
    for shape in (*TREES.values(), LONG):
        loud = Tree.of(shape)
        loud = replace(loud, q=loud.q * 3e4)
        out, lse = loud.run("compiled")
        expected, expected_lse = loud.specified()
        assert relative_error(out, expected) < 1e-2
        assert lse_error(lse, expected_lse) < 5e-5


def test_rows_behind_the_step_and_empty_steps_are_absent() -> None:
    for name in ("nothing shared", "one prefix", "chunks, drafts and whole prompts"):
        case = Tree.of(TREES[name])
        longer = replace(case, q=torch.cat([case.q, torch.full_like(case.q[:2], torch.nan)]))
        out, lse = longer.run("compiled")
        torch.testing.assert_close(out[:-2], case.run("compiled")[0])
        assert not out[-2:].any()
        assert bool(lse[-2:].isneginf().all())
    case = replace(Tree.of(TREES["one prefix"]), requests=(), shared=())
    out, lse = case.run("compiled")
    assert not out.any()
    assert bool(lse.isneginf().all())


def test_where_scattered_blocks_lie_changes_no_bit() -> None:
    case = Tree.of(LONG)
    order = torch.cat([torch.arange(1, len(case.k_cache)).flip(0), torch.zeros(1).long()])
    place = order.argsort().tolist()
    moved = replace(
        case,
        k_cache=case.k_cache[order],
        v_cache=case.v_cache[order],
        requests=tuple(
            replace(r, block_table=[place[b] for b in r.block_table]) for r in case.requests
        ),
    )
    for found, expected in zip(moved.run("compiled"), case.run("compiled"), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("has_unit", [False, True])
def test_what_attends_in_cpp_is_chosen_by_what_there_is(
    monkeypatch: pytest.MonkeyPatch, *, has_unit: bool
) -> None:
    """Only it reads quantised blocks, so that it does also where a matrix unit would be faster."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_unit)
    for kind, (dtype, kv_dtype) in KINDS.items():
        is_quantised = kv_dtype is not None
        is_native = dtype == torch.float32 or is_quantised or not has_unit
        assert choice.is_native(dtype, is_quantised=is_quantised, head_dim=64) == is_native, kind
        case = Tree.of(TREES["one prefix"], dtype=dtype, kv_dtype=kv_dtype)
        assert native.can_attend(case.q, case.kv[0]) == is_native, kind
        assert chosen("auto", dtype=dtype, is_quantised=is_quantised) == (
            "compiled",
            f"the fastest here, {'in C++' if is_native else 'as a graph of torch'}",
        )
        assert chosen("compiled", dtype=dtype, is_quantised=is_quantised)[1].startswith(
            "asked for,"
        )
        if is_quantised:
            check(case)
    for other, head_dim in ((torch.float16, 64), (torch.float32, 40), (torch.float32, 1040)):
        assert not choice.is_native(other, head_dim=head_dim)
        assert chosen("auto", dtype=other, head_dim=head_dim, is_quantised=True)[0] == "sdpa"


@each_kind
def test_what_is_no_number_shows(kind: str) -> None:
    """In a query, or in a key that others do not see: nobody takes a failure for an answer."""
    dtype, kv_dtype = KINDS[kind]
    for shape in (TREES["three levels"], TREES["nothing shared"], LONG):
        case = Tree.of(shape, dtype=dtype, kv_dtype=kv_dtype)
        case.check_that_nan_shows(lambda tree: tree.run("compiled"))


def test_no_graph_is_compiled() -> None:
    before = counters["stats"]["unique_graphs"]
    for shape in TREES.values():
        Tree.of(shape).run("compiled")
    assert counters["stats"]["unique_graphs"] == before


def test_it_is_compiled_without_headers_of_torch_and_without_trying_out_vectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Either takes longer than the kernel itself."""

    def fail(*_args: object, **_keywords: object) -> None:
        raise AssertionError("nobody asked for that")

    for name in ("pick_vec_isa", "_precompile_header"):
        monkeypatch.setattr(codecache, name, fail)
    codecache.CppPythonBindingsCodeCache.cache_clear()
    assert callable(native._kernel.__wrapped__(64, "Float32", is_bfloat16=False))
    for source in native._SOURCES:
        assert "torch/" not in source.read_text(encoding="utf-8")
