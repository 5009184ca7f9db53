"""What the prefix cache costs when it never hits: caching on against caching off.

All prompts are unique. Both ways run the same prompts, one directly after the other, and who goes
first alternates. Each keeps its pool from run to run, small enough that blocks are evicted all
the time. What is counted for the cache: hashing, lookups, publishing, evicting, encoding KV
events. Without it tokens are not even hashed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tqdm import tqdm

from kvway_worker.engine import Engine
from kvway_worker.settings import WorkerSettings
from kvway_worker.sim import CostModel, SimEngine
from loadtests.report import Spread
from loadtests.steps import Run, StepLoop


class Workload(NamedTuple):
    """The requests of one run, all of them there at once."""

    num_requests: int
    prompt_tokens: int
    max_tokens: int

    def prompts(self, chooser: random.Random, vocab_size: int) -> list[list[int]]:
        """Make prompts that have never been seen."""
        ids = range(vocab_size)
        return [chooser.choices(ids, k=self.prompt_tokens) for _ in range(self.num_requests)]

    def num_blocks(self, block_size: int) -> int:
        """Blocks of a pool that holds these requests once and a half."""
        one = -(-(self.prompt_tokens + self.max_tokens) // block_size)
        return 3 * one * self.num_requests // 2


SIM = Workload(num_requests=32, prompt_tokens=512, max_tokens=64)
TORCH = Workload(num_requests=8, prompt_tokens=256, max_tokens=24)


class Overhead(NamedTuple):
    """Of each pair: throughput lost to the cache, and what the cache itself took.

    Attributes:
        lost_pct: Of the throughput without it, by the clock.
        books_pct: Time of hashes, scheduler, pool and events beyond that of the run without the
            cache, as a share of the run: the same loss without the noise of the engine.
        us_per_step: That time per step.
        us_per_token: That time per token, of prompts and answers.
    """

    lost_pct: Spread
    books_pct: Spread
    us_per_step: Spread
    us_per_token: Spread


def on_sim(pairs: int, workload: Workload = SIM) -> Overhead:
    """Measure scheduler and pool alone; steps take what the sim engine's defaults say.

    The engine's own work is left out and its modelled time put in, so nothing here waits.
    """
    defaults = WorkerSettings(model="sim")
    costs = CostModel(
        prefill_tokens_per_s=defaults.sim_prefill_tokens_per_s,
        attention_s_per_pair=defaults.sim_attention_s_per_pair,
        step_overhead_s=defaults.sim_decode_step_s,
        decode_s_per_seq=defaults.sim_decode_s_per_seq,
    )
    engine = SimEngine(num_blocks=workload.num_blocks(16), block_size=16)
    return _measure(
        engine, pairs, workload, costs=costs, vocab_size=32_000, time_s=_books_and_model
    )


def on_engine(engine: Engine, pairs: int, *, vocab_size: int, workload: Workload) -> Overhead:
    """Measure by the clock, with what the engine really takes."""
    return _measure(
        engine, pairs, workload, costs=None, vocab_size=vocab_size, time_s=lambda run: run.total_s
    )


def _books_and_model(run: Run) -> float:
    return run.books_s + run.modelled_s


def _measure(
    engine: Engine,
    pairs: int,
    workload: Workload,
    *,
    costs: CostModel | None,
    vocab_size: int,
    time_s: Callable[[Run], float],
) -> Overhead:
    """Run pairs and compare them; the first pair warms up and does not count."""
    chooser = random.Random(3)
    loops = [StepLoop(engine, prefix_caching=caching, costs=costs) for caching in (True, False)]
    measured: list[tuple[Run, Run]] = []
    for index in tqdm(range(pairs + 1), unit="pair", file=sys.stderr):
        prompts = workload.prompts(chooser, vocab_size)
        order = (0, 1) if index % 2 else (1, 0)
        runs = {which: loops[which].run(prompts, workload.max_tokens) for which in order}
        if runs[0].cached_tokens:
            sys.exit("a prompt that was never sent before was found in the cache")
        measured.append((runs[0], runs[1]))
    return _compare(measured[1:], workload, time_s)


def _compare(
    measured: Sequence[tuple[Run, Run]], workload: Workload, time_s: Callable[[Run], float]
) -> Overhead:
    num_tokens = workload.num_requests * (workload.prompt_tokens + workload.max_tokens)
    extra_s = [on.books_s - off.books_s for on, off in measured]
    return Overhead(
        lost_pct=Spread.of([100 * (1 - time_s(off) / time_s(on)) for on, off in measured]),
        books_pct=Spread.of(
            [100 * extra / time_s(on) for extra, (on, _) in zip(extra_s, measured, strict=True)]
        ),
        us_per_step=Spread.of(
            [1e6 * extra / on.num_steps for extra, (on, _) in zip(extra_s, measured, strict=True)]
        ),
        us_per_token=Spread.of([1e6 * extra / num_tokens for extra in extra_s]),
    )
