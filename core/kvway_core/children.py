"""Child processes that end with their parent, and signals that are read instead of handled.

For a program with one thread that starts others and watches over them. Signals are blocked and
read where the program waits, so that nothing runs in a signal handler and no step of a start
needs a path of its own for being interrupted. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from kvway_core.errors import ConfigError

_POLL_S: Final = 0.05
_LOG_TAIL_BYTES: Final = 8192
_PR_SET_PDEATHSIG: Final = 1
_STOP_SIGNALS: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


class StopRequested(Exception):
    """Someone asked this process to end; the text names the signal."""


class Signals:
    """Stop requests and ended children, read where the program waits.

    Inside the ``with`` block the signals are blocked for this thread; children get the mask that
    was there before, see `child_mask`. What is still pending at the end is dropped. A SIGHUP that
    is ignored stays ignored, so ``nohup`` works.
    """

    __slots__ = ("_watched", "child_mask")

    def __init__(self) -> None:
        self._watched = {*_STOP_SIGNALS, signal.SIGCHLD}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            self._watched.discard(signal.SIGHUP)

    def __enter__(self) -> Self:
        self.child_mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._watched)
        return self

    def __exit__(self, *_: object) -> None:
        while signal.sigtimedwait(self._watched, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, self.child_mask)

    def stop_requested(self, *, within_s: float) -> signal.Signals | None:
        """Wait for a signal, at most so long; return it when it was a stop request."""
        info = signal.sigtimedwait(self._watched, within_s)
        if info is None or info.si_signo not in _STOP_SIGNALS:
            return None
        return signal.Signals(info.si_signo)

    def pause(self, limit_s: float = _POLL_S) -> None:
        """Wait until a child ends or the limit is over.

        Raises:
            StopRequested: someone asked this process to end.
        """
        if number := self.stop_requested(within_s=limit_s):
            raise StopRequested(number.name)


class Child:
    """One process of ours.

    It leads a process group of its own, so a terminal's Ctrl-C reaches the parent alone, which
    then ends its children in order. When the parent dies, Linux kills the child; processes that
    the child started are not covered by that.

    Attributes:
        name: what people call it.
        log: file with what it prints.
    """

    __slots__ = ("_popen", "log", "name")

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        signals: Signals,
        env: Mapping[str, str],
        show_stderr: bool = False,
    ) -> None:
        """Start `command`; its stderr goes to the log, or with `show_stderr` where ours goes.

        Raises:
            OSError: it could not be started.
        """
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self._popen = subprocess.Popen(  # noqa: S603  # no shell, and the command is the caller's
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if show_stderr else subprocess.STDOUT,
                env=env,
                process_group=0,
                preexec_fn=ending_with_parent(signals.child_mask),  # noqa: PLW1509  # one thread
            )

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._popen.poll()

    def send(self, number: signal.Signals) -> None:
        """Signal the process and those it started; one that has ended is left alone."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, number)

    def wait(self) -> None:
        """Wait until it has ended."""
        self._popen.wait()

    def how_it_ended(self) -> str:
        """Say how it ended, for people."""
        code = self.exit_code
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def last_lines(self, limit: int) -> list[str]:
        """Return the last lines that it printed, at most `limit`, without empty ones."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _LOG_TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-limit:]


def kvway_command() -> str:
    """Return the path of the `kvway` command that belongs to this interpreter.

    Raises:
        ConfigError: there is none, and none on the PATH either.
    """
    script = Path(sysconfig.get_path("scripts")) / "kvway"
    found = str(script) if script.is_file() else shutil.which("kvway")
    if found is None:
        raise ConfigError([f"the `kvway` command is neither at {script} nor on the PATH"])
    return found


def stop_all(children: Iterable[Child], *, signals: Signals, grace_s: float) -> None:
    """End every child: SIGTERM, and SIGKILL for those still there after `grace_s`.

    Another stop request meanwhile means "now": the rest is killed at once.
    """
    running = [child for child in children if child.exit_code is None]
    for child in running:
        child.send(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(child.exit_code is None for child in running):
        if signals.stop_requested(within_s=_POLL_S):
            break
    for child in running:
        child.send(signal.SIGKILL)
    for child in running:
        child.wait()


def ending_with_parent(mask: Iterable[int] = ()) -> Callable[[], None]:
    """Return what a child runs before its program: end with the parent, block only `mask`.

    To be called, and the child to be started, by the thread that lives as long as the parent.
    """
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def in_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return in_child
