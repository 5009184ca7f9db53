"""A router before replicas that cost nothing: the ground of all load tests."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from kvway_core.testing.byte_model import write_byte_model
from loadtests.programs import Program, ProgramFailed

_START_LIMIT_S: Final = 30.0
_POLL_S: Final = 0.02


class Replicas:
    """Processes of `load_replica`. Open them as an async context manager, which gives their URLs.

    Args:
        num: How many.
        slots: Requests that each runs at once.
        step_ms: From one token to the next; 0 for whole answers at once.
        folder: Where their logs go.
        event_bytes: Of each token of a stream; 0 for as few as usual.
    """

    def __init__(
        self, *, num: int, slots: int, step_ms: float, folder: Path, event_bytes: int = 0
    ) -> None:
        """Nothing runs yet."""
        self._num = num
        self._options = (
            *("--slots", str(slots), "--step-ms", str(step_ms)),
            *("--event-bytes", str(event_bytes)),
        )
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []

    async def __aenter__(self) -> list[str]:
        """Starts them."""
        try:
            return [await self._start(number) for number in range(self._num)]
        except BaseException:
            self._end()
            raise

    async def __aexit__(self, *_: object) -> None:
        """Ends them."""
        self._end()

    async def _start(self, number: int) -> str:
        ready = self._folder / f"replica-{number}.json"
        log = self._folder / f"replica-{number}.log"
        command = [sys.executable, "-m", "loadtests.load_replica", "--ready-file", str(ready)]
        with log.open("wb") as output:
            popen = subprocess.Popen(  # noqa: S603, ASYNC220 - our own module; it takes no time
                [*command, *self._options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=Path(__file__).parent.parent,
            )
        self._running.append(popen)
        deadline_s = time.monotonic() + _START_LIMIT_S
        while not ready.exists():
            if popen.poll() is not None or time.monotonic() > deadline_s:
                raise ProgramFailed(f"a replica is not ready:\n{log.read_text(errors='replace')}")
            await asyncio.sleep(_POLL_S)
        url = str(json.loads(ready.read_bytes())["url"])
        ready.unlink()
        return url

    def _end(self) -> None:
        for popen in self._running:
            popen.kill()
            popen.wait()


@dataclass(frozen=True, slots=True)
class Fleet:
    """A router and its replicas.

    Attributes:
        router: The process.
        replicas: URLs.
    """

    router: Program
    replicas: Sequence[str]

    @property
    def url(self) -> str:
        """Where clients ask."""
        return str(self.router.ready["api"])

    async def count(self) -> dict[str, int]:
        """Returns what all replicas have seen, together."""
        pages = [await asyncio.to_thread(_page, f"{url}/count") for url in self.replicas]
        return {key: sum(page[key] for page in pages) for key in pages[0]}

    def resident_mb(self) -> float:
        """Returns the memory of the router."""
        return float(psutil.Process(self.router.pid).memory_info().rss) / 2**20

    def cpu_s(self) -> float:
        """Returns the processor time of the router so far."""
        times = psutil.Process(self.router.pid).cpu_times()
        return float(times.user + times.system)


def _page(url: str) -> dict[str, int]:
    with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - loopback, our own
        counts: dict[str, int] = json.load(answer)
        return counts


@asynccontextmanager
async def fleet(
    folder: Path,
    *options: str,
    num_replicas: int = 2,
    slots: int = 1024,
    step_ms: float = 20.0,
    event_bytes: int = 0,
) -> AsyncIterator[Fleet]:
    """Starts replicas, and a router before them with a model whose tokens are bytes.

    Args:
        folder: Where logs go.
        options: More of them, of the router.
        num_replicas: How many.
        slots: As for `Replicas`.
        step_ms: As for `Replicas`.
        event_bytes: As for `Replicas`.
    """
    model = write_byte_model(folder / "model")
    async with Replicas(
        num=num_replicas, slots=slots, step_ms=step_ms, folder=folder, event_bytes=event_bytes
    ) as urls:
        args = [
            *("router", "--model", str(model), "--served-model-name", "m"),
            *("--port", "0", "--admin-port", "0", "--log-level", "warning"),
            *(word for url in urls for word in ("--replica", url)),
            *options,
        ]
        router = Program("router", args, folder=folder)
        await router.start()
        try:
            yield Fleet(router, urls)
        finally:
            router.kill()
