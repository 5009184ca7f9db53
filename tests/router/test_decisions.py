"""The memory of decisions: bounded, newest first, whole at every moment."""

from __future__ import annotations

import msgspec

from kvway_router.decisions import (
    MAX_CANDIDATES,
    DecisionRecord,
    DecisionStore,
    shown_candidates,
    summarize,
)
from kvway_router.policies.cost import choose
from kvway_router.policy import Decision, PolicyParams, Prompt, ReplicaLoad


def record(request_id: str) -> DecisionRecord:
    return DecisionRecord(
        id=request_id,
        time=0.0,
        route="/v1/completions",
        model="m",
        stream=False,
        num_prompts=1,
        prompt_tokens=32,
        prompt_tokens_exact=True,
        prompt_blocks=2,
        block_size=16,
        replica_id="a:1",
        reason="prefix",
        price_of_work=0.0,
        matched_tokens=16,
        reachable_tokens=16,
        sticky=False,
        predicted_ttft_s=0.1,
        num_candidates=1,
        attempts=(),
    )


def decision(name: str = "a") -> Decision:
    loads = [load(0, queued_prefill_s=0.0)]
    loads = [msgspec.structs.replace(loads[0], replica_id=f"{name}:1")]
    return choose(Prompt(num_tokens=100, block_size=16), {}, loads=loads, params=PolicyParams())


def test_the_oldest_record_makes_room() -> None:
    store = DecisionStore(max_records=2)
    for request_id in ("a", "b", "c"):
        store.add(record(request_id), decision())
    assert [kept.id for kept in store.latest(9)] == ["c", "b"]
    assert store.get("a") is None
    assert len(store) == 2


def test_a_newer_record_takes_the_place_of_the_older() -> None:
    store = DecisionStore(max_records=2)
    store.add(record("a"), decision())
    store.add(record("b"), decision())
    store.update(msgspec.structs.replace(record("a"), status=200))
    assert [(kept.id, kept.status) for kept in store.latest(9)] == [("b", None), ("a", 200)]


def test_a_forgotten_record_does_not_come_back() -> None:
    store = DecisionStore(max_records=1)
    store.add(record("a"), decision())
    store.add(record("b"), decision())
    store.update(record("a"))
    assert [kept.id for kept in store.latest(9)] == ["b"]


def test_a_record_is_whole_when_it_is_read() -> None:
    """With the candidates of the last choice, also after what happened since."""
    store = DecisionStore(max_records=2)
    store.add(record("a"), decision("a"))
    store.update(record("a"), decision("b"))
    store.update(msgspec.structs.replace(record("a"), status=200))
    kept = store.get("a")
    assert kept is not None
    assert [candidate.replica_id for candidate in kept.candidates] == ["b:1"]
    assert "b:1 holds 0 of 100 prompt tokens" in kept.detail
    assert store.latest(1) == [kept]
    assert store.summaries(1) == [summarize(kept)]


def test_a_record_of_a_large_fleet_is_made_when_its_request_ends() -> None:
    loads = [load(number, queued_prefill_s=0.0) for number in range(MAX_CANDIDATES + 1)]
    many = choose(Prompt(num_tokens=100, block_size=16), {}, loads=loads, params=PolicyParams())
    store = DecisionStore(max_records=1)
    store.add(record("a"), many)
    running = store.get("a")
    assert running is not None
    assert store._records["a"][1] is many
    store.update(msgspec.structs.replace(record("a"), finish="done"))
    ended = store.get("a")
    assert ended == msgspec.structs.replace(running, finish="done")
    assert store._records["a"][1] is None


def test_a_store_of_none_stays_empty() -> None:
    store = DecisionStore(max_records=0)
    store.add(record("a"), decision())
    assert store.latest(9) == []


def test_latest_returns_no_more_than_asked_for() -> None:
    store = DecisionStore(max_records=9)
    for request_id in ("a", "b", "c"):
        store.add(record(request_id), decision())
    assert [kept.id for kept in store.latest(1)] == ["c"]


def test_a_summary_is_the_record_without_its_long_parts() -> None:
    summary = msgspec.to_builtins(summarize(record("a")))
    whole = msgspec.to_builtins(record("a"))
    assert summary.items() <= whole.items()
    assert not {"candidates", "attempts", "detail"} & summary.keys()


def load(number: int, *, queued_prefill_s: float) -> ReplicaLoad:
    return ReplicaLoad(
        replica_id=f"r{number}:1",
        queued_prefill_s=queued_prefill_s,
        queued_tokens=1000.0 * queued_prefill_s,
        num_prefills=0,
        decode_step_s=0.0,
        prefill_tokens_per_s=1000.0,
        blocks_pinned=0,
        blocks_total=None,
        in_flight=0 if number else 1000,
        blocks_held=0,
    )


def test_of_many_candidates_the_cheapest_and_the_chosen_are_kept() -> None:
    loads = [load(number, queued_prefill_s=0.0) for number in range(100)]
    decision = choose(
        Prompt(num_tokens=100, block_size=16), {}, loads=loads, params=PolicyParams()
    )
    shown = shown_candidates(decision)
    assert len(shown) == MAX_CANDIDATES
    assert decision.replica_id in {candidate.replica_id for candidate in shown}
    costs = [candidate.cost_s for candidate in shown[:-1]]
    assert costs == sorted(costs)
