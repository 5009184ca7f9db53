"""What it costs to relay a request: processor time of the router, and the time it adds.

All routers run at once before the same replicas, which answer at once and cost next to nothing,
and take turns. Their processor time is measured, not their speed: so it matters little that
client, replicas and routers share the cores.

    small    a short question, a short answer                      32 connections
    big      a document of 64 KB that others ask about too, and a
             question that nobody asked before                     16 connections
    stream   an answer of 100 events, one every 5 ms               64 connections
    burst    the same, all events at once                          32 connections

`x_vs_peer` is requests per core of ours over theirs, the median of the rounds. What a router adds
is the time of a small request, one at a time, by way of it less the time without it, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import uvloop

from kvway_core.models import find_model
from kvway_core.up_options import DEFAULT_MODEL
from loadtests.load_fleet import Replicas
from loadtests.load_peers import INSTALL, OURS, PEERS, Running, find, our_program, running
from loadtests.load_wire import Connection, post_bytes
from loadtests.open_loop import quantile
from loadtests.report import Report, commit, machine, table

NUM_EVENTS: Final = 100
STEP_MS: Final = 5.0
BIG_BYTES: Final = 64 * 1024
NUM_DOCUMENTS: Final = 8
WARM_UP_S: Final = 0.5
_WORDS: Final = (Path(__file__).parent.parent / "LICENSE").read_text().replace('"', "").split()


@dataclass(frozen=True, slots=True)
class Scenario:
    """A kind of request.

    Attributes:
        name: Of the scenario.
        num_connections: That ask without pause.
        body: Returns the body of the n-th request.
        step_ms: Of the replicas.
        num_events: In each answer; 0 where it is no stream.
    """

    name: str
    num_connections: int
    body: Callable[[int], bytes]
    step_ms: float = 0.0
    num_events: int = 0


class Sample(NamedTuple):
    """One turn of one router: processor time per request, and what a client saw."""

    cpu_us: float
    p50_ms: float
    p99_ms: float
    per_s: float


def scenarios() -> list[Scenario]:
    """Returns what is measured."""
    documents = [_words(BIG_BYTES, seed=number) for number in range(NUM_DOCUMENTS)]

    def small(number: int) -> bytes:
        question = f"What is {number} times seven?"
        return f'{{"model":"m","messages":[{{"role":"user","content":"{question}"}}]}}'.encode()

    def big(number: int) -> bytes:
        document = documents[number % NUM_DOCUMENTS]
        question = f"Question {number}: " + _words(300, seed=number)
        return (
            f'{{"model":"m","messages":[{{"role":"system","content":"{document}"}},'
            f'{{"role":"user","content":"{question}"}}]}}'
        ).encode()

    def stream(number: int) -> bytes:
        return (
            f'{{"model":"m","stream":true,"max_tokens":{NUM_EVENTS},"messages":'
            f'[{{"role":"user","content":"Tell me about number {number}."}}]}}'
        ).encode()

    return [
        Scenario("small", 32, small),
        Scenario("big", 16, big),
        Scenario("stream", 64, stream, STEP_MS, NUM_EVENTS + 1),
        Scenario("burst", 32, stream, 0.0, NUM_EVENTS + 1),
    ]


def _words(num_bytes: int, *, seed: int) -> str:
    """Returns text of about that length."""
    rng = random.Random(seed)
    words = [rng.choice(_WORDS) for _ in range(num_bytes // 6)]
    sentences = [" ".join(words[at : at + 12]) for at in range(0, len(words), 12)]
    return ". ".join(sentences)


async def turn(router: Running, scenario: Scenario, seconds: float, *, first: int) -> Sample:
    """Has all connections ask for so long; raises if one answer is not whole.

    `first` numbers the requests: no turn may ask what another one of this router asked.
    """
    connections = [await Connection.connect(router.url) for _ in range(scenario.num_connections)]
    numbers = iter(range(first, sys.maxsize))
    took_s: list[float] = []

    async def asking(connection: Connection, until_s: float, into: list[float]) -> None:
        while (begun_s := time.perf_counter()) < until_s:
            answer = await connection.ask(post_bytes(router.url, scenario.body(next(numbers))))
            if not answer.is_good or answer.num_events != scenario.num_events:
                raise RuntimeError(f"{router.name}, {scenario.name}: {answer}")
            into.append((answer.ended_s or 0.0) - begun_s)

    async def for_s(length_s: float, into: list[float]) -> float:
        begun_s = time.perf_counter()
        await asyncio.gather(*(asking(c, begun_s + length_s, into) for c in connections))
        return time.perf_counter() - begun_s

    await for_s(min(WARM_UP_S, seconds), [])
    before_s = router.cpu_s()
    wall_s = await for_s(seconds, took_s)
    cpu_s = router.cpu_s() - before_s
    for connection in connections:
        connection.close()
    return Sample(
        cpu_us=cpu_s / len(took_s) * 1e6,
        p50_ms=quantile(took_s, 0.5) * 1e3,
        p99_ms=quantile(took_s, 0.99) * 1e3,
        per_s=len(took_s) / wall_s,
    )


async def added_ms(
    routers: Sequence[Running], replica: str, scenario: Scenario, num_requests: int
) -> dict[str, tuple[float, float]]:
    """Returns what each router adds to one request at a time: at the median, and at p99."""
    urls = {"": replica} | {router.name: router.url for router in routers}
    connections = {name: await Connection.connect(url) for name, url in urls.items()}
    took_ms: dict[str, list[float]] = {name: [] for name in urls}
    for number in range(num_requests):
        for name, connection in connections.items():
            request = post_bytes(urls[name], scenario.body(number))
            begun_s = time.perf_counter()
            answer = await connection.ask(request)
            if not answer.is_good:
                raise RuntimeError(f"{name}: {answer}")
            took_ms[name].append(((answer.ended_s or 0.0) - begun_s) * 1e3)
    for connection in connections.values():
        connection.close()
    direct = took_ms.pop("")
    return {
        name: (
            quantile(ms, 0.5) - quantile(direct, 0.5),
            quantile(ms, 0.99) - quantile(direct, 0.99),
        )
        for name, ms in took_ms.items()
    }


class Measured(NamedTuple):
    """What a run has found.

    Attributes:
        samples: Of each scenario and router, one a round.
        added: Milliseconds that each router adds, at the median and at p99.
        versions: Of the routers.
    """

    samples: dict[str, dict[str, list[Sample]]]
    added: dict[str, tuple[float, float]]
    versions: dict[str, str]


async def measure(args: argparse.Namespace, programs: Mapping[str, Path]) -> Measured:
    """Has all routers take their turns."""
    chosen = [s for s in scenarios() if s.name in args.only]
    model = find_model(args.model, os.environ)
    found = Measured({}, {}, {})
    # Replicas that answer at once and those that take steps are different ones.
    for step_ms in sorted({s.step_ms for s in chosen}):
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvway-relay-")))
            urls = await stack.enter_async_context(
                Replicas(num=2, slots=256, step_ms=step_ms, folder=folder)
            )
            routers = [
                await stack.enter_async_context(
                    running(name, program, replicas=urls, folder=folder, model=model)
                )
                for name, program in programs.items()
            ]
            found.versions.update({router.name: router.version for router in routers})
            for scenario in (s for s in chosen if s.step_ms == step_ms):
                taken = found.samples.setdefault(scenario.name, {name: [] for name in programs})
                for number in range(args.rounds):
                    for router in routers:
                        sample = await turn(
                            router, scenario, args.seconds, first=number * 1_000_000
                        )
                        taken[router.name].append(sample)
                if scenario.name == "small":
                    found.added.update(await added_ms(routers, urls[0], scenario, args.requests))
    return found


def figures(measured: Measured) -> dict[str, float | int | str]:
    """Returns the figures of the report."""
    metrics: dict[str, float | int | str] = {}
    for scenario, by_name in measured.samples.items():
        ours = [sample.cpu_us for sample in by_name[OURS]]
        metrics[f"{scenario}_rps_per_core"] = round(1e6 / statistics.median(ours))
        for name, theirs in by_name.items():
            key = name.replace("-", "_")
            if name == OURS:
                continue
            ratios = [t.cpu_us / us for us, t in zip(ours, theirs, strict=True)]
            metrics[f"{scenario}_vs_{key}"] = round(statistics.median(ratios), 3)
    for scenario, key in (("stream", "cpu_us_per_chunk"), ("burst", "burst_us_per_chunk")):
        if scenario in measured.samples:
            us = statistics.median(s.cpu_us for s in measured.samples[scenario][OURS])
            metrics[key] = round(us / NUM_EVENTS, 2)
    for name, version in measured.versions.items():
        metrics[f"version_{name.replace('-', '_')}"] = version
    for name, (median, p99) in measured.added.items():
        prefix = "" if name == OURS else name.replace("-", "_") + "_"
        metrics[f"{prefix}added_ms_p50"] = round(median, 3)
        metrics[f"{prefix}added_ms_p99"] = round(p99, 3)
    return metrics


def shown(samples: Mapping[str, Mapping[str, Sequence[Sample]]]) -> str:
    """Returns a table for people: medians of the rounds."""
    rows = []
    for scenario, by_name in samples.items():
        for name, taken in by_name.items():
            middle = [statistics.median(values) for values in zip(*taken, strict=True)]
            cpu_us, p50_ms, p99_ms, per_s = middle
            rows.append(
                (scenario, name, f"{cpu_us:.1f}", f"{1e6 / cpu_us:,.0f}" if cpu_us else "-",
                 f"{per_s:,.0f}", f"{p50_ms:.2f}", f"{p99_ms:.2f}")
            )  # fmt: skip
    header = ("scenario", "router", "CPU us", "per core and s", "per s", "p50 ms", "p99 ms")
    return table(header, rows)


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the report if asked to."""
    args = parse(argv)
    programs, missing = {OURS: our_program()}, []
    for name in args.peers:
        program = find(name, getattr(args, name.replace("-", "_")))
        if program is None:
            missing.append(name)
            print(f"{name}: not here, so nothing to compare with ({INSTALL[name]})")
        else:
            programs[name] = program
    measured = uvloop.run(measure(args, programs))
    print(shown(measured.samples))
    metrics = figures(measured)
    metrics["missing"] = ", ".join(missing) or "none"
    result = Report("relay", commit(), machine(), "make bench-relay", metrics)
    if args.output is not None:
        args.output.write_text(result.json() + "\n")
    print(result.json())
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Command line of the benchmark."""
    names = [scenario.name for scenario in scenarios()]
    parser = argparse.ArgumentParser(
        prog="make bench-relay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds, taken in turns")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a turn")
    parser.add_argument("--requests", type=int, default=1000, help="one at a time, for latency")
    parser.add_argument("--only", nargs="+", default=names, choices=names, help="scenarios")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model folder or id, for ours")
    for name in PEERS:
        parser.add_argument(f"--{name}", type=Path, help="its program, if it is not on the PATH")
    parser.add_argument("--output", type=Path, help="write the JSON report there, too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
