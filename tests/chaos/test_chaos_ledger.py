"""The books of a chaos run find what they are there to find: each broken promise by its name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvway_worker.sim import answer
from loadtests.chaos_clients import Ending, Outcome, Request, plan
from loadtests.chaos_faults import Kind, Mark
from loadtests.chaos_ledger import (
    PROMISES,
    SILENT,
    TWO_LOSSES,
    Books,
    Text,
    broken,
    disagreements,
    figures,
    judge,
    read_books,
)

REQUEST = Request(
    client_id="chaos-1",
    at_s=0.0,
    path="/v1/completions",
    topic="rivers",
    prompt="nonce",
    max_tokens=12,
    stream=True,
    leaves_after=None,
    is_slow=False,
)
RIGHT = REQUEST.expected()
DONE = Outcome(
    REQUEST,
    ending=Ending.DONE,
    text=RIGHT,
    status=200,
    router_id="r1",
    replica="a:1",
    ended_s=5.0,
)
ROUTER_LINE = {
    "event": "request_finished",
    "request_id": "r1",
    "finish": "done",
    "status": 200,
    "error": None,
    "attempts": 1,
}
WORKER_LINE = {"event": "request_finished", "request_id": "chaos-1", "outcome": "ok"}


def books(
    router: list[dict[str, Any]] | None = None, workers: list[dict[str, Any]] | None = None
) -> Books:
    """Books that agree with `DONE`, or others."""
    return Books(
        [ROUTER_LINE] if router is None else router,
        [WORKER_LINE] if workers is None else workers,
        num_exceptions=0,
    )


def kill(replica: str, at_s: float) -> Mark:
    """A worker is killed, and back after a second."""
    return Mark(Kind.KILL, replica[0], replica, "", at_s, at_s + 1)


def test_a_good_run_breaks_no_promise() -> None:
    metrics = figures([DONE], books(), [], leaked=0)
    assert broken(metrics) == []
    assert metrics["done"] == metrics["requests"] == metrics["attempts_per_request"] == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Text.RIGHT),
        ("abc", Text.RIGHT),
        ("abcdef", Text.RIGHT),
        ("abcabc", Text.DUPLICATED),
        ("abccdef", Text.DUPLICATED),
        ("abcdefdef", Text.DUPLICATED),
        ("xyz", Text.CROSSED),
        ("abcdefz", Text.CROSSED),
        ("abdef", Text.CROSSED),
    ],
)
def test_an_answer_is_right_or_has_a_part_twice_or_is_anothers(text: str, expected: Text) -> None:
    assert judge(text, "abcdef") is expected


@pytest.mark.parametrize(
    ("change", "promise"),
    [
        ({"ending": Ending.LOST, "status": None}, "lost_before_first_byte"),
        ({"ending": Ending.FAILED, "status": 502}, "lost_before_first_byte"),
        ({"ending": Ending.UNCLEAR}, "without_terminal_state"),
        ({"text": "?" + RIGHT[1:]}, "crossed"),
        ({"text": RIGHT[:6] + RIGHT}, "duplicated"),
        ({"text": RIGHT[:6]}, "cut_short"),
        ({"ending": Ending.REFUSED, "status": 503}, "refused"),
    ],
)
def test_what_a_client_must_not_see_breaks_its_promise(
    change: dict[str, Any], promise: str
) -> None:
    metrics = figures([replace(DONE, **change)], books(), [], leaked=0)
    assert metrics[promise] == 1
    assert any(failure.startswith(promise) for failure in broken(metrics))


def test_leaks_and_too_many_attempts_and_exceptions_break_theirs() -> None:
    many = books(router=[ROUTER_LINE | {"attempts": 2}])
    metrics = figures([DONE], replace(many, num_exceptions=1), [], leaked=3)
    names = {failure.split(" ")[0] for failure in broken(metrics)}
    assert names == {"leaked_inflight", "exceptions_logged", "attempts_per_request"}
    assert set(PROMISES) <= set(metrics)


@pytest.mark.parametrize(
    ("ending", "finish", "status", "agrees"),
    [
        (Ending.DONE, "done", 200, True),
        (Ending.DONE, "failed", 200, False),
        (Ending.INTERRUPTED, "failed", 200, True),
        (Ending.INTERRUPTED, "done", 200, False),
        (Ending.REFUSED, "failed", 503, True),
        (Ending.REFUSED, "done", 200, False),
        (Ending.LEFT, "client_gone", 499, True),
        (Ending.LEFT, "done", 200, True),
    ],
)
def test_client_and_router_must_agree_on_the_end(
    ending: Ending, finish: str, status: int, *, agrees: bool
) -> None:
    line = ROUTER_LINE | {"finish": finish, "status": status}
    found = disagreements([replace(DONE, ending=ending)], books(router=[line]), [])
    assert (found == []) is agrees


def test_a_name_that_the_router_does_not_know_is_found_on_both_sides() -> None:
    found = disagreements([replace(DONE, router_id="r2")], books(), [])
    assert [line.split(" ")[0] for line in found] == ["r2", "the"]


def test_a_request_ends_once_in_the_routers_log() -> None:
    (found,) = disagreements([DONE], books(router=[ROUTER_LINE, ROUTER_LINE]), [])
    assert "twice" in found


def test_what_nobody_sent_is_found_at_router_and_worker() -> None:
    stranger = ROUTER_LINE | {"request_id": "r9", "finish": "client_gone"}
    (found,) = disagreements([DONE], books(router=[ROUTER_LINE, stranger]), [])
    assert "nobody sent" in found
    left = Outcome(replace(REQUEST, client_id="chaos-2"), ending=Ending.LEFT)
    assert disagreements([DONE, left], books(router=[ROUTER_LINE, stranger]), []) == []
    unknown = WORKER_LINE | {"request_id": "chaos-9"}
    (found,) = disagreements([DONE], books(workers=[WORKER_LINE, unknown]), [])
    assert "chaos-9" in found


def test_a_done_request_is_in_a_workers_log_unless_that_worker_was_killed_then() -> None:
    aborted = [WORKER_LINE | {"outcome": "client_disconnected"}]
    (found,) = disagreements([DONE], books(workers=aborted), [])
    assert "no worker says so" in found
    assert disagreements([DONE], books(workers=[]), [kill("a:1", 5.5)]) == []
    assert disagreements([DONE], books(workers=[]), [kill("a:1", 9.0)]) != []
    assert disagreements([DONE], books(workers=[]), [kill("b:1", 5.5)]) != []


def test_a_request_ended_for_two_losses_must_have_had_two_to_lose() -> None:
    ended = replace(DONE, ending=Ending.FAILED, status=500, detail=TWO_LOSSES)
    agreeing = books(router=[ROUTER_LINE | {"finish": "failed", "status": 500}], workers=[])
    metrics = figures([ended], agreeing, [kill("a:1", 1.0), kill("b:1", 3.0)], leaked=0)
    assert metrics["lost_before_first_byte"] == metrics["ledger_disagreements"] == 0
    assert metrics["ended_after_two_losses"] == 1
    assert metrics["ended_for_silence"] == 0
    assert broken(metrics) == ["ended_after_two_losses_pct is 100.0, at most 2.0 was promised"]
    feed = Mark(Kind.FEED, "b", "b:1", "", 3.0, 4.0)
    for marks in ([kill("a:1", 1.0), feed], [kill("a:1", 1.0), kill("a:1", 2.0)]):
        (found,) = disagreements([ended], agreeing, marks)
        assert "1 were hurt" in found


def test_a_request_ended_for_silence_must_have_met_a_hurt_worker() -> None:
    ended = replace(DONE, ending=Ending.FAILED, status=504, detail=SILENT)
    agreeing = books(router=[ROUTER_LINE | {"finish": "failed", "status": 504}], workers=[])
    metrics = figures([ended], agreeing, [kill("a:1", 1.0)], leaked=0)
    assert metrics["lost_before_first_byte"] == metrics["ledger_disagreements"] == 0
    assert broken(metrics) == ["ended_for_silence_pct is 100.0, at most 2.0 was promised"]
    (found,) = disagreements([ended], agreeing, [])
    assert "0 were hurt" in found


def test_logs_are_read_line_by_line() -> None:
    other = {"event": "request_started"}
    failed = {"event": "replica_watch_failed", "exception": []}
    router = "\n".join(map(json.dumps, (other, ROUTER_LINE, failed)))
    worker = f"Traceback (most recent call last):\n  a\n{json.dumps(WORKER_LINE)}\n"
    read = read_books(router, [worker, json.dumps(WORKER_LINE)])
    assert read == Books([ROUTER_LINE], [WORKER_LINE, WORKER_LINE], num_exceptions=2)


def test_a_seed_draws_the_same_requests_again() -> None:
    assert plan(7, 50, 10.0) == plan(7, 50, 10.0) != plan(8, 50, 10.0)
    drawn = plan(7, 1000, 10.0)
    assert len({request.client_id for request in drawn}) == 1000
    assert len({request.expected() for request in drawn[:50]}) == 50
    assert drawn[-1].at_s == pytest.approx(100, rel=0.2)
    for kind in (
        [request.stream for request in drawn],
        [request.is_slow for request in drawn],
        [request.leaves_after is not None for request in drawn],
    ):
        assert 0.01 < sum(kind) / 1000 < 0.9


def test_what_is_expected_is_what_the_engine_answers_to_the_rendered_prompt() -> None:
    """Chat and completion have the same text here, and other tokens."""
    text = "On rivers: " + "You answer in one sentence and you never guess. " * 12 + "nonce"
    assert bytes(answer(text.encode(), 12)).decode() == RIGHT
    assert replace(REQUEST, path="/v1/chat/completions").expected() != RIGHT
