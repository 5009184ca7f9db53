"""What replicas say of their load is added to what the router counts, and counted once."""

from __future__ import annotations

import msgspec
import pytest

from kvway_core.answers import BlockCounts
from kvway_core.testing.fake_clock import FakeClock
from kvway_router.ledger import Ledger
from kvway_router.policy import PolicyParams
from kvway_router.telemetry import Telemetry
from tests.router.ledger_cases import PARAMS, STALE_S, candidate, hear, load, report


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(monotonic_s=1000.0)


@pytest.fixture
def ledger(clock: FakeClock) -> Ledger:
    return Ledger(clock=clock, params=PARAMS, stale_after_s=STALE_S)


def test_a_report_tells_more_of_a_whole_answer_than_a_prediction(
    ledger: Ledger, clock: FakeClock
) -> None:
    ledger.charge(candidate(tokens=500), is_stream=False)
    clock.advance(5.1)
    hear(ledger, "a:1", report(num_waiting=1, waiting_uncached_tokens=500))
    assert load(ledger).num_prefills == 1
    clock.advance(STALE_S + 0.1)
    assert load(ledger).num_prefills == 0


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


def test_a_recount_of_blocks_counts_where_the_report_cannot_have_them(ledger: Ledger) -> None:
    seen, unseen = ledger.charge(candidate(tokens=160)), ledger.charge(candidate(tokens=160))
    seen.token()
    used = BlockCounts(free=990, cached=0, total=1000)
    hear(ledger, "a:1", report(blocks=used, num_waiting=1))
    seen.recount(uncached_tokens=320, cached_tokens=0, num_blocks=20)
    assert load(ledger).blocks_pinned == 10 + 10
    unseen.recount(uncached_tokens=320, cached_tokens=0, num_blocks=20)
    assert load(ledger).blocks_pinned == 10 + 20


@pytest.mark.parametrize("size", [1, 16, 256, 784])
def test_blocks_of_another_size_are_counted_in_ours(ledger: Ledger, size: int) -> None:
    blocks = BlockCounts(free=10, cached=22, total=64)
    hear(ledger, "a:1", report(block_size=size, blocks=blocks))
    now = load(ledger)
    assert (now.blocks_pinned, now.blocks_total) == (32 * size // 16, 64 * size // 16)
