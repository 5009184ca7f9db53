"""Where compiled kernels are kept, and how the wait for them is told."""

from __future__ import annotations

import _bisect
import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import torch
from torch._inductor import config
from torch._inductor.exc import CppCompileError, InductorError
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from kvway_core.errors import ConfigError
from kvway_kernels import choice
from kvway_worker.torch_engine import processor
from kvway_worker.torch_engine.attention import PLAIN, AttentionChoice, AttentionOptions
from kvway_worker.torch_engine.compiling import (
    CompilingFailed,
    compiled_home,
    compiling,
    keep_compiled,
    told,
)

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
    assert folder == compiled_home(env)
    assert folder is not None
    assert folder.parent == tmp_path / "compiled"
    assert folder.name.startswith(f"torch-{torch.__version__}-")
    assert env[CACHE_DIR] == str(folder)
    assert list(folder.iterdir()) == []
    assert config.compile_threads == 1
    assert keep_compiled(env) == folder  # an engine that follows in this process


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


CPUINFO = (
    "processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu avx2\n\nmodel name\t: B\nflags : x\n"
)


def test_processors_that_differ_in_model_or_flags_keep_apart_what_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home may be shared, and code is compiled for all that a processor can do."""
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(processor, "_CPUINFO", cpuinfo)
    env = {"KVWAY_HOME": str(tmp_path)}

    def of(text: str) -> Path:
        cpuinfo.write_text(text)
        return compiled_home(env)

    homes = [
        of(CPUINFO.replace(*change)) for change in (("", ""), ("A C", "C C"), ("avx2", "sse"))
    ]
    assert homes[0].name.startswith(f"torch-{torch.__version__}-a-cpu-")
    assert len(set(homes)) == 3
    assert of(CPUINFO.replace("fpu avx2", "avx2 fpu")) == homes[0]
    assert of("Features : asimd fp\n").name.startswith(
        f"torch-{torch.__version__}-{os.uname().machine.replace('_', '-')}-"
    )
    assert processor.processor_flags() == {"asimd", "fp"}
    cpuinfo.unlink()
    assert compiled_home(env) not in homes
    assert processor.processor_flags() == frozenset()


def test_libraries_that_are_cut_off_are_deleted_and_said(tmp_path: Path) -> None:
    """To load one may end the process by a signal."""
    env = {"KVWAY_HOME": str(tmp_path)}
    whole = Path(_bisect.__file__).read_bytes()
    folder = compiled_home(env) / "ab"
    folder.mkdir(parents=True)
    sizes = (0, 3, 63, 64, len(whole) // 2, len(whole) - 1)
    for size in sizes:
        (folder / f"cut{size}.main.so").write_bytes(whole[:size])
    for name in ("whole.main.so", "notes.txt"):
        (folder / name).write_bytes(whole)
    (folder / "foreign.so").write_bytes(b"\xfe\xed\xfa\xcf" + bytes(80))
    with structlog.testing.capture_logs() as logs:
        keep_compiled(env)
    assert {path.name for path in folder.iterdir()} == {"whole.main.so", "notes.txt", "foreign.so"}
    found = {Path(log["path"]).name for log in logs if log["event"] == "compiled_kernel_damaged"}
    assert found == {f"cut{size}.main.so" for size in sizes}


class Run:
    """Fails as scripted, time after time, then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.num_times = 0

    def __call__(self) -> None:
        self.num_times += 1
        if self.errors:
            raise self.errors.pop(0)


def in_graph(error: Exception) -> Exception:
    """As the compiler of graphs raises what failed in it."""
    return InductorError(error, None)


BROKEN_COMPILER = CppCompileError(
    ["g++"], "In file included from x.cpp:\ncc1plus: fatal error: omp.h: No such file\nstopped.\n"
)
CUT_OFF = ImportError("/somewhere/main.so: file too short", path="/somewhere/main.so")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of what was compiled before."""
    monkeypatch.setenv("KVWAY_HOME", str(tmp_path))
    path = compiled_home(os.environ) / "ab" / "graph.py"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


@pytest.mark.parametrize("error", [BROKEN_COMPILER, in_graph(BROKEN_COMPILER)])
def test_where_the_compiler_fails_its_own_line_is_said_and_what_to_do(
    kept: Path, error: Exception
) -> None:
    run = Run(error)
    with pytest.raises(CompilingFailed) as raised:
        compiling(run, folder=compiled_home(os.environ))
    message = str(raised.value)
    assert "cc1plus: fatal error: omp.h: No such file;" in message
    assert "--no-compile" in message
    assert str(compiled_home(os.environ)) in message
    assert run.num_times == 1
    assert kept.exists()


@pytest.mark.parametrize("error", [CUT_OFF, in_graph(CUT_OFF), in_graph(SyntaxError("half"))])
def test_what_is_damaged_is_forgotten_said_and_compiled_once_more(
    kept: Path, error: Exception
) -> None:
    run = Run(error)
    with structlog.testing.capture_logs() as logs:
        compiling(run, folder=compiled_home(os.environ))
    assert run.num_times == 2
    assert not kept.exists()
    assert compiled_home(os.environ).is_dir()
    assert [log["event"] for log in logs] == ["compiled_kernels_damaged"]
    assert logs[0]["error"] in (
        "ImportError: /somewhere/main.so: file too short",
        "SyntaxError: half",
    )


def lock_of(kind: int) -> bool:
    """Say whether another process could have this lock on the folder now."""
    folder = compiled_home(os.environ)
    with (folder.parent / f".{folder.name}.lock").open("rb") as lock:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_nobody_deletes_what_others_compile_in(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one compiles others may, and nobody deletes; while one deletes nobody compiles."""
    seen: list[tuple[str, bool, bool]] = []
    delete = shutil.rmtree

    def note(what: str) -> None:
        seen.append((what, lock_of(fcntl.LOCK_SH), lock_of(fcntl.LOCK_EX)))

    def noted(path: Path, ignore_errors: bool = False) -> None:  # noqa: FBT001, FBT002 - as it has
        if path.exists():
            note("deletes")
        delete(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", noted)
    errors = [CUT_OFF]

    def run() -> None:
        note("compiles")
        if errors:
            raise errors.pop()

    compiling(run, folder=compiled_home(os.environ))
    assert seen == [
        ("compiles", True, False),
        ("deletes", False, False),
        ("compiles", True, False),
    ]
    assert lock_of(fcntl.LOCK_EX)
    assert not kept.exists()


def test_what_another_process_has_made_anew_is_not_deleted(kept: Path) -> None:
    """Both found the same damage; the other was faster."""
    folder = compiled_home(os.environ)
    fresh = folder / "fresh.py"
    errors = [CUT_OFF]

    def run() -> None:
        if errors:
            folder.rename(folder.with_name("old"))
            folder.mkdir()
            fresh.touch()
            raise errors.pop()

    compiling(run, folder=folder)
    assert fresh.exists()


def test_what_fails_again_is_an_error_of_its_own(kept: Path) -> None:
    run = Run(CUT_OFF, CUT_OFF, CUT_OFF)
    with pytest.raises(CompilingFailed, match="file too short"):
        compiling(run, folder=compiled_home(os.environ))
    assert run.num_times == 2
    assert not kept.exists()


@pytest.mark.parametrize("is_named", [True, False])
def test_a_folder_that_is_not_kvways_is_never_deleted(
    kept: Path, tmp_path: Path, *, is_named: bool
) -> None:
    run = Run(CUT_OFF)
    with pytest.raises(CompilingFailed) as raised:
        compiling(run, folder=tmp_path if is_named else None)
    assert run.num_times == 1
    assert (f"delete {tmp_path} " in str(raised.value)) == is_named
    assert kept.exists()


@pytest.mark.parametrize("error", [ValueError("of the model"), ImportError("no package timm")])
def test_what_is_not_of_compiling_goes_through(kept: Path, error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        compiling(Run(error), folder=compiled_home(os.environ))
    with pytest.raises(type(error), match=str(error)):
        compiling(Run(CUT_OFF, error), folder=compiled_home(os.environ))


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


def test_what_lacks_a_compiler_is_refused_by_name_and_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message says what to install."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(choice, "_missing", lambda *_: "no C++ compiler: install g++")
    found = AttentionChoice.of(AttentionOptions(), device=cpu, deterministic=False)
    assert found == AttentionChoice("sdpa", "no C++ compiler: install g++", "on")
    with pytest.raises(ConfigError, match=r"--attention compiled: .* install g\+\+"):
        AttentionChoice.of(AttentionOptions("compiled"), device=cpu, deterministic=False)


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
    found = AttentionChoice.of(options, device=cpu, deterministic=deterministic)
    assert found == AttentionChoice(*expected)


@pytest.mark.parametrize("name", ["compiled", "triton", "reference"])
def test_what_is_asked_for_by_name_is_not_replaced_by_what_is_deterministic(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--attention {name} and --deterministic exclude"):
        AttentionChoice.of(AttentionOptions(name), device=torch.device("cpu"), deterministic=True)
