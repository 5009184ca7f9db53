"""A whole router over scripted replicas, on real sockets, in the test's own loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvway_core.clock import SystemClock
from kvway_core.lifecycle import Supervisor
from kvway_core.prompts import PromptEncoder
from kvway_core.testing.byte_model import write_byte_model
from kvway_core.testing.fake_replica import FakeReplica
from kvway_router.app import Router
from kvway_router.settings import RouterSettings

MODEL = "test-model"


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    folder: Path = write_byte_model(tmp_path_factory.mktemp("models") / MODEL)
    return PromptEncoder.load(folder)


class Bench:
    """A router that runs, its replicas, and a client of both its listeners."""

    def __init__(
        self, router: Router, replicas: list[FakeReplica], client: aiohttp.ClientSession
    ) -> None:
        self.router = router
        self.replicas = replicas
        self.client = client

    @property
    def replica(self) -> FakeReplica:
        """The only replica."""
        (only,) = self.replicas
        return only

    def api(self, path: str) -> str:
        return self.router.addresses.api + path

    def admin(self, path: str) -> str:
        return self.router.addresses.admin + path

    def named(self, replica_id: str) -> FakeReplica:
        return next(r for r in self.replicas if r.replica_id == replica_id)

    async def chat(self, text: str = "hello", **fields: Any) -> tuple[int, Any, Any]:
        """POST a chat; status, headers and body as JSON, or as bytes of a stream."""
        body = chat_body(text, **fields)
        async with self.client.post(self.api("/v1/chat/completions"), json=body) as response:
            if response.content_type == "application/json":
                return response.status, response.headers, await response.json()
            return response.status, response.headers, await response.read()

    async def get(self, url: str) -> Any:
        async with self.client.get(url) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def decision(self, headers: Any) -> Any:
        return await self.get(self.admin(f"/admin/decisions/{headers['x-kvway-request-id']}"))

    async def metrics(self) -> dict[str, float]:
        async with self.client.get(self.admin("/metrics")) as response:
            lines = (await response.text()).splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in samples}


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}]} | fields


async def nothing_in_flight(router: Router) -> None:
    """Checks, once all clients have left, that no request has left anything behind."""
    await router.dispatcher.running.wait_idle()
    assert router.admission.num_waiting == 0
    for replica in router.replicas.all():
        assert router.replicas.num_in_flight(replica.id) == 0
        assert router.replicas.num_awaited(replica.id) == 0


StartBench = Callable[..., Awaitable[Bench]]


@pytest.fixture
async def start_bench(encoder: PromptEncoder) -> AsyncIterator[StartBench]:
    """Starts a router over `num_replicas` scripted replicas that it has seen ready."""
    async with AsyncExitStack() as stack:

        async def start(num_replicas: int = 1, **options: Any) -> Bench:
            replicas = [
                await stack.enter_async_context(FakeReplica(model=MODEL))
                for _ in range(num_replicas)
            ]
            settings = RouterSettings(
                model=MODEL,
                replica=tuple(replica.url for replica in replicas),
                **{"port": 0, "admin_port": 0, "probe_interval_s": 0.1, "lame_duck_s": 0.0}
                | options,
            )
            supervisor = await stack.enter_async_context(Supervisor())
            router = await stack.enter_async_context(
                Router(
                    settings,
                    name=MODEL,
                    encoder=encoder,
                    supervisor=supervisor,
                    clock=SystemClock(),
                )
            )
            await router.replicas.wait_for(lambda: len(router.replicas.usable()) == num_replicas)
            stack.push_async_callback(nothing_in_flight, router)
            client = await stack.enter_async_context(aiohttp.ClientSession())
            return Bench(router, replicas, client)

        yield start


@pytest.fixture
async def bench(start_bench: StartBench) -> Bench:
    """A router over one replica."""
    return await start_bench()
