"""Baselines of Preble and LMetric: three replicas, one is made different."""

from __future__ import annotations

from typing import Any

import pytest

from kvway_router.policies.reasons import Reason
from kvway_router.policies.registry import POLICIES, first_state
from kvway_router.policies.state import PolicyState
from kvway_router.policy import Prompt
from tests.router.policy_cases import choose, choose_many, load, situation

IDLE = (load("a"), load("b"), load("c"))
NOW_S = 1000.0


def remembering(num_choices: int = 150, **work_s: float) -> PolicyState:
    """Returns a state in which replicas were sent so much work a moment ago, a request each."""
    state = first_state(POLICIES["preble_e2"])
    for name, seconds in work_s.items():
        state = state.after(f"{name}:1", seconds, now_s=NOW_S)
    return PolicyState(num_choices=num_choices, window=state.window)


@pytest.mark.parametrize("marked", ["a", "b", "c"])
@pytest.mark.parametrize(
    ("policy", "matched", "changes", "reason"),
    [
        ("preble_e2", 51, {"in_flight": 99, "queued_tokens": 10**6}, Reason.EXPLOIT),
        ("preble_e2", 0, {"prefill_tokens_per_s": 1001.0}, Reason.EXPLORE),
        ("preble_e2", 1, {}, Reason.EXPLORE),
        ("lmetric", 1, {}, Reason.PRODUCT),
        ("lmetric", 0, {"queued_tokens": 999}, Reason.PRODUCT),
        ("lmetric", 0, {"in_flight": 4}, Reason.PRODUCT),
    ],
)
def test_the_one_that_is_marked_is_chosen(
    policy: str, matched: int, changes: dict[str, Any], reason: Reason, marked: str
) -> None:
    busy = {"in_flight": 5, "queued_tokens": 1000}
    loads = [load(n, **{**busy, **(changes if n == marked else {})}) for n in "abc"]
    decision = choose(policy, *loads, matches={f"{marked}:1": matched})
    assert (decision.replica_id, decision.reason) == (f"{marked}:1", reason)
    assert decision.detail.startswith(f"{policy}: ")


# --- Preble ----------------------------------------------------------------------------------


def test_preble_exploits_a_match_only_if_it_is_more_than_what_is_missing() -> None:
    """Work of late keeps it from the holder when it explores."""
    state = remembering(num_choices=0, a=10.0)
    for matched, expected in ((50, Reason.EXPLORE), (51, Reason.EXPLOIT)):
        decision = choose("preble_e2", *IDLE, matches={"a:1": matched}, state=state, now_s=NOW_S)
        assert decision.reason is expected
        assert (decision.replica_id == "a:1") == (expected is Reason.EXPLOIT)


def test_preble_exploits_the_holder_that_was_sent_less() -> None:
    state = remembering(num_choices=0, a=3.0, b=2.0)
    decision = choose("preble_e2", *IDLE, matches={"a:1": 90, "b:1": 90}, state=state, now_s=NOW_S)
    assert (decision.replica_id, decision.reason) == ("b:1", Reason.EXPLOIT)


def test_preble_leaves_a_holder_with_more_than_one_and_a_half_times_the_least_work() -> None:
    for holders_s, expected in (
        (15.0, ("a:1", Reason.EXPLOIT)),
        (15.1, ("c:1", Reason.REBALANCE)),
    ):
        state = remembering(a=holders_s, b=11.0, c=10.0)
        decision = choose("preble_e2", *IDLE, matches={"a:1": 90}, state=state, now_s=NOW_S)
        assert (decision.replica_id, decision.reason) == expected


def test_preble_leaves_no_holder_before_fifty_choices_per_replica() -> None:
    matches = {"a:1": 90}
    for num_choices, expected in ((149, Reason.EXPLOIT), (150, Reason.REBALANCE)):
        state = remembering(num_choices, a=20.0, b=1.0, c=1.0)
        decision = choose("preble_e2", *IDLE, matches=matches, state=state, now_s=NOW_S)
        assert decision.reason is expected


def test_preble_forgets_work_after_three_minutes() -> None:
    state = remembering(a=1.0, b=50.0, c=50.0)
    soon = choose("preble_e2", *IDLE, matches={"b:1": 10}, state=state, now_s=NOW_S + 160.0)
    late = choose("preble_e2", *IDLE, matches={"b:1": 10}, state=state, now_s=NOW_S + 181.0)
    assert (soon.replica_id, late.replica_id) == ("a:1", "b:1")


def test_preble_counts_an_expected_answer_as_work() -> None:
    """Prefills are alike; the steps of a are ten times as long, so it gets fewer requests."""
    prompt = Prompt(num_tokens=160, block_size=16, num_output_tokens=100)
    loads = [load("a", decode_step_s=0.1), load("b", decode_step_s=0.01)]
    chosen = choose_many("preble_e2", situation(*loads, prompt=prompt), 60)
    assert chosen.count("a") < 15


def test_preble_explores_away_from_where_blocks_have_to_go() -> None:
    """Room for 100 more blocks at a, for 50 at b, where nothing was sent of late."""
    loads = [load("a", blocks_held=900), load("b", blocks_held=950)]
    assert choose("preble_e2", *loads).replica_id == "a:1"
    unknown = [load("a", blocks_held=950), load("b", blocks_held=10**6, blocks_total=None)]
    assert choose("preble_e2", *unknown).replica_id == "b:1"


def test_preble_weighs_evicted_blocks_less_where_more_requests_used_the_window() -> None:
    """Of two that evict alike, one served twenty requests of no work in the window."""
    state = first_state(POLICIES["preble_e2"])
    for _ in range(20):
        state = state.after("b:1", 0.0, now_s=NOW_S)
    loads = [load("a", blocks_held=1000), load("b", blocks_held=1000)]
    assert choose("preble_e2", *loads, state=state, now_s=NOW_S).replica_id == "b:1"


# --- LMetric ---------------------------------------------------------------------------------


def test_lmetric_multiplies_tokens_by_requests() -> None:
    """1600 tokens at the fourth request are as much as 3200 at the second."""
    for queued, expected in ((1590, "b:1"), (1610, "a:1")):
        loads = [load("a", in_flight=3), load("b", in_flight=1, queued_tokens=queued)]
        assert choose("lmetric", *loads).replica_id == expected


def test_lmetric_tells_idle_replicas_apart_by_what_they_hold() -> None:
    assert choose("lmetric", *IDLE, matches={"b:1": 2, "c:1": 1}).replica_id == "b:1"
