"""Real kvway processes for the end-to-end tests: console scripts, port 0, ready files, sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

KVWAY = str(Path(sys.executable).parent / "kvway")
START_LIMIT_S = 300.0
POLL_S = 0.02
T = TypeVar("T")


async def until(probe: Callable[[], Awaitable[T | None]], *, limit_s: float, failure: str) -> T:
    """Await `probe` until it returns something true, or fail with `failure` at the limit."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if value := await probe():
            return value
        await asyncio.sleep(POLL_S)
    raise AssertionError(failure)


@dataclass(slots=True)
class Process:
    """One kvway process, where its output goes, and what its ready file said."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    ready: dict[str, Any] = field(default_factory=dict)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a process that has already gone is fine."""
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(number)

    async def wait(self, *, limit_s: float) -> int:
        """Return the exit code, or fail with the log when the process outlives the limit."""

        async def ended() -> tuple[int] | None:
            code = self.popen.poll()
            return None if code is None else (code,)

        (code,) = await until(ended, limit_s=limit_s, failure=f"{self.name} goes on: {self.tail}")
        return code

    @property
    def tail(self) -> str:
        """Last lines of the process's output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


class Cluster:
    """Starts kvway processes in one folder and leaves none behind."""

    def __init__(self, folder: Path, model: Path, http: aiohttp.ClientSession) -> None:
        self.folder = folder
        self.model = model
        self.http = http
        self.processes: list[Process] = []

    async def start(self, name: str, *args: str, prefix: tuple[str, ...] = ()) -> Process:
        """Start `kvway ARGS`, behind `prefix`, and return once its ready file is there."""
        ready_file = self.folder / f"{name}.json"
        ready_file.unlink(missing_ok=True)
        process = self.spawn(name, *args, "--ready-file", str(ready_file), prefix=prefix)

        async def ready() -> dict[str, Any] | None:
            assert process.popen.poll() is None, f"{name} died: {process.tail}"
            if not ready_file.exists():
                return None
            payload: dict[str, Any] = json.loads(ready_file.read_text())
            return payload

        process.ready = await until(
            ready, limit_s=START_LIMIT_S, failure=f"{name} is not ready: {process.tail}"
        )
        return process

    def spawn(self, name: str, *args: str, prefix: tuple[str, ...] = ()) -> Process:
        """Start `kvway ARGS` without waiting for anything."""
        log = self.folder / f"{name}.log"
        with log.open("ab") as out:
            popen = subprocess.Popen(
                [*prefix, KVWAY, *args],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        process = Process(name, popen, log)
        self.processes.append(process)
        return process

    async def worker(
        self, name: str, *args: str, port: int = 0, prefix: tuple[str, ...] = ()
    ) -> Process:
        """Start a sim worker on a free port (or on the port that it had before)."""
        return await self.start(
            name,
            *("worker", "--engine", "sim", "--model", str(self.model), "--port", str(port)),
            *("--served-model-name", "tiny", *args),
            prefix=prefix,
        )

    async def router(
        self,
        *workers: Process,
        args: tuple[str, ...] = (),
        urls: tuple[str, ...] = (),
        prefix: tuple[str, ...] = (),
    ) -> Process:
        """Start a router in front of these workers and URLs and wait until it sees all of them."""
        urls = (*(worker.ready["url"] for worker in workers), *urls)
        replicas = [flag for url in urls for flag in ("--replica", url)]
        router = await self.start(
            "router",
            *("router", "--model", str(self.model), "--served-model-name", "tiny"),
            # On a starved machine a look takes long; a test that freezes replicas gives its own.
            *("--port", "0", "--admin-port", "0", "--probe-timeout-s", "5", *replicas, *args),
            prefix=prefix,
        )
        await self.replicas_ready(router, len(urls))
        return router

    async def replicas_ready(self, router: Process, count: int) -> None:
        """Wait until exactly `count` of the router's replicas are ready."""

        async def seen() -> bool:
            replicas = await self.get(router.ready["admin"] + "/admin/replicas")
            num_ready = len([r for r in replicas["replicas"] if r["state"] == "ready"])
            return num_ready == count

        await until(seen, limit_s=20, failure=f"never saw {count} replicas: {router.tail}")

    async def get(self, url: str) -> dict[str, Any]:
        """GET a JSON object."""
        async with self.http.get(url) as response:
            assert response.status == 200, await response.text()
            body: dict[str, Any] = await response.json()
            return body

    async def close(self) -> None:
        """Kill what a test left running, newest first."""
        for process in reversed(self.processes):
            if process.popen.poll() is None:
                process.signal(signal.SIGKILL)
        for process in self.processes:
            await asyncio.to_thread(process.popen.wait)
