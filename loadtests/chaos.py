"""Chaos: requests through a router to four sim workers, of which one is hurt every second.

Workers are killed and started again, stopped and continued, drained, cut off from the network;
their connections are reset, broken, hung, garbled, slowed, each in many ways; their KV events are
lost. Clients stream and do not, leave before and in the answer, and read slowly. At the end all
is mended, and the books of clients, router and workers must agree:

    lost_before_first_byte   an error, or nothing, in place of a first byte
    without_terminal_state   no end, an end without a reason, or two
    crossed, duplicated      an answer that is not the prompt's, or has a part of it twice
    leaked_inflight          what router or workers still count when all have ended

A request that was at two workers when each was lost is not sent to a third one, as it may be what
kills them; one whose connection hangs while the worker is well is ended after its time, as the
worker may still be at it. These are counted apart, and workers must have been hurt for them.

The exit code is 1 if a promise is broken. The seed draws requests and faults again; how they meet
is up to the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from tqdm import tqdm

from loadtests.chaos_clients import Client, Ending, Outcome, Request, plan
from loadtests.chaos_faults import EVERY_S, Chaos, Kind, Mark
from loadtests.chaos_fleet import Fleet
from loadtests.chaos_ledger import broken, disagreements, figures, read_books
from loadtests.chaos_plot import svg
from loadtests.report import Report, commit, machine, table

T = TypeVar("T")
_SETTLE_LOOKS: Final = 100
_MEND_LIMIT_S: Final = 60.0
_MAX_SHOWN: Final = 10


class Run(NamedTuple):
    """What happened."""

    outcomes: Sequence[Outcome]
    marks: Sequence[Mark]
    metrics: dict[str, float | int]
    problems: Sequence[str]
    no_namespace: str


async def chaos(
    requests: Sequence[Request],
    *,
    seed: int,
    fleet: Fleet,
    kinds: Sequence[Kind] = tuple(Kind),
    every_s: float = EVERY_S,
    watch: Callable[[Fleet], Coroutine[Any, Any, None]] | None = None,
) -> Run:
    """Runs the fleet, the clients and the faults, and reads the books.

    Args:
        requests: What the clients do.
        seed: Draws the faults.
        fleet: Who is hurt; not opened yet.
        kinds: What is done to workers.
        every_s: How often.
        watch: Runs beside it, and is cancelled once all requests have ended.
    """
    async with fleet:
        client = Client(fleet.url)
        faults = Chaos(fleet, seed=seed, now_s=client.now_s, kinds=kinds, every_s=every_s)
        end = asyncio.Event()
        outcomes: list[Outcome] = []
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch(fleet)) if watch else None
            _ = group.create_task(faults.run(end))
            asking = [group.create_task(client.send(request)) for request in requests]
            with tqdm(total=len(requests), unit="request", file=sys.stderr, mininterval=1) as bar:
                for asked in asyncio.as_completed(asking):
                    outcomes.append(await asked)
                    bar.update()
                    bar.set_postfix_str(f"{len(faults.marks)} faults", refresh=False)
            if watching is not None:
                watching.cancel()
            end.set()
        await fleet.whole(limit_s=_MEND_LIMIT_S)
        leaked = await fleet.settled(num_looks=_SETTLE_LOOKS)
        no_namespace = fleet.no_namespace
        logs = [worker.program.log.read_text(errors="replace") for worker in fleet.workers]
        books = read_books(fleet.router.log.read_text(errors="replace"), logs)
    metrics = figures(outcomes, books, faults.marks, leaked=leaked)
    metrics |= {"faults": len(faults.marks), "seconds": round(client.now_s(), 1)}
    problems = disagreements(outcomes, books, faults.marks)
    return Run(outcomes, faults.marks, metrics, problems, no_namespace)


async def ending_on_sigterm(run: Coroutine[Any, Any, T]) -> T:
    """Returns what a run does; SIGTERM ends it as Ctrl-C does, and leaves no process behind."""
    task = asyncio.create_task(run)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def main(argv: Sequence[str]) -> int:
    """Run, print, draw; return 1 if a promise is broken."""
    args = parse(argv)
    print(f"seed {args.seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="kvway-chaos-") as made:
        folder = args.logs or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        requests = plan(args.seed, args.requests, args.rate)
        run = asyncio.run(ending_on_sigterm(chaos(requests, seed=args.seed, fleet=Fleet(folder))))
    show(run)
    if args.plot is not None:
        args.plot.write_text(svg(run.outcomes, run.marks))
    drawn = f"--requests {args.requests} --rate {args.rate:g} --seed {args.seed}"
    command = f"make chaos ARGS={shlex.quote(drawn)}"
    metrics = {"seed": args.seed, "namespace": run.no_namespace or "yes"} | run.metrics
    result = Report("chaos", commit(), machine(), command, metrics)
    if args.output is not None:
        args.output.write_text(result.json() + "\n")
    print(result.json())
    failures = broken(run.metrics)
    for failure in failures:
        print(f"broken: {failure}", file=sys.stderr)
    return 1 if failures else 0


def show(run: Run) -> None:
    """Print the figures, what was done, and what is not as it should be."""
    if run.no_namespace:
        print(f"no worker is in a network namespace: {run.no_namespace}")
    done: dict[str, list[float]] = {}
    for mark in run.marks:
        name = f"{mark.kind}: {mark.detail}" if mark.detail else str(mark.kind)
        done.setdefault(name, []).append(mark.ended_s - mark.began_s)
    rows = [(name, len(s), f"{max(s):.1f}") for name, s in sorted(done.items())]
    print(table(("fault", "times", "longest s"), rows))
    print(table(("what", "measured"), list(run.metrics.items())))
    must_not = (Ending.FAILED, Ending.LOST, Ending.UNCLEAR)
    bad = [outcome for outcome in run.outcomes if outcome.ending in must_not]
    for o in bad[:_MAX_SHOWN]:
        print(
            f"{o.ending} at {o.sent_s:.2f} to {o.ended_s:.2f} s: status {o.status}, {o.detail}, "
            f"replica {o.replica}, {len(o.text)} characters, router's id {o.router_id}"
        )
    for problem in run.problems[:_MAX_SHOWN]:
        print(problem)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Command line of the run."""
    parser = argparse.ArgumentParser(
        prog="make chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=10_000, help="how many there are")
    parser.add_argument("--rate", type=float, default=50.0, help="requests per second, on average")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the run")
    parser.add_argument("--output", type=Path, help="write the JSON report there, too")
    parser.add_argument("--plot", type=Path, help="draw the timeline there, as SVG")
    parser.add_argument("--logs", type=Path, help="keep the processes' logs in this folder")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
