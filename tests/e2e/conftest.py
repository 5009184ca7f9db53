"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvway_core.clock import Clock, SystemClock
from kvway_core.lifecycle import Supervisor
from kvway_core.prompts import PromptEncoder
from kvway_core.testing.fake_replica import FakeReplica
from kvway_router.app import Router
from kvway_router.settings import RouterSettings
from tests.e2e.harness import Cluster
from tests.e2e.routing import PLAIN
from tests.router.conftest import MODEL, Bench


@pytest.fixture
async def cluster(tmp_path: Path, byte_model: Path) -> AsyncIterator[Cluster]:
    """Start processes through it; whatever still runs at the end is killed."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=40)) as http:
        cluster = Cluster(tmp_path, byte_model, http)
        try:
            yield cluster
        finally:
            await cluster.close()


async def all_usable(router: Router, num_replicas: int) -> None:
    """Waits until a router sees so many replicas ready."""
    await router.replicas.wait_for(lambda: len(router.replicas.usable()) == num_replicas)


PATIENT = {"probe_timeout_s": 30.0}
"""Nobody is suspect for answering late on a busy machine."""

StartRouters = Callable[..., Awaitable[list[Bench]]]


@pytest.fixture
async def start_routers(byte_model: Path) -> AsyncIterator[StartRouters]:
    """Starts routers that do not talk, over the same scripted replicas, in the test's loop."""
    encoder = PromptEncoder.load(byte_model)
    async with AsyncExitStack() as stack:

        async def start(
            num_replicas: int, num_routers: int = 1, *, load: dict[str, Any] | None = None,
            loads: Sequence[dict[str, Any]] = (), metrics: bytes | None = None,
            clock: Clock | None = None, **options: Any,
        ) -> list[Bench]:  # fmt: skip
            replicas = [
                await stack.enter_async_context(FakeReplica(model=MODEL, answer=PLAIN))
                for _ in range(num_replicas)
            ]
            for number, replica in enumerate(replicas):
                # Something waits, so no report says that what the test holds back is computed.
                replica.pages["/load"] = (200, replica.load(**(load or {"num_waiting": 1})))
                if loads:  # one each
                    replica.pages["/load"] = (200, replica.load(**loads[number]))
                if metrics is not None:  # another engine
                    del replica.pages["/load"]
                    replica.pages["/metrics"] = (200, metrics)
            supervisor = await stack.enter_async_context(Supervisor())
            client = await stack.enter_async_context(aiohttp.ClientSession())
            benches = []
            for _ in range(num_routers):
                settings = RouterSettings(
                    model=MODEL,
                    replica=tuple(replica.url for replica in replicas),
                    **{"port": 0, "admin_port": 0, "probe_interval_s": 0.5, **PATIENT, **options},
                )
                router = Router(
                    settings, name=MODEL, encoder=encoder, supervisor=supervisor,
                    clock=clock or SystemClock(),
                )  # fmt: skip
                await stack.enter_async_context(router)
                await all_usable(router, num_replicas)
                benches.append(Bench(router, replicas, client))
            return benches

        yield start
