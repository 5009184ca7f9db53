"""How fast a replica is, by what its requests show."""

from __future__ import annotations

import msgspec
import pytest

from kvway_core.testing.fake_clock import FakeClock
from kvway_router.charges import Charge
from kvway_router.failures import FAILURE_S, HALF_LIFE_S
from kvway_router.ledger import Ledger
from kvway_router.policies.cost import choose
from kvway_router.policy import PolicyParams, Prompt
from tests.router.ledger_cases import PARAMS, STALE_S, candidate, hear, load, report


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(monotonic_s=1000.0)


@pytest.fixture
def ledger(clock: FakeClock) -> Ledger:
    return Ledger(clock=clock, params=PARAMS, stale_after_s=STALE_S)


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
