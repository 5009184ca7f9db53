"""A router in operation: what its log does not tell, SIGHUP, several processes on one port."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.e2e.harness import until

if TYPE_CHECKING:
    from tests.e2e.harness import Cluster, Process

pytestmark = [pytest.mark.e2e]

CHAT = "/v1/chat/completions"


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4} | (
        fields
    )


def events(process: Process, name: str) -> list[dict[str, Any]]:
    """Lines of a process's log that tell of one kind of event."""
    lines = [json.loads(line) for line in process.log.read_text().splitlines()]
    return [line for line in lines if line["event"] == name]


# --- logs ------------------------------------------------------------------------------------

CANARY = "canary7f3"


async def test_no_log_and_no_metric_has_a_word_of_a_client(cluster: Cluster) -> None:
    """Prompts, answers, names, keys and paths of good, bad and broken requests: none is logged."""
    worker = await cluster.worker("a", "--log-level", "debug")
    router = await cluster.router(
        worker, args=("--log-level", "debug", "--tokenize-timeout-s", "5")
    )
    texts = {name: f"{CANARY}-{name} " * 9 for name in ("user", "system", "tool", "salt", "stop")}
    good = chat(
        texts["user"],
        user=texts["system"],
        stop=[texts["stop"]],
        cache_salt=texts["salt"],
        metadata={texts["tool"]: texts["tool"]},
    )
    bodies = [
        json.dumps(good),
        json.dumps(good | {"stream": True}),
        json.dumps(good | {"model": texts["user"]}),
        json.dumps(good | {texts["tool"]: 1, "temperature": texts["tool"]}),
        json.dumps(good | {"messages": [{"role": texts["user"], "content": texts["user"]}]}),
        json.dumps(good)[:-20],
        f'{{"{CANARY}":1,"{CANARY}":2}}',
        f"{CANARY}\xff",
        json.dumps(chat(texts["user"] * 3000)),
    ]
    headers = {"Authorization": f"Bearer {CANARY}-key", "x-own": CANARY, "x-kvway-sticky": CANARY}
    answers = []
    for base in (router.ready["api"], worker.ready["url"]):
        for path in (CHAT, "/v1/completions", f"/v1/{CANARY}", f"/{CANARY}?{CANARY}=1"):
            for body in bodies:
                async with cluster.http.post(base + path, data=body, headers=headers) as response:
                    if response.status >= 400:
                        answers.append(await response.text())
                    await response.read()
        reader, writer = await asyncio.open_connection(*base.removeprefix("http://").split(":"))
        writer.write(f"GET /{CANARY} HTTP/1.1\r\n{CANARY}\r\n\r\n".encode())
        answers.append((await reader.read()).decode())
        writer.close()
        answers.append(await (await cluster.http.get(base + "/metrics")).text())
    pages = [router.ready["admin"] + path for path in ("/admin/replicas", "/admin/decisions")]
    answers += [await (await cluster.http.get(page)).text() for page in pages]
    for process in (router, worker):
        assert CANARY not in process.log.read_text()
    finished = events(router, "request_finished")
    assert {"OK", "OE", "BR"} <= {line["end"] for line in finished}
    assert all(len(line["end"]) == 2 and line["request_id"] for line in finished)
    assert [answer for answer in answers if CANARY in answer] == []


# --- SIGHUP ----------------------------------------------------------------------------------


async def test_sighup_changes_the_replicas_and_drops_no_request(cluster: Cluster) -> None:
    """A stream goes on at a replica that a reload takes away; what cannot change is named."""
    old = await cluster.worker("a", "--sim-decode-step-s", "0.02")
    new = await cluster.worker("b")
    config = cluster.folder / "router.toml"
    config.write_text(f'replica = ["{old.ready["url"]}"]\nmax_attempts = 2\n')
    router = await cluster.start(
        "router",
        *("router", "--model", str(cluster.model), "--served-model-name", "tiny"),
        *("--port", "0", "--admin-port", "0", "--config", str(config)),
    )
    await cluster.replicas_ready(router, 1)
    url = router.ready["api"] + CHAT
    body = chat("Name one.", max_tokens=60, ignore_eos=True, stream=True)
    async with cluster.http.post(url, json=body) as response:
        chunks = [await response.content.readany()]
        config.write_text(f'replica = ["{new.ready["url"]}"]\nmax_attempts = 3\nblock_size = 32\n')
        router.signal(signal.SIGHUP)

        async def has_moved() -> bool:
            view = await cluster.get(router.ready["admin"] + "/admin/replicas")
            return [r["url"] for r in view["replicas"]] == [new.ready["url"]]

        await until(has_moved, limit_s=20, failure=f"no reload: {router.tail}")
        chunks += [chunk async for chunk in response.content.iter_any()]
    assert b"".join(chunks).endswith(b"data: [DONE]\n\n")
    (line,) = events(router, "config_reloaded")
    assert line["changed"] == ["replica", "max_attempts"]
    assert line["refused"] == ["block_size"]
    await cluster.replicas_ready(router, 1)
    async with cluster.http.post(url, json=chat("And another one.")) as response:
        assert response.headers["x-kvway-replica"] == new.ready["url"].removeprefix("http://")
    config.write_text("replica = 7\n")
    router.signal(signal.SIGHUP)

    async def has_failed() -> bool:
        return bool(events(router, "reload_failed"))

    await until(has_failed, limit_s=20, failure=f"no failure told: {router.tail}")
    async with cluster.http.post(url, json=chat("Still there?")) as response:
        assert response.status == 200


# --- several processes -----------------------------------------------------------------------


async def ask(router: Process, body: dict[str, Any]) -> tuple[int, Any]:
    """Asks over a connection of its own, which the system gives to any of the processes."""
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.post(router.ready["api"] + CHAT, json=body) as response,
    ):
        await response.read()
        return response.status, response.headers


async def counted(cluster: Cluster, router: Process) -> dict[str, float]:
    """Requests that each process has answered with 200."""
    async with cluster.http.get(router.ready["admin"] + "/metrics") as response:
        lines = (await response.text()).splitlines()
    start = "kvway_router_requests_total{process="
    return {
        line.split('"')[1]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(start) and 'code="200"' in line
    }


async def test_processes_share_a_port_and_agree(cluster: Cluster) -> None:
    """A prompt meets its prefix through either of two routers; one that dies comes back."""
    a, b, late = [await cluster.worker(name) for name in ("a", "b", "late")]
    router = await cluster.start(
        "router",
        *("router", "--model", str(cluster.model), "--served-model-name", "tiny"),
        *("--port", "0", "--admin-port", "0", "--processes", "2", "--probe-timeout-s", "5"),
        *("--replica", a.ready["url"], "--replica", b.ready["url"], "--lame-duck-s", "0"),
    )
    admin = router.ready["admin"]

    async def ready() -> bool:
        async with cluster.http.get(admin + "/ready") as response:
            return response.status == 200

    await until(ready, limit_s=30, failure=f"not ready: {router.tail}")
    topics = [f"{number} is what you know all about. " * 20 for number in range(4)]
    placed: dict[str, set[str]] = {topic: set() for topic in topics}

    async def both_have_answered() -> bool:
        for topic in topics:
            status, headers = await ask(router, chat(topic + "Well?"))
            assert status == 200
            placed[topic].add(headers["x-kvway-replica"])
            decision = await cluster.get(
                f"{admin}/admin/decisions/{headers['x-kvway-request-id']}"
            )
            assert decision["status"] == 200
        numbers = await counted(cluster, router)
        return min(numbers.get("0", 0), numbers.get("1", 0)) >= 8

    await until(both_have_answered, limit_s=60, failure="one process gets everything")
    assert all(len(replicas) == 1 for replicas in placed.values()), placed

    body = {"url": late.ready["url"]}
    async with cluster.http.post(admin + "/admin/replicas", json=body) as response:
        assert response.status == 200
        assert [p["process"] for p in (await response.json())["processes"]] == [0, 1]
    processes = (await cluster.get(admin + "/admin/processes"))["processes"]
    victim = processes[1]
    pid = int(victim["pid"])
    os.kill(pid, signal.SIGKILL)

    async def is_back() -> bool:
        now = (await cluster.get(admin + "/admin/processes"))["processes"][1]
        return now["num_restarts"] == 1 and now["url"] is not None

    await until(is_back, limit_s=60, failure=f"it stays away: {router.tail}")
    for number in (0, 1):
        view = await cluster.get(f"{admin}/admin/replicas?process={number}")
        assert late.ready["url"] in [r["url"] for r in view["replicas"]]
    router.signal(signal.SIGTERM)
    assert await router.wait(limit_s=30) == 0, router.tail


async def test_processes_that_cannot_start_end_their_parent(cluster: Cluster) -> None:
    """What is wrong with the configuration of all ends the whole, with 2, like that of one."""
    router = cluster.spawn(
        "router",
        *("router", "--model", str(cluster.folder / "nothing"), "--processes", "2"),
        *("--port", "0", "--admin-port", "0", "--replica", "http://127.0.0.1:1"),
    )
    assert await router.wait(limit_s=60) == 2, router.tail
