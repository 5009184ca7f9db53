"""Work is counted from the choice on, and given back exactly once, whatever happens."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from kvway_core.answers import BlockCounts
from kvway_core.api import LoadReport
from kvway_core.testing.fake_clock import FakeClock
from kvway_router.charges import Charge
from kvway_router.failures import FAILURE_S, HALF_LIFE_S
from kvway_router.ledger import Ledger
from kvway_router.policies.cost import choose
from kvway_router.policy import Candidate, PolicyParams, Prompt, ReplicaLoad
from kvway_router.telemetry import Telemetry

# Without the term for long contexts, tokens of work are tokens.
PARAMS = PolicyParams(attention_tokens=1e18, default_prefill_tokens_per_s=100.0)
STALE_S = 5.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(monotonic_s=1000.0)


@pytest.fixture
def ledger(clock: FakeClock) -> Ledger:
    return Ledger(clock=clock, params=PARAMS, stale_after_s=STALE_S)


def candidate(name: str = "a", *, tokens: int = 500, cached: int = 0) -> Candidate:
    return Candidate(
        replica_id=f"{name}:1",
        matched_blocks=cached // 16,
        slow_blocks=0,
        uncached_tokens=tokens,
        cached_tokens=cached,
        own_blocks=-(-tokens // 16),
        queued_s=0.0,
        step_s=0.0,
        own_s=tokens / 100.0,
        work_s=tokens / 100.0,
        price_s=0.0,
        kv_s=0.0,
        reload_s=0.0,
        in_flight=0,
        blocks_held=0,
        ttft_s=tokens / 100.0,
        cost_s=tokens / 100.0,
    )


def report(**changes: Any) -> LoadReport:
    fields: dict[str, Any] = {
        "boot_id": "boot-1",
        "model": "m",
        "block_size": 16,
        "hash_scheme": "kvway-1",
        "state": "ready",
        "num_running": 0,
        "num_waiting": 0,
        "waiting_uncached_tokens": 0,
        "blocks": BlockCounts(free=1000, cached=0, total=1000),
        "prefill_tokens_per_s": 0.0,
        "decode_step_s": 0.0,
        "max_model_len": 8192,
        "max_num_seqs": 8,
    }
    return LoadReport(**(fields | changes))


def hear(ledger: Ledger, replica_id: str, report: LoadReport) -> None:
    """A report that was asked for, given and received in one moment."""
    ledger.report(replica_id, Telemetry.of(report), asked_s=ledger.now())


def load(ledger: Ledger, name: str = "a") -> ReplicaLoad:
    (found,) = ledger.loads([(f"{name}:1", 7)])
    return found


IDLE = ReplicaLoad(
    replica_id="a:1",
    queued_prefill_s=0.0,
    queued_tokens=0,
    num_prefills=0,
    decode_step_s=0.0,
    prefill_tokens_per_s=None,
    blocks_pinned=0,
    blocks_total=None,
    in_flight=0,
    blocks_held=7,
)


def test_a_replica_nobody_used_is_idle(ledger: Ledger) -> None:
    assert load(ledger) == IDLE


def test_work_counts_from_the_choice_on(ledger: Ledger) -> None:
    """A burst of slow prefills spreads before any of them has answered."""
    charges = [ledger.charge(candidate(tokens=500)) for _ in range(64)]
    busy = load(ledger)
    assert busy.queued_prefill_s == pytest.approx(64 * 5.0)
    assert (busy.num_prefills, busy.in_flight, busy.blocks_pinned) == (64, 64, 64 * 32)
    for charge in charges:
        charge.close()
    assert load(ledger) == IDLE


def test_the_first_token_gives_back_the_prefill_and_the_end_the_rest(ledger: Ledger) -> None:
    with ledger.charge(candidate()) as charge:
        charge.token()
        charge.token()
        running = load(ledger)
        assert (running.queued_prefill_s, running.num_prefills) == (0.0, 0)
        assert (running.in_flight, running.blocks_pinned) == (1, 32)
    assert load(ledger) == IDLE


def test_the_end_gives_back_what_never_began(ledger: Ledger) -> None:
    with pytest.raises(ConnectionError), ledger.charge(candidate()):
        raise ConnectionError
    assert load(ledger) == IDLE
    assert ledger.num_in_flight("a:1") == 0


def test_whatever_the_order_everything_is_given_back_once(ledger: Ledger) -> None:
    rng = random.Random(7)
    charges: list[Charge] = []
    for _ in range(2_000):
        charges.append(ledger.charge(candidate(rng.choice("ab"), tokens=rng.randint(1, 3000))))
        action = rng.choice([Charge.token, Charge.close, Charge.close])
        for charge in rng.sample(charges, min(len(charges), 3)):
            action(charge)
        if rng.random() < 0.1:
            hear(ledger, "a:1", report(num_running=rng.randint(0, 9)))
        for name in "ab":
            now = load(ledger, name)
            assert now.queued_prefill_s >= 0
            assert min(now.num_prefills, now.in_flight, now.blocks_pinned) >= 0
    for charge in charges:
        charge.close()
        charge.token()
        charge.close()
    assert load(ledger, "b") == msgspec.structs.replace(IDLE, replica_id="b:1")
    hear(ledger, "a:1", report())
    assert load(ledger) == msgspec.structs.replace(IDLE, blocks_total=1000)


def test_a_long_request_is_never_forgotten(ledger: Ledger, clock: FakeClock) -> None:
    with ledger.charge(candidate()):
        clock.advance(3600.0)
        assert load(ledger).num_prefills == 1


def test_a_rate_is_learned_from_a_request_that_did_not_queue(
    ledger: Ledger, clock: FakeClock
) -> None:
    charge = ledger.charge(candidate(tokens=500))
    clock.advance(2.0)
    charge.token()
    assert load(ledger).prefill_tokens_per_s == pytest.approx(250.0)
    charge.close()
    assert load(ledger).prefill_tokens_per_s == pytest.approx(250.0)


def test_a_rate_is_learned_from_a_queue_in_whatever_order_it_is_served(
    ledger: Ledger, clock: FakeClock
) -> None:
    """What was prefilled between two idle moments, over the time between them."""
    charges = [ledger.charge(candidate(tokens=tokens)) for tokens in (900, 500)]
    clock.advance(2.0)
    later = ledger.charge(candidate(tokens=600))
    charges[1].token()
    assert load(ledger).prefill_tokens_per_s is None
    clock.advance(6.0)
    charges[0].token()
    later.token()
    assert load(ledger).prefill_tokens_per_s == pytest.approx(2000 / 8.0)
    assert load(ledger).queued_prefill_s == 0.0


def test_a_replica_that_never_idles_teaches_its_rate_all_the_same(
    ledger: Ledger, clock: FakeClock
) -> None:
    queue = [ledger.charge(candidate(tokens=1000)) for _ in range(3)]
    for _ in range(40):
        clock.advance(2.0)
        queue.append(ledger.charge(candidate(tokens=1000)))
        queue.pop(0).token()
    assert load(ledger).prefill_tokens_per_s == pytest.approx(500.0, rel=0.05)


def test_a_prefill_of_unknown_end_spoils_no_rate(ledger: Ledger, clock: FakeClock) -> None:
    gone, stays = (ledger.charge(candidate(tokens=500)) for _ in range(2))
    clock.advance(1.0)
    gone.close()
    clock.advance(1.0)
    stays.token()
    assert load(ledger).prefill_tokens_per_s is None
    again = ledger.charge(candidate(tokens=500))
    clock.advance(1.0)
    again.token()
    assert load(ledger).prefill_tokens_per_s == pytest.approx(500.0)


def test_a_whole_answer_counts_as_prefill_for_as_long_as_it_was_predicted_to(
    ledger: Ledger, clock: FakeClock
) -> None:
    """Engines without reports show nothing of it before its end."""
    whole = ledger.charge(candidate(tokens=500), is_stream=False)  # predicted to take 5 s
    stream = ledger.charge(candidate(tokens=300))
    clock.advance(4.9)
    assert (load(ledger).num_prefills, load(ledger).queued_tokens) == (2, 800)
    clock.advance(0.2)
    seen = load(ledger)
    assert (seen.num_prefills, seen.queued_tokens, seen.in_flight) == (1, 300, 2)
    assert seen.blocks_pinned == 32 + 19
    for charge in (whole, stream):
        charge.close()
    assert load(ledger) == IDLE


def test_a_report_tells_more_of_a_whole_answer_than_a_prediction(
    ledger: Ledger, clock: FakeClock
) -> None:
    ledger.charge(candidate(tokens=500), is_stream=False)
    clock.advance(5.1)
    hear(ledger, "a:1", report(num_waiting=1, waiting_uncached_tokens=500))
    assert load(ledger).num_prefills == 1
    clock.advance(STALE_S + 0.1)
    assert load(ledger).num_prefills == 0


def test_estimates_do_not_outlive_their_requests_by_much(ledger: Ledger) -> None:
    for _ in range(1000):
        ledger.charge(candidate(tokens=100_000), is_stream=False).close()
    assert len(ledger._accounts["a:1"]._promises) < 100


def test_short_prompts_teach_no_rate(ledger: Ledger, clock: FakeClock) -> None:
    charge = ledger.charge(candidate(tokens=20))
    clock.advance(1.0)
    charge.token()
    assert load(ledger).prefill_tokens_per_s is None


@pytest.mark.parametrize(("seconds", "learned"), [(0.0, None), (1e-6, 1e7), (1e9, 1.0)])
def test_rates_stay_within_reason(
    ledger: Ledger, clock: FakeClock, seconds: float, learned: float | None
) -> None:
    charge = ledger.charge(candidate(tokens=500))
    clock.advance(seconds)
    charge.token()
    assert load(ledger).prefill_tokens_per_s == learned


def test_a_reported_rate_counts_more_than_what_is_seen_from_here(
    ledger: Ledger, clock: FakeClock
) -> None:
    hear(ledger, "a:1", report(prefill_tokens_per_s=5000.0))
    charge = ledger.charge(candidate(tokens=500))
    clock.advance(1.0)
    charge.token()
    assert load(ledger).prefill_tokens_per_s == 5000.0


def test_no_rate_is_learned_behind_the_prefills_of_others(
    ledger: Ledger, clock: FakeClock
) -> None:
    hear(ledger, "a:1", report(num_waiting=1, waiting_uncached_tokens=900))
    charge = ledger.charge(candidate(tokens=500))
    clock.advance(1.0)
    charge.token()
    assert load(ledger).prefill_tokens_per_s is None


def test_no_rate_is_learned_while_blocks_come_back_from_slower_tiers(
    ledger: Ledger, clock: FakeClock
) -> None:
    slow = msgspec.structs.replace(candidate(tokens=500, cached=500), slow_blocks=30)
    with ledger.charge(slow) as charge:
        clock.advance(9.0)
        charge.token()
    assert load(ledger).prefill_tokens_per_s is None


def test_a_queue_that_is_not_counted_in_tokens_is_taken_for_prompts_like_ours(
    ledger: Ledger,
) -> None:
    told = Telemetry(num_running=2, num_waiting=3)
    ledger.report("a:1", told, asked_s=ledger.now())
    assert load(ledger).queued_tokens == 3 * PARAMS.chunk_tokens, "none of ours is known yet"
    with ledger.charge(candidate("b", tokens=500)):
        ledger.report("a:1", told, asked_s=ledger.now())
    assert load(ledger).queued_tokens == 3 * 500
    assert (load(ledger).num_prefills, load(ledger).in_flight) == (3, 5)


def test_a_count_that_lags_takes_no_request_of_ours_for_that_of_another(
    ledger: Ledger, clock: FakeClock
) -> None:
    """Eight were there at once within the lag, so of the nine that are told of one is foreign."""
    told = Telemetry(num_running=6, num_waiting=3, lag_s=30.0)
    charges = [ledger.charge(candidate()) for _ in range(8)]
    for charge in charges:
        clock.advance(1.0)
        charge.close()
    ledger.report("a:1", told, asked_s=ledger.now())
    assert (load(ledger).in_flight, load(ledger).num_prefills) == (1, 1)
    clock.advance(26.0)
    ledger.report("a:1", told, asked_s=ledger.now())
    assert load(ledger).in_flight == 4, "five were there half a minute ago"
    clock.advance(60.0)
    with ledger.charge(candidate()):
        pass
    ledger.report("a:1", told, asked_s=ledger.now())
    assert load(ledger).in_flight == 8
    assert len(ledger._accounts["a:1"]._before) == 1


def test_an_engine_that_counts_no_tokens_says_nothing_of_prefills(
    ledger: Ledger, clock: FakeClock
) -> None:
    """None waits, but one may be half done: what was promised counts, not the report."""
    ledger.charge(candidate(tokens=500), is_stream=False)  # predicted to take 5 s
    clock.advance(4.0)
    ledger.report("a:1", Telemetry(num_running=1), asked_s=ledger.now())
    assert load(ledger).num_prefills == 1
    clock.advance(1.1)
    assert load(ledger).num_prefills == 0


def test_how_many_replicas_were_busy_is_a_mean_over_time(ledger: Ledger, clock: FakeClock) -> None:
    both = [("a:1", 0), ("b:1", 0)]
    ledger.loads(both)
    charge = ledger.charge(candidate())
    for _ in range(5):
        ledger.loads(both)
    assert ledger.busy_share == 0.0, "no time has gone by"
    clock.advance(20.0)
    ledger.loads(both)
    assert ledger.busy_share == pytest.approx(0.5 * (1 - math.exp(-1)))
    clock.advance(1000.0)
    ledger.loads(both)
    assert ledger.busy_share == pytest.approx(0.5)
    charge.close()
    clock.advance(1000.0)
    ledger.loads(both)
    assert ledger.busy_share == pytest.approx(0.0)


def test_an_unknown_rate_is_borrowed_for_the_queue(ledger: Ledger) -> None:
    hear(ledger, "b:1", report(prefill_tokens_per_s=1000.0))
    ledger.charge(candidate("a", tokens=500))
    loads = ledger.loads([("a:1", 0), ("b:1", 0)])
    assert loads[0].prefill_tokens_per_s is None
    assert loads[0].queued_prefill_s == pytest.approx(0.5)


def test_steps_are_timed_by_the_gaps_of_streams_until_they_are_reported(
    ledger: Ledger, clock: FakeClock
) -> None:
    charge = ledger.charge(candidate())
    for _ in range(3):
        charge.token()
        clock.advance(0.25)
    assert load(ledger).decode_step_s == pytest.approx(0.25)
    hear(ledger, "a:1", report(decode_step_s=0.5))
    assert load(ledger).decode_step_s == pytest.approx(0.5)
    charge.close()
    assert load(ledger).decode_step_s == 0.0


def test_the_work_of_others_is_added_and_ours_is_not_counted_twice(ledger: Ledger) -> None:
    ledger.charge(candidate(tokens=500))
    hear(ledger, "a:1", report(num_running=2, num_waiting=3, waiting_uncached_tokens=1700))
    seen = load(ledger)
    assert seen.queued_prefill_s == pytest.approx(17.0)
    assert (seen.num_prefills, seen.in_flight) == (3, 5)
    ledger.charge(candidate(tokens=300))
    assert load(ledger).queued_prefill_s == pytest.approx(20.0)


def test_queued_tokens_are_plain_tokens_and_leave_with_the_prefill(clock: FakeClock) -> None:
    """Attention makes the work of 500 tokens that of 3000 here; they stay 500 tokens."""
    ledger = Ledger(clock=clock, params=PolicyParams(attention_tokens=100.0))
    charge = ledger.charge(candidate(tokens=500, cached=250))
    seen = load(ledger)
    assert seen.queued_tokens == 500
    assert seen.queued_prefill_s > 500 / PolicyParams().default_prefill_tokens_per_s
    charge.token()
    assert load(ledger).queued_tokens == 0
    hear(ledger, "a:1", report(num_waiting=1, waiting_uncached_tokens=70))
    assert load(ledger).queued_tokens == 70


def test_a_report_never_hides_what_was_just_sent(ledger: Ledger) -> None:
    """The report may be older than the request, which then is not in it."""
    ledger.charge(candidate(tokens=500))
    hear(ledger, "a:1", report())
    seen = load(ledger)
    assert seen.queued_prefill_s == pytest.approx(5.0)
    assert (seen.num_prefills, seen.in_flight, seen.blocks_pinned) == (1, 1, 32)


def test_a_report_by_which_nothing_waits_ends_prefills_that_no_stream_shows(
    ledger: Ledger, clock: FakeClock
) -> None:
    """An answer that is no stream shows no first token."""
    charge = ledger.charge(candidate(tokens=500))
    clock.advance(1.0)
    running = report(num_running=1, blocks=BlockCounts(free=90, cached=0, total=100))
    hear(ledger, "a:1", msgspec.structs.replace(running, waiting_uncached_tokens=100))
    assert load(ledger).num_prefills == 1, "a part of it is still to be computed"
    hear(ledger, "a:1", running)
    seen = load(ledger)
    assert (seen.queued_prefill_s, seen.num_prefills, seen.in_flight) == (0.0, 0, 1)
    assert seen.blocks_pinned == 10, "its blocks are among those reported"
    charge.close()
    assert load(ledger).in_flight == 0


def test_a_report_asked_for_before_the_request_arrived_ends_no_prefill(
    ledger: Ledger, clock: FakeClock
) -> None:
    asked_s = ledger.now()
    ledger.charge(candidate(tokens=500))
    clock.advance(1.0)
    ledger.report("a:1", Telemetry.of(report()), asked_s=asked_s)
    assert load(ledger).num_prefills == 1


def test_blocks_are_those_reported_and_those_wanted_since(ledger: Ledger) -> None:
    running = ledger.charge(candidate(tokens=160))
    running.token()
    ledger.charge(candidate(tokens=320))
    hear(ledger, "a:1", report(blocks=BlockCounts(free=100, cached=200, total=1000)))
    assert load(ledger).blocks_total == 1000
    assert load(ledger).blocks_pinned == 700 + 20
    running.close()
    assert load(ledger).blocks_pinned == 700 + 20


def test_a_stale_report_is_ignored_and_the_own_count_stays(
    ledger: Ledger, clock: FakeClock
) -> None:
    ledger.charge(candidate(tokens=500))
    hear(
        ledger,
        "a:1",
        report(
            num_waiting=9,
            waiting_uncached_tokens=9000,
            prefill_tokens_per_s=1000.0,
            blocks=BlockCounts(free=0, cached=0, total=1000),
        ),
    )
    clock.advance(STALE_S)
    assert load(ledger).num_prefills == 9
    clock.advance(0.001)
    stale = load(ledger)
    assert (stale.num_prefills, stale.in_flight, stale.blocks_pinned) == (1, 1, 32)
    assert stale.queued_prefill_s == pytest.approx(0.5)


def test_a_replica_that_left_is_forgotten_with_its_last_request(ledger: Ledger) -> None:
    hear(ledger, "a:1", report(prefill_tokens_per_s=5000.0))
    charge = ledger.charge(candidate())
    ledger.forget("a:1")
    assert load(ledger).in_flight == 1
    assert load(ledger).prefill_tokens_per_s is None
    charge.close()
    assert load(ledger) == IDLE
    assert ledger._accounts == {}
    ledger.forget("a:1")


def test_a_replica_that_comes_back_still_has_its_requests(ledger: Ledger) -> None:
    before = ledger.charge(candidate())
    ledger.forget("a:1")
    after = ledger.charge(candidate())
    assert load(ledger).in_flight == 2
    before.close()
    assert load(ledger).in_flight == 1
    after.close()
    assert load(ledger) == IDLE


def test_the_mean_of_own_work_follows_the_choices(ledger: Ledger) -> None:
    assert ledger.mean_work_s is None
    ledger.charge(candidate(tokens=100))
    assert ledger.mean_work_s == pytest.approx(1.0)
    ledger.charge(candidate(tokens=300))
    assert ledger.mean_work_s == pytest.approx(1.1)


def test_what_is_kept_of_a_load_is_what_would_be_reckoned_anew(
    ledger: Ledger, clock: FakeClock
) -> None:
    """Whatever happens between two looks, and whoever is asked for."""
    rng = random.Random(5)
    names = ["a:1", "b:1", "c:1", "never:1"]
    charges: list[Charge] = []
    num_kept = 0
    for _ in range(1500):
        name = rng.choice("abc")
        match rng.randrange(9):
            case 0 | 1:
                chosen = candidate(name, tokens=rng.randrange(1, 900))
                charges.append(ledger.charge(chosen, is_stream=rng.random() < 0.7))
            case 2 | 3 if charges:
                rng.choice(charges).token()
            case 4 if charges:
                charges.pop(rng.randrange(len(charges))).close()
            case 5 if charges:
                rng.choice(charges).recount(
                    uncached_tokens=rng.randrange(1, 900), cached_tokens=16, num_blocks=9
                )
            case 6:
                clock.advance(rng.choice([0.01, 0.05, 0.05, 0.5, 6.0]))
            case 7:
                said = {"num_running": rng.randrange(9), "num_waiting": rng.randrange(2)}
                hear(ledger, f"{name}:1", report(**said, prefill_tokens_per_s=rng.choice([0, 70])))
            case 8 if rng.random() < 0.05:
                ledger.forget(f"{name}:1")
            case 8 if rng.random() < 0.02:
                ledger.failed(f"{name}:1")
        asked = [(each, 7 + (rng.random() < 0.1)) for each in names if rng.random() < 0.8]
        before = ledger.loads(asked)
        again = ledger.loads(asked)
        num_kept += before is again
        ledger.loads([])
        anew = ledger.loads(asked)
        assert list(again) == list(anew)
        assert np.allclose(again.matrix, anew.matrix, rtol=1e-12, atol=0)
    assert num_kept > 20


def test_loads_that_were_given_out_stay_what_they_were(ledger: Ledger) -> None:
    """A decision is read long after it was made, and was made from these."""
    for name in "ab":
        hear(ledger, f"{name}:1", report(prefill_tokens_per_s=70.0))
    given = ledger.loads([("a:1", 7), ("b:1", 7)])
    loads, matrix, queued_s = list(given), given.matrix.copy(), list(given.queued_s)
    ledger.charge(candidate("b"))
    newer = ledger.loads([("a:1", 7), ("b:1", 7)])
    assert newer[1].queued_prefill_s > 0
    assert newer.queued_s[1] == newer[1].queued_prefill_s
    assert (list(given), given.queued_s) == (loads, queued_s)
    assert np.array_equal(given.matrix, matrix)


def test_a_recount_takes_the_place_of_the_estimate(ledger: Ledger) -> None:
    """All of it before the first token, blocks as long as it is open, nothing afterwards."""
    charge, other = ledger.charge(candidate(tokens=500)), ledger.charge(candidate(tokens=100))
    charge.recount(uncached_tokens=50, cached_tokens=350, num_blocks=4)
    now = load(ledger)
    assert (now.queued_tokens, now.queued_prefill_s, now.blocks_pinned) == (150, 1.5, 4 + 7)
    assert (charge.uncached_tokens, charge.cached_tokens) == (50, 350)
    charge.token()
    charge.recount(uncached_tokens=900, cached_tokens=0, num_blocks=60)
    now = load(ledger)
    assert (now.queued_tokens, now.blocks_pinned) == (100, 60 + 7)
    assert now.queued_prefill_s == pytest.approx(1.0)
    charge.close()
    charge.recount(uncached_tokens=800, cached_tokens=0, num_blocks=50)
    now = load(ledger)
    assert (now.queued_tokens, now.blocks_pinned) == (100, 7)
    other.close()
    assert load(ledger).blocks_pinned == 0


def test_a_recount_of_blocks_counts_where_the_report_cannot_have_them(ledger: Ledger) -> None:
    seen, unseen = ledger.charge(candidate(tokens=160)), ledger.charge(candidate(tokens=160))
    seen.token()
    used = BlockCounts(free=990, cached=0, total=1000)
    hear(ledger, "a:1", report(blocks=used, num_waiting=1))
    seen.recount(uncached_tokens=320, cached_tokens=0, num_blocks=20)
    assert load(ledger).blocks_pinned == 10 + 10
    unseen.recount(uncached_tokens=320, cached_tokens=0, num_blocks=20)
    assert load(ledger).blocks_pinned == 10 + 20


# --- failures, pauses and other units --------------------------------------------------------


def test_a_failure_counts_until_it_is_forgotten_or_the_replica_restarts(
    ledger: Ledger, clock: FakeClock
) -> None:
    ledger.failed("a:1")
    assert load(ledger).failing_s == FAILURE_S
    clock.advance(HALF_LIFE_S)
    assert load(ledger).failing_s == pytest.approx(FAILURE_S / 2)
    ledger.forget("a:1")
    assert load(ledger).failing_s == 0.0
    ledger.failed("a:1")
    clock.advance(30 * HALF_LIFE_S)
    assert load(ledger).failing_s == 0.0


def test_who_fails_gets_ever_fewer_requests_and_is_tried_again(clock: FakeClock) -> None:
    """Cold prompts at three replicas of which one fails at once; the others are mostly busy."""
    params = PolicyParams()
    ledger = Ledger(clock=clock, params=params)
    names = [(f"{name}:1", 0) for name in "abc"]
    tried_s = []
    charges: list[tuple[float, Charge]] = []
    for number in range(600):
        clock.advance(0.5)
        while charges and charges[0][0] <= clock.monotonic():
            charges.pop(0)[1].close()
        prompt = Prompt(num_tokens=1600, block_size=16, prefix_key=b"%d" % number)
        decision = choose(prompt, {}, ledger.loads(names), params=params)
        if decision.replica_id == "b:1":
            ledger.charge(decision.chosen).close()
            ledger.failed("b:1")
            tried_s.append(clock.monotonic())
        else:
            charges.append((clock.monotonic() + 1.5, ledger.charge(decision.chosen)))
    assert 3 <= len(tried_s) <= 40, "a third of them would be 200"
    assert tried_s[-1] - tried_s[0] > 200, "it is not shut out for good"


@pytest.mark.parametrize("pause_s", [60.0, 1e6])
def test_one_long_pause_in_a_stream_does_not_starve_a_replica_for_ever(
    clock: FakeClock, pause_s: float
) -> None:
    """The pause was the client's or a preemption's; nobody is sent there, so none unlearns it."""
    params = PolicyParams()
    ledger = Ledger(clock=clock, params=params)
    names = [("a:1", 0), ("b:1", 0)]

    def ask(number: int, gap_s: float) -> str:
        prompt = Prompt(num_tokens=800, block_size=16, prefix_key=b"%d" % number)
        decision = choose(
            prompt, {}, ledger.loads(names), params=params, mean_work_s=ledger.mean_work_s
        )
        with ledger.charge(decision.chosen) as charge:
            clock.advance(0.4)
            charge.token()
            clock.advance(gap_s)
            charge.token()
        return decision.replica_id

    paused = ask(0, pause_s)
    assert sum(ask(number, 0.01) == paused for number in range(1, 500)) > 100


def test_time_in_which_nobody_listened_is_no_step(ledger: Ledger, clock: FakeClock) -> None:
    charge = ledger.charge(candidate())
    for gap_s in (0.25, 0.25, 0.9):
        charge.token()
        clock.advance(gap_s)
    charge.pause()
    charge.token()
    assert load(ledger).decode_step_s == pytest.approx(0.25)


@pytest.mark.parametrize("size", [1, 16, 256, 784])
def test_blocks_of_another_size_are_counted_in_ours(ledger: Ledger, size: int) -> None:
    blocks = BlockCounts(free=10, cached=22, total=64)
    hear(ledger, "a:1", report(block_size=size, blocks=blocks))
    now = load(ledger)
    assert (now.blocks_pinned, now.blocks_total) == (32 * size // 16, 64 * size // 16)
