"""The Triton kernels in Triton's interpreter, on a CPU, against the reference in float64.

They run in a process of their own (see `triton_cases`), where tensors that are allocated and not
written hold NaN: a slot that no program fills shows. The same cases run on a GPU where there is
one.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

import pytest
import torch

from kvway_kernels.api import plan
from tests.kernels import triton_cases
from tests.kernels.trees import TREES, Shape, Tree
from tests.kernels.triton_cases import LONG, Errors, errors

pytest.importorskip("triton")
pytestmark = pytest.mark.timeout(240)  # the interpreter is slow, and slower where cores are shared

P = ParamSpec("P")
R = TypeVar("R")

OUT_BUDGET = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}
LSE_BUDGET = {torch.float32: 2e-6, torch.float16: 1e-4, torch.bfloat16: 1e-4}
"""In the interpreter. It multiplies in float32, so a GPU's rounding is not what is measured."""

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")


class Interpreter:
    """Calls functions in the process that interprets."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def __call__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return self._pool.submit(function, *args, **kwargs).result()


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Interpreter]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=triton_cases.interpret) as pool:
        yield Interpreter(pool)


def check(found: Errors, dtype: torch.dtype = torch.float32) -> None:
    assert found.out < OUT_BUDGET[dtype]
    assert found.lse < LSE_BUDGET[dtype]


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"),
    [
        ((6, 2), 64, torch.float32),
        ((4, 1), 128, torch.float16),
        ((1, 1), 64, torch.bfloat16),
        ((8, 1), 64, torch.float16),
        ((3, 1), 80, torch.float32),
    ],
    ids=str,
)
def test_within_the_error_budget_of_float64(
    interpreted: Interpreter, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    check(interpreted(errors, LONG, heads=heads, head_dim=head_dim, dtype=dtype), dtype)


@pytest.mark.parametrize(
    "tree",
    [
        "nothing shared",
        "three levels",
        "a level missing in the middle",
        "not from the start",
        "members apart",
        "chunks, drafts and whole prompts",
        "block border -1",
        "block border",
        "block border +1",
    ],
)
def test_trees_of_every_form(interpreted: Interpreter, tree: str) -> None:
    check(interpreted(errors, TREES[tree], heads=(2, 1), head_dim=16))


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (17, 3.0), (60, None), (None, 50.0)])
def test_windows_and_soft_caps(
    interpreted: Interpreter, window: int | None, softcap: float | None
) -> None:
    tree = TREES["chunks, drafts and whole prompts"]
    check(interpreted(errors, tree, heads=(2, 1), head_dim=16, window=window, softcap=softcap))


def test_a_prompt_of_several_large_tiles_skips_what_no_row_of_a_tile_sees(
    interpreted: Interpreter,
) -> None:
    prompt = Shape((), ((70, 75), (1, 40)))
    for window in (None, 40):
        found = interpreted(
            errors, prompt, heads=(1, 1), head_dim=16, dtype=torch.float16, window=window
        )
        check(found, torch.float16)


def test_more_heads_per_key_head_than_a_tile_has_pairs(interpreted: Interpreter) -> None:
    check(interpreted(errors, Shape((), ((2, 20),)), heads=(71, 1), head_dim=16))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_slots_of_nobody_have_no_effect(interpreted: Interpreter, poison: float) -> None:
    shape = TREES["chunks, drafts and whole prompts"]
    check(interpreted(errors, shape, heads=(2, 1), head_dim=16, poison=poison))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_blocks_are_read_as_what_they_stand_for(
    interpreted: Interpreter, dtype: torch.dtype
) -> None:
    check(interpreted(triton_cases.quantised_errors, dtype))


def test_a_plan_for_triton_is_attended_to_by_the_kernels(interpreted: Interpreter) -> None:
    assert interpreted(triton_cases.is_what_the_api_calls)


def test_where_the_blocks_lie_changes_no_bit(interpreted: Interpreter) -> None:
    assert interpreted(triton_cases.is_moved_without_a_trace)


def test_a_decode_row_that_shares_nothing_gets_the_same_bits_in_any_company(
    interpreted: Interpreter,
) -> None:
    assert interpreted(triton_cases.is_a_decode_row_alone_the_same)


def test_extreme_scores_stay_finite(interpreted: Interpreter) -> None:
    shape = TREES["three levels"]
    found = interpreted(errors, shape, heads=(2, 1), head_dim=16, loudness=3e4)
    assert found.out < 1e-2
    assert found.lse < 1e-5


def test_what_is_no_number_shows(interpreted: Interpreter) -> None:
    interpreted(triton_cases.check_that_nan_shows)


def test_rows_behind_the_step_are_zero_with_no_weight(interpreted: Interpreter) -> None:
    expected = [False, True, True]
    assert interpreted(triton_cases.padded) == (expected, expected)
    assert interpreted(triton_cases.empty) == ([True, True], [True, True])


def test_slots_merge_as_merge_states_does_and_absent_ones_have_no_effect(
    interpreted: Interpreter,
) -> None:
    found = interpreted(triton_cases.merged)
    assert found.out[0] == found.lse[0] == 0, "nothing there: (0, -inf)"
    assert found.out[1] == found.lse[1] == 0, "one there: its bits"
    assert found.out[2] < 1e-6
    assert found.lse[2] < 1e-5
    assert found.out[3] == found.lse[3] == 0, "the other weighs nothing"


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="kernels are interpreted here")
def test_tensors_on_a_cpu_are_refused_where_kernels_are_compiled() -> None:
    from kvway_kernels.triton.attention import attend

    case = Tree.of(Shape((), ((1, 5),)), head_dim=16)
    step = plan(case.requests, num_blocks=len(case.k_cache), block_size=16)
    with pytest.raises(ValueError, match="it needs a CUDA device"):
        plan(case.requests, num_blocks=9, block_size=16, implementation="triton")
    with pytest.raises(ValueError, match="need a CUDA device"):
        attend(case.q, case.k_cache, case.v_cache, step, scale=1.0)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((6, 2), 64), ((4, 1), 128), ((1, 1), 80), ((8, 1), 256)]
)
def test_on_a_gpu_within_the_error_budget_of_float64(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    for shape in (LONG, *TREES.values()):
        for window, softcap in ((None, None), (60, None), (None, 50.0)):
            found = errors(
                shape,
                heads=heads,
                head_dim=head_dim,
                dtype=dtype,
                window=window,
                softcap=softcap,
                poison=float("nan"),
                device="cuda",
            )
            check(found, dtype)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_on_a_gpu_quantised_blocks_are_read_as_what_they_stand_for(dtype: torch.dtype) -> None:
    found = triton_cases.quantised_errors(dtype, device="cuda")
    check(found)
