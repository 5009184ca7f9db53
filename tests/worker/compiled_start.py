"""A start of an engine that compiles, in a process of its own, and what it tells."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kvway_worker.torch_engine import AttentionOptions, TorchEngine
from kvway_worker.torch_engine.attention import ALWAYS
from tests.worker.cascading import answers, batch_of_256, random_batch
from tests.worker.torch_models import Driver


@dataclass(frozen=True, slots=True)
class Told:
    """What a start tells.

    Attributes:
        num_compiled: graphs that were compiled.
        num_found: graphs that an earlier start had compiled.
        num_graphs: after loading.
        num_new: graphs that steps made after it.
        num_passes: shared runs that were read once in these steps.
        answered: prompts with their greedy answers, of batches that came behind these steps.
        log: of loading.
    """

    num_compiled: int
    num_found: int
    num_graphs: int
    num_new: int
    num_passes: int
    answered: list[tuple[list[int], list[int]]]
    log: str = ""


def start(folder: Path, home: Path, *, num_steps: int) -> Told:
    """Load an engine and run random steps, then batches; with no steps it only loads.

    Costs are measured then, else sharing pays.
    """
    env = {**os.environ, "KVWAY_HOME": str(home)}
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(folder), str(num_steps)],
        cwd=Path(__file__).parents[2],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *log, last = done.stdout.splitlines()
    return Told(**{**json.loads(last), "log": "\n".join(log)})


def random_steps(engine: TorchEngine, num_steps: int) -> None:
    """Run steps in which requests come and go, prefixes are shared, and prompts are cut."""
    rng = random.Random(0)
    driver = Driver(engine, max_num_batched_tokens=96)
    shared = [[rng.randrange(256) for _ in range(length)] for length in (17, 40, 100)]
    done = 0
    while done < num_steps:
        for _ in range(rng.choice([0, 0, 1, 5])):
            if driver.scheduler.num_running < 14:
                tail = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
                driver.add([*rng.choice([*shared, []]), *tail], rng.randint(1, 25))
        if driver.scheduler.has_work:
            driver.step()
            done += 1


def steps_and_batches(engine: TorchEngine, num_steps: int) -> list[tuple[list[int], list[int]]]:
    """Run random steps, and batches behind them; return what was answered in these."""
    if not num_steps:
        return []
    random_steps(engine, num_steps)
    answered = batch_of_256(engine)
    for seed in (0, 1):
        batch = random_batch(seed)
        answered += zip(batch.prompts, answers(engine, batch), strict=True)
    return answered


def _main(folder: Path, num_steps: int) -> None:
    from torch._dynamo.utils import counters

    torch.set_num_threads(1)
    options = AttentionOptions("compiled", costs=ALWAYS if num_steps else None)
    engine = TorchEngine(folder, dtype="float32", device="cpu", num_blocks=600, attention=options)
    for layer in (*engine._cache.k, *engine._cache.v):
        layer.fill_(float("nan"))  # what is read before it is written shows
    num_graphs = counters["stats"]["unique_graphs"]
    # On a thread of their own, as in a worker.
    with ThreadPoolExecutor(1) as thread:
        answered = thread.submit(steps_and_batches, engine, num_steps).result()
    found = counters["inductor"]
    told = Told(
        num_compiled=found["fxgraph_cache_miss"],
        num_found=found["fxgraph_cache_hit"],
        num_graphs=num_graphs,
        num_new=counters["stats"]["unique_graphs"] - num_graphs,
        num_passes=engine.attention().num_passes,
        answered=answered,
    )
    sys.stdout.write(json.dumps(asdict(told)))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
