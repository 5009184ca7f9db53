"""The compiled graph: right, and compiled once. Skipped where torch finds no compiler.

In float32 on a CPU, test_native.py is about what is taken instead of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import codecache

from kvway_kernels import native
from kvway_kernels.api import chosen
from kvway_kernels.costs import HeadShape, calibrate
from tests.kernels.trees import BLOCK_SIZE, TREES, Shape, Tree, lse_error, relative_error

_NAME, _REASON = chosen("auto")

pytestmark = [
    pytest.mark.skipif(_NAME != "compiled", reason=_REASON),
    pytest.mark.timeout(300),  # it compiles
]


def _no_headers(*_args: object, **_keywords: object) -> None:
    raise AssertionError("to compile torch's headers first takes longer than both graphs")


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """Make both graphs: with shared runs and without."""
    patch = pytest.MonkeyPatch()
    patch.setattr(native, "can_attend", lambda q, k_cache: False)
    patch.setattr(codecache, "_precompile_header", _no_headers)
    for tree in ("nothing shared", "one prefix"):
        Tree.of(TREES[tree]).run("compiled")
    yield
    patch.undo()
    torch._dynamo.reset()


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("tree", TREES)
def test_within_the_error_budget_of_float64(tree: str, window: int | None) -> None:
    case = Tree.of(TREES[tree], window=window)
    out, lse = case.run("compiled")
    expected, expected_lse = case.specified()
    assert relative_error(out, expected) < 2e-6
    assert lse_error(lse, expected_lse) < 2e-6


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_slots_of_nobody_have_no_effect(poison: float) -> None:
    for name, shape in TREES.items():
        clean = Tree.of(shape, poison=0.0).run("compiled")
        found = Tree.of(shape, poison=poison).run("compiled")
        assert torch.equal(found[0], clean[0]), name
        assert torch.equal(found[1], clean[1]), name


def test_strides_of_queries_make_no_graph() -> None:
    """Ours are a view into q, k and v together; in a step with chunks they are copied."""
    before = counters["stats"]["unique_graphs"]
    lone = Shape((), ((1, 20),))
    for shape in (*TREES.values(), lone):
        case = Tree.of(shape)
        together = torch.cat([case.q, torch.full_like(case.q[:, :4], torch.nan)], 1)
        strided = replace(case, q=together[:, : case.q.shape[1]])
        assert strided.q.stride() != case.q.stride()
        for found, expected in zip(strided.run("compiled"), case.run("compiled"), strict=True):
            assert torch.equal(found, expected)
    assert counters["stats"]["unique_graphs"] == before


def test_costs_are_measured_with_the_graphs_of_an_engine() -> None:
    """Whose blocks are allocated outside of inference mode, and whose steps run in it."""
    case = Tree.of(TREES["one prefix"], heads=(6, 2), head_dim=64)
    with torch.inference_mode():
        case.run("compiled")
        replace(case, shared=()).run("compiled")
    before = counters["stats"]["unique_graphs"]
    calibrate(HeadShape(6, 2, 64), dtype=torch.float32, implementation="compiled", budget_s=0.0)
    assert counters["stats"]["unique_graphs"] == before


def test_2000_random_steps_compile_nothing() -> None:
    """Requests, keys, levels, blocks of the cache and rows behind the step: all vary."""
    rng = random.Random(0)
    before = counters["stats"]["unique_graphs"]
    num_shared = 0
    for step in range(2_000):
        shape = _random_shape(rng)
        num_shared += bool(shape.runs)
        case = Tree.of(shape, seed=step)
        out, _ = case.run("compiled")
        if step % 100 == 0:
            expected, _ = case.specified(torch.float32)
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert 500 < num_shared < 1_900
    assert counters["stats"]["unique_graphs"] == before


def _random_shape(rng: random.Random) -> Shape:
    num_requests = rng.randint(1, 9)
    num_blocks = rng.randint(1, 4)
    lengths = tuple(
        (1, (num_blocks + rng.randint(0, 2)) * BLOCK_SIZE + rng.randint(1, BLOCK_SIZE))
        for _ in range(num_requests)
    )
    runs: list[tuple[tuple[int, ...], int, int]] = []
    first = 0
    members = list(range(num_requests))
    while first < num_blocks and len(members) > 1 and rng.random() < 0.8:
        size = rng.randint(1, num_blocks - first)
        runs.append((tuple(members), first, size))
        first += size
        members = sorted(rng.sample(members, rng.randint(1, len(members))))
    return Shape(tuple(runs), lengths)
