"""`kvway top`: the fleet in a terminal, again and again until Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from rich.console import Console, Group
from rich.live import Live

from kvway_core.cli import Command
from kvway_core.errors import ConfigError
from kvway_router.admin import DecisionList
from kvway_router.admin_client import AdminClient, AdminParser, AskFailed
from kvway_router.explain import EXIT_FAILED
from kvway_router.fleet import FleetView
from kvway_router.prefixes.watch import PrefixReport
from kvway_router.terminal import new_console, plain
from kvway_router.top_view import Look, view

MIN_INTERVAL_S: Final = 0.1
MAX_INTERVAL_S: Final = 3600.0
NUM_DECISIONS: Final = 8

SUMMARY: Final = "show the fleet in the terminal"
DESCRIPTION: Final = (
    "Shows the replicas, what they do and hold, the latest requests and what keeps prompts from "
    "sharing. Rates are those since the last look; with --once, or where the output is no "
    "terminal, it looks once, and they are those since the router's start."
)


def run(argv: Sequence[str]) -> int:
    """Shows the fleet; returns 1 if it looks once and there is no router.

    Raises:
        ConfigError: An argument is not as it must be.
    """
    parser = AdminParser(prog="kvway top", description=DESCRIPTION)
    parser.add_argument(
        "--interval-s", type=float, default=1.0, help="seconds between looks (%(default)g)"
    )
    parser.add_argument("--once", action="store_true", help="print it once and end")
    options = parser.parse_args(argv)
    if not MIN_INTERVAL_S <= options.interval_s <= MAX_INTERVAL_S:
        limits = f"{MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}"
        raise ConfigError([f"--interval-s must be {limits}, got {options.interval_s:g}"])
    client, console = AdminClient(options.admin), new_console()
    if options.once or not console.is_terminal:
        return _once(client, console)
    try:
        _live(client, console, interval_s=options.interval_s)
    except KeyboardInterrupt:
        return 0
    return 0


def look(client: AdminClient, *, now_s: Callable[[], float] = time.monotonic) -> Look:
    """Returns what a router says now.

    Raises:
        AskFailed: It says nothing.
    """
    return Look(
        at_s=now_s(),
        fleet=client.get("/admin/replicas", FleetView),
        decisions=client.get(f"/admin/decisions?limit={NUM_DECISIONS}", DecisionList).decisions,
        prefixes=client.get("/admin/prefixes", PrefixReport),
    )


def frames(client: AdminClient, console: Console) -> Iterator[Group]:
    """Yields what to show, one look each, without end; the last fleet stays while none answers."""
    before: Look | None = None
    last: Look | None = None
    while True:
        try:
            now = look(client)
        except AskFailed as exc:
            problem = plain(str(exc), style="bold red")
            yield Group(problem, *([view(before, last, width=console.width)] if last else []))
            continue
        yield view(last, now, width=console.width)
        before, last = last, now


def _once(client: AdminClient, console: Console) -> int:
    try:
        console.print(view(None, look(client), width=console.width))
    except AskFailed as exc:
        sys.stderr.write(f"kvway: {exc}\n")
        return EXIT_FAILED
    return 0


def _live(client: AdminClient, console: Console, *, interval_s: float) -> None:
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for frame in frames(client, console):
            live.update(frame, refresh=True)
            time.sleep(interval_s)


COMMAND: Final = Command(name="top", summary=SUMMARY, run=run)
