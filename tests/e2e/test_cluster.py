"""Router and sim workers as real processes: affinity, reasons, loss, disconnects, shutdown."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.harness import until

if TYPE_CHECKING:
    from tests.e2e.harness import Cluster, Process

pytestmark = [pytest.mark.e2e]

BLOCK = 16
SLOW = ("--sim-decode-step-s", "0.05")


def system_prompt(topic: str) -> str:
    """About 600 byte tokens that differ from their first words on."""
    return f"{topic}: " + "You answer in one sentence and you never guess. " * 13


def chat(topic: str, question: str, **fields: Any) -> dict[str, Any]:
    """A chat request with a long system prompt."""
    messages = [
        {"role": "system", "content": system_prompt(topic)},
        {"role": "user", "content": question},
    ]
    return {"model": "tiny", "messages": messages, "max_tokens": 8} | fields


async def post(cluster: Cluster, router: Process, body: dict[str, Any]) -> tuple[Any, Any]:
    """POST a chat completion; return headers and body."""
    url = router.ready["api"] + "/v1/chat/completions"
    async with cluster.http.post(url, json=body) as response:
        payload = await response.json()
        assert response.status == 200, payload
        return response.headers, payload


async def running(cluster: Cluster, worker: Process) -> int:
    """Requests that a worker runs or holds waiting."""
    load = await cluster.get(worker.ready["url"] + "/load")
    return int(load["num_running"]) + int(load["num_waiting"])


async def test_second_request_meets_its_prefix_and_another_prompt_goes_elsewhere(
    cluster: Cluster,
) -> None:
    """The second question of a system prompt lands on its replica and reuses each token."""
    router = await cluster.router(await cluster.worker("a"), await cluster.worker("b"))
    first, cold = await post(cluster, router, chat("Rivers", "Name one in Europe."))
    second, warm = await post(cluster, router, chat("Rivers", "Which one is longest?"))
    other, _ = await post(cluster, router, chat("Mountains", "Name one in Asia."))

    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    shared = await shared_tokens(cluster, router)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == shared
    assert second["x-kvway-replica"] == first["x-kvway-replica"]
    assert second["x-kvway-reason"].startswith("prefix")
    assert other["x-kvway-replica"] != first["x-kvway-replica"]


async def shared_tokens(cluster: Cluster, router: Process) -> int:
    """Leading tokens that the two questions about rivers have in common."""
    replicas = await cluster.get(router.ready["admin"] + "/admin/replicas")
    url = replicas["replicas"][0]["url"] + "/tokenize"
    lists: list[list[int]] = []
    for question in ("Name one in Europe.", "Which one is longest?"):
        body = chat("Rivers", question)
        async with cluster.http.post(url, json={k: body[k] for k in ("model", "messages")}) as r:
            lists.append((await r.json())["tokens"])
    same = 0
    while lists[0][same] == lists[1][same]:
        same += 1
    assert same > 600
    return same


async def test_a_decision_says_what_was_weighed_and_what_happened(cluster: Cluster) -> None:
    """The record of a request names each candidate, its match, its times, choice and outcome."""
    router = await cluster.router(await cluster.worker("a"), await cluster.worker("b"))
    await post(cluster, router, chat("Rivers", "Name one in Europe."))
    headers, body = await post(cluster, router, chat("Rivers", "Which one is longest?"))
    record = await cluster.get(
        f"{router.ready['admin']}/admin/decisions/{headers['x-kvway-request-id']}"
    )
    assert record["replica_id"] == headers["x-kvway-replica"]
    assert record["reason"] == "prefix"
    matched = {c["replica_id"]: c["matched_blocks"] for c in record["candidates"]}
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert matched.pop(record["replica_id"]) == cached // BLOCK
    assert list(matched.values()) == [0]
    costs = {c["replica_id"]: c["cost_s"] for c in record["candidates"]}
    assert min(costs, key=lambda replica: costs[replica]) == record["replica_id"]
    assert record["cached_tokens"] == cached
    assert record["ttft_s"] > 0


async def test_a_killed_worker_is_skipped_and_comes_back(cluster: Cluster) -> None:
    """Kill -9 of a worker costs no request that has not begun; restarted, it serves again."""
    a, b = await cluster.worker("a"), await cluster.worker("b")
    router = await cluster.router(a, b)
    await post(cluster, router, chat("Rivers", "Name one in Europe."))
    headers, _ = await post(cluster, router, chat("Rivers", "Which one is longest?"))
    holder = a if a.ready["url"].endswith(headers["x-kvway-replica"]) else b
    port = int(holder.ready["url"].rpartition(":")[2])
    holder.signal(signal.SIGKILL)
    await holder.wait(limit_s=5)

    after, _ = await post(cluster, router, chat("Rivers", "Which one is shortest?"))
    assert after["x-kvway-replica"] != headers["x-kvway-replica"]
    await cluster.replicas_ready(router, 1)

    await cluster.worker("again", port=port)
    await cluster.replicas_ready(router, 2)
    back, answer = await post(cluster, router, chat("Mountains", "Name one in Asia."))
    assert back["x-kvway-replica"] == headers["x-kvway-replica"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("leave", ["before the first byte", "in the middle"])
async def test_a_client_that_leaves_frees_the_slot(
    cluster: Cluster, leave: str, *, stream: bool
) -> None:
    """The worker runs nothing any more soon after the client has gone."""
    worker = await cluster.worker("a", *SLOW)
    router = await cluster.router(worker)
    before = await cluster.get(worker.ready["url"] + "/load")
    body = chat("Rivers", "Name one.", max_tokens=2000, ignore_eos=True, stream=stream)
    url = router.ready["api"] + "/v1/chat/completions"

    async def ask() -> None:
        async with cluster.http.post(url, json=body) as response:
            async for _ in response.content.iter_any():
                got_bytes.set()

    got_bytes = asyncio.Event()
    request = asyncio.create_task(ask())

    async def busy() -> bool:
        return await running(cluster, worker) == 1

    await until(busy, limit_s=10, failure=worker.tail)
    if leave == "in the middle" and stream:
        await asyncio.wait_for(got_bytes.wait(), 10)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request

    async def idle() -> bool:
        return await running(cluster, worker) == 0

    await until(idle, limit_s=10, failure=worker.tail)
    after = await cluster.get(worker.ready["url"] + "/load")
    assert after["blocks"]["total"] == before["blocks"]["total"]
    assert after["blocks"]["free"] + after["blocks"]["cached"] == after["blocks"]["total"]


async def test_sigterm_lets_streams_end_and_exits_0(cluster: Cluster) -> None:
    """Router and worker finish what runs, take nothing new, and exit 0."""
    worker = await cluster.worker("a", *SLOW)
    router = await cluster.router(worker, args=("--lame-duck-s", "0.2"))
    url = router.ready["api"] + "/v1/chat/completions"
    body = chat("Rivers", "Name one.", max_tokens=30, ignore_eos=True, stream=True)
    async with cluster.http.post(url, json=body) as response:
        chunks = [await response.content.readany()]
        router.signal(signal.SIGTERM)
        worker.signal(signal.SIGTERM)
        chunks += [chunk async for chunk in response.content.iter_any()]
    assert b"".join(chunks).endswith(b"data: [DONE]\n\n")
    assert await router.wait(limit_s=20) == 0, router.tail
    assert await worker.wait(limit_s=20) == 0, worker.tail


async def test_both_programs_answer_probes_and_metrics(cluster: Cluster) -> None:
    """/health, /ready and /metrics on the worker and on both listeners of the router."""
    worker = await cluster.worker("a")
    router = await cluster.router(worker)
    for base in (worker.ready["url"], router.ready["api"], router.ready["admin"]):
        for path in ("/health", "/ready", "/metrics"):
            async with cluster.http.get(base + path) as response:
                assert response.status == 200, (base, path)
                assert await response.read()


async def test_a_router_without_a_live_worker_says_503(cluster: Cluster) -> None:
    """With every replica gone the answer is a 503 in OpenAI form with Retry-After."""
    worker = await cluster.worker("a")
    router = await cluster.router(worker)
    worker.signal(signal.SIGKILL)
    await worker.wait(limit_s=5)
    await cluster.replicas_ready(router, 0)
    url = router.ready["api"] + "/v1/chat/completions"
    async with cluster.http.post(url, json=chat("Rivers", "Name one.")) as response:
        body = await response.json()
        assert response.status == 503
        assert body["error"]["code"] == "no_replica_available"
        assert int(response.headers["Retry-After"]) >= 1
