"""`--processes N`: N routers on one port, and a parent that starts, watches and ends them.

    kvway router --processes 2             the parent: the admin listener (process_admin.py)
      |- kvway router --share-port ...     a router: the API port, a private admin port
      `- kvway router --share-port ...     another one

The system spreads connections over those that listen. They do not talk to each other: KV events
tell each what the replicas hold, their load reports what others have sent them, and a prompt that
nobody holds is placed by a hash that is the same in all.

One that ends is started again, later each time it ends soon, and is told once more what was
changed by call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import tempfile
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from kvway_core.children import ending_with_parent, kvway_command
from kvway_core.cli import EXIT_CONFIG
from kvway_core.errors import ConfigError
from kvway_core.lifecycle import (
    Supervisor,
    local_url,
    on_hangup,
    start_site,
    write_ready_file,
)
from kvway_core.web import HttpLimits, make_runner, new_app
from kvway_router.admin_views import MAX_BODY_BYTES
from kvway_router.process_admin import ProcessAdmin
from kvway_router.settings import RouterSettings

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 30.0
STEADY_S: Final = 60.0
"""One that ran for so long starts again after the first pause."""
GRACE_S: Final = 5.0
"""What a router may take to end beyond the time that it gives its requests."""
_POLL_S: Final = 0.05

_log = structlog.get_logger(__name__)


def pause_s(num_quick: int) -> float:
    """Returns how long to wait before a start, after so many that ended soon."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(num_quick, 16))


class RouterProcess:
    """One router of the parent's: started again whenever it ends, until it is to stop.

    Attributes:
        number: From 0 on.
        url: Its admin listener while it serves; None otherwise.
        num_restarts: Times that it was started again.
        cannot_start: Whether its configuration is at fault, as it has printed.
        serves: Set once it has served, or cannot start.

    Args:
        number: From 0 on.
        command: What to run.
        ready_file: That the command writes.
        admin: Tells it what was changed by call before it was started.
    """

    def __init__(
        self, number: int, command: Sequence[str], *, ready_file: Path, admin: ProcessAdmin
    ) -> None:
        """Starts nothing."""
        self.number = number
        self.url: str | None = None
        self.num_restarts = 0
        self._stop = asyncio.Event()
        self.cannot_start = False
        self.serves = asyncio.Event()
        self._command = command
        self._ready_file = ready_file
        self._admin = admin
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the process that runs; None while there is none."""
        return self._process.pid if self._process is not None else None

    async def run(self) -> None:
        """Keeps one running, until `stop`, or until the first one cannot start."""
        num_quick = 0
        while True:
            begun_s = time.monotonic()
            code = await self._run_once()
            if self._stop.is_set():
                return
            if code == EXIT_CONFIG and not self.serves.is_set():
                self.cannot_start = True
                self.serves.set()
                return
            num_quick = 0 if time.monotonic() - begun_s > STEADY_S else num_quick + 1
            wait_s = pause_s(num_quick)
            _log.error("process_ended", process=self.number, code=code, again_in_s=wait_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._stop.wait()
                return
            self.num_restarts += 1

    async def _run_once(self) -> int:
        self._ready_file.unlink(missing_ok=True)
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C reaches the parent alone
            preexec_fn=ending_with_parent(),
        )
        if self._stop.is_set():
            process.terminate()
        try:
            ended = asyncio.ensure_future(process.wait())
            while not ended.done() and not self._ready_file.exists():
                await asyncio.wait([ended], timeout=_POLL_S)
            if not ended.done():
                url = str(json.loads(self._ready_file.read_text())["admin"])
                await self._admin.catch_up(url)
                self.url = url
                self.serves.set()
                _log.info("process_started", process=self.number, pid=process.pid)
            return await ended
        finally:
            self.url = self._process = None
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def send(self, number: signal.Signals) -> None:
        """Signals it, if it runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def stop(self) -> None:
        """Has it end, and not start again."""
        self._stop.set()
        self.send(signal.SIGTERM)


async def serve_processes(
    argv: Sequence[str], settings: RouterSettings, *, supervisor: Supervisor
) -> None:
    """Runs the routers until the process is asked to stop, then lets all of them drain.

    SIGHUP is passed on to them: each reads its configuration again.

    Args:
        argv: What the parent was started with: each router is, too.
        settings: Read from that.
        supervisor: Of the process.

    Raises:
        ConfigError: A port is taken, or the routers cannot start.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvway-router-")))
        port = stack.enter_context(_reserved(settings.host, settings.port))
        admin = await stack.enter_async_context(ProcessAdmin())
        routers = [
            RouterProcess(
                number,
                _command(argv, settings, port=port, number=number, folder=folder),
                ready_file=folder / f"{number}.json",
                admin=admin,
            )
            for number in range(settings.processes)
        ]
        admin.processes = routers
        app = new_app()
        app.add_routes(admin.routes())
        runner = make_runner(app, HttpLimits(max_body_bytes=MAX_BODY_BYTES))
        stack.push_async_callback(runner.cleanup)
        admin_port = await start_site(runner, settings.admin_host, settings.admin_port)
        stack.enter_context(on_hangup(partial(_reload_all, routers)))
        async with asyncio.TaskGroup() as running:
            for router in routers:
                _ = running.create_task(router.run(), name=f"router-{router.number}")
            await _first_of(supervisor.wait_for_stop(), _all_serve(routers))
            cannot_start = any(router.cannot_start for router in routers)
            if not supervisor.stopping and not cannot_start:
                addresses = {
                    "api": local_url(settings.host, port),
                    "admin": local_url(settings.admin_host, admin_port),
                }
                if settings.ready_file is not None:
                    write_ready_file(settings.ready_file, addresses)
                _log.info("processes_started", number=len(routers), **addresses)
                await supervisor.wait_for_stop()
            for router in routers:
                router.stop()
            limit_s = settings.lame_duck_s + settings.drain_timeout_s + GRACE_S
            killing = asyncio.get_running_loop().call_later(
                limit_s, _send_all, routers, signal.SIGKILL
            )
        killing.cancel()
        if cannot_start:
            raise ConfigError(["a router process could not start; it said why"])


def _send_all(routers: Iterable[RouterProcess], number: signal.Signals) -> None:
    for router in routers:
        router.send(number)


def _reload_all(routers: Iterable[RouterProcess]) -> None:
    """Has those that serve reload; one that is starting reads the new configuration anyway."""
    _send_all([router for router in routers if router.url is not None], signal.SIGHUP)


async def _all_serve(routers: Iterable[RouterProcess]) -> None:
    for router in routers:
        await router.serves.wait()


async def _first_of(*waits: Coroutine[object, object, None]) -> None:
    """Returns once one of them has."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _command(
    argv: Sequence[str], settings: RouterSettings, *, port: int, number: int, folder: Path
) -> list[str]:
    """Returns how one router is started: of an option given twice the last one counts."""
    own = {
        "--port": port,
        "--admin-host": "127.0.0.1",
        "--admin-port": 0,
        "--ready-file": folder / f"{number}.json",
    }
    if settings.index_snapshot is not None:
        path = settings.index_snapshot
        own["--index-snapshot"] = path.with_name(f"{path.name}.{number}")
    options = [str(word) for option in own.items() for word in option]
    return [kvway_command(), "router", *argv, "--share-port", *options]


@contextmanager
def _reserved(host: str, port: int) -> Iterator[int]:
    """Holds a port, without listening there, that the routers share; returns its number.

    Raises:
        ConfigError: It cannot be had.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        held = socket.socket(family, kind, proto)
    except (OSError, UnicodeError) as exc:
        raise ConfigError([f"cannot listen on {host}:{port}: {exc}; check the host"]) from exc
    with held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            held.bind(address)
        except OSError as exc:
            raise ConfigError([f"cannot listen on {host}:{port}: {exc.strerror}"]) from exc
        yield held.getsockname()[1]
