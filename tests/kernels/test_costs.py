"""The cost model: what is fitted to timed steps, and that the steps can be timed."""

from __future__ import annotations

import math
import random
from dataclasses import astuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvway_kernels import costs
from kvway_kernels.costs import Costs, HeadShape, Sample, calibrate, fit

CALL, REQUEST = 3e-5, 2e-6
REAL = Costs(paged_key=5e-7, run=2e-4, run_key=4e-7, run_pair=8e-8, merge=3e-6)
SHAPES = [(n, tokens) for n in (2, 6, 16) for tokens in (128, 512, 1024)]


def sample(real: Costs, n: int, tokens: int, factors: tuple[float, float] = (1.0, 1.0)) -> Sample:
    """What a machine with these costs takes."""
    own = 32
    base = CALL + n * REQUEST + n * own * real.paged_key
    alone = base + n * tokens * real.paged_key
    together = alone - real.saved_s(n, tokens)
    return Sample(n, tokens, own, factors[0] * alone, factors[1] * together)


def test_exact_times_give_back_the_costs_that_made_them() -> None:
    found = fit([sample(REAL, n, tokens) for n, tokens in SHAPES])
    assert astuple(found) == pytest.approx(astuple(REAL), rel=1e-6)


def test_noise_of_a_twentieth_moves_what_is_saved_by_little() -> None:
    chooser = random.Random(3)
    noisy = [
        sample(REAL, n, tokens, (chooser.uniform(1, 1.05), chooser.uniform(1, 1.05)))
        for n, tokens in SHAPES
    ]
    found = fit(noisy)
    for n, tokens in ((8, 1024), (32, 1024), (32, 4096)):
        assert found.saved_s(n, tokens) == pytest.approx(REAL.saved_s(n, tokens), rel=0.15)


def test_a_cost_below_zero_is_zero() -> None:
    falling = []
    for n, tokens in SHAPES:
        one = sample(REAL, n, tokens)
        base_s = one.alone_s - n * tokens * REAL.paged_key
        falling.append(one._replace(together_s=base_s + 1e-3 - tokens * 5e-7))
    found = fit(falling)
    assert found.run_key == 0.0
    assert found.paged_key == pytest.approx(REAL.paged_key, rel=0.2)  # the others are fitted
    assert 2e-4 < found.run < 1.5e-3


def test_where_sharing_never_paid_it_is_not_promised() -> None:
    useless = [sample(REAL, n, tokens) for n, tokens in SHAPES]
    useless = [one._replace(together_s=1.01 * one.alone_s) for one in useless]
    found = fit(useless)
    assert all(found.saved_s(n, tokens) <= 1e-12 for n, tokens in SHAPES)


@pytest.mark.property
@given(
    times=st.lists(
        st.tuples(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0)),
        min_size=len(SHAPES),
        max_size=len(SHAPES),
    )
)
def test_no_gain_is_promised_for_a_step_that_was_measured_to_be_none(
    times: list[tuple[float, float]],
) -> None:
    samples = [Sample(*shape, 32, *pair) for shape, pair in zip(SHAPES, times, strict=True)]
    found = fit(samples)
    assert all(value >= 0 and math.isfinite(value) for value in astuple(found))
    for one in samples:
        if one.together_s >= one.alone_s:
            alone_s = one.num_requests * one.num_tokens * found.paged_key
            assert found.saved_s(one.num_requests, one.num_tokens) <= 1e-9 * alone_s


@pytest.mark.parametrize("nonsense", [0.0, -1.0, math.inf, math.nan])
def test_nonsense_is_refused(nonsense: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        fit([sample(REAL, 2, 128), Sample(4, 128, 32, nonsense, 1.0)])
    with pytest.raises(ValueError, match="no step"):
        fit([])


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_a_calibration_times_both_ways_and_gives_finite_costs(
    kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "_CACHED_BYTES", 2**20)
    with torch.inference_mode():
        steps = costs._Steps(
            HeadShape(4, 2, 8),
            dtype=torch.float32,
            kv_dtype=torch.float32,
            device=torch.device("cpu"),
            implementation="sdpa",
        )
        plans = [(alone.shared, together.shared) for _, alone, together in steps._timed]
    assert all(not alone and len(together) == 1 for alone, together in plans)
    found = calibrate(
        HeadShape(4, 2, 8),
        dtype=torch.float32,
        kv_dtype=kv_dtype,
        implementation="sdpa",
        budget_s=0,
    )
    assert all(math.isfinite(value) and value >= 0 for value in astuple(found))
    assert any(astuple(found))


def test_what_cannot_run_is_not_measured() -> None:
    with pytest.raises(ValueError, match="no-such"):
        calibrate(HeadShape(4, 2, 8), dtype=torch.float32, implementation="no-such")
