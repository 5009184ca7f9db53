"""Soak: a fleet under mixed load and faults for half an hour, of which nothing may be left.

The load and the books are those of `make chaos`, the faults fewer, and without those that begin a
worker anew: the memory of a process is looked at over its whole life. Every second the resident
memory and the open files of router and workers are read, and every 200 ms a process asks the
router's /health: how long that takes bounds the time for which its event loop was busy.

After a warm-up (a third of the time) memory may not grow and files may not stay open. What fills
up to its bound must be full by then: caches that take an hour of this load get smaller bounds
here. docs/reliability.md names each. A run below twenty minutes is too short to judge growth and
shows it only.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from loadtests.chaos import chaos, ending_on_sigterm, show
from loadtests.chaos_clients import plan
from loadtests.chaos_faults import Kind
from loadtests.chaos_fleet import Fleet
from loadtests.chaos_ledger import broken
from loadtests.report import Report, commit, machine

KINDS: Final = (Kind.STOP, Kind.DROP, Kind.CONNECTIONS, Kind.FEED)
WARM_UP: Final = 1 / 3
MIN_JUDGED_MINUTES: Final = 20.0
LIMITS: Final = {"router_mb_per_min": 0.1, "worker_mb_per_min": 0.1, "router_more_files": 5}
ROUTER_ARGS: Final = (
    *("--max-index-bytes", str(4 * 2**20)),
    *("--tokenizer-cache-bytes", str(2**20)),
)
WORKER_ARGS: Final = (
    *("--num-blocks", "1024"),
    *("--tokenizer-cache-bytes", str(2**20)),
    *("--kv-events-buffer", "500"),
)
_SAMPLE_S: Final = 1.0


@dataclass(slots=True)
class Samples:
    """What was read of one process: minutes since the start, resident MB, open files."""

    minutes: list[float] = field(default_factory=list)
    resident_mb: list[float] = field(default_factory=list)
    num_files: list[int] = field(default_factory=list)

    def read(self, pid: int, minutes: float) -> None:
        """Reads one more."""
        status = Path(f"/proc/{pid}/status").read_text()
        (resident,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
        self.minutes.append(minutes)
        self.resident_mb.append(int(resident.split()[1]) / 1024)
        self.num_files.append(sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()))

    def mb_per_min(self) -> float:
        """Returns by how much memory grew after the warm-up: the slope of a straight line."""
        first = self._first()
        minutes, resident = self.minutes[first:], self.resident_mb[first:]
        return statistics.linear_regression(minutes, resident).slope

    def more_files(self) -> float:
        """Returns how many more files are open at the end than after the warm-up: medians."""
        num_files = self.num_files[self._first() :]
        part = max(1, len(num_files) // 4)
        return statistics.median(num_files[-part:]) - statistics.median(num_files[:part])

    def _first(self) -> int:
        return min(int(len(self.minutes) * WARM_UP), len(self.minutes) - 2)


class Watch:
    """Reads the processes of a fleet until it is cancelled."""

    def __init__(self) -> None:
        """Nothing is read yet."""
        self.router = Samples()
        self.workers: dict[str, Samples] = {}
        self.asked_ms: list[float] = []

    async def run(self, fleet: Fleet) -> None:
        """Reads now and then."""
        started_s = time.monotonic()
        self.workers = {worker.name: Samples() for worker in fleet.workers}
        with asking(fleet.url, self.asked_ms):
            while True:
                minutes = (time.monotonic() - started_s) / 60
                self.router.read(fleet.router.pid, minutes)
                for worker in fleet.workers:
                    self.workers[worker.name].read(worker.program.pid, minutes)
                await asyncio.sleep(_SAMPLE_S)

    def metrics(self) -> dict[str, float | int]:
        """Returns what was seen."""
        asked = sorted(self.asked_ms)
        return {
            "router_mb": round(self.router.resident_mb[-1], 1),
            "router_mb_per_min": round(self.router.mb_per_min(), 3),
            "worker_mb": round(max(w.resident_mb[-1] for w in self.workers.values()), 1),
            "worker_mb_per_min": round(max(w.mb_per_min() for w in self.workers.values()), 3),
            "router_files": self.router.num_files[-1],
            "router_more_files": round(self.router.more_files(), 1),
            "loop_busy_ms_p50": round(statistics.median(asked), 1),
            "loop_busy_ms_p99": round(asked[int(len(asked) * 0.99)], 1),
            "loop_busy_ms_max": round(asked[-1], 1),
        }


@contextmanager
def asking(url: str, asked_ms: list[float]) -> Iterator[None]:
    """Has a process ask for /health again and again, and takes in how long each took.

    Raises:
        RuntimeError: It got no answer.
    """
    with tempfile.TemporaryFile("w+") as printed:
        command = [sys.executable, "-m", "loadtests.asking", url]
        asks = subprocess.Popen(command, stdout=printed)  # noqa: S603  our own
        try:
            yield
        finally:
            asks.terminate()
            if asks.wait() not in (0, -signal.SIGTERM):
                raise RuntimeError("the router did not answer /health: see above")
            printed.seek(0)
            asked_ms += map(float, printed)


def grown(metrics: dict[str, float | int], *, minutes: float) -> list[str]:
    """Returns what has grown that may not, for people; nothing of a short run."""
    if minutes < MIN_JUDGED_MINUTES:
        return []
    return [
        f"{key} is {metrics[key]}, at most {limit} was promised"
        for key, limit in LIMITS.items()
        if metrics[key] > limit
    ]


def main(argv: Sequence[str]) -> int:
    """Run, print; return 1 if a promise is broken."""
    args = parse(argv)
    print(f"seed {args.seed}", file=sys.stderr)
    requests = plan(args.seed, max(1, round(args.minutes * 60 * args.rate)), args.rate)
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="kvway-soak-") as made:
        folder = args.logs or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        soaking = chaos(
            requests,
            seed=args.seed,
            fleet=Fleet(folder, router_args=ROUTER_ARGS, worker_args=WORKER_ARGS),
            kinds=KINDS,
            every_s=args.every,
            watch=watch.run,
        )
        run = asyncio.run(ending_on_sigterm(soaking))
    metrics = run.metrics | watch.metrics()
    show(run._replace(metrics=metrics))
    drawn = f"--minutes {args.minutes:g} --rate {args.rate:g} --every {args.every:g}"
    command = f"python -m loadtests.soak {drawn} --seed {args.seed}"
    shown = {"seed": args.seed, "minutes": args.minutes} | metrics
    result = Report("soak", commit(), machine(), command, shown)
    if args.output is not None:
        args.output.write_text(result.json() + "\n")
    print(result.json())
    failures = [*broken(metrics), *grown(metrics, minutes=args.minutes)]
    for failure in failures:
        print(f"broken: {failure}", file=sys.stderr)
    return 1 if failures else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Command line of the run."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="how long requests come")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second, on average")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the run")
    parser.add_argument("--output", type=Path, help="write the JSON report there, too")
    parser.add_argument("--logs", type=Path, help="keep the processes' logs in this folder")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
