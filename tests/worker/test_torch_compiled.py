"""Compiled attention in the worker: one start compiles, no step does, the next start finds it.

The tiny model's heads are too small for the native kernel: it runs the graph, as models in
bfloat16 do.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch._inductor.exc import CppCompileError

from kvway_kernels import native
from kvway_kernels.api import chosen
from kvway_worker.torch_engine import AttentionOptions, TorchEngine
from kvway_worker.torch_engine.attention import ALWAYS
from kvway_worker.torch_engine.compiling import CompilingFailed, compiled_home
from tests.worker.compiled_start import Told, start
from tests.worker.torch_models import check_by_transformers, write_model

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
def cold(folder: Path, home: Path) -> list[Told]:
    """The first starts on a machine: two workers at once."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda _: start(folder, home, num_steps=0), range(2)))


def test_first_starts_at_once_have_each_graph_once_and_tell_the_wait(cold: list[Told]) -> None:
    """One finds what the other was faster to compile. To measure costs takes no graph."""
    for told in cold:
        assert told.num_compiled + told.num_found == told.num_graphs == NUM_GRAPHS
        for part in ("compiling_attention", "measuring_attention"):
            assert f"{part}_started" in told.log
        assert "compiling_attention_done" in told.log
        assert "damaged" not in told.log
    assert sum(told.num_compiled for told in cold) >= NUM_GRAPHS


def test_the_next_start_finds_what_is_whole_and_no_step_compiles_anything(
    folder: Path, home: Path, cold: list[Told]
) -> None:
    """Hundreds of random steps, and greedy answers that are transformers' own.

    One library is cut off, as by a start that was killed.
    """
    assert cold
    [kept] = (home / "compiled").glob("torch-*")
    cut, *others = sorted(kept.rglob("*.main.so"), key=lambda path: path.stat().st_size)
    os.truncate(cut, cut.stat().st_size // 2)
    times = [path.stat().st_mtime_ns for path in others]
    told = start(folder, home, num_steps=300)
    assert (told.num_compiled, told.num_found, told.num_graphs) == (0, NUM_GRAPHS, NUM_GRAPHS)
    assert told.num_new == 0
    assert told.num_passes > 300
    assert f"compiled_kernel_damaged        error='it is cut off' path={cut}" in told.log
    assert [path.stat().st_mtime_ns for path in others] == times
    assert len(told.answered) > 256
    check_by_transformers(folder, told.answered)


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
