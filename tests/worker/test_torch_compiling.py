"""Where compiled kernels are kept, and how the wait for them is told."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import torch
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from kvway_worker.torch_engine.attention import PLAIN, AttentionChoice, AttentionOptions
from kvway_worker.torch_engine.compiling import compiled_home, keep_compiled, told

CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    with config.patch(compile_threads=7):
        yield


@pytest.mark.parametrize(
    "before", [{}, {CACHE_DIR: default_cache_dir()}], ids=["unset", "torch's"]
)
def test_compiled_kernels_are_kept_beside_the_models_by_version_of_torch(
    tmp_path: Path, before: dict[str, str]
) -> None:
    env = {"KVWAY_HOME": str(tmp_path), **before}
    folder = keep_compiled(env)
    assert folder == tmp_path / "compiled" / f"torch-{torch.__version__}" == compiled_home(env)
    assert env[CACHE_DIR] == str(folder)
    assert list(folder.iterdir()) == []
    assert config.compile_threads == 1


def test_what_torch_was_told_is_left(tmp_path: Path) -> None:
    env = {
        "KVWAY_HOME": str(tmp_path),
        CACHE_DIR: "/elsewhere",
        "TORCHINDUCTOR_COMPILE_THREADS": "7",
    }
    assert keep_compiled(env) == Path("/elsewhere")
    assert env[CACHE_DIR] == "/elsewhere"
    assert config.compile_threads == 7
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "compiled").write_text("in the way")
    env = {"KVWAY_HOME": str(tmp_path)}
    with structlog.testing.capture_logs() as logs:
        assert keep_compiled(env) is None
    assert CACHE_DIR not in env
    assert [log["event"] for log in logs] == ["compiled_kernels_not_kept"]


def test_a_slow_part_of_loading_says_that_it_goes_on_and_how_long_it_took() -> None:
    said = threading.Event()

    def note(_logger: object, _name: str, event: structlog.typing.EventDict) -> str:
        events.append(event)
        if event["event"] == "compiling_goes_on":
            said.set()
        raise structlog.DropEvent

    events: list[structlog.typing.EventDict] = []
    before = structlog.get_config()
    structlog.configure(processors=[note])
    try:
        with told("compiling", every_s=0.001, what_for="attention"):
            assert said.wait(30)
    finally:
        structlog.configure(**before)
    assert events[0]["event"] == "compiling_started"
    assert events[0]["what_for"] == "attention"
    assert events[-1]["event"] == "compiling_done"
    assert events[-1]["elapsed_s"] >= events[1]["elapsed_s"] >= 0


def test_what_fails_is_not_told_to_be_done() -> None:
    with (
        structlog.testing.capture_logs() as logs,
        pytest.raises(ValueError, match="as scripted"),
        told("compiling"),
    ):
        raise ValueError("as scripted")
    assert [log["event"] for log in logs] == ["compiling_started"]


CHOOSE = """
import torch
from kvway_core.errors import ConfigError
from kvway_worker.torch_engine.attention import AttentionChoice, AttentionOptions

def choose(**options):
    asked = AttentionOptions(**options)
    return AttentionChoice.of(asked, device=torch.device("cpu"), deterministic=False)

print(choose())
try:
    choose(implementation="compiled")
except ConfigError as error:
    print(error)
"""


@pytest.mark.timeout(300)
def test_without_a_compiler_torchs_own_operations_attend_and_the_reason_is_told() -> None:
    """Asked for by name it is refused, and the message says what to install."""
    env = {**os.environ, "CXX": "/nowhere/g++"}
    said = subprocess.run(
        [sys.executable, "-c", CHOOSE], env=env, capture_output=True, text=True, check=True
    ).stdout
    auto, by_name = said.splitlines()
    assert "implementation='sdpa'" in auto
    assert "reason='no C++ compiler: install g++" in auto
    assert "--attention compiled" in by_name
    assert "install g++" in by_name


@pytest.mark.parametrize(
    ("options", "deterministic", "expected"),
    [
        (AttentionOptions(compiles=False), False, ("sdpa", "--no-compile", "on")),
        (AttentionOptions("sdpa"), False, ("sdpa", "asked for", "on")),
        (PLAIN, False, ("sdpa", "asked for", "off: --no-cascade")),
        (AttentionOptions(), True, ("sdpa", "--deterministic", "off: --deterministic")),
    ],
)
def test_what_was_asked_for_is_what_attends_and_why(
    options: AttentionOptions, *, deterministic: bool, expected: tuple[str, str, str]
) -> None:
    cpu = torch.device("cpu")
    choice = AttentionChoice.of(options, device=cpu, deterministic=deterministic)
    assert choice == AttentionChoice(*expected)
