"""Sim workers behind fault proxies, a router before them, and what can be done to them.

    clients -> router -> FaultProxy 127.0.0.1:P -> worker 127.0.0.2:P
                  ^----- FaultProxy 127.0.0.1:E <- its KV events, and their replay

A proxy has the port of what is behind it, so that what a worker says of its KV events is true for
the router too. Where the system allows network namespaces, one worker lives in one of its own.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, Self

import aiohttp

from kvway_core.testing.byte_model import write_byte_model
from kvway_core.testing.fault_proxy import FaultProxy
from kvway_core.testing.faults import Fault
from loadtests.namespaces import Namespace, why_not
from loadtests.programs import Program

MODEL: Final = "tiny"
NUM_WORKERS: Final = 4
NAMES: Final = "abcdefgh"
_WORKER_ARGS: Final = (
    *("--engine", "sim", "--served-model-name", MODEL, "--num-blocks", "2048"),
    *("--sim-prefill-tokens-per-s", "20000", "--sim-decode-step-s", "0.01"),
    *("--max-num-seqs", "16", "--drain-timeout-s", "10"),
)
_ROUTER_ARGS: Final = (
    *("--served-model-name", MODEL, "--port", "0", "--admin-port", "0"),
    *("--probe-interval-s", "0.5", "--max-decisions", "10"),
    *("--first-token-timeout-s", "10", "--token-timeout-s", "5"),
)


class WorkerHost:
    """One worker, and the proxies through which the router sees it."""

    def __init__(
        self, name: str, *, folder: Path, args: Sequence[str], namespace: Namespace | None
    ) -> None:
        """Takes where it is to live, and options it has beside its own; nothing is opened yet."""
        self.name = name
        self.namespace = namespace
        self.host = namespace.address if namespace else "127.0.0.2"
        self.api, self.events, self.replay = (FaultProxy(self.host, 0) for _ in range(3))
        self._folder = folder
        self._args = args
        self._program: Program | None = None

    @property
    def program(self) -> Program:
        """The worker process."""
        if self._program is None:
            raise RuntimeError(f"worker {self.name} was not opened")
        return self._program

    async def open(self, model: Path) -> None:
        """Opens the proxies and starts the worker."""
        for proxy in (self.api, self.events, self.replay):
            await proxy.accept()
            proxy.target = (self.host, proxy.port)
        self._program = Program(
            f"worker-{self.name}",
            [
                *("worker", "--model", str(model), *_WORKER_ARGS, *self._args),
                *("--host", self.host, "--port", str(self.api.port)),
                *("--kv-events-host", self.host, "--kv-events-port", str(self.events.port)),
                *("--kv-events-replay-port", str(self.replay.port)),
            ],
            folder=self._folder,
            prefix=self.namespace.command if self.namespace else (),
        )
        await self._program.start()

    async def close(self) -> None:
        """Ends all of it."""
        if self._program is not None:
            self._program.kill()
        for proxy in (self.api, self.events, self.replay):
            await proxy.__aexit__()

    # -- what can be done to it -----------------------------------------------------------------

    async def kill(self) -> None:
        """Kill -9, and a start with an empty cache on the same port."""
        self.program.kill()
        await self._begin_again()

    async def drain(self) -> None:
        """SIGTERM: it refuses what is new and ends what runs; then a start as after a kill."""
        self.program.send(signal.SIGTERM)
        await self.program.ended()
        await self._begin_again()

    async def stop(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long: the kernel goes on to accept connections."""
        self.program.send(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self.program.send(signal.SIGCONT)

    async def drop(self, seconds: float) -> None:
        """Its network loses everything for so long: without a namespace, its proxies do."""
        if self.namespace is not None:
            self.namespace.cut()
            await asyncio.sleep(seconds)
            self.namespace.mend()
            return
        for proxy in (self.api, self.events, self.replay):
            proxy.freeze()
        await asyncio.sleep(seconds)
        for proxy in (self.api, self.events, self.replay):
            proxy.thaw()

    async def lose_feed(self, seconds: float) -> None:
        """Its KV events stop for so long, and then the connection is gone with what was sent."""
        self.events.freeze()
        await asyncio.sleep(seconds)
        self.events.cut()
        self.replay.cut()
        self.events.thaw()

    async def break_connections(self, fault: Fault, seconds: float) -> None:
        """Gives all connections a fault: those that are open, and those of the next seconds."""
        self.api.afflict(fault)
        self.api.fault = fault
        await asyncio.sleep(seconds)
        self.api.fault = Fault()
        self.api.afflict(Fault())

    async def _begin_again(self) -> None:
        for proxy in (self.api, self.events, self.replay):
            await proxy.refuse()
            proxy.cut()
        await self.program.start()
        for proxy in (self.api, self.events, self.replay):
            await proxy.accept()


class Fleet:
    """The router and its workers, all up while it is open as a context manager.

    Attributes:
        workers: In the order of their names.
        router: The router process.
        no_namespace: Why no worker lives in a network namespace; empty when one does.
    """

    def __init__(
        self, folder: Path, *, router_args: Sequence[str] = (), worker_args: Sequence[str] = ()
    ) -> None:
        """Takes the folder of logs, and options beside those here; nothing is started yet."""
        self._folder = folder
        self._worker_args = worker_args
        self._router_args = router_args
        self._open = AsyncExitStack()
        self.no_namespace = ""
        self.workers: list[WorkerHost] = []
        self.router: Program

    async def __aenter__(self) -> Self:
        """Starts everything and waits until the router sees all workers."""
        async with AsyncExitStack() as opening:
            model = write_byte_model(self._folder / MODEL)
            self.no_namespace = why_not()
            namespace = None
            if not self.no_namespace:
                namespace = opening.enter_context(Namespace())
            for name in NAMES[:NUM_WORKERS]:
                worker = WorkerHost(
                    name, folder=self._folder, args=self._worker_args, namespace=namespace
                )
                namespace = None
                opening.push_async_callback(worker.close)
                self.workers.append(worker)
            await asyncio.gather(*(worker.open(model) for worker in self.workers))
            replicas = [arg for w in self.workers for arg in ("--replica", w.api.url)]
            self.router = Program(
                "router",
                ["router", "--model", str(model), *_ROUTER_ARGS, *self._router_args, *replicas],
                folder=self._folder,
            )
            opening.callback(self.router.kill)
            await self.router.start()
            self._http = await opening.enter_async_context(
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5))
            )
            await self.whole(limit_s=20)
            self._open = opening.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends everything."""
        await self._open.aclose()

    @property
    def url(self) -> str:
        """Where the router takes requests."""
        return str(self.router.ready["api"])

    async def whole(self, *, limit_s: float) -> None:
        """Waits until the router sees every worker ready.

        Raises:
            TimeoutError: It does not, for so long.
        """
        for worker in self.workers:
            await self.back(worker, limit_s=limit_s)

    async def back(self, worker: WorkerHost, *, limit_s: float) -> None:
        """Waits until the router sees a worker ready.

        Raises:
            TimeoutError: It does not, for so long.
        """
        async with asyncio.timeout(limit_s):
            while True:
                view = await self._get(self.router.ready["admin"] + "/admin/replicas")
                states = {replica["replica_id"]: replica["state"] for replica in view["replicas"]}
                if states[worker.api.address] == "ready":
                    return
                await asyncio.sleep(0.2)

    async def num_in_flight(self) -> int:
        """Returns the requests that the router or any worker still counts as running."""
        count = 0.0
        async with self._http.get(f"{self.url}/metrics") as response:
            for line in (await response.text()).splitlines():
                if line.startswith("kvway_router_in_flight_requests{"):
                    count += float(line.rpartition(" ")[2])
        for worker in self.workers:
            load = await self._get(f"http://{worker.host}:{worker.api.port}/load")
            count += load["num_running"] + load["num_waiting"]
        return round(count)

    async def settled(self, *, num_looks: int) -> int:
        """Looks ten times a second until nothing is in flight; returns what still is then."""
        count = await self.num_in_flight()
        for _ in range(num_looks):
            if not count:
                break
            await asyncio.sleep(0.1)
            count = await self.num_in_flight()
        return count

    async def _get(self, url: str) -> dict[str, Any]:
        async with self._http.get(url) as response:
            response.raise_for_status()
            body: dict[str, Any] = await response.json()
            return body
