"""Cascade attention: keys that requests share are read once, and nothing else changes.

The reference knows nothing of sharing: it is computed from each request's own table.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvway_kernels import choice, compiled, dense, native
from kvway_kernels.api import SharedRun, chosen, plan
from tests.kernels.trees import (
    BLOCK_SIZE,
    IMPLEMENTATIONS,
    TREES,
    Shape,
    Tree,
    lse_error,
    relative_error,
)

BUDGET = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
LSE_BUDGET = {torch.float32: 2e-6, torch.bfloat16: 1e-4}


@pytest.fixture(autouse=True)
def graph_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the graph of `compiled` without the compiler: test_compiled.py runs it with.

    test_native.py is about what float32 on a CPU takes instead.
    """
    graph: Any = compiled._decode
    monkeypatch.setattr(native, "can_attend", lambda q, k_cache: False)
    monkeypatch.setattr(compiled, "_compiled", lambda: graph)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tree", TREES)
def test_shared_runs_change_nothing_but_rounding(
    tree: str, implementation: str, dtype: torch.dtype
) -> None:
    case = Tree.of(TREES[tree], dtype=dtype)
    out, lse = case.run(implementation)
    expected, expected_lse = case.specified()
    assert relative_error(out, expected) < BUDGET[dtype]
    assert lse_error(lse, expected_lse) < LSE_BUDGET[dtype]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 60, 1000])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tree", TREES)
def test_windows_and_soft_caps(
    tree: str, implementation: str, window: int, softcap: float | None
) -> None:
    case = Tree.of(TREES[tree], window=window, softcap=softcap)
    out, lse = case.run(implementation)
    expected, expected_lse = case.specified()
    assert relative_error(out, expected) < BUDGET[torch.float32]
    assert lse_error(lse, expected_lse) < LSE_BUDGET[torch.float32]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slots_of_nobody_have_no_effect(
    implementation: str, poison: float, window: int | None, softcap: float | None
) -> None:
    for name, shape in TREES.items():
        clean = Tree.of(shape, poison=0.0, window=window, softcap=softcap).run(implementation)
        found = Tree.of(shape, poison=poison, window=window, softcap=softcap).run(implementation)
        assert torch.equal(found[0], clean[0]), name
        assert torch.equal(found[1], clean[1]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (8, 2), (8, 1)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_grouping_of_heads(
    implementation: str, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    case = Tree.of(TREES["three levels"], heads=heads, head_dim=head_dim, dtype=dtype)
    out, lse = case.run(implementation)
    expected, expected_lse = case.specified()
    assert relative_error(out, expected) < BUDGET[dtype]
    assert lse_error(lse, expected_lse) < LSE_BUDGET[dtype]


@pytest.mark.parametrize("implementation", ["sdpa", "compiled"])
def test_bfloat16_loses_little_more_than_rounding_the_result(implementation: str) -> None:
    """The independent low-precision reference: the exact result, rounded to bfloat16 once."""
    for name, shape in TREES.items():
        case = Tree.of(shape, dtype=torch.bfloat16)
        expected, _ = case.specified()
        rounded = relative_error(expected.bfloat16(), expected)
        assert relative_error(case.run(implementation)[0], expected) < 3 * rounded + 1e-4, name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_long_runs_are_read_in_pieces(implementation: str) -> None:
    members = tuple(range(17))
    case = Tree.of(Shape(((members, 0, 200),), ((1, 3210),) * 17), heads=(2, 1), head_dim=16)
    step = case.planned(implementation)
    assert [run.num_keys for run in step.passes] == [1024, 1024, 1024, 128]
    out, lse = case.run(implementation)
    expected, expected_lse = case.specified()
    assert relative_error(out, expected) < BUDGET[torch.float32]
    assert lse_error(lse, expected_lse) < LSE_BUDGET[torch.float32]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_extreme_scores_stay_finite(implementation: str) -> None:
    for name, shape in TREES.items():
        case = Tree.of(shape)
        loud = replace(case, q=case.q * 3e4)
        out, lse = loud.run(implementation)
        expected, expected_lse = loud.specified()
        assert relative_error(out, expected) < 1e-2, name
        assert lse_error(lse, expected_lse) < 1e-5, name


@pytest.mark.parametrize("implementation", ["reference", "compiled"])
def test_what_is_no_number_shows(implementation: str) -> None:
    """In a query, or in a key that others do not see: nobody takes a failure for an answer.

    Torch's own operation, in sdpa, takes a row of nothing but NaN for one that sees no key.
    """
    for shape in TREES.values():
        Tree.of(shape).check_that_nan_shows(lambda tree: tree.run(implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_where_scattered_blocks_lie_changes_no_bit(implementation: str) -> None:
    for name, shape in TREES.items():
        case = Tree.of(shape)
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
        for found, expected in zip(
            moved.run(implementation), case.run(implementation), strict=True
        ):
            assert torch.equal(found, expected), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_request_alone_gets_what_it_gets_among_others(implementation: str) -> None:
    case = Tree.of(TREES["three levels"])
    together, _ = case.run(implementation)
    for row, request in enumerate(case.requests):
        alone = replace(case, q=case.q[row : row + 1], requests=(request,), shared=())
        found, _ = alone.run(implementation)
        torch.testing.assert_close(found[0], together[row], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_behind_the_step_are_absent(implementation: str) -> None:
    for name in ("nothing shared", "one prefix", "chunks, drafts and whole prompts"):
        case = Tree.of(TREES[name])
        longer = replace(case, q=torch.cat([case.q, torch.full_like(case.q[:2], torch.nan)]))
        out, lse = longer.run(implementation)
        torch.testing.assert_close(out[:-2], case.run(implementation)[0])
        assert not out[-2:].any()
        assert bool(lse[-2:].isneginf().all())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_empty_step_attends_to_nothing(implementation: str) -> None:
    case = replace(Tree.of(TREES["one prefix"]), requests=(), shared=())
    out, lse = case.run(implementation)
    assert not out.any()
    assert bool(lse.isneginf().all())


def test_a_run_that_a_window_cuts_is_not_used() -> None:
    case = Tree.of(TREES["two groups and a lone one"], window=41)
    assert case.planned("sdpa").shared == ()
    assert replace(case, window=50).planned("sdpa").shared == case.shared[:1]
    assert replace(case, window=90).planned("sdpa").shared == case.shared


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (((0,), 0, 1), "two or more, ascending"),
        (((1, 0), 0, 1), "two or more, ascending"),
        (((0, 0), 0, 1), "two or more, ascending"),
        (((0, 7), 0, 1), "in a step of 5 requests"),
        (((-1, 0), 0, 1), "in a step of 5 requests"),
        (((0, 1), 0, 0), "at least one"),
        (((0, 1), -1, 1), "at least one"),
        (((0, 1), 0, 3), "only 2 full blocks"),
        (((0, 3), 0, 2), "other blocks"),
        (((3, 4), 1, 2), "overlap at block 1"),
    ],
)
def test_plan_refuses_runs_that_are_not_shared(
    run: tuple[tuple[int, ...], int, int], problem: str
) -> None:
    case = Tree.of(TREES["two groups and a lone one"])
    with pytest.raises(ValueError, match=problem):
        replace(case, shared=(*case.shared, SharedRun(*run))).planned("sdpa")


def test_plan_refuses_options_that_cannot_be() -> None:
    case = Tree.of(TREES["one prefix"])
    for options, problem in (
        ({"window": 0}, "at least 1"),
        ({"implementation": "fastest"}, "not one of auto"),
        ({"fixed_shapes": True, "shared": case.shared}, "share nothing"),
        ({"fixed_shapes": True, "implementation": "compiled"}, "for sdpa only"),
    ):
        with pytest.raises(ValueError, match=problem):
            plan(case.requests, num_blocks=99, block_size=BLOCK_SIZE, **options)


def test_a_log_sum_exp_of_another_base_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's operation is checked before its first use, and the budgets would notice it, too."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def in_base_2(*args: Any, **keywords: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = flash(*args, **keywords)
        return out, lse / math.log(2)

    case = Tree.of(TREES["one prefix"])
    dense.check_flash()
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", in_base_2)
    out, _ = case.run("sdpa")  # checked before
    assert relative_error(out, case.specified()[0]) > 100 * BUDGET[torch.float32]
    dense.check_flash.cache_clear()
    with pytest.raises(RuntimeError, match="cannot merge"):
        case.run("sdpa")
    monkeypatch.undo()
    case.run("sdpa")


def test_auto_takes_what_can_run_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_missing_to_compile", lambda: "no C++ compiler: install g++")
    choice._missing.cache_clear()
    try:
        assert chosen("auto") == ("sdpa", "no C++ compiler: install g++")
        with pytest.raises(ValueError, match="'compiled' cannot run on cpu: no C"):
            chosen("compiled")
    finally:
        choice._missing.cache_clear()


def test_a_missing_compiler_is_named() -> None:
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert "install g++" in choice._missing_to_compile()


def test_exp_of_the_graph_is_exact_to_single_precision() -> None:
    x = -torch.linspace(0, 86.9, 100_001)
    exact = torch.exp(x.double())
    assert float(((compiled._exp(x) - exact) / exact).abs().max()) < 2e-7
    assert not compiled._exp(torch.tensor([-87.5, -1e30, -torch.inf])).any()
