"""Baselines that count requests or draw: three replicas, one is made different."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvway_router.policies.reasons import Reason
from kvway_router.policy import Prompt
from tests.router.conftest import StartBench
from tests.router.policy_cases import choose, choose_many, load, situation

IDLE = (load("a"), load("b"), load("c"))


def one(name: str, **changes: Any) -> list[Any]:
    """Three equal replicas with two requests each, of which one is changed."""
    return [load(n, **{"in_flight": 2, **(changes if n == name else {})}) for n in "abc"]


@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize(
    ("policy", "changes", "reason"),
    [
        ("least_requests", {"in_flight": 1}, Reason.LEAST_REQUESTS),
        (
            "least_uncached_work",
            {"prefill_tokens_per_s": 1001.0, "in_flight": 9},
            Reason.LEAST_UNCACHED_WORK,
        ),
    ],
)
def test_the_one_that_is_marked_is_chosen(
    policy: str, changes: dict[str, Any], reason: Reason, name: str
) -> None:
    decision = choose(policy, *one(name, **changes))
    assert (decision.replica_id, decision.reason) == (f"{name}:1", reason)
    assert decision.detail.startswith(f"{policy}: ")
    assert f"{name}:1" in decision.detail


def test_round_robin_takes_turns_whatever_is_cached_or_busy() -> None:
    asked = situation(load("b", in_flight=50), load("a"), load("c"), matches={"c:1": 100})
    assert choose_many("round_robin", asked, 7) == ["a", "b", "c", "a", "b", "c", "a"]
    decision = choose("round_robin", *IDLE)
    assert decision.reason is Reason.ROUND_ROBIN
    assert "turn 1 of 3" in decision.detail


def test_random_draws_each_about_as_often_and_the_same_with_the_same_seed() -> None:
    asked = situation(*IDLE)
    drawn = choose_many("random", asked, 3000)
    assert all(900 < number < 1100 for number in Counter(drawn).values())
    assert drawn == choose_many("random", asked, 3000)
    assert drawn != choose_many("random", asked, 3000, seed=1)
    assert choose("random", *IDLE).reason is Reason.RANDOM


def test_equal_replicas_share_what_least_requests_chooses() -> None:
    drawn = Counter(choose_many("least_requests", situation(*IDLE), 3000))
    assert all(900 < number < 1100 for number in drawn.values())


def test_of_two_drawn_ones_the_one_with_more_requests_is_never_taken() -> None:
    """The fullest is in two of three pairs and never taken, the emptiest in two and always."""
    asked = situation(load("a", in_flight=1), load("b", in_flight=2), load("c", in_flight=3))
    drawn = Counter(choose_many("power_of_two", asked, 3000))
    assert drawn["c"] == 0
    assert 1900 < drawn["a"] < 2100
    decision = choose("power_of_two", *asked.loads)
    assert decision.reason is Reason.POWER_OF_TWO
    assert "were drawn" in decision.detail


def test_power_of_two_draws_every_pair_alike() -> None:
    """Of the six pairs of four the emptiest wins three, the next one two, the third one."""
    asked = situation(*(load(name, in_flight=number) for number, name in enumerate("abcd")))
    drawn = Counter(choose_many("power_of_two", asked, 6000))
    assert drawn["d"] == 0
    assert 2800 < drawn["a"] < 3200
    assert 1850 < drawn["b"] < 2150
    assert 900 < drawn["c"] < 1100


def test_least_uncached_work_weighs_the_queue_against_the_match() -> None:
    """Computing the prompt anew takes 1.62 s."""
    matches = {"b:1": 100}
    waits = load("b", queued_prefill_s=1.5)
    assert choose("least_uncached_work", load("a"), waits, matches=matches).replica_id == "b:1"
    waits = load("b", queued_prefill_s=1.7)
    assert choose("least_uncached_work", load("a"), waits, matches=matches).replica_id == "a:1"


def test_a_hash_sends_equal_beginnings_to_one_replica_and_spreads_others() -> None:
    chosen = []
    for number in range(300):
        prompt = Prompt(num_tokens=100, block_size=16, prefix_key=b"%d" % number)
        decision = choose("consistent_hash", *IDLE, prompt=prompt)
        assert decision.reason is Reason.HASH
        again = choose("consistent_hash", *reversed(IDLE), prompt=prompt)
        assert decision.replica_id == again.replica_id
        left = choose("consistent_hash", *IDLE[:2], prompt=prompt)
        assert decision.replica_id in (left.replica_id, "c:1")
        chosen.append(decision.replica_id)
    assert min(Counter(chosen).values()) > 70


def test_a_hash_passes_by_who_has_more_than_its_share_and_a_quarter() -> None:
    """Of 11 + 1 requests the share of three is 4, and 1.25 times that is 5."""
    owner = choose("consistent_hash", *IDLE).replica_id

    def loads(at_owner: int) -> list[Any]:
        others = [n for n in "abc" if f"{n}:1" != owner]
        rest = 11 - at_owner
        return [
            load(owner.removesuffix(":1"), in_flight=at_owner),
            load(others[0], in_flight=rest // 2),
            load(others[1], in_flight=rest - rest // 2),
        ]

    within = choose("consistent_hash", *loads(5))
    assert (within.replica_id, within.reason) == (owner, Reason.HASH)
    over = choose("consistent_hash", *loads(6))
    assert over.reason is Reason.HASH_OVERFLOW
    assert over.replica_id != owner
    assert owner in over.detail


async def test_the_router_chooses_by_the_policy_it_was_given(start_bench: StartBench) -> None:
    """The same prompt, which its own policy would keep at one replica, takes turns."""
    bench = await start_bench(3, policy="round_robin")
    answers = [(await bench.chat("the same prompt " * 10))[1] for _ in range(6)]
    assert all(len(replica.requests) == 2 for replica in bench.replicas)
    record = await bench.decision(answers[0])
    assert record["reason"] == "round_robin"
    assert record["detail"].startswith("round_robin: turn 1 of 3")
    assert answers[0]["x-kvway-reason"].startswith("round_robin; ")
    metrics = await bench.metrics()
    reasons = {name for name in metrics if name.startswith("kvway_router_decisions_total")}
    assert 'kvway_router_decisions_total{reason="round_robin"}' in reasons
    assert 'kvway_router_decisions_total{reason="prefix"}' not in reasons
