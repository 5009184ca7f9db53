"""Failures: they count against a replica, are visible in a decision, and are forgotten."""

from __future__ import annotations

import pytest

from kvway_router.failures import FAILURE_S, HALF_LIFE_S, MOST_S, Failures
from kvway_router.policies.reasons import Reason
from tests.router.policy_cases import choose, load


def test_each_failure_costs_and_half_of_that_is_forgotten_in_a_half_life() -> None:
    failures = Failures()
    assert failures.cost_s(0.0) == 0.0
    failures.note(10.0)
    assert failures.cost_s(10.0) == FAILURE_S
    assert failures.cost_s(10.0 + HALF_LIFE_S) == pytest.approx(FAILURE_S / 2)
    failures.note(10.0 + HALF_LIFE_S)
    assert failures.cost_s(10.0 + HALF_LIFE_S) == pytest.approx(1.5 * FAILURE_S)
    assert failures.cost_s(10.0 + 20 * HALF_LIFE_S) == 0.0


def test_failures_cost_no_more_than_a_minute_however_many() -> None:
    failures = Failures()
    for _ in range(10_000):
        failures.note(1.0)
    assert failures.cost_s(1.0) == MOST_S


def test_who_fails_is_not_the_cheapest_for_being_idle() -> None:
    busy = load("b", queued_prefill_s=2.0, num_prefills=1, in_flight=1)
    decision = choose("cost", load("a", failing_s=FAILURE_S), busy)
    assert decision.replica_id == "b:1"
    worst = decision.candidates[-1]
    assert (worst.replica_id, worst.failing_s) == ("a:1", FAILURE_S)
    assert worst.cost_s == pytest.approx(
        worst.ttft_s + worst.price_s + worst.kv_s + worst.failing_s
    )


def test_who_holds_a_prompt_and_fails_is_passed_by_and_the_sentence_says_so() -> None:
    loads = load("a", failing_s=FAILURE_S), load("b")
    decision = choose("cost", *loads, matches={"a:1": 99})
    assert (decision.replica_id, decision.reason) == ("b:1", Reason.SPILL)
    assert "5.00 s for failures" in decision.detail


def test_where_all_fail_none_is_shut_out() -> None:
    assert choose("cost", load("a", failing_s=MOST_S), load("b", failing_s=MOST_S)).replica_id
    decision = choose("cost", load("a", failing_s=MOST_S))
    assert decision.reason is Reason.ONLY_REPLICA
