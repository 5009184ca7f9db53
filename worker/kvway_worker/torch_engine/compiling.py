"""Kernels that torch compiles for this machine: where they are kept, and how the wait is told."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import structlog
import torch

from kvway_core.models import kvway_home

_CACHE_DIR: Final = "TORCHINDUCTOR_CACHE_DIR"
"""Torch's own variable for the folder."""

_THREADS: Final = "TORCHINDUCTOR_COMPILE_THREADS"
"""Torch's own variable, too. More than one are processes of their own, which stay: they do not pay
for a few kernels."""

_TELL_EVERY_S: Final = 10.0

_log: Final = structlog.get_logger()


def compiled_home(env: Mapping[str, str]) -> Path:
    """Return kvway's folder for what this version of torch compiles; it may not exist yet."""
    return kvway_home(env) / "compiled" / f"torch-{torch.__version__}"


def keep_compiled(env: MutableMapping[str, str]) -> Path | None:
    """Let torch keep what it compiles, so that the next start finds it, and compile on one thread.

    Several processes may use the folder at the same time: torch locks what it writes.

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
    named = env.get(_CACHE_DIR)
    if named and named != default_cache_dir():  # torch itself writes its default there
        return Path(named)
    folder = compiled_home(env)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _log.warning("compiled_kernels_not_kept", folder=str(folder), error=str(error))
        return None
    env[_CACHE_DIR] = str(folder)
    _log.info("compiled_kernels_kept", folder=str(folder))
    return folder


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
