"""The choice: three replicas, one is made different, and both the choice and its reason follow."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from kvway_core.errors import NoReplicaAvailable
from kvway_router.policies.cost import choose
from kvway_router.policies.reasons import Reason
from kvway_router.policy import (
    Decision,
    Prompt,
    ReplicaLoad,
    own_work_tokens,
    running_mean,
)
from tests.router.policy_cases import PARAMS, load

PROMPT = Prompt(num_tokens=1610, block_size=16, prefix_key=b"system")


def decide(*loads: ReplicaLoad, matches: dict[str, int] | None = None, **options: Any) -> Decision:
    prompt = options.pop("prompt", PROMPT)
    return choose(prompt, matches or {}, loads, params=PARAMS, **options)


def test_the_longest_match_wins_among_idle_replicas() -> None:
    decision = decide(load("a"), load("b"), load("c"), matches={"b:1": 90, "c:1": 40})
    assert (decision.replica_id, decision.reason) == ("b:1", Reason.PREFIX)
    assert decision.chosen.cached_tokens == 1440
    assert decision.chosen.uncached_tokens == 170
    assert "b:1 holds 1440 of 1610 prompt tokens" in decision.detail


def test_without_a_match_the_least_work_wins() -> None:
    decision = decide(load("a", queued_prefill_s=2.0), load("b"), load("c", queued_prefill_s=1.0))
    assert (decision.replica_id, decision.reason) == ("b:1", Reason.LEAST_LOADED)
    assert [c.replica_id for c in decision.candidates] == ["b:1", "c:1", "a:1"]


def test_a_match_is_left_exactly_when_waiting_costs_more_than_computing() -> None:
    """The whole prompt takes about 1.63 s here; the match saves 1.44 s of it and a bit."""
    matches = {"a:1": 90}
    own = decide(load("a"), load("b"), matches=matches).candidates
    saved = next(c for c in own if c.replica_id == "b:1").own_s - own[0].own_s
    near = decide(load("a", queued_prefill_s=saved - 0.01), load("b"), matches=matches)
    far = decide(load("a", queued_prefill_s=saved + 0.01), load("b"), matches=matches)
    assert (near.replica_id, near.reason) == ("a:1", Reason.PREFIX)
    assert (far.replica_id, far.reason) == ("b:1", Reason.SPILL)
    assert "a:1 holds 1440" in far.detail


def test_one_hot_replica_does_not_take_affinity_from_the_others() -> None:
    decision = decide(
        load("a", queued_prefill_s=60.0), load("b", queued_prefill_s=0.2), load("c"),
        matches={"b:1": 90},
    )  # fmt: skip
    assert (decision.replica_id, decision.reason) == ("b:1", Reason.PREFIX)


def test_saved_work_counts_more_the_longer_all_queue() -> None:
    """The same difference of queues: it decides while others idle, and not when all are behind."""
    matches = {"a:1": 90}
    calm = decide(load("a", queued_prefill_s=2.0), load("b"), matches=matches, mean_work_s=10.0)
    busy = decide(
        load("a", queued_prefill_s=12.0), load("b", queued_prefill_s=10.0),
        matches=matches, mean_work_s=10.0,
    )  # fmt: skip
    assert calm.replica_id == "b:1"
    assert calm.price_of_work == pytest.approx(0.1)
    assert busy.replica_id == "a:1"
    assert busy.price_of_work == pytest.approx(1.1)
    assert busy.chosen.price_s == pytest.approx(1.1 * busy.chosen.own_s)


def test_a_step_is_paid_for_each_prefill_before_and_each_own_chunk() -> None:
    decision = decide(
        load("a", num_prefills=3, decode_step_s=0.1), prompt=Prompt(num_tokens=5000, block_size=16)
    )
    assert decision.chosen.step_s == pytest.approx((3 + 3) * 0.1)


def test_own_work_grows_with_the_context_before_it() -> None:
    assert own_work_tokens(1000, 0, attention_tokens=60_000) == pytest.approx(1000 * (1 + 1 / 120))
    assert own_work_tokens(1000, 60_000, attention_tokens=60_000) == pytest.approx(
        1000 * (2 + 1 / 120)
    )


def test_memory_that_runs_out_costs_and_memory_that_is_unknown_does_not() -> None:
    """Own need is 101 blocks of 1000: 0.85 + 0.101 is 0.151 over the threshold."""
    full = load("a", blocks_pinned=850)
    assert decide(full).chosen.kv_s == pytest.approx(3.0 * 0.151)
    assert decide(load("a", blocks_pinned=690)).chosen.kv_s == 0.0
    assert decide(load("a", blocks_pinned=10**9, blocks_total=None)).chosen.kv_s == 0.0
    assert decide(full, load("b")).replica_id == "b:1"


def test_a_full_hit_still_computes_a_token() -> None:
    prompt = Prompt(num_tokens=1600, block_size=16)
    chosen = decide(load("a"), matches={"a:1": 100}, prompt=prompt).chosen
    assert (chosen.uncached_tokens, chosen.cached_tokens) == (1, 1599)
    assert chosen.own_s > 0


def test_an_empty_prompt_costs_a_token() -> None:
    chosen = decide(load("a"), prompt=Prompt(num_tokens=0, block_size=16)).chosen
    assert (chosen.uncached_tokens, chosen.cached_tokens) == (1, 0)


def test_an_unknown_rate_is_borrowed_from_the_fleet() -> None:
    candidates = decide(
        load("a", prefill_tokens_per_s=500.0),
        load("b", prefill_tokens_per_s=1500.0),
        load("c", prefill_tokens_per_s=None),
    ).candidates
    times = {c.replica_id: c.own_s for c in candidates}
    assert times["c:1"] == pytest.approx(times["a:1"] / 2)
    alone = decide(load("c", prefill_tokens_per_s=None)).chosen
    assert alone.own_s == pytest.approx(
        own_work_tokens(1610, 0, attention_tokens=60_000) / PARAMS.default_prefill_tokens_per_s
    )


def test_a_new_replica_gets_the_next_cold_prompt() -> None:
    decision = decide(
        load("a", blocks_held=900),
        load("b", blocks_held=900),
        load("new", prefill_tokens_per_s=None),
    )
    assert (decision.replica_id, decision.reason) == ("new:1", Reason.LEAST_LOADED)


def test_of_tied_candidates_those_with_more_than_their_share_are_passed_by() -> None:
    """A request weighs as much as 50 blocks; up to a quarter above the mean is fair."""
    assert decide(load("a", blocks_held=41), load("b", blocks_held=7)).replica_id == "b:1"
    assert decide(load("a", in_flight=2), load("b", blocks_held=49)).replica_id == "b:1"
    assert decide(load("a", in_flight=1), load("b", blocks_held=99)).replica_id == "a:1"
    chosen = set()
    for number in range(20):
        prompt = Prompt(num_tokens=100, block_size=16, prefix_key=b"%d" % number)
        fair = (load("a", blocks_held=410), load("b", blocks_held=390))
        chosen.add(decide(*fair, prompt=prompt).replica_id)
    assert chosen == {"a:1", "b:1"}, "a difference that is no matter decides nothing"


def test_a_sticky_key_breaks_ties_and_nothing_else() -> None:
    names = ("a", "b", "c", "d")
    keys = [b"user %d" % number for number in range(40)]
    placed = {}
    for key in keys:
        # The beginning differs with every turn; the key stays.
        choices = {
            decide(
                *map(load, names),
                prompt=Prompt(100, 16, prefix_key=b"turn %d" % turn, sticky_key=key),
            ).replica_id
            for turn in range(5)
        }
        (placed[key],) = choices
    assert len(set(placed.values())) == 4
    key, home = next(iter(placed.items()))
    prompt = Prompt(1600, 16, prefix_key=b"x", sticky_key=key)
    others = [load(name, queued_prefill_s=5.0 * (f"{name}:1" == home)) for name in names]
    assert decide(*others, prompt=prompt).replica_id != home, "not when it costs more"
    holder = next(f"{name}:1" for name in names if f"{name}:1" != home)
    kept = decide(*map(load, names), prompt=prompt, matches={holder: 50})
    assert (kept.replica_id, kept.reason) == (holder, Reason.PREFIX)


def test_no_prefill_takes_less_than_a_step() -> None:
    """Ten tokens take 10 ms at this rate, and a step of this replica takes 85."""
    prompt = Prompt(num_tokens=10, block_size=16)
    idle = decide(load("a", least_step_s=0.085), prompt=prompt).chosen
    assert (idle.ttft_s, idle.own_s) == (0.085, 0.085)
    assert idle.work_s == pytest.approx(0.010, rel=1e-3)
    busy = decide(load("a", least_step_s=0.085, decode_step_s=0.085), prompt=prompt).chosen
    assert busy.ttft_s == pytest.approx(0.085 + busy.work_s), "the step it shares is that step"
    long = decide(load("a", least_step_s=0.085), prompt=Prompt(5000, 16)).chosen
    assert long.own_s == long.work_s > 3 * 0.085


def test_below_a_steps_time_a_match_still_counts() -> None:
    """Both would take one step, so waiting is equal; the work that is saved is not."""
    prompt = Prompt(num_tokens=64, block_size=16, prefix_key=b"p")
    busy = load("a", least_step_s=0.5, blocks_held=900)
    decision = decide(busy, load("b", least_step_s=0.5), matches={"a:1": 3}, prompt=prompt)
    assert (decision.replica_id, decision.reason) == ("a:1", Reason.PREFIX)


def test_attention_that_a_replica_showed_counts_and_an_unknown_one_is_borrowed() -> None:
    prompt = Prompt(num_tokens=16_000, block_size=16)
    candidates = decide(
        load("a", attention_tokens=8_000.0), load("b", attention_tokens=24_000.0), load("c"),
        prompt=prompt,
    ).candidates  # fmt: skip
    work = {c.replica_id: c.work_s for c in candidates}
    assert work["a:1"] == pytest.approx(16.0 * (1 + 8_000 / 8_000))
    assert work["c:1"] == pytest.approx(16.0 * (1 + 8_000 / 16_000))


def test_blocks_on_a_slower_tier_count_and_cost_their_way_back() -> None:
    """70 blocks on the device; 20 more on the host, and 10 on a disk behind them."""
    matches, slower = {"a:1": 70, "b:1": 70}, {"a:1": (20, 10)}
    params = dataclasses.replace(PARAMS, host_token_s=1e-4, disk_token_s=1e-3)
    a, b = choose(PROMPT, matches, [load("a"), load("b")], params=params, slower=slower).candidates
    assert (a.replica_id, a.matched_blocks, a.slow_blocks) == ("a:1", 100, 30)
    assert (a.uncached_tokens, b.uncached_tokens) == (10, 490)
    assert a.reload_s == pytest.approx(16 * (20 * 1e-4 + 10 * 1e-3))
    assert a.ttft_s == pytest.approx(a.own_s + a.reload_s)
    assert b.reload_s == 0.0
    slow = dataclasses.replace(PARAMS, host_token_s=1e-2)
    first, *_ = choose(
        PROMPT, matches, [load("a"), load("b")], params=slow, slower=slower
    ).candidates
    assert first.replica_id == "b:1", "computing is faster than such a tier"


def test_rates_that_differ_by_noise_are_a_tie() -> None:
    decision = decide(
        load("a", prefill_tokens_per_s=1040.0, blocks_held=50), load("b", blocks_held=0)
    )
    assert decision.replica_id == "b:1"


def test_a_few_shared_words_do_not_gather_all_prompts_at_one_replica() -> None:
    """Templates begin alike: a block of a hundred is no reason to follow."""
    busy = load("a", blocks_held=5000, in_flight=9)
    decision = decide(busy, load("b"), matches={"a:1": 1})
    assert (decision.replica_id, decision.reason) == ("b:1", Reason.LEAST_LOADED)
    assert "a:1 holds 16 of 1610 prompt tokens, too few to matter" in decision.detail


def test_a_tie_never_gives_a_match_away_that_matters() -> None:
    """Seven blocks of a hundred are more than noise between candidates may cost."""
    busy = load("a", blocks_held=5000, in_flight=9)
    decision = decide(busy, load("b"), matches={"a:1": 7})
    assert (decision.replica_id, decision.reason) == ("a:1", Reason.PREFIX)


def test_routers_that_do_not_talk_agree_and_prefixes_spread() -> None:
    names = [f"r{number}" for number in range(4)]
    chosen = []
    for number in range(200):
        prompt = Prompt(num_tokens=100, block_size=16, prefix_key=f"prefix {number}".encode())
        one = decide(*map(load, names), prompt=prompt)
        other = decide(*map(load, reversed(names)), prompt=prompt)
        assert one.replica_id == other.replica_id
        chosen.append(one.replica_id)
    counts = [chosen.count(f"{name}:1") for name in names]
    assert min(counts) > 25


def test_a_replica_that_leaves_moves_only_its_own_prefixes() -> None:
    names = [f"r{number}" for number in range(4)]
    for number in range(100):
        prompt = Prompt(num_tokens=100, block_size=16, prefix_key=f"prefix {number}".encode())
        before = decide(*map(load, names), prompt=prompt).replica_id
        after = decide(*map(load, names[:3]), prompt=prompt).replica_id
        assert before in (after, "r3:1")


def test_one_candidate_is_the_only_replica() -> None:
    decision = decide(load("a", queued_prefill_s=100.0), matches={"a:1": 3})
    assert decision.reason is Reason.ONLY_REPLICA
    assert "only replica" in decision.detail


@pytest.mark.parametrize("loads", [[load("a")], [load("a"), load("b")]])
def test_a_retry_says_so(loads: list[ReplicaLoad]) -> None:
    decision = decide(*loads, retry=True)
    assert decision.reason is Reason.RETRY
    assert decision.detail.endswith(".")


def test_nobody_to_choose_from_is_an_error() -> None:
    with pytest.raises(NoReplicaAvailable):
        decide()


def test_every_term_is_in_the_cost() -> None:
    decision = decide(
        load("a", queued_prefill_s=1.0, num_prefills=1, decode_step_s=0.5, blocks_pinned=900),
        load("b", queued_prefill_s=50.0),
        matches={"a:1": 10, "b:1": 4},
        mean_work_s=2.0,
    )
    for c in decision.candidates:
        assert c.ttft_s == c.queued_s + c.step_s + c.own_s + c.reload_s
        assert c.cost_s == pytest.approx(c.ttft_s + c.price_s + c.kv_s)
    assert all(
        value > 0
        for value in (decision.chosen.step_s, decision.chosen.price_s, decision.chosen.kv_s)
    )
    assert decision.candidates[0].cost_s <= decision.candidates[1].cost_s


def test_a_running_mean_starts_with_its_first_value() -> None:
    assert running_mean(None, 3.0) == 3.0
    assert running_mean(2.0, 4.0, weight=0.25) == pytest.approx(2.5)
    assert math.isclose(running_mean(5.0, 5.0), 5.0)
