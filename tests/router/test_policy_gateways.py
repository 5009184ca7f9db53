"""Baselines of SGLang, Dynamo and llm-d: three replicas, one is made different."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvway_router.policies.gateways import Dynamo
from kvway_router.policies.reasons import Reason
from kvway_router.policies.registry import POLICIES, first_state
from kvway_router.policy import ReplicaLoad
from tests.router.policy_cases import choose, choose_many, load, situation

BUSY = {"in_flight": 10, "num_prefills": 4, "queued_tokens": 8000, "blocks_pinned": 400}


def three(marked: str = "", **changes: Any) -> list[ReplicaLoad]:
    """Three equally busy replicas, of which one is changed."""
    return [load(n, **{**BUSY, **(changes if n == marked else {})}) for n in "abc"]


@pytest.mark.parametrize("marked", ["a", "b", "c"])
@pytest.mark.parametrize(
    ("policy", "matched", "changes", "reason"),
    [
        # SGLang: more than 30 % of the prompt is a match, whatever is queued there.
        ("sglang_cache_aware", 31, {"in_flight": 70}, Reason.MATCH),
        ("sglang_cache_aware", 0, {"in_flight": 9}, Reason.MISS),
        # Dynamo: blocks to compute and blocks in use.
        ("dynamo", 1, {}, Reason.BLOCK_COST),
        ("dynamo", 0, {"queued_tokens": 7000}, Reason.BLOCK_COST),
        ("dynamo", 0, {"blocks_pinned": 399}, Reason.BLOCK_COST),
        # llm-d: prefix, queue and memory each decide when the others are equal.
        ("llmd", 1, {}, Reason.WEIGHTED_SCORES),
        ("llmd", 0, {"num_prefills": 3}, Reason.WEIGHTED_SCORES),
        ("llmd", 0, {"blocks_pinned": 399}, Reason.WEIGHTED_SCORES),
        # Sticky: 80 % of the prompt, else the fewest tokens to compute.
        ("llmd_sticky", 80, {"queued_tokens": 100_000}, Reason.STICKY),
        ("llmd_sticky", 0, {"queued_tokens": 7999}, Reason.NOT_STICKY),
        ("llmd_sticky", 1, {}, Reason.NOT_STICKY),
    ],
)
def test_the_one_that_is_marked_is_chosen(
    policy: str, matched: int, changes: dict[str, Any], reason: Reason, marked: str
) -> None:
    decision = choose(policy, *three(marked, **changes), matches={f"{marked}:1": matched})
    assert (decision.replica_id, decision.reason) == (f"{marked}:1", reason)
    assert decision.detail.startswith(f"{policy}: ")


# --- SGLang ----------------------------------------------------------------------------------


def test_sglang_needs_more_than_the_threshold() -> None:
    """30 of 100 blocks are the threshold itself."""
    loads = [load("a", in_flight=9), load("b"), load("c", in_flight=9)]
    at = choose("sglang_cache_aware", *loads, matches={"a:1": 30})
    over = choose("sglang_cache_aware", *loads, matches={"a:1": 31})
    assert (at.replica_id, at.reason) == ("b:1", Reason.MISS)
    assert (over.replica_id, over.reason) == ("a:1", Reason.MATCH)


@pytest.mark.parametrize(
    ("busiest", "idlest", "is_balanced"),
    [(64, 0, True), (65, 0, False), (194, 129, False), (195, 130, True)],
)
def test_sglang_drops_all_affinity_when_difference_and_ratio_are_exceeded(
    busiest: int, idlest: int, *, is_balanced: bool
) -> None:
    """More than 64 requests more, and more than 1.5 times as many."""
    loads = [load("a", in_flight=busiest), load("b", in_flight=idlest + 1)]
    decision = choose(
        "sglang_cache_aware", *loads, load("c", in_flight=idlest), matches={"b:1": 100}
    )
    if is_balanced:
        assert (decision.replica_id, decision.reason) == ("b:1", Reason.MATCH)
    else:
        assert (decision.replica_id, decision.reason) == ("c:1", Reason.IMBALANCE)


def test_sglang_takes_the_less_busy_of_equal_holders() -> None:
    loads = [load("a", in_flight=3), load("b", in_flight=2), load("c")]
    decision = choose("sglang_cache_aware", *loads, matches={"a:1": 90, "b:1": 90})
    assert (decision.replica_id, decision.reason) == ("b:1", Reason.MATCH)


def test_sglang_spreads_misses_that_do_not_meet() -> None:
    asked = situation(load("a"), load("b"), load("c"))
    assert choose_many("sglang_cache_aware", asked, 6) == ["a", "b", "c", "a", "b", "c"]


# --- Dynamo ----------------------------------------------------------------------------------


def test_dynamo_weighs_queued_blocks_as_much_as_matched_ones_and_those_in_use() -> None:
    """A match of 50 blocks saves 50 to compute, and to hold those that somebody holds already."""
    for held, queued, expected in (
        (0, 49, "a:1"), (0, 51, "b:1"), (20, 49, "a:1"), (20, 51, "b:1"), (80, 19, "a:1"),
        (80, 21, "b:1"),
    ):  # fmt: skip
        loads = [load("a", queued_tokens=16 * queued, blocks_pinned=held), load("b")]
        assert choose("dynamo", *loads, matches={"a:1": 50}).replica_id == expected


def test_dynamo_gives_no_credit_for_blocks_that_are_not_on_the_device() -> None:
    asked = situation(load("a"), load("b"), matches={"b:1": 50}, slower={"a:1": (50, 50)})
    assert set(choose_many("dynamo", asked, 20)) == {"b"}


def test_dynamo_scales_prefill_against_blocks_in_use() -> None:
    loads = [load("a", queued_tokens=160), load("b", blocks_pinned=20)]
    assert choose(Dynamo(), *loads).replica_id == "a:1"
    assert choose(Dynamo(prefill_load_scale=4.0), *loads).replica_id == "b:1"


def test_dynamo_credits_what_is_held_as_far_as_it_is_told() -> None:
    """Without credit for computing, a match saves nothing where nobody holds its blocks."""
    loads = [load("a", queued_tokens=16 * 40), load("b")]
    assert choose(Dynamo(), *loads, matches={"a:1": 50}).replica_id == "a:1"
    assert choose(Dynamo(overlap_credit=0.0), *loads, matches={"a:1": 50}).replica_id == "b:1"


def test_dynamo_draws_among_equal_ones_and_among_all_with_a_temperature() -> None:
    """At temperature 1 the dearest is drawn e times more seldom than the cheapest."""
    equal = situation(load("a"), load("b"), load("c", blocks_pinned=1))
    drawn = Counter(choose_many(Dynamo(), equal, 2000))
    assert drawn["c"] == 0
    assert 900 < drawn["a"] < 1100
    warm = Counter(choose_many(Dynamo(temperature=1.0), equal, 3000))
    assert 2.2 < warm["a"] / warm["c"] < 3.3
    cool = Counter(choose_many(Dynamo(temperature=0.1), equal, 3000))
    assert cool["c"] < 10


# --- llm-d -----------------------------------------------------------------------------------


def test_llmd_weighs_prefix_three_queue_two_and_memory_two() -> None:
    """A whole prompt is worth 3, the shortest queue 2, an empty memory 2."""
    whole = {"a:1": 100}
    queue = load("a", num_prefills=9)
    assert choose("llmd", queue, load("b"), load("c"), matches=whole).replica_id == "a:1"
    both = load("a", num_prefills=9, blocks_pinned=499)
    assert choose("llmd", both, load("b"), load("c"), matches=whole).replica_id == "a:1"
    both = load("a", num_prefills=9, blocks_pinned=501)
    assert choose("llmd", both, load("b"), load("c"), matches=whole).replica_id != "a:1"


def test_llmd_takes_unknown_memory_for_free() -> None:
    loads = [load("a", blocks_pinned=1), load("b", blocks_pinned=900, blocks_total=None)]
    assert choose("llmd", *loads).replica_id == "b:1"


def test_llmd_has_a_cliff_at_four_fifths() -> None:
    loads = [load("a", queued_tokens=5000), load("b")]
    assert choose("llmd_sticky", *loads, matches={"a:1": 79}).replica_id == "b:1"
    assert choose("llmd_sticky", *loads, matches={"a:1": 80}).replica_id == "a:1"


def test_llmd_sticks_until_the_wait_is_eighteen_seconds_longer() -> None:
    """At 15,928 tokens/s that is 286,704 tokens."""
    others = [load("b", queued_tokens=1000), load("c", queued_tokens=2000)]
    matches = {"a:1": 100}
    near = choose("llmd_sticky", load("a", queued_tokens=287_704), *others, matches=matches)
    far = choose("llmd_sticky", load("a", queued_tokens=287_705), *others, matches=matches)
    assert (near.replica_id, near.reason) == ("a:1", Reason.STICKY)
    assert (far.replica_id, far.reason) == ("b:1", Reason.STICKY_SATURATED)


def test_llmd_sticks_to_the_least_loaded_of_several_holders() -> None:
    loads = [load("a", queued_tokens=9000), load("b", queued_tokens=8000), load("c")]
    decision = choose("llmd_sticky", *loads, matches={"a:1": 100, "b:1": 90})
    assert (decision.replica_id, decision.reason) == ("b:1", Reason.STICKY)


def test_llmd_counts_no_more_than_four_million_tokens() -> None:
    loads = [load("a", queued_tokens=4_200_000), load("b", queued_tokens=9_000_000)]
    drawn = Counter(choose_many("llmd_sticky", situation(*loads), 200))
    assert min(drawn["a"], drawn["b"]) > 60


def test_a_policy_with_a_window_remembers_and_others_do_not() -> None:
    lengths = {name: first_state(policy).window.length_s for name, policy in POLICIES.items()}
    assert {name for name, length in lengths.items() if length} == {
        "sglang_cache_aware",
        "preble_e2",
    }
