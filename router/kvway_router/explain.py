"""`kvway explain ID`: why a request went where it went, and what became of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Final
from urllib.parse import quote

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvway_core.cli import Command
from kvway_router.admin import DecisionList
from kvway_router.admin_client import AdminClient, AdminParser, AskFailed
from kvway_router.decisions import CandidateRecord, DecisionRecord
from kvway_router.terminal import new_console, plain

EXIT_FAILED: Final = 1
MIN_WIDTH: Final = 130
"""Columns that all terms of the cost take."""

SUMMARY: Final = "say why a request went where it went"
DESCRIPTION: Final = (
    "Shows a decision of the router: every candidate with the terms of its cost in seconds, what "
    "was predicted, and what really happened. ID is in the x-kvway-request-id of the answer; "
    "without it the latest request is shown."
)

_TERMS: Final[tuple[tuple[str, Callable[[CandidateRecord], float]], ...]] = (
    ("queued", lambda it: it.queued_s),
    ("step", lambda it: it.step_s),
    ("own", lambda it: it.own_s),
    ("reload", lambda it: it.reload_s),
    ("first token", lambda it: it.predicted_ttft_s),
    ("price", lambda it: it.price_s),
    ("kv", lambda it: it.kv_s),
    ("failing", lambda it: it.failing_s),
    ("cost", lambda it: it.cost_s),
)
_ALWAYS: Final = {"queued", "own", "first token", "cost"}


def run(argv: Sequence[str]) -> int:
    """Prints a decision; returns 1 if there is none, or no router.

    Raises:
        ConfigError: An argument is not as it must be.
    """
    parser = AdminParser(prog="kvway explain", description=DESCRIPTION)
    parser.add_argument("id", metavar="ID", nargs="?", help="id of the request")
    options = parser.parse_args(argv)
    client = AdminClient(options.admin)
    try:
        request_id = quote(_id(client, options.id), safe="")
        record = client.get(f"/admin/decisions/{request_id}", DecisionRecord)
    except AskFailed as exc:
        sys.stderr.write(f"kvway: {exc}\n")
        return EXIT_FAILED
    console = new_console(at_least=MIN_WIDTH)
    for part in explained(record):
        console.print(part)
    return 0


def _id(client: AdminClient, given: str | None) -> str:
    if given is not None:
        return given
    latest = client.get("/admin/decisions?limit=1", DecisionList).decisions
    if not latest:
        raise AskFailed(f"{client.url} has decided about no request yet")
    return latest[0].id


def explained(record: DecisionRecord) -> Iterator[RenderableType]:
    """Yields what there is to say of a decision, top to bottom."""
    time = datetime.fromtimestamp(record.time).astimezone()
    how = "stream" if record.stream else "whole"
    yield plain(f"{record.id}  {time:%Y-%m-%d %H:%M:%S%z}  {record.route}  {record.model}  {how}")
    about = "" if record.prompt_tokens_exact else "about "
    yield plain(
        f"{about}{record.prompt_tokens:,} prompt tokens, {record.prompt_blocks:,} full blocks of "
        f"{record.block_size}"
    )
    yield _chosen(record)
    if record.candidates:
        yield _candidates(record)
    if record.num_candidates > len(record.candidates):
        yield plain(f"and {record.num_candidates - len(record.candidates)} that cost more")
    for unusable in record.unusable:
        yield plain(f"  {unusable.replica_id} could not take it: {unusable.why}")
    if record.price_of_work:
        yield plain(
            f"own work counts {1 + record.price_of_work:.2f} times, because replicas queue "
            f"({record.busy_share:.0%} of them had work of late)"
        )
    yield _outcome(record)
    if len(record.attempts) > 1 or any(attempt.error for attempt in record.attempts):
        for number, attempt in enumerate(record.attempts, start=1):
            became = attempt.error or "not failed"
            yield plain(f"attempt {number}: {attempt.replica_id}, {attempt.reason}: {became}")
    yield _end(record)


def _chosen(record: DecisionRecord) -> Text:
    detail = f": {record.detail}" if record.detail else ""
    if not record.replica_id:
        return plain(f"no replica ({record.reason}){detail}", style="bold red")
    return plain(f"{record.replica_id}  {record.reason}{detail}", style="bold")


def _candidates(record: DecisionRecord) -> Table:
    """Returns the candidates; a term that is 0 for all of them has no column."""
    terms = [
        (name, of)
        for name, of in _TERMS
        if name in _ALWAYS or any(of(candidate) for candidate in record.candidates)
    ]
    table = Table("", "replica", box=None, pad_edge=False, title="cost, seconds")
    table.title_justify = "left"
    for name in ("matched", "to compute", *(name for name, _ in terms), "in flight", "listed"):
        table.add_column(name, justify="right", no_wrap=True)
    for it in record.candidates:
        is_chosen = it.replica_id == record.replica_id
        table.add_row(
            ">" if is_chosen else "",
            plain(it.replica_id),
            f"{it.matched_blocks * record.block_size:,}",
            f"{it.uncached_tokens:,}",
            *(f"{of(it):.3f}" for _, of in terms),
            f"{it.in_flight:,}",
            f"{it.blocks_held:,}",
            style="bold" if is_chosen else None,
        )
    return table


def _outcome(record: DecisionRecord) -> Table:
    """Returns predictions beside what came."""
    table = Table("", box=None, pad_edge=False)
    table.add_column("predicted", justify="right")
    table.add_column("real", justify="right")
    table.add_row("cached tokens", f"{record.matched_tokens:,}", _or_unknown(record.cached_tokens))
    if record.reachable_tokens != record.matched_tokens:
        table.add_row("  at who held most", f"{record.reachable_tokens:,}", "")
    table.add_row(
        "first token" if record.stream else "answer (whole)",
        f"{record.predicted_ttft_s:.3f} s",
        "not yet" if record.ttft_s is None else f"{record.ttft_s:.3f} s",
    )
    return table


def _or_unknown(tokens: int | None) -> str:
    return "not told" if tokens is None else f"{tokens:,}"


def _end(record: DecisionRecord) -> Text:
    parts = [record.finish]
    if record.status is not None:
        parts.append(f"status {record.status}")
    if record.error is not None:
        parts.append(record.error)
    if record.duration_s is not None:
        parts.append(f"after {record.duration_s:.3f} s")
    return Text(", ".join(parts), style="" if record.finish in {"done", "running"} else "red")


COMMAND: Final = Command(name="explain", summary=SUMMARY, run=run)
