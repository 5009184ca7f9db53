"""kvway processes of a load test: started through the console script, waited for, ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvway_core.children import kvway_command

START_LIMIT_S: Final = 60.0
_POLL_S: Final = 0.02


class ProgramFailed(Exception):
    """A process ended by itself, or was not ready in time; the text shows its log."""


class Program:
    """One command line that is started, and started again after it was killed.

    Args:
        name: Of its log and ready file.
        args: Behind `kvway`.
        folder: Where log and ready file go.
        prefix: In front of `kvway`.

    Attributes:
        log: What all its lives printed.
        ready: What the last life wrote when it was ready.
    """

    def __init__(
        self, name: str, args: Sequence[str], *, folder: Path, prefix: Sequence[str] = ()
    ) -> None:
        """Takes the command; nothing runs yet, and what an earlier run logged there is gone."""
        self.name = name
        self.log = folder / f"{name}.log"
        self.log.unlink(missing_ok=True)
        self.ready: dict[str, Any] = {}
        self._ready_file = folder / f"{name}.json"
        self._command = [*prefix, kvway_command(), *args, "--ready-file", str(self._ready_file)]
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the life that was started last."""
        if self._popen is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._popen is not None and self._popen.poll() is None

    async def start(self) -> None:
        """Starts it and returns when it is ready.

        Raises:
            ProgramFailed: It ended, or it takes too long.
        """
        self._ready_file.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(  # noqa: S603, ASYNC220 - our command; it takes no time
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + START_LIMIT_S
        while not self._ready_file.exists():
            if not self.is_running or time.monotonic() > deadline:
                raise ProgramFailed(f"{self.name} is not ready:\n{self.tail()}")
            await asyncio.sleep(_POLL_S)
        self.ready = json.loads(self._ready_file.read_bytes())

    def send(self, number: signal.Signals) -> None:
        """Sends a signal; one that has ended is left alone."""
        if self._popen is not None:
            with contextlib.suppress(ProcessLookupError):
                self._popen.send_signal(number)

    async def ended(self) -> int:
        """Returns the exit code once it has ended."""
        if self._popen is None:
            raise RuntimeError(f"{self.name} was not started")
        return await asyncio.to_thread(self._popen.wait)

    def kill(self) -> None:
        """Ends it at once, also when it is stopped."""
        self.send(signal.SIGKILL)
        if self._popen is not None:
            self._popen.wait()

    def tail(self, num_lines: int = 20) -> str:
        """Returns the last lines that it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])
