"""Compiled attention in the worker: one start compiles, no step does, the next start finds it.

The tiny model's heads are too small for the native kernel: it runs the graph, as models in
bfloat16 do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor.exc import CppCompileError

from kvway_kernels import native
from kvway_kernels.api import chosen
from kvway_worker.torch_engine import AttentionOptions, TorchEngine
from kvway_worker.torch_engine.attention import ALWAYS
from kvway_worker.torch_engine.compiling import CompilingFailed, compiled_home
from tests.worker.cascading import answers, expected, random_batch
from tests.worker.compiled_start import Told, start
from tests.worker.torch_models import write_model

_IMPLEMENTATION, _REASON = chosen("auto")
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(_IMPLEMENTATION != "compiled", reason=_REASON),
]

NUM_GRAPHS = 2
"""With shared runs, and without."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def cold(folder: Path, home: Path) -> Told:
    """The first start on a machine."""
    return start(folder, home, num_steps=0)


@pytest.fixture(scope="module")
def engine(folder: Path, home: Path, cold: Told) -> Iterator[TorchEngine]:
    """An engine in whose blocks whatever is read before it is written shows up as NaN."""
    assert cold.num_compiled
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVWAY_HOME", str(home))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled_home(os.environ)))
        engine = TorchEngine(
            folder,
            dtype="float32",
            device="cpu",
            num_blocks=256,
            attention=AttentionOptions("compiled", costs=ALWAYS),
        )
        for layer in (*engine._cache.k, *engine._cache.v):
            layer.fill_(float("nan"))
        yield engine
    torch.set_num_threads(before)


def test_the_first_start_compiles_each_graph_once_and_tells_the_wait(cold: Told) -> None:
    """To measure costs takes no graph of its own."""
    assert (cold.num_compiled, cold.num_found, cold.num_graphs) == (NUM_GRAPHS, 0, NUM_GRAPHS)
    for part in ("compiling_attention", "measuring_attention"):
        assert f"{part}_started" in cold.log
        assert f"{part}_done" in cold.log


def test_the_next_start_finds_what_is_whole_and_no_step_compiles_anything(
    folder: Path, home: Path, cold: Told
) -> None:
    """Hundreds of random steps; one library is cut off, as by a start that was killed."""
    assert cold.num_compiled
    [kept] = (home / "compiled").iterdir()
    cut, *others = sorted(kept.rglob("*.main.so"), key=lambda path: path.stat().st_size)
    os.truncate(cut, cut.stat().st_size // 2)
    times = [path.stat().st_mtime_ns for path in others]
    told = start(folder, home, num_steps=300)
    assert (told.num_compiled, told.num_found, told.num_graphs) == (0, NUM_GRAPHS, NUM_GRAPHS)
    assert told.num_new == 0
    assert told.num_passes > 300
    assert f"compiled_kernel_damaged        error='it is cut off' path={cut}" in told.log
    assert [path.stat().st_mtime_ns for path in others] == times


def test_greedy_equals_generate_with_compiled_attention(engine: TorchEngine, folder: Path) -> None:
    for seed in (0, 1):
        batch = random_batch(seed)
        assert answers(engine, batch) == expected(folder, batch)
    assert engine.attention().implementation == "compiled"
    assert engine.attention().num_passes


def test_a_compiler_that_fails_is_not_the_models_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, head_dim=16)

    def fail(_head_dim: int, _kind: str, *, is_bfloat16: bool) -> None:
        assert not is_bfloat16
        raise CppCompileError(["g++"], "cc1plus: fatal error: omp.h: No such file")

    monkeypatch.setenv("KVWAY_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled_home(os.environ)))
    monkeypatch.setattr(native, "_kernel", fail)
    with pytest.raises(CompilingFailed) as raised:
        TorchEngine(
            folder,
            dtype="float32",
            device="cpu",
            num_blocks=16,
            attention=AttentionOptions("compiled", costs=ALWAYS),
        )
    message = str(raised.value)
    assert message.startswith("attention cannot be compiled on this machine: cc1plus: fatal error")
    assert "--no-compile" in message
    assert str(compiled_home(os.environ)) in message
