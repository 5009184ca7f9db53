"""Load on a router whose replicas cost nothing: what it holds, refuses, bounds and delays.

    streams    a thousand streams at once, two tokens a second each
    overload   twice what the replicas can answer
    slow       clients that stop reading
    lag        bodies of 10 MB beside a hundred streams

Requests are sent when they are due, whatever the answers do (`open_loop`). What counts holds in
every run; times are judged from `JUDGED_S` on, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

import uvloop

from loadtests import load_lag, load_overload, load_slow, load_streams
from loadtests.report import Report, commit, machine, table

PARTS: Final[Mapping[str, ModuleType]] = {
    "streams": load_streams,
    "overload": load_overload,
    "slow": load_slow,
    "lag": load_lag,
}
JUDGED_S: Final = 20.0
_TIMES: Final = ("_ms_", "_pace", "_goodput", "_recovery_s")


async def measure(names: Sequence[str], seconds: float) -> dict[str, float | int]:
    """Runs parts one after the other, each for about so long."""
    metrics: dict[str, float | int] = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="kvway-load-") as folder:
            metrics |= await PARTS[name].measure(Path(folder), seconds)
    return metrics


def broken(metrics: Mapping[str, float | int], *, seconds: float) -> list[str]:
    """Returns what was promised and is not so, for people."""
    failures = []
    for part in PARTS.values():
        for key, limit in part.AT_MOST.items():
            if metrics.get(key, limit) > limit and _is_judged(key, seconds):
                failures.append(f"{key} is {metrics[key]}, at most {limit} was promised")
        for key, limit in part.AT_LEAST.items():
            if metrics.get(key, limit) < limit and _is_judged(key, seconds):
                failures.append(f"{key} is {metrics[key]}, at least {limit} was promised")
    return failures


def _is_judged(key: str, seconds: float) -> bool:
    return seconds >= JUDGED_S or not any(part in key for part in _TIMES)


def main(argv: Sequence[str]) -> int:
    """Measure, print; return 1 if a promise is broken."""
    args = parse(argv)
    metrics = uvloop.run(measure(args.only, args.seconds))
    print(table(("what", "measured"), [(key, str(value)) for key, value in metrics.items()]))
    shown = {"seconds": args.seconds} | metrics
    result = Report("load", commit(), machine(), "make load", shown)
    if args.output is not None:
        args.output.write_text(result.json() + "\n")
    print(result.json())
    failures = broken(metrics, seconds=args.seconds)
    for failure in failures:
        print(f"broken: {failure}", file=sys.stderr)
    return 1 if failures else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Command line of the run."""
    parser = argparse.ArgumentParser(
        prog="make load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS, help="parts")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each part")
    parser.add_argument("--output", type=Path, help="write the JSON report there, too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
