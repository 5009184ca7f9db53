"""Shared runs and decode rows in float32 on a CPU: right, wherever keys are, on any threads.

Skipped where torch finds no compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import codecache

from kvway_kernels import native
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


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def check(case: Tree) -> None:
    """Compare with the reference in float64."""
    assert native.can_attend(case.q)
    out, lse = case.run("compiled")
    expected, expected_lse = case.specified()
    assert relative_error(out, expected) < 2e-6
    assert lse_error(lse, expected_lse) < 2e-6


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 60])
@pytest.mark.parametrize("tree", TREES)
def test_trees_windows_and_soft_caps(tree: str, window: int | None, softcap: float | None) -> None:
    check(Tree.of(TREES[tree], window=window, softcap=softcap))


@pytest.mark.parametrize("heads", [(3, 3), (4, 2), (9, 3), (8, 2), (5, 1), (8, 1)])
def test_every_grouping_of_heads(heads: tuple[int, int]) -> None:
    for shape in (TREES["three levels"], TREES["chunks, drafts and whole prompts"], LONG):
        check(Tree.of(shape, heads=heads))


@pytest.mark.parametrize("head_dim", [16, 80, 128, 256])
def test_sizes_of_heads(head_dim: int) -> None:
    for shape in (TREES["three levels"], LONG):
        check(Tree.of(shape, head_dim=head_dim))


@pytest.mark.usefixtures("two_threads")
def test_two_threads_give_what_one_gives() -> None:
    for shape in (LONG, Shape((((*range(40),), 0, 9),), ((1, 150),) * 40)):
        case = Tree.of(shape)
        torch.set_num_threads(1)
        expected = case.run("compiled")
        torch.set_num_threads(2)
        for found, each in zip(case.run("compiled"), expected, strict=True):
            torch.testing.assert_close(found, each, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_slots_of_nobody_have_no_effect(poison: float) -> None:
    for name, shape in TREES.items():
        clean = Tree.of(shape, poison=0.0).run("compiled")
        found = Tree.of(shape, poison=poison).run("compiled")
        assert torch.equal(found[0], clean[0]), name
        assert torch.equal(found[1], clean[1]), name


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


def test_other_kinds_of_queries_take_the_graph() -> None:
    assert not native.can_attend(torch.zeros(1, 2, 64, dtype=torch.bfloat16))
    assert not native.can_attend(torch.zeros(1, 2, 40))
    assert Tree.of(TREES["one prefix"], dtype=torch.bfloat16).planned("compiled").units is None


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
    assert callable(native._kernel.__wrapped__(64))
    assert "torch/" not in native._SOURCE.read_text(encoding="utf-8")
