"""Work is counted from the choice on, and given back exactly once, whatever happens."""

from __future__ import annotations

import math
import random

import msgspec
import numpy as np
import pytest

from kvway_core.testing.fake_clock import FakeClock
from kvway_router.charges import Charge
from kvway_router.ledger import Ledger
from tests.router.ledger_cases import IDLE, PARAMS, STALE_S, candidate, hear, load, report


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(monotonic_s=1000.0)


@pytest.fixture
def ledger(clock: FakeClock) -> Ledger:
    return Ledger(clock=clock, params=PARAMS, stale_after_s=STALE_S)


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


def test_estimates_do_not_outlive_their_requests_by_much(ledger: Ledger) -> None:
    for _ in range(1000):
        ledger.charge(candidate(tokens=100_000), is_stream=False).close()
    assert len(ledger._accounts["a:1"]._promises) < 100


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
