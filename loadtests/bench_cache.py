"""What the prefix cache costs, what it saves, and what one starts from without it.

    hash           hashing the blocks of 50,000 tokens
    pool           blocks matched, allocated, published, committed and freed per second
    overhead-sim   throughput lost at 0 % hits: scheduler and pool, with modelled steps
    overhead       throughput lost at 0 % hits, with the real model
    ttft           warm against cold time to first token, through HTTP (as make bench-ttft)
    baseline       transformers with a deep-copied cache against kvway, on one shared prefix
    speculation    n-gram drafts where an answer copies its prompt, and where it does not

Everything that is compared runs side by side in this run. Medians, and between what the middle
half of the measurements lies.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import random
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from kvway_core.blocks import Namespace, block_hashes
from kvway_core.prompts import PromptEncoder
from kvway_worker.fetch import DEFAULT_MODEL, resolve_model
from kvway_worker.torch_engine import AttentionOptions, TorchEngine
from loadtests import bench_ttft, cache_baseline, cache_overhead, cache_speculation, pool_ops
from loadtests.report import Report, Spread, commit, machine, table

NUM_HASHED_TOKENS = 50_000
POOL_RUNS = 5
WAYS = {
    "copies": "transformers, copy each",
    "batch": "transformers, one batch",
    "kvway": "kvway",
}


class Outcome(NamedTuple):
    """What one part measured: a table for people, numbers for machines."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    metrics: Mapping[str, float]


class Bench:
    """What the parts share: options, and one engine that is loaded when the first part needs it.

    Args:
        args: The command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model_dir = resolve_model(args.model)

    @functools.cached_property
    def engine(self) -> TorchEngine:
        """The real model, with blocks for the larger of the parts' requests."""
        return TorchEngine(
            self.model_dir,
            dtype=self.args.dtype,
            num_threads=self.args.threads,
            num_blocks=cache_overhead.TORCH.num_blocks(16),
            attention=AttentionOptions(),  # as `kvway worker` does
        )

    def hash(self) -> Outcome:
        """Hash as a request's arrival does."""
        ids = random.Random(1).choices(range(50_000), k=NUM_HASHED_TOKENS)
        parent = Namespace("bench").root()
        times = []
        for _ in tqdm(range(41), unit="run", file=sys.stderr):
            started = time.perf_counter()
            block_hashes(ids, parent=parent)
            times.append(1000 * (time.perf_counter() - started))
        spread = Spread.of(times[1:])
        return Outcome(
            "Hashing 50,000 tokens, blocks of 16",
            ("ms",),
            [(spread.text(),)],
            spread.metrics("hash_ms_per_50k_tokens"),
        )

    def pool(self) -> Outcome:
        """Count whole lives of blocks per second."""
        runs = [pool_ops.measure() for _ in tqdm(range(POOL_RUNS), unit="run", file=sys.stderr)]
        spread = Spread.of(runs)
        return Outcome(
            "Blocks through the pool: match, allocate, publish, commit, free",
            ("blocks/s",),
            [(spread.text(0),)],
            spread.metrics("pool_ops_per_s", 0),
        )

    def overhead_sim(self) -> Outcome:
        """Measure the worst case: scheduler and pool, steps as fast as the sim engine's."""
        found = cache_overhead.on_sim(self.args.pairs)
        return Outcome(
            f"Throughput lost at 0 % hits, sim engine, {self.args.pairs} pairs",
            ("lost %", "us per step", "us per token"),
            [(found.lost_pct.text(), found.us_per_step.text(1), found.us_per_token.text(3))],
            {
                **found.lost_pct.metrics("zero_hit_overhead_sim_pct"),
                **found.us_per_step.metrics("zero_hit_us_per_step"),
                **found.us_per_token.metrics("zero_hit_us_per_token", 3),
            },
        )

    def overhead(self) -> Outcome:
        """Measure with the real model."""
        found = cache_overhead.on_engine(
            self.engine,
            self.args.pairs,
            vocab_size=self.engine.vocab_size,
            workload=cache_overhead.TORCH,
        )
        return Outcome(
            f"Throughput lost at 0 % hits, {self.args.model}, {self.args.pairs} pairs",
            ("lost % by the clock", "lost % by the cache's own time", "us per step"),
            [(found.lost_pct.text(), found.books_pct.text(3), found.us_per_step.text(1))],
            {
                **found.lost_pct.metrics("zero_hit_overhead_pct"),
                **found.books_pct.metrics("zero_hit_overhead_own_time_pct", 3),
            },
        )

    def ttft(self) -> Outcome:
        """Measure at a client of a worker of its own."""
        options = ["--model", self.args.model, "--dtype", self.args.dtype]
        options += ["--pairs", str(self.args.pairs), "--threads", str(self.args.threads)]
        cold, warm = asyncio.run(bench_ttft.run(bench_ttft.parse(options)))
        reductions = [100 * (1 - w.ttft_s / c.ttft_s) for c, w in zip(cold, warm, strict=True)]
        spread = Spread.of(reductions)
        cold_ms, warm_ms = (Spread.of([1000 * a.ttft_s for a in each]) for each in (cold, warm))
        return Outcome(
            f"TTFT, 1,500 shared and 100 new tokens, {self.args.pairs} pairs",
            ("cold ms", "warm ms", "lower by %"),
            [(cold_ms.text(0), warm_ms.text(0), spread.text(1))],
            {
                **spread.metrics("warm_ttft_reduction_pct", 1),
                "cold_ttft_ms": round(cold_ms.median, 1),
                "warm_ttft_ms": round(warm_ms.median, 1),
            },
        )

    def baseline(self) -> Outcome:
        """Compare with the plain way."""
        cases = cache_baseline.cases(
            self.model_dir, dtype=self.args.baseline_dtype, num_threads=self.args.threads
        )
        outcomes = cache_baseline.measure(cases)
        rows = []
        metrics: dict[str, float] = {}
        for case, found in zip(cases, outcomes, strict=True):
            kv_mib, rss_mib = found.kv_bytes / 2**20, found.rss_bytes / 2**20
            rows.append(
                (
                    *(case.num_requests, WAYS[case.way]),
                    *(f"{found.prefix_s:.2f}", f"{found.requests_s:.2f}"),
                    *(f"{kv_mib:.1f}", f"{rss_mib:.0f}"),
                )
            )
            key = f"baseline_{case.way}_{case.num_requests}"
            metrics |= {
                f"{key}_s": round(found.requests_s, 3),
                f"{key}_kv_mib": round(kv_mib, 1),
                f"{key}_rss_mib": round(rss_mib, 1),
            }
        metrics["baseline_answers_differing"] = _differing(cases, outcomes)
        return Outcome(
            "One prefix of 1,024 tokens; each request 32 of its own, 16 generated; "
            f"{self.args.baseline_dtype}, {self.args.threads} threads",
            ("requests", "way", "prefix s", "requests s", "KV MiB", "memory seen MiB"),
            rows,
            metrics,
        )

    def speculation(self) -> Outcome:
        """Compare with and without drafts."""
        encoder = PromptEncoder.load(self.model_dir)
        rows = []
        metrics: dict[str, float] = {}
        copied = cache_speculation.edits(encoder)
        for name, prompts, temperature in (
            ("copy 1", copied[:1], 0.0),
            ("copy 4", copied[:4], 0.0),
            ("random 1", cache_speculation.unrelated(encoder, 1, 256), 1.0),
        ):
            found = cache_speculation.measure(
                self.engine,
                prompts,
                pairs=max(1, self.args.pairs // 2),
                max_tokens=96,
                temperature=temperature,
            )
            rows.append(
                (
                    *(name, found.plain_tokens_per_s.text(1), found.tokens_per_s.text(1)),
                    *(found.speedup.text(), f"{found.accepted_pct:.0f}", found.differing),
                )
            )
            key = f"speculation_{name.replace(' ', '_')}"
            metrics |= found.speedup.metrics(f"{key}_speedup")
            metrics |= found.tokens_per_s.metrics(f"{key}_tokens_per_s", 1)
            metrics |= {
                f"{key}_accepted_pct": round(found.accepted_pct, 1),
                f"{key}_answers_differing": found.differing,
            }
        return Outcome(
            f"n-gram speculation, {cache_speculation.NUM_DRAFTS} drafts, 96 tokens each",
            ("prompts", "tokens/s without", "with", "speedup", "accepted %", "answers differing"),
            rows,
            metrics,
        )


PARTS: Mapping[str, Callable[[Bench], Outcome]] = {
    "hash": Bench.hash,
    "pool": Bench.pool,
    "overhead-sim": Bench.overhead_sim,
    "overhead": Bench.overhead,
    "ttft": Bench.ttft,
    "baseline": Bench.baseline,
    "speculation": Bench.speculation,
}


def main(argv: Sequence[str]) -> int:
    """Run the parts; print a table each and, last, the JSON report."""
    args = parse(argv)
    cache_baseline.quiet()
    bench = Bench(args)
    metrics: dict[str, float] = {}
    for name in args.only or PARTS:
        outcome = PARTS[name](bench)
        print(f"\n{outcome.title}")
        print(table(outcome.header, outcome.rows), flush=True)
        metrics |= outcome.metrics
    result = Report(
        bench="cache",
        commit=commit(),
        machine=machine(),
        command="python -m loadtests.bench_cache " + shlex.join(argv),
        metrics=metrics,
    )
    if args.output:
        args.output.write_text(result.json() + "\n")
    print(result.json())
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(
        prog="make bench-cache",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts alone")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto", help="of the model, but for the baseline")
    parser.add_argument("--baseline-dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2, help="threads that compute")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of what is compared")
    parser.add_argument("--output", type=Path, help="write the JSON report there, too")
    return parser.parse_args(argv)


def _differing(
    cases: Sequence[cache_baseline.Case], outcomes: Sequence[cache_baseline.Outcome]
) -> int:
    """Count answers that are not those of transformers, one request after another."""
    plain = {
        case.num_requests: outcome.answers
        for case, outcome in zip(cases, outcomes, strict=True)
        if case.way == "copies"
    }
    return sum(
        answer != expected
        for case, outcome in zip(cases, outcomes, strict=True)
        for answer, expected in zip(outcome.answers, plain[case.num_requests], strict=True)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
