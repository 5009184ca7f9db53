"""The last hour as the page gets it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvway_core.testing.fake_replica import Answer
from kvway_router.fleet import TokenCounts
from kvway_router.history import MAX_TTFTS, NUM_RECENT, NUM_SAMPLES, Gauges, History
from tests.router.conftest import Bench

NOTHING = Gauges(in_flight={}, waiting=0, queued_prefill_s=0.0, ready=0)


def history() -> History:
    return History(1000.0, rng=random.Random(1))


def counts(tokens: int, **more: Any) -> TokenCounts:
    return TokenCounts(requests=1, prompt_tokens=tokens, **more)


def test_a_sample_has_what_happened_since_the_one_before() -> None:
    kept = history()
    first = counts(
        100, ceiling_tokens=80, reachable_tokens=60, matched_tokens=40, cached_tokens=20
    )
    kept.sample(1005.0, first, NOTHING, {})
    kept.saw_failure()
    kept.sample(1010.0, first.plus(counts(7, cached_tokens=5)), NOTHING, {})
    old, new = kept.view({}).samples
    assert (old.requests, old.prompt_tokens, old.failed) == (1, 100, 0)
    assert (old.ceiling_tokens, old.reachable_tokens) == (80, 60)
    assert (old.matched_tokens, old.cached_tokens) == (40, 20)
    assert (new.requests, new.prompt_tokens, new.cached_tokens, new.failed) == (1, 7, 5, 1)
    assert (new.time, new.span_s) == (1010.0, 5.0)


def test_times_to_first_token_are_percentiles_of_one_step() -> None:
    kept = history()
    for number in range(1, 101):
        kept.saw_ttft(number / 100)
    kept.sample(1005.0, TokenCounts(streams=4, predicted_ttft_s=2.0), NOTHING, {})
    kept.sample(1010.0, TokenCounts(streams=4, predicted_ttft_s=2.0), NOTHING, {})
    busy, idle = kept.view({}).samples
    assert (busy.ttft_p50_s, busy.ttft_p95_s) == (0.5, 0.95)
    assert busy.predicted_ttft_s == 0.5
    assert (idle.ttft_p50_s, idle.ttft_p95_s, idle.predicted_ttft_s) == (None, None, None)


def test_of_many_times_to_first_token_a_fair_part_is_kept() -> None:
    kept = history()
    for number in range(20 * MAX_TTFTS):
        kept.saw_ttft(float(number >= 10 * MAX_TTFTS))
    assert len(kept._ttfts) == MAX_TTFTS
    assert 0.4 < sum(kept._ttfts) / MAX_TTFTS < 0.6


def test_an_hour_is_kept_and_only_what_is_asked_for_is_told() -> None:
    kept = history()
    for number in range(1, NUM_SAMPLES + 11):
        kept.sample(1000.0 + 5 * number, TokenCounts(), NOTHING, {})
    samples = kept.view({}).samples
    assert len(samples) == NUM_SAMPLES
    assert samples[0].time == 1055.0
    newest = samples[-1].time
    assert [sample.time for sample in kept.view({}, since_s=newest - 7).samples] == [
        newest - 5,
        newest,
    ]


def test_a_replica_is_told_of_by_its_last_five_minutes() -> None:
    kept = history()
    for number in range(1, NUM_RECENT + 3):
        gauges = Gauges(in_flight={"a:1": number}, waiting=0, queued_prefill_s=0.0, ready=1)
        kept.sample(1000.0 + 5 * number, TokenCounts(), gauges, {"a:1": counts(number)})
    views = kept.view({"a:1": counts(100), "new:1": counts(9)}).replicas
    assert views["a:1"].counts.prompt_tokens == 100 - 2
    assert views["a:1"].in_flight == list(range(3, NUM_RECENT + 3))
    assert views["new:1"].counts.prompt_tokens == 9
    assert set(views["new:1"].in_flight) == {0}


async def test_the_funnel_is_told_in_tokens(bench: Bench) -> None:
    bench.replica.answer = Answer(cached_tokens=32)
    for _ in range(2):
        await bench.chat("x" * 200)
    bench.router.insight.sample()
    view = await bench.get(bench.admin("/admin/history"))
    (sample,) = view["samples"]
    prompt = (await bench.get(bench.admin("/admin/replicas")))["totals"]["prompt_tokens"] // 2
    in_blocks = prompt // 16 * 16
    assert sample["requests"] == 2
    assert sample["prompt_tokens"] == 2 * prompt
    # Of the first prompt nothing had been sent before, and still the engine had some of it.
    assert sample["ceiling_tokens"] == 32 + in_blocks
    assert sample["reachable_tokens"] == sample["matched_tokens"] == in_blocks
    assert sample["cached_tokens"] == 64
    assert sample["ready"] == 1
    recent = view["replicas"][bench.replica.replica_id]
    assert recent["counts"]["requests"] == 2
    later = await bench.get(bench.admin(f"/admin/history?since={sample['time']}"))
    assert later["samples"] == []
    assert later["started"] == view["started"]


async def test_streams_and_failures_are_in_the_history(bench: Bench) -> None:
    await bench.chat("hello", stream=True)
    bench.replica.answer = Answer(status=500, body=b"{}")
    assert (await bench.chat("other"))[0] >= 500
    bench.router.insight.sample()
    (sample,) = (await bench.get(bench.admin("/admin/history")))["samples"]
    assert sample["failed"] == 1
    assert sample["ttft_p50_s"] > 0


@pytest.mark.parametrize("since", ["x", "nan", "inf", "1e999"])
async def test_since_must_be_a_number(bench: Bench, since: str) -> None:
    async with bench.client.get(bench.admin(f"/admin/history?since={since}")) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "since"
