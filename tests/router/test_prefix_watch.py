"""The router looks for prefix killers off the request's path, within its share of CPU time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvway_core.api import ChatMessage, ChatRequest
from kvway_core.testing.fake_clock import FakeClock
from kvway_router.prefixes import watch as watch_module
from kvway_router.prefixes.values import Kind
from kvway_router.prefixes.watch import LOG_INTERVAL_S, MAX_WAITING, Allowance, PrefixWatch
from tests.router.conftest import Bench

STABLE = " ".join(f"Rule {n}: greet visitor {n * 37 % 101} kindly." for n in range(30))


def ended(number: int, text: str | None = None, **fields: Any) -> Any:
    """Returns the trip of a request that has ended, as far as the watch reads it."""
    said = f"Ticket {1_000_000 + 7919 * number}.\n{STABLE}" if text is None else text
    record = SimpleNamespace(
        model="m", num_prompts=1, prompt_tokens=len(said) // 4, reachable_tokens=0
    )
    request = ChatRequest(model="m", messages=[ChatMessage(role="system", content=said)])
    trip = {
        "request_id": f"id{number}",
        "record": record,
        "reading": SimpleNamespace(prompt_text=f"<system>{said}", parsed=request),
        "finish": "done",
        "status": 200,
        "ttft_s": 0.5,
        "token_s": 0.001,
        "is_event_stream": True,
    }
    return SimpleNamespace(**trip | fields)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def watch(clock: FakeClock) -> PrefixWatch:
    watch = PrefixWatch(lambda text: len(text) // 4, clock=clock)
    watch._allowance = Allowance(share=0, burst_s=1000)  # however slow the machine is
    return watch


def test_an_allowance_is_a_share_and_a_burst() -> None:
    allowance = Allowance(share=0.02, burst_s=0.5)
    allowance.earn(1000)  # what was not spent is not saved
    assert allowance.left_s == 0.5
    allowance.spend(0.6)
    assert allowance.left_s == 0
    allowance.earn(20)
    assert allowance.left_s == pytest.approx(0.3)


def test_what_ended_is_looked_at_later(watch: PrefixWatch) -> None:
    for number in range(8):
        watch.offer(ended(number))
    assert watch.report.looked_at == 0
    watch.look()
    assert watch.report.looked_at == 8
    (finding,) = watch.report.findings
    assert (finding.kind, finding.message, finding.requests) == (Kind.NUMERIC_ID, 0, 7)
    assert finding.ttft_s == 0.5
    assert watch.report.avoidable_tokens[Kind.NUMERIC_ID] == pytest.approx(finding.lost_tokens)
    assert watch.cpu_s > 0


def test_without_allowance_nothing_is_looked_at_and_later_looks_stand_for_it(
    watch: PrefixWatch,
) -> None:
    watch._allowance = Allowance(share=0, burst_s=0)
    for number in range(10):
        watch.offer(ended(number))
    watch.look()
    assert watch.report.looked_at == 0
    watch._allowance = Allowance(share=0, burst_s=10)
    for number in range(10, 15):
        watch.offer(ended(number))
    watch.look()
    assert watch.report.looked_at == 5
    assert watch.report.requests == pytest.approx(15)


def test_with_little_allowance_some_stand_for_all(watch: PrefixWatch) -> None:
    watch._look_s = 0.01
    watch._allowance = Allowance(share=0, burst_s=0.035)
    for number in range(12):
        watch.offer(ended(number))
    watch.look()
    assert watch.report.looked_at == 3
    assert watch.report.requests == pytest.approx(12)


def test_the_line_is_bounded(watch: PrefixWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(MAX_WAITING + 5):
        watch.offer(ended(number))
    assert watch.num_unseen == 5
    watch.look()
    assert watch.report.looked_at <= MAX_WAITING
    assert watch.report.requests == pytest.approx(MAX_WAITING + 5)
    monkeypatch.setattr(watch_module, "MAX_WAITING_CHARS", 1000)
    watch.offer(ended(1, text="x" * 600))
    watch.offer(ended(2, text="x" * 600))
    assert watch.num_unseen == 6


@pytest.mark.parametrize(
    "fields",
    [
        {"record": None},
        {"reading": None},
        {"finish": "client_gone"},
        {"status": 400},
        {"reading": SimpleNamespace(prompt_text=None, parsed=None)},
    ],
)
def test_what_says_nothing_is_not_looked_at(watch: PrefixWatch, fields: dict[str, Any]) -> None:
    watch.offer(ended(1, **fields))
    watch.look()
    assert watch.report.looked_at == 0


def test_new_findings_are_logged_one_a_minute(watch: PrefixWatch, clock: FakeClock) -> None:
    clock.advance(1)
    with capture_logs() as logs:
        for number in range(8):
            watch.offer(ended(number))
            watch.offer(ended(number, text=f"[{number:08x}f0]\n{STABLE[::-1]}"))
        watch.look()
    (line,) = [line for line in logs if line["event"] == "prefix_killer_found"]
    assert line["log_level"] == "warning"
    assert "greet" not in str(line)
    clock.advance(LOG_INTERVAL_S)
    with capture_logs() as logs:
        for number in range(8):
            watch.offer(ended(number, text=f"It is 12:{number + 10}:00.\n{STABLE.upper()}"))
        watch.look()
    (line,) = [line for line in logs if line["event"] == "prefix_killer_found"]
    assert line["kind"] == "timestamp"
    assert line["not_logged"] == 1


def test_a_look_that_fails_is_logged_and_not_the_last(
    watch: PrefixWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "INTERVAL_S", 0.0)
    calls = iter(range(3))

    def fails() -> None:
        if next(calls, None) is None:
            watch._closed.set()
        raise RuntimeError("no")

    monkeypatch.setattr(watch, "look", fails)
    with capture_logs() as logs:
        watch.start()
        watch._thread.join(10)
    assert not watch._thread.is_alive()
    assert [line["event"] for line in logs] == ["prefixes_not_looked_at"] * 4


async def looked_at(bench: Bench, num_prompts: int) -> Any:
    """Returns the report once so many prompts were looked at."""
    while True:
        report = await bench.get(bench.admin("/admin/prefixes"))
        if report["looked_at"] >= num_prompts:
            return report
        await asyncio.sleep(0.02)


async def test_a_killer_shows_on_the_admin_listener_and_in_the_metrics(bench: Bench) -> None:
    stable = STABLE[:900]
    for number in range(9):
        system = {"role": "system", "content": f"Ticket {1_000_000 + 7919 * number}.\n{stable}"}
        question = {"role": "user", "content": f"Why {number}?"}
        status, _, _ = await bench.chat("", messages=[system, question])
        assert status == 200
    report = await looked_at(bench, 9)
    (finding,) = report["findings"]
    assert (finding["kind"], finding["message"], finding["char"]) == ("numeric_id", 0, 7)
    assert finding["token"] == 1 + len("system\nTicket ")  # of the byte model, exactly
    assert finding["requests"] == pytest.approx(8)
    assert finding["lost_tokens_per_request"] == pytest.approx(900, rel=0.05)
    assert finding["hit_rate"] < 0.1
    assert finding["hit_rate_if_moved"] > 0.8
    assert stable[:20] not in str(report)
    metrics = await bench.metrics()
    lost = metrics['kvway_router_avoidable_prefill_tokens_total{kind="numeric_id"}']
    assert lost == pytest.approx(finding["lost_tokens"])
    assert metrics["kvway_router_prefix_killers"] == 1
    assert metrics["kvway_router_prefix_looks_total"] == 9


async def test_prompts_that_share_their_beginning_show_nothing(bench: Bench) -> None:
    for number in range(9):
        system = {"role": "system", "content": STABLE[:900]}
        question = {"role": "user", "content": f"Ticket {1_000_000 + 7919 * number}: why?"}
        assert (await bench.chat("", messages=[system, question]))[0] == 200
    report = await looked_at(bench, 9)
    assert report["findings"] == []
    assert report["hit_rate"] > 0.4
