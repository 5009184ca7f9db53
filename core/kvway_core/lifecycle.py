"""How a process starts, watches its tasks and stops.

    async def main(supervisor: Supervisor) -> None:
        _ = supervisor.spawn("probe", probe_replicas())
        port = await start_site(make_runner(app), host, port)
        write_ready_file(path, {"url": ...})
        await supervisor.wait_for_stop()
        ...drain...

    exit_code = run(main)

SIGTERM and SIGINT ask `main` to return; a second one ends the process at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import structlog
import uvloop

from kvway_core.errors import ConfigError

if TYPE_CHECKING:
    from aiohttp import web

_LOG = structlog.get_logger(__name__)


class Supervisor:
    """Owns the tasks of a process. A task that fails stops the process: nothing dies unseen.

    Use as an async context manager; on leaving it every task is cancelled and awaited.

    Invariants:
        1. Every task that was spawned has ended when the context is left.
        2. `failed` is True exactly if a task raised.
    """

    def __init__(self) -> None:
        self.failed = False
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(kind, exc, traceback)

    def spawn(self, name: str, coro: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Runs a coroutine as a task; it may return early or be cancelled, but not raise.

        Args:
            name: Of the task, in logs.
            coro: What to run.
        """
        task = self._group.create_task(self._watch(name, coro), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first step never starts its coroutine.
        task.add_done_callback(lambda _task: coro.close())
        return task

    def stop(self, reason: str) -> None:
        """Asks the process to stop; asking twice is asking once."""
        if not self._stop.is_set():
            _LOG.info("stop_requested", reason=reason)
            self._stop.set()

    @property
    def stopping(self) -> bool:
        """Whether the process was asked to stop."""
        return self._stop.is_set()

    async def wait_for_stop(self) -> None:
        """Returns when the process should stop: by a signal, a failed task, or `stop`."""
        await self._stop.wait()

    async def _watch(self, name: str, coro: Coroutine[object, object, None]) -> None:
        """Runs a task to its end: the other one of the two places that catch everything."""
        try:
            await coro
        except Exception:  # noqa: BLE001 (the supervisor of a task)
            self.failed = True
            _LOG.exception("task_failed", task=name)
            self.stop(f"task {name} failed")


def run(main: Callable[[Supervisor], Awaitable[None]]) -> int:
    """Runs a program on uvloop until its `main` returns, and returns its exit code.

    The code is 1 if a task failed and 0 otherwise.

    Raises:
        ConfigError: If `main` does: the command line prints it.
    """

    async def supervised() -> int:
        async with Supervisor() as supervisor:
            remove = _install_signal_handlers(supervisor)
            try:
                await main(supervisor)
            finally:
                remove()
        return 1 if supervisor.failed else 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_unwrapped(supervised()))


async def start_site(
    runner: web.AppRunner, host: str, port: int, *, share_port: bool = False
) -> int:
    """Starts to listen and returns the port, which the system chose if `port` is 0.

    Args:
        runner: From `web.make_runner`; the caller owns it and awaits its `cleanup`.
        host: Address or name to listen on.
        port: 0 to 65535.
        share_port: Whether other processes of this user may listen there too; the system spreads
            connections over them.

    Raises:
        ConfigError: If the address cannot be listened on, naming it and the fix.
    """
    from kvway_core.web import listen

    return await listen(runner, host, port, share_port=share_port)


def local_url(host: str, port: int) -> str:
    """Returns where clients on this machine reach a server that listens on `host` and `port`."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{local}]:{port}" if ":" in local else f"http://{local}:{port}"


def write_ready_file(path: Path, payload: Mapping[str, object]) -> None:
    """Writes JSON to a file that appears at once and whole: who sees it can read all of it.

    Raises:
        ConfigError: If it cannot be written there.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(json.dumps(payload) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as exc:
        raise ConfigError([f"--ready-file {path} cannot be written: {exc.strerror}"]) from exc


@contextmanager
def on_hangup(action: Callable[[], None]) -> Iterator[None]:
    """Has SIGHUP do something while the context is open.

    Where it is ignored, as under nohup, it stays so.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, action)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def _install_signal_handlers(supervisor: Supervisor) -> Callable[[], None]:
    """Makes SIGTERM and SIGINT stop the process, the second one at once; returns the undoing."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def handle(number: signal.Signals) -> None:
        if supervisor.stopping:
            os._exit(128 + number)
        supervisor.stop(number.name)

    for number in signals:
        loop.add_signal_handler(number, handle, number)

    def remove() -> None:
        for number in signals:
            loop.remove_signal_handler(number)

    return remove


async def _unwrapped(program: Awaitable[int]) -> int:
    """Awaits a program; an error that a task group put into a group of one comes out of it."""
    try:
        return await program
    except BaseExceptionGroup as group:
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from group
        raise
