"""What cascade attention saves, beside three other ways, and what it costs where it does not pay.

    grid        one layer of a decode step in four ways (see cascade_ways.py), for the heads of
                SmolLM2 and of Llama-3-8B: time, bytes, and the share of what this machine can do
    slowdown    where the cost model says no: whole steps that may cascade, against plain ones
    grouping    finding what 64 requests of 8k tokens share, and planning the step, as shares of it
    engine      decode in the worker's engine, SmolLM2, 32 requests on a prefix of 4k tokens

Ways that are compared take turns in one run; on a CPU one thread computes and processor time
counts, the shortest of the rounds; the slowdown is the median of pairs; in the engine the clock
counts, and the median. The floor of a
step is the larger of bytes, each read once, at the measured bandwidth, and of operations at the
measured rate of a large matrix product.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Final, NamedTuple

import torch
from tqdm import tqdm

from kvway_kernels.api import chosen
from kvway_kernels.costs import HeadShape, calibrate
from kvway_worker.fetch import DEFAULT_MODEL, resolve_model
from kvway_worker.scheduling.prefix_groups import CascadeCosts
from kvway_worker.torch_engine import TorchEngine
from kvway_worker.torch_engine.attention import AttentionOptions
from loadtests.cascade_engine import Decoding, Workload, grouping_s, in_turn
from loadtests.cascade_page import Outcome, publish
from loadtests.cascade_plot import Panel, svg
from loadtests.cascade_ways import BLOCK_SIZE, Case, Timed, Ways, rates
from loadtests.report import Report, Spread, commit, machine, table

HEADS: Final = {"smollm2": HeadShape(9, 3, 64), "llama3_8b": HeadShape(32, 8, 128)}
TITLES: Final = {"smollm2": "SmolLM2 (9/3/64)", "llama3_8b": "Llama-3-8B (32/8/128)"}
NUM_LAYERS: Final = {"smollm2": 30, "llama3_8b": 32}
NUM_REQUESTS: Final = (1, 2, 4, 8, 16, 32, 64)
NUM_SHARED: Final = (512, 1024, 2048, 4096, 8192)
NUM_OWN: Final = (32, 256)
QUICK: Final = ((2, 64, 32), (4, 512, 32))
GOAL: Final = (32, 4096, 32)
"""Requests, shared and own tokens of the figures that have a name."""


class Key(NamedTuple):
    """Names a case."""

    heads: str
    dtype: str
    num_requests: int
    num_shared: int
    num_own: int

    @property
    def case(self) -> Case:
        """What is timed."""
        return Case(HEADS[self.heads], getattr(torch, self.dtype), *self[2:])

    @property
    def suffix(self) -> str:
        """Ends the names of figures: none for SmolLM2's heads in float32."""
        heads = "" if self.heads == "smollm2" else f"_{self.heads}"
        return heads + ("" if self.dtype == "float32" else f"_{self.dtype}")


class Bench:
    """What the parts share.

    Args:
        args: The command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.implementation, self.reason = chosen(args.implementation, device=self.device)
        self.timed: dict[Key, Timed] = {}

    @functools.cached_property
    def keys(self) -> list[Key]:
        """The cases, the named ones of each heads and dtype among them."""
        sizes = [(n, p, s) for s in NUM_OWN for p in NUM_SHARED for n in NUM_REQUESTS]
        if self.args.quick:
            return [Key("smollm2", d, *size) for d in self.args.dtypes for size in QUICK]
        return [Key(h, d, *size) for d in self.args.dtypes for h in HEADS for size in sizes]

    @functools.cache  # noqa: B019 (one Bench per process)
    def rates(self, dtype: str) -> tuple[float, float]:
        """Bytes and operations per second of this machine, at most."""
        num_bytes = 2**22 if self.args.quick else 2**28
        return rates(getattr(torch, dtype), self.device, num_bytes=num_bytes)

    @functools.cache  # noqa: B019
    def costs(self, heads: str, dtype: str) -> CascadeCosts:
        """What the worker would decide by."""
        found = calibrate(
            HEADS[heads],
            dtype=getattr(torch, dtype),
            device=self.device,
            implementation=self.implementation,
        )
        return CascadeCosts(*astuple(found))

    def ways(self, key: Key) -> Ways:
        """Lay out a case."""
        return Ways(
            key.case,
            device=self.device,
            implementation=self.implementation,
            max_dense_bytes=int(self.args.dense_gib * 2**30),
        )

    def pays(self, key: Key) -> bool:
        """Say whether the worker would cascade."""
        costs = self.costs(key.heads, key.dtype)
        return key.num_requests > 1 and costs.pays(key.num_requests, key.num_shared)

    def grid(self) -> Outcome:
        """Time every case in every way."""
        rows: list[tuple[object, ...]] = []
        metrics: dict[str, float] = {}
        for key in tqdm(self.keys, unit="case", file=sys.stderr):
            ways = self.ways(key)
            timed = ways.time(rounds=self.args.rounds, budget_s=self.args.case_s)
            self.timed[key] = timed
            floor_s = key.case.floor_s(*self.rates(key.dtype))
            share = floor_s / timed.best_s("cascade")
            speedup = timed.ratio("paged", "cascade")
            rows.append(
                (
                    *key,
                    *(
                        f"{1000 * timed.best_s(way):.2f}" if way in timed.seconds else "-"
                        for way in ("paged", "gather", "contiguous", "cascade")
                    ),
                    f"{key.case.once_bytes / 2**20:.1f} / {key.case.plain_bytes / 2**20:.1f}",
                    *(f"{speedup:.2f}", f"{100 * share:.0f}", "yes" if self.pays(key) else "no"),
                )
            )
            name = "_".join(["ms", key.heads, key.dtype, *(f"{size}" for size in key[2:])])
            metrics |= {
                f"{name}_{way}": _rounded(1000 * timed.best_s(way)) for way in timed.seconds
            }
            if key[2:] == GOAL:
                metrics |= _named(key, timed, share)
        for dtype in self.args.dtypes:
            bytes_per_s, operations_per_s = self.rates(dtype)
            metrics[f"read_gb_per_s_{dtype}"] = round(bytes_per_s / 1e9, 2)
            metrics[f"product_gflop_per_s_{dtype}"] = round(operations_per_s / 1e9, 1)
        yes = [key for key in self.keys if self.pays(key)]
        losses = [self.timed[key].ratio("cascade", "paged") for key in yes]
        metrics["worst_slowdown_where_yes_pct"] = round(100 * (max([*losses, 1.0]) - 1), 2)
        gains = [
            self.timed[key].ratio("paged", "cascade")
            for key in self.keys
            if key.num_requests > 1 and key not in yes
        ]
        metrics["largest_speedup_where_no"] = round(max([*gains, 1.0]), 2)
        return Outcome(
            f"One layer, ms, {self.device.type}, {self.implementation} ({self.reason}); read "
            + ", ".join(
                f"{self.rates(d)[0] / 1e9:.1f} GB/s, products in {d} {self.rates(d)[1] / 1e9:.0f} "
                "GFLOP/s"
                for d in self.args.dtypes
            ),
            (
                *("heads", "dtype", "n", "shared", "own"),
                *("paged", "gather", "contiguous", "cascade"),
                *("MiB once / plain", "x paged", "% of floor", "pays"),
            ),
            rows,
            metrics,
        )

    def slowdown(self) -> Outcome:
        """Time whole steps where the cost model says no."""
        rows = []
        for key in tqdm(self.keys, unit="case", file=sys.stderr):
            if self.pays(key):
                continue
            ratio = self.ways(key).slowdown(
                self.costs(key.heads, key.dtype),
                rounds=4 * self.args.rounds,
                budget_s=self.args.case_s,
            )
            rows.append((*key, f"{100 * (ratio - 1):.2f}"))
        slowdowns = [float(row[-1]) for row in rows]
        return Outcome(
            "Steps that may cascade where it does not pay, against plain ones",
            ("heads", "dtype", "n", "shared", "own", "slower by %"),
            rows,
            {
                "worst_slowdown_pct": max([0.0, *slowdowns]),
                "median_slowdown_pct": Spread.of(slowdowns or [0.0]).metrics("x")["x"],
            },
        )

    def grouping(self) -> Outcome:
        """Compare finding shared runs with the attention of the step alone, which is less."""
        dtype, num_requests = self.args.dtypes[0], 4 if self.args.quick else 64
        num_tokens = 512 if self.args.quick else 8192
        costs = self.costs("smollm2", dtype)
        found_s = grouping_s(costs, num_requests=num_requests, num_tokens=num_tokens)
        key = Key("smollm2", dtype, num_requests, num_tokens - 32, 32)
        timed = self.ways(key).time(rounds=self.args.rounds, budget_s=self.args.case_s)
        step_s = NUM_LAYERS["smollm2"] * timed.best_s("cascade")
        planned_s = self.ways(key).planning_s(rounds=4 * self.args.rounds)
        shares = [100 * seconds / step_s for seconds in (found_s, planned_s)]
        return Outcome(
            f"Finding what {num_requests} requests of {num_tokens} tokens share, and planning",
            (
                "finding, us",
                "planning, us",
                "attention of the step, ms",
                "% finding",
                "% planning",
            ),
            [
                (
                    *(f"{1e6 * seconds:.0f}" for seconds in (found_s, planned_s)),
                    f"{1000 * step_s:.1f}",
                    *(f"{share:.3f}" for share in shares),
                )
            ],
            {
                "grouping_us_64x8k": round(1e6 * found_s, 1),
                "grouping_pct_64x8k": round(shares[0], 3),
                "planning_us_64x8k": round(1e6 * planned_s, 1),
                "planning_pct_64x8k": round(shares[1], 3),
            },
        )

    def engine(self) -> Outcome:
        """Decode in turn with cascade attention and without."""
        work = Workload(4, 256, 16, 8) if self.args.quick else Workload()
        torch.set_num_threads(self.args.threads)
        on, off = (
            TorchEngine(
                resolve_model(self.args.model),
                dtype=self.args.dtypes[0],
                device=self.device.type,
                num_threads=self.args.threads,
                num_blocks=work.num_blocks(BLOCK_SIZE),
                attention=AttentionOptions(
                    self.args.implementation,
                    cascade=cascade,
                    costs=self.costs("smollm2", self.args.dtypes[0]),  # of this run, not kept ones
                ),
            )
            for cascade in (True, False)
        )
        steps = in_turn(*(Decoding(each, work, vocab_size=each.vocab_size) for each in (on, off)))
        torch.set_num_threads(1)
        ratios = [b / a for a, b in zip(steps.on_s, steps.off_s, strict=True)]
        speedup = Spread.of(ratios)
        with_it, without = (
            Spread.of([work.num_requests / s for s in each]) for each in (steps.on_s, steps.off_s)
        )
        return Outcome(
            f"Decode in the engine, {work.num_requests} requests on {work.prefix_tokens} tokens, "
            f"{self.args.dtypes[0]}, {self.args.threads} threads",
            ("tokens/s with", "without", "speedup", "answers differing"),
            [(with_it.text(1), without.text(1), speedup.text(), steps.num_differing)],
            {
                **speedup.metrics("e2e_decode_speedup_n32_p4k"),
                "e2e_decode_tokens_per_s_on": round(with_it.median, 1),
                "e2e_decode_tokens_per_s_off": round(without.median, 1),
                "e2e_answers_differing": steps.num_differing,
            },
        )

    def plot(self) -> str:
        """Draw how much faster than the paged path, over the number of requests."""
        panels = []
        for heads in HEADS:
            lines: dict[str, list[tuple[float, float]]] = {}
            for key in self.timed:
                if key.heads == heads and key.dtype == self.args.dtypes[0] and key.num_own == 32:
                    point = (key.num_requests, self.timed[key].ratio("paged", "cascade"))
                    lines.setdefault(f"{key.num_shared} shared", []).append(point)
            panels.append(Panel(f"{TITLES[heads]}, {self.args.dtypes[0]}", lines))
        return svg(panels, x_label="requests", y_label="times faster than our paged path")


PARTS: Mapping[str, Callable[[Bench], Outcome]] = {
    "grid": Bench.grid,
    "slowdown": Bench.slowdown,
    "grouping": Bench.grouping,
    "engine": Bench.engine,
}


def main(argv: Sequence[str]) -> int:
    """Run the parts; print a table each and, last, the JSON report."""
    args = parse(argv)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    bench = Bench(args)
    metrics: dict[str, float | str] = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "implementation": bench.implementation,
    }
    outcomes = []
    with torch.inference_mode():
        for name in args.only or PARTS:
            outcome = PARTS[name](bench)
            outcomes.append(outcome)
            print(f"\n{outcome.title}")
            print(table(outcome.header, outcome.rows), flush=True)
            metrics |= outcome.metrics
    result = Report(
        bench="cascade",
        commit=commit(),
        machine=machine(),
        command="python -m loadtests.bench_cascade " + shlex.join(argv),
        metrics=metrics,
    )
    if args.output:
        args.output.write_text(result.json() + "\n", encoding="utf-8")
    if args.publish:
        publish(outcomes, result, plot=bench.plot(), at=GOAL[1:])
    print(result.json())
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(
        prog="make bench-cascade",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts alone")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=("float32", "bfloat16"),
        help="by default float32 on a CPU, bfloat16 too if it has instructions for it; bfloat16 "
        "on a GPU",
    )
    parser.add_argument("--implementation", default="auto", help="of our two ways")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="of the engine")
    parser.add_argument("--threads", type=int, default=2, help="threads of the engine")
    parser.add_argument("--rounds", type=int, default=11, help="of each case, at most")
    parser.add_argument("--case-s", type=float, default=2.0, help="seconds of a case, about")
    parser.add_argument("--dense-gib", type=float, default=2.0, help="for contiguous copies")
    parser.add_argument("--quick", action="store_true", help="tiny cases: only to see it run")
    parser.add_argument("--output", type=Path, help="write the JSON report there, too")
    parser.add_argument(
        "--publish", action="store_true", help="write results, plot and the figures of the page"
    )
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU on this machine; use --device cpu")
    if args.publish and (args.only or args.quick):
        parser.error("--publish is for a whole run: leave out --only and --quick")
    if not args.dtypes:
        args.dtypes = ["bfloat16"] if args.device == "cuda" else _cpu_dtypes()
    return args


def _cpu_dtypes() -> list[str]:
    words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())
    if words.isdisjoint({"amx_bf16", "avx512_bf16"}):
        print("bfloat16 is left out: this CPU has no instructions for it", file=sys.stderr)
        return ["float32"]
    return ["float32", "bfloat16"]


def _named(key: Key, timed: Timed, share: float) -> dict[str, float]:
    return {
        f"speedup_vs_{way}_n32_p4k{key.suffix}": round(timed.ratio(way, "cascade"), 2)
        for way in timed.seconds
        if way != "cascade"
    } | {f"roofline_share_n32_p4k{key.suffix}": round(share, 3)}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
