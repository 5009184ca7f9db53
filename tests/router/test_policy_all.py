"""What holds for every policy, whatever its rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvway_core.errors import NoReplicaAvailable
from kvway_router.policies.base import Situation, decide
from kvway_router.policies.reasons import Reason
from kvway_router.policies.registry import DEFAULT_POLICY, POLICIES, first_state
from kvway_router.policies.state import NUM_BUCKETS, PolicyState, Sent, Window
from kvway_router.policy import PolicyParams, Prompt, ReplicaLoad
from tests.router.policy_cases import choose, load, situation

NAMES = sorted(POLICIES)
_SECONDS = st.floats(0, 1e6)
_COUNTS = st.integers(0, 10**9)
_BLOCKS = st.integers(0, 1000)
_RATES = st.one_of(st.none(), st.floats(1.0, 1e7))


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    names = draw(st.lists(st.integers(0, 999), min_size=1, max_size=12, unique=True))
    loads = [
        ReplicaLoad(
            replica_id=f"10.0.0.{name}:1",
            queued_prefill_s=draw(_SECONDS),
            queued_tokens=draw(_COUNTS),
            num_prefills=draw(_COUNTS),
            decode_step_s=draw(st.floats(0, 10)),
            prefill_tokens_per_s=draw(_RATES),
            blocks_pinned=draw(_COUNTS),
            blocks_total=draw(st.one_of(st.none(), st.integers(0, 10**9))),
            in_flight=draw(_COUNTS),
            blocks_held=draw(_COUNTS),
            attention_tokens=draw(st.one_of(st.none(), st.floats(1e3, 1e6))),
            least_step_s=draw(st.floats(0, 10)),
        )
        for name in names
    ]
    prompt = Prompt(
        num_tokens=draw(st.integers(0, 10**6)),
        block_size=draw(st.integers(1, 512)),
        prefix_key=draw(st.binary(max_size=8)),
        num_output_tokens=draw(st.integers(0, 10**5)),
    )
    known = [*(each.replica_id for each in loads), "tried:1"]
    matches = st.dictionaries(
        st.sampled_from(known), st.integers(0, prompt.num_tokens // prompt.block_size)
    )
    return Situation(
        prompt=prompt,
        matches=draw(matches),
        loads=loads,
        params=PolicyParams(),
        mean_work_s=draw(st.one_of(st.none(), st.floats(1e-6, 1e6))),
        retry=draw(st.booleans()),
        now_s=draw(_SECONDS),
        slower=draw(
            st.dictionaries(st.sampled_from(known), st.tuples(_BLOCKS, _BLOCKS), max_size=3)
        ),
    )


@pytest.mark.property
@pytest.mark.parametrize("name", NAMES)
@given(asked=situations(), seed=st.integers(0, 2**64 - 1), later_s=st.lists(st.floats(0, 400)))
def test_any_situation_gives_one_of_the_candidates_and_the_same_again(
    name: str, asked: Situation, seed: int, later_s: list[float]
) -> None:
    policy = POLICIES[name]
    state = first_state(policy, seed=seed)
    usable = {each.replica_id for each in asked.loads}
    now_s = asked.now_s
    for wait_s in [0.0, *later_s[:4]]:
        now_s += wait_s
        now = Situation(
            asked.prompt, asked.matches, asked.loads, asked.params,
            asked.mean_work_s, asked.retry, now_s, asked.slower,
        )  # fmt: skip
        turned = Situation(
            asked.prompt, asked.matches, asked.loads[::-1], asked.params,
            asked.mean_work_s, asked.retry, now_s, asked.slower,
        )  # fmt: skip
        decision, after = decide(policy, now, state)
        assert decision.replica_id in usable
        assert {c.replica_id for c in decision.candidates} == usable
        assert decision.reason in policy.reasons
        assert decision.detail.endswith(".")
        assert decide(policy, now, state) == (decision, after)
        assert decide(policy, turned, state)[0].replica_id == decision.replica_id
        state = after


@pytest.mark.parametrize("name", NAMES)
def test_who_is_left_out_stays_out(name: str) -> None:
    """The best in every respect is no candidate, since it was tried."""
    busy = {"in_flight": 5, "queued_prefill_s": 1.0, "queued_tokens": 1000, "blocks_pinned": 500}
    matches = {"tried:1": 100}
    decision = choose(name, load("a", **busy), load("b", **busy), matches=matches, retry=True)
    assert decision.replica_id in ("a:1", "b:1")
    assert decision.reason is Reason.RETRY


@pytest.mark.parametrize("name", NAMES)
def test_one_candidate_is_the_only_replica(name: str) -> None:
    decision = choose(name, load("a", in_flight=100, queued_prefill_s=100.0, queued_tokens=1e5))
    assert (decision.replica_id, decision.reason) == ("a:1", Reason.ONLY_REPLICA)


@pytest.mark.parametrize("name", NAMES)
def test_nobody_to_choose_from_is_an_error(name: str) -> None:
    policy = POLICIES[name]
    with pytest.raises(NoReplicaAvailable):
        decide(policy, situation(), first_state(policy))


@pytest.mark.parametrize("name", NAMES)
def test_a_baselines_candidates_are_those_of_the_cost(name: str) -> None:
    loads = (load("a", queued_prefill_s=3.0), load("b"), load("c", decode_step_s=0.1))
    ours = choose(DEFAULT_POLICY, *loads, matches={"a:1": 50})
    theirs = choose(name, *loads, matches={"a:1": 50})
    assert theirs.candidates == ours.candidates


def test_every_reason_is_one_that_a_policy_may_give() -> None:
    given = {reason for policy in POLICIES.values() for reason in policy.reasons}
    assert given == set(Reason)


def test_names_are_those_of_the_policies() -> None:
    assert DEFAULT_POLICY == "cost"
    assert all(name == policy.name for name, policy in POLICIES.items())


def test_a_window_remembers_for_its_length_and_no_longer() -> None:
    window = Window(length_s=180.0).sent("a", 2.0, now_s=1000.0).sent("a", 3.0, now_s=1001.0)
    window = window.sent("b", 1.0, now_s=1100.0)
    assert window.totals(now_s=1101.0) == {"a": Sent(2, 5.0), "b": Sent(1, 1.0)}
    assert window.totals(now_s=1169.0)["a"] == Sent(2, 5.0)
    assert window.totals(now_s=1181.0) == {"b": Sent(1, 1.0)}
    assert window.totals(now_s=1300.0) == {}


def test_a_window_is_bounded_in_parts() -> None:
    window = Window(length_s=18.0)
    for second in range(500):
        window = window.sent("a", 1.0, now_s=float(second))
    assert len(window.parts) == NUM_BUCKETS
    assert window.totals(now_s=499.0) == {"a": Sent(18, 18.0)}


def test_a_window_without_length_remembers_nothing() -> None:
    assert Window().sent("a", 1.0, now_s=0.0) == Window()
    assert Window().totals(now_s=0.0) == {}


def test_a_state_draws_evenly_and_differently_each_time() -> None:
    shares = []
    state = PolicyState(seed=3)
    for _ in range(2000):
        shares.append(state.draw_share())
        state = state.after("a", 0.0, now_s=0.0)
    assert 0.0 <= min(shares) < max(shares) < 1.0
    assert abs(sum(shares) / len(shares) - 0.5) < 0.03
    assert len(set(shares)) == len(shares)
