"""Kernels that torch compiles for this machine: where they are kept, and what is told.

That is how long one waits, and whose fault it is where compiling fails.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Final, Literal

import structlog
import torch

from kvway_core.errors import ConfigError
from kvway_core.models import kvway_home
from kvway_worker.torch_engine.processor import processor_flags, processor_name

_CACHE_DIR: Final = "TORCHINDUCTOR_CACHE_DIR"
"""Torch's own variable for the folder."""

_THREADS: Final = "TORCHINDUCTOR_COMPILE_THREADS"
"""Torch's own variable, too. More than one are processes of their own, which stay: they do not pay
for a few kernels."""

_TELL_EVERY_S: Final = 10.0

_ELF_HEADER: Final = struct.Struct("<4s 36x Q 10x HH 2x")
"""Of a 64-bit library: magic, where its table of sections is, size and number of entries of it."""

_log: Final = structlog.get_logger()


def compiled_home(env: Mapping[str, str]) -> Path:
    """Return kvway's folder for what is compiled here; it may not exist yet.

    Each version of torch and each kind of processor has its own: code is compiled for all that a
    processor can do, another of a shared home might not be able to run it.
    """
    name = processor_name()
    flags = " ".join(sorted(processor_flags()))
    kind = sha256(f"{name}\n{flags}".encode()).hexdigest()[:8]
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    return kvway_home(env) / "compiled" / f"torch-{torch.__version__}-{slug}-{kind}"


def keep_compiled(env: MutableMapping[str, str]) -> Path | None:
    """Let torch keep what it compiles, so that the next start finds it, and compile on one thread.

    Several processes may use the folder at the same time: torch locks what it writes. Libraries
    that are cut off, as by a process that was killed while it wrote them, are deleted: to load one
    may end the process.

    Args:
        env: the process's environment; what somebody told torch in it is left.

    Returns:
        The folder. None where none can be written: torch takes one for temporary files then.

    Mutates:
        env: names the folder.
    """
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if _THREADS not in env:
        config.compile_threads = 1
    folder = compiled_home(env)
    named = env.get(_CACHE_DIR)
    # Torch itself writes its default there, and an earlier engine of this process its folder.
    if named and named not in (default_cache_dir(), str(folder)):
        return Path(named)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _log.warning("compiled_kernels_not_kept", folder=str(folder), error=str(error))
        return None
    for library in _cut_off(folder):
        _log.warning("compiled_kernel_damaged", path=str(library), error="it is cut off")
        library.unlink(missing_ok=True)
    env[_CACHE_DIR] = str(folder)
    _log.info("compiled_kernels_kept", folder=str(folder))
    return folder


class CompilingFailed(ConfigError):
    """What attends could not be compiled, or not be loaded."""


def compiling(run: Callable[[], None], *, folder: Path | None) -> None:
    """Run what compiles at first use. Where what is kept is damaged, forget it and run once more.

    Other processes may do the same in kvway's own folder at the same time: what is damaged is
    deleted when none of them runs, and once.

    Args:
        run: may be run twice.
        folder: where it is kept; deleted only if it is kvway's own. None: nowhere.

    Raises:
        CompilingFailed: the compiler fails, or it fails twice; the message has its own line.
        Exception: what else `run` raises.
    """
    is_own = folder is not None and folder == compiled_home(os.environ)
    with _claimed(folder if is_own else None) as claim:
        try:
            run()
        except Exception as error:
            kind, line = _failure(error)
            if kind == "other":
                raise
            if kind == "compiler" or claim is None:
                raise _not_compiled(line, folder) from error
            _log.warning("compiled_kernels_damaged", folder=str(folder), error=line)
        else:
            return
        claim.forget()
        try:
            run()
        except Exception as error:
            kind, line = _failure(error)
            if kind == "other":
                raise
            raise _not_compiled(line, folder) from error


def _failure(error: BaseException) -> tuple[Literal["compiler", "torch", "other"], str]:
    """Return whose failure an error is, and the line that tells most."""
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.exc import CppCompileError

    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, CppCompileError):
            lines = [line.strip() for line in cause.output.splitlines() if line.strip()]
            telling = [line for line in lines if "error" in line.lower()] or lines
            return "compiler", telling[0] if telling else "the C++ compiler failed silently"
    if not any(isinstance(cause, BackendCompilerFailed) or _is_library(cause) for cause in causes):
        return "other", ""
    lines = str(causes[-1]).strip().splitlines()
    return "torch", f"{type(causes[-1]).__name__}: {lines[0] if lines else 'no message'}"


def _is_library(error: BaseException) -> bool:
    """Return whether a library that was compiled could not be loaded."""
    return isinstance(error, ImportError) and str(error.path).endswith(".so")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and what it was raised from, the root last."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        inner = getattr(cause, "inner_exception", None)
        cause = inner or cause.__cause__ or cause.__context__


def _not_compiled(line: str, folder: Path | None) -> CompilingFailed:
    kept = "" if folder is None else f", and delete {folder} if it may be damaged"
    problem = (
        f"attention cannot be compiled on this machine: {line}; mend the C++ compiler{kept}, "
        "or start with --no-compile"
    )
    return CompilingFailed([problem])


@dataclass(frozen=True, slots=True)
class _Claim:
    """A folder that this process compiles in, and so may others; none deletes it meanwhile.

    Attributes:
        folder: what is claimed.
        lock: an open file beside it: shared by those who compile, exclusive for who deletes.
        found: inode of the folder when it was claimed.
    """

    folder: Path
    lock: IO[bytes]
    found: int

    def forget(self) -> None:
        """Delete what is kept, unless somebody else did, and what this process remembers of it."""
        from torch._inductor.utils import clear_caches

        fcntl.flock(self.lock, fcntl.LOCK_UN)  # two that wait for each other would wait for ever
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        if self.folder.exists() and self.folder.stat().st_ino == self.found:
            # Another folder takes its place before it goes: no two have the same inode.
            old = self.folder.with_name(f"{self.folder.name}.damaged")
            shutil.rmtree(old, ignore_errors=True)  # of a process that was killed here
            self.folder.rename(old)
            self.folder.mkdir()
            shutil.rmtree(old)
        fcntl.flock(self.lock, fcntl.LOCK_SH)
        torch.compiler.reset()
        clear_caches()


@contextmanager
def _claimed(folder: Path | None) -> Iterator[_Claim | None]:
    """Keep others from deleting a folder until the block is left; None claims nothing."""
    if folder is None:
        yield None
        return
    with folder.with_name(f".{folder.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield _Claim(folder, lock, folder.stat().st_ino)


def _cut_off(folder: Path) -> Iterator[Path]:
    """Yield the libraries that end before their last byte. Nobody is writing them any more."""
    from torch.utils._filelock import FileLock

    for library in folder.rglob("*.so"):
        if _is_whole(library):
            continue
        locks = folder / "locks"
        locks.mkdir(exist_ok=True)
        with FileLock(locks / f"{library.name.partition('.')[0]}.lock"):
            if library.exists() and not _is_whole(library):
                yield library


def _is_whole(library: Path) -> bool:
    """Return whether a library has all of its bytes: its table of sections is at its end."""
    try:
        with library.open("rb") as file:
            header = file.read(_ELF_HEADER.size)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if len(header) < _ELF_HEADER.size:
        return False
    magic, table, entry_size, num_entries = _ELF_HEADER.unpack(header)
    return bool(magic != b"\x7fELF" or table + entry_size * num_entries <= size)


@contextmanager
def told(what: str, *, every_s: float = _TELL_EVERY_S, **details: object) -> Iterator[None]:
    """Log that a slow part of loading began, that it goes on, and how long it took.

    Args:
        what: the part; `<what>_started`, `<what>_goes_on` and `<what>_done` are logged.
        every_s: time between two signs of life, seconds.
        details: of the beginning.
    """
    _log.info(f"{what}_started", **details)
    started_s = time.monotonic()
    done = threading.Event()

    def passed_s() -> float:
        return round(time.monotonic() - started_s, 1)

    def watch() -> None:
        while not done.wait(every_s):
            _log.info(f"{what}_goes_on", elapsed_s=passed_s())

    watcher = threading.Thread(target=watch, name=what, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    _log.info(f"{what}_done", elapsed_s=passed_s())
