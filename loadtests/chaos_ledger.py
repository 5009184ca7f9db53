"""The books of a chaos run: what clients saw, what router and workers logged, where they differ.

Pure: outcomes and log lines in, figures out. A client names its request, and the worker logs that
name; the router names it too, tells the client, and logs that.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from loadtests.chaos_clients import Ending, Outcome
from loadtests.chaos_faults import Kind, Mark

KILL_WINDOW_S: Final = 2.0
"""So long before a worker was killed, what it had finished may be missing in its log."""


FOUND_S: Final = 5.0
"""So long after a worker was hurt the router may lose a connection to it."""

TWO_LOSSES: Final = "request_crashed_replica"
"""Why a request is ended that was at two workers when each was lost: it may be what marks them."""

SILENT: Final = "first_token_timeout"
"""Why a request is ended that a replica may still be at work on: it said nothing, but is there."""


class Text(StrEnum):
    """What an answer is, held against the one right answer."""

    RIGHT = "right"
    """It, or its beginning."""
    DUPLICATED = "duplicated"
    """Its beginning, then some of it again."""
    CROSSED = "crossed"
    """Something else."""


def judge(text: str, expected: str) -> Text:
    """Tells what came of an answer from what it should be."""
    if expected.startswith(text):
        return Text.RIGHT
    same = next(
        (n for n, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b),
        min(len(text), len(expected)),
    )
    is_again = any(
        expected.startswith(text[cut:], start)
        for cut in range(1, same + 1)
        for start in range(cut)
    )
    return Text.DUPLICATED if is_again else Text.CROSSED


@dataclass(frozen=True, slots=True)
class Books:
    """The lines ``request_finished`` of all logs, and how many lines tell of an exception."""

    router: Sequence[Mapping[str, Any]]
    workers: Sequence[Mapping[str, Any]]
    num_exceptions: int


def read_books(router_log: str, worker_logs: Iterable[str]) -> Books:
    """Reads logs of JSON lines. A traceback is none, and counts as an exception."""
    num_exceptions = 0
    finished: list[list[dict[str, Any]]] = []
    for log in (router_log, "\n".join(worker_logs)):
        lines = []
        for text in filter(None, log.splitlines()):
            try:
                line = json.loads(text)
            except ValueError:
                num_exceptions += "Traceback" in text or "never retrieved" in text
                continue
            num_exceptions += "exception" in line
            if line["event"] == "request_finished":
                lines.append(line)
        finished.append(lines)
    router, workers = finished
    return Books(router, workers, num_exceptions)


_AGREES: Final = {
    Ending.DONE: ({"done"}, {200}),
    Ending.REFUSED: ({"failed", "done"}, {429, 503}),
    Ending.INTERRUPTED: ({"failed", "shut_down"}, {200}),
    Ending.FAILED: ({"failed", "done", "shut_down"}, set(range(400, 600)) | {200}),
    # It may have been through with its side when the client left.
    Ending.LEFT: ({"client_gone", "done", "failed"}, {200, 429, 499, 500, 502, 503, 504}),
}
"""What the router may say of a request that ended so for its client: finish and status."""


def disagreements(outcomes: Sequence[Outcome], books: Books, marks: Sequence[Mark]) -> list[str]:
    """Returns every entry of one book that another one contradicts, for people."""
    return [
        *_between_client_and_router(outcomes, books),
        *_between_client_and_workers(outcomes, books, marks),
        *_without_reason(outcomes, marks),
    ]


def _between_client_and_router(outcomes: Sequence[Outcome], books: Books) -> Iterable[str]:
    lines = {line["request_id"]: line for line in books.router}
    if len(lines) != len(books.router):
        yield f"the router ended {len(books.router) - len(lines)} requests twice"
    for outcome in outcomes:
        line = lines.pop(outcome.router_id or "", None)
        if outcome.router_id is None or outcome.ending not in _AGREES:
            continue
        finishes, statuses = _AGREES[outcome.ending]
        if line is None:
            yield f"{outcome.router_id} {outcome.ending} is not in the router's log"
        elif line["finish"] not in finishes or line["status"] not in statuses:
            yield (
                f"{outcome.router_id} {outcome.ending} ({outcome.detail}), but for the router "
                f"{line['finish']} {line['status']} ({line['error']})"
            )
    # Who left before the head was there was not told the router's name for the request.
    num_unnamed = sum(outcome.router_id is None for outcome in outcomes)
    if len(lines) > num_unnamed:
        yield f"the router knows {len(lines) - num_unnamed} requests that nobody sent"


def _between_client_and_workers(
    outcomes: Sequence[Outcome], books: Books, marks: Sequence[Mark]
) -> Iterable[str]:
    ended: dict[str, list[str]] = defaultdict(list)
    for line in books.workers:
        ended[line["request_id"]].append(line["outcome"])
    for name in ended.keys() - {outcome.request.client_id for outcome in outcomes}:
        yield f"a worker knows {name}, which nobody sent"
    for outcome in outcomes:
        was_whole = "ok" in ended[outcome.request.client_id]
        if outcome.ending is Ending.DONE and not was_whole and not _lost_line(outcome, marks):
            yield f"{outcome.request.client_id} is done, but no worker says so"


def _lost_line(outcome: Outcome, marks: Iterable[Mark]) -> bool:
    return any(
        mark.kind is Kind.KILL
        and mark.replica == outcome.replica
        and abs(mark.began_s - outcome.ended_s) < KILL_WINDOW_S
        for mark in marks
    )


def _without_reason(outcomes: Sequence[Outcome], marks: Sequence[Mark]) -> Iterable[str]:
    """Names the requests that were ended for lost or silent workers where none were hurt."""
    needed = {TWO_LOSSES: 2, SILENT: 1}
    for outcome in outcomes:
        hurt = {
            mark.worker
            for mark in marks
            if mark.kind is not Kind.FEED
            and mark.began_s < outcome.ended_s
            and mark.ended_s > outcome.sent_s - FOUND_S
        }
        if len(hurt) < needed.get(outcome.detail, 0):
            yield f"{outcome.router_id} ended with {outcome.detail}, but {len(hurt)} were hurt"


def figures(
    outcomes: Sequence[Outcome], books: Books, marks: Sequence[Mark], *, leaked: int
) -> dict[str, float | int]:
    """Returns what a run has shown; every key of `PROMISES` should be within its limit."""
    endings = Counter(outcome.ending for outcome in outcomes)
    texts = Counter(judge(outcome.text, outcome.request.expected()) for outcome in outcomes)
    short = sum(
        outcome.ending is Ending.DONE and len(outcome.text) < outcome.request.max_tokens
        for outcome in outcomes
    )
    failed = Counter(o.detail for o in outcomes if o.ending is Ending.FAILED)
    twice, silent = failed[TWO_LOSSES], failed[SILENT]
    attempts = sum(line.get("attempts", 0) for line in books.router)
    return {
        "requests": len(outcomes),
        "done": endings[Ending.DONE],
        "interrupted": endings[Ending.INTERRUPTED],
        "refused": endings[Ending.REFUSED],
        "refused_pct": round(100 * endings[Ending.REFUSED] / max(1, len(outcomes)), 2),
        "left": endings[Ending.LEFT],
        "ended_after_two_losses": twice,
        "ended_for_silence": silent,
        "ended_for_silence_pct": round(100 * silent / max(1, len(outcomes)), 2),
        "ended_after_two_losses_pct": round(100 * twice / max(1, len(outcomes)), 2),
        "lost_before_first_byte": endings[Ending.LOST] + failed.total() - twice - silent,
        "without_terminal_state": endings[Ending.UNCLEAR],
        "crossed": texts[Text.CROSSED],
        "duplicated": texts[Text.DUPLICATED],
        "cut_short": short,
        "leaked_inflight": leaked,
        "ledger_disagreements": len(disagreements(outcomes, books, marks)),
        "exceptions_logged": books.num_exceptions,
        "attempts_per_request": round(attempts / max(1, len(books.router)), 3),
        "worker_requests_per_request": round(len(books.workers) / max(1, len(outcomes)), 3),
    }


PROMISES: Final = {
    "lost_before_first_byte": 0,
    "without_terminal_state": 0,
    "crossed": 0,
    "duplicated": 0,
    "cut_short": 0,
    "leaked_inflight": 0,
    "ledger_disagreements": 0,
    "exceptions_logged": 0,
    "ended_after_two_losses_pct": 2.0,
    "ended_for_silence_pct": 2.0,
    "refused_pct": 2.0,
    "attempts_per_request": 1.1,
}
"""The most that a figure may be."""


def broken(metrics: Mapping[str, float | int]) -> list[str]:
    """Returns the promises that a run has broken, for people."""
    return [
        f"{key} is {metrics[key]}, at most {limit} was promised"
        for key, limit in PROMISES.items()
        if metrics[key] > limit
    ]
