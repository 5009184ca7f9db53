"""Compiled attention in the worker: one start compiles, no step does, the next start finds it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvway_kernels.api import chosen
from kvway_worker.torch_engine import AttentionOptions, TorchEngine
from kvway_worker.torch_engine.attention import ALWAYS
from kvway_worker.torch_engine.compiling import compiled_home
from tests.worker.cascading import answers, expected, random_batch
from tests.worker.torch_models import Driver, write_model

_IMPLEMENTATION, _REASON = chosen("auto")
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(_IMPLEMENTATION != "compiled", reason=_REASON),
]

COMPILED = AttentionOptions("compiled", costs=ALWAYS)
START = """
import json, sys, torch
from pathlib import Path
from kvway_worker.torch_engine import AttentionOptions, TorchEngine
from kvway_worker.torch_engine.attention import ALWAYS
torch.set_num_threads(1)
TorchEngine(Path(sys.argv[1]), dtype="float32", device="cpu", num_blocks=256,
            attention=AttentionOptions("compiled", costs=ALWAYS))
from torch._dynamo.utils import counters
found = counters["inductor"]
print(json.dumps([found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]]))
"""


def start(folder: Path, home: Path) -> tuple[int, int, str]:
    """Load an engine in a process of its own; return graphs compiled, graphs found, its log."""
    env = {**os.environ, "KVWAY_HOME": str(home)}
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", START, str(folder)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *log, last = done.stdout.splitlines()
    misses, hits = json.loads(last)
    return misses, hits, "\n".join(log)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def cold(folder: Path, home: Path) -> tuple[int, int, str]:
    """The first start on a machine."""
    return start(folder, home)


@pytest.fixture(scope="module")
def engine(folder: Path, home: Path, cold: tuple[int, int, str]) -> Iterator[TorchEngine]:
    """An engine in whose blocks whatever is read before it is written shows up as NaN."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVWAY_HOME", str(home))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled_home(os.environ)))
        engine = TorchEngine(
            folder, dtype="float32", device="cpu", num_blocks=256, attention=COMPILED
        )
        for layer in (*engine._cache.k, *engine._cache.v):
            layer.fill_(float("nan"))
        yield engine
    torch.set_num_threads(before)


def test_the_next_start_finds_what_the_first_compiled(
    folder: Path, home: Path, cold: tuple[int, int, str]
) -> None:
    compiled, found, log = cold
    assert compiled > 0
    assert found == 0
    assert "compiling_attention_started" in log
    assert "compiling_attention_done" in log
    assert any((home / "compiled" / f"torch-{torch.__version__}").iterdir())
    assert start(folder, home)[:2] == (0, compiled)


def test_greedy_equals_generate_with_compiled_attention(engine: TorchEngine, folder: Path) -> None:
    for seed in (0, 1):
        batch = random_batch(seed)
        assert answers(engine, batch) == expected(folder, batch)
    assert engine.attention().implementation == "compiled"
    assert engine.attention().num_passes


def test_no_step_compiles_anything(engine: TorchEngine) -> None:
    """Hundreds of random steps, on a thread of their own as in a worker: nothing is left to do."""
    from torch._dynamo.utils import counters

    rng = random.Random(0)
    driver = Driver(engine, max_num_batched_tokens=96)
    shared = [[rng.randrange(256) for _ in range(length)] for length in (17, 40, 100)]
    num_steps = 0

    def live() -> None:
        nonlocal num_steps
        while num_steps < 300:
            for _ in range(rng.choice([0, 0, 1, 5])):
                if driver.scheduler.num_running < 14:
                    tail = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
                    driver.add([*rng.choice([*shared, []]), *tail], rng.randint(1, 25))
            if driver.scheduler.has_work:
                driver.step()
                num_steps += 1

    failed: list[BaseException] = []

    def run() -> None:
        try:
            with torch._dynamo.config.patch(error_on_recompile=True):
                live()
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    graphs = counters["stats"]["unique_graphs"]
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed, failed
    assert num_steps == 300
    assert counters["stats"]["unique_graphs"] == graphs
