"""Cascade attention: keys that requests share are read once, and nothing else changes.

The reference knows nothing of sharing: it is computed from each request's own table.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvway_kernels import compiled
from tests.kernels.trees import IMPLEMENTATIONS, TREES, Tree, lse_error, relative_error

BUDGET = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
LSE_BUDGET = {torch.float32: 2e-6, torch.bfloat16: 1e-4}


@pytest.fixture(autouse=True)
def graph_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the graph of `compiled` without the compiler: test_compiled.py runs it with."""
    graph: Any = compiled._decode
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
