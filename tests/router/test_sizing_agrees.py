"""`kvway size` reckons as the router does: the same formula, the same assumptions."""

from __future__ import annotations

import pytest

from kvway_core.sizing import ASSUMED_ATTENTION_TOKENS, BUSY_SHARE, PrefillSpeed
from kvway_router.policy import PolicyParams, own_work_tokens


def test_what_is_assumed_is_the_same() -> None:
    params = PolicyParams()
    assert params.attention_tokens == ASSUMED_ATTENTION_TOKENS
    assert params.kv_threshold == BUSY_SHARE


@pytest.mark.parametrize(("new", "cached"), [(100, 1500), (1600, 0), (1, 100_000)])
def test_prefill_takes_what_the_cost_says(new: int, cached: int) -> None:
    """But for the pair of each token and itself, which the cost counts half."""
    work = own_work_tokens(new, cached, attention_tokens=5000.0)
    assert PrefillSpeed(1.0, 5000.0).seconds(new, cached) - work == pytest.approx(new / 2 / 5000)
