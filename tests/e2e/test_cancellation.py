"""A client that leaves frees its place at the worker within a second, wherever its request is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.harness import until

if TYPE_CHECKING:
    from tests.e2e.harness import Cluster, Process

pytestmark = [pytest.mark.e2e]

FREE_S = 1.0
ONE_SLOT = ("--max-num-seqs", "1", "--sim-decode-step-s", "0.05")


async def load(cluster: Cluster, worker: Process) -> tuple[int, int]:
    """Requests that a worker runs, and that wait there."""
    report = await cluster.get(worker.ready["url"] + "/load")
    return report["num_running"], report["num_waiting"]


async def becomes(
    cluster: Cluster, worker: Process, expected: tuple[int, int], *, limit_s: float
) -> None:
    """Waits until a worker has so many requests."""

    async def seen() -> bool:
        return await load(cluster, worker) == expected

    await until(seen, limit_s=limit_s, failure=f"never {expected} at the worker: {worker.tail}")


async def queued(cluster: Cluster, router: Process) -> int:
    """Requests that wait in the router."""
    async with cluster.http.get(router.ready["admin"] + "/metrics") as response:
        lines = (await response.text()).splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith("kvway_router_queued_req")]
    return int(float(value))


async def test_who_leaves_is_gone_at_the_worker_within_a_second(cluster: Cluster) -> None:
    """In a stream, before the first token, in the queue, and waiting for a whole answer."""
    worker = await cluster.worker("a", *ONE_SLOT)
    router = await cluster.router(worker)
    url = router.ready["api"] + "/v1/chat/completions"

    def ask(*, stream: bool) -> asyncio.Task[Any]:
        async def post() -> None:
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": "hello"}],
                "max_tokens": 400,
                "ignore_eos": True,
                "stream": stream,
            }
            async with cluster.http.post(url, json=body) as response:
                await response.read()

        return asyncio.create_task(post())

    async def leave(asked: asyncio.Task[Any]) -> None:
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    async def is_queued(number: int) -> bool:
        return await queued(cluster, router) == number

    in_stream = ask(stream=True)
    await becomes(cluster, worker, (1, 0), limit_s=20)
    before_first_token = ask(stream=True)
    await becomes(cluster, worker, (1, 1), limit_s=20)
    in_queue = ask(stream=False)
    await until(lambda: is_queued(1), limit_s=20, failure="it never waited in the router")

    await leave(in_queue)
    await until(lambda: is_queued(0), limit_s=FREE_S, failure="it still waits in the router")
    assert await load(cluster, worker) == (1, 1), "the worker never saw it"
    await leave(before_first_token)
    await becomes(cluster, worker, (1, 0), limit_s=FREE_S)
    await leave(in_stream)
    await becomes(cluster, worker, (0, 0), limit_s=FREE_S)

    whole = ask(stream=False)
    await becomes(cluster, worker, (1, 0), limit_s=20)
    await leave(whole)
    await becomes(cluster, worker, (0, 0), limit_s=FREE_S)
