"""Replicas that come and go by call while requests run, and a configuration that is read again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvway_core.errors import ConfigError, InvalidRequest
from kvway_core.testing.fake_replica import Answer, FakeReplica
from kvway_router import discovery as discovery_module
from kvway_router.discovery import Discovery, DnsName, ReplicaAddress
from kvway_router.reload import RELOADABLE, reloaded
from kvway_router.settings import RouterSettings
from tests.router.conftest import MODEL, Bench, StartBench


async def change(
    bench: Bench, method: str, path: str, body: Any = None, content_type: str = "application/json"
) -> tuple[int, Any]:
    """Calls the admin listener; returns status and answer."""
    data = body if isinstance(body, bytes) else b"" if body is None else repr(body).encode()
    headers = {"Content-Type": content_type}
    url = bench.admin(path)
    async with bench.client.request(method, url, data=data, headers=headers) as response:
        return response.status, await response.json()


async def add(bench: Bench, url: str) -> tuple[int, Any]:
    return await change(bench, "POST", "/admin/replicas", b'{"url":"%s"}' % url.encode())


def ready(bench: Bench) -> set[str]:
    return {replica.id for replica in bench.router.replicas.usable()}


async def test_replicas_come_and_go_under_load_and_nothing_fails(start_bench: StartBench) -> None:
    bench = await start_bench(2)
    router, (old, stays) = bench.router, bench.replicas
    statuses: list[int] = []
    is_over = False

    async def ask(number: int) -> None:
        while not is_over:
            status, _, _ = await bench.chat(
                f"{number} {len(statuses)} " * 9, stream=number % 2 > 0
            )
            statuses.append(status)

    asking = [asyncio.create_task(ask(number)) for number in range(6)]
    async with FakeReplica(model=MODEL) as new:
        assert (await add(bench, new.url))[0] == 200
        await new.wait_for(lambda: bool(new.requests))
        status, answer = await change(bench, "POST", f"/admin/replicas/{old.replica_id}/drain")
        assert (status, answer["state"]) == (200, "draining")
        assert ready(bench) == {stays.replica_id, new.replica_id}
        await router.replicas.wait_for(lambda: router.replicas.num_in_flight(old.replica_id) == 0)
        num_old = len(old.requests)
        status, answer = await change(bench, "DELETE", f"/admin/replicas/{old.replica_id}")
        assert (status, answer["state"], answer["in_flight"]) == (200, "removed", 0)
        await old.stop()
        num_done = len(statuses)
        await new.wait_for(lambda: len(statuses) > num_done + 30)
        is_over = True
        await asyncio.gather(*asking)
        assert len(old.requests) == num_old
        assert set(statuses) == {200}
        view = await bench.get(bench.admin("/admin/replicas"))
        assert {r["replica_id"] for r in view["replicas"]} == {stays.replica_id, new.replica_id}


async def test_who_is_removed_finishes_what_it_has(bench: Bench) -> None:
    bench.replica.answer = Answer(hold_after_pieces=1)
    asked = asyncio.create_task(bench.chat(stream=True))
    await bench.replica.wait_for(lambda: bool(bench.replica.requests))
    status, answer = await change(bench, "DELETE", f"/admin/replicas/{bench.replica.replica_id}")
    assert (status, answer["in_flight"]) == (200, 1)
    bench.replica.release()
    status, _, body = await asked
    assert status == 200
    assert body.endswith(b"data: [DONE]\n\n")
    assert (await bench.chat())[0] == 503


async def test_a_drain_outlasts_good_looks_and_an_addition_ends_it(bench: Bench) -> None:
    replica = bench.replica
    await change(bench, "POST", f"/admin/replicas/{replica.replica_id}/drain")
    num_looks = replica.probes["/load"]
    await replica.wait_for(lambda: replica.probes["/load"] > num_looks + 2)
    assert not ready(bench)
    async with bench.client.get(bench.admin("/ready")) as response:
        assert response.status == 503
    assert (await add(bench, replica.url))[0] == 200
    await bench.router.replicas.wait_for(lambda: ready(bench) == {replica.replica_id})
    assert (await bench.chat())[0] == 200


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b'{"url":"http://10.0.0.1:1"}', "text/plain"),
        (b'{"url":"http://10.0.0.1:1"}', "application/x-www-form-urlencoded"),
        (b'{"url":"http://user@10.0.0.1:1"}', "application/json"),
        (b'{"url":"http://10.0.0.1:1/path"}', "application/json"),
        (b'{"url":"file:///etc/passwd"}', "application/json"),
        (b'{"url":"10.0.0.1:1"}', "application/json"),
        (b'{"url":"http://10.0.0.1:1","weight":2}', "application/json"),
        (b'{"url":7}', "application/json"),
        (b"{}", "application/json"),
        (b"\xff", "application/json"),
    ],
)
async def test_what_is_no_replica_is_refused(bench: Bench, body: bytes, content_type: str) -> None:
    status, answer = await change(bench, "POST", "/admin/replicas", body, content_type)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert len(bench.router.replicas.all()) == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/admin/replicas/10.0.0.9:1/drain"), ("DELETE", "/admin/replicas/10.0.0.9:1")],
)
async def test_who_is_not_there_cannot_go(bench: Bench, method: str, path: str) -> None:
    status, answer = await change(bench, method, path)
    assert (status, answer["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("path", ["/admin/replicas/x:1/drain", "/admin/reload"])
async def test_no_page_of_another_site_can_change_anything(bench: Bench, path: str) -> None:
    status, _ = await change(bench, "POST", path, b"", "text/plain")
    assert status == 400


async def test_calls_are_not_on_the_api_listener(bench: Bench) -> None:
    async with bench.client.post(bench.api("/admin/replicas"), json={}) as response:
        assert response.status == 404


# --- where replicas come from ----------------------------------------------------------------


def test_what_was_removed_stays_away_though_it_is_listed() -> None:
    told: list[Any] = []
    discovery = Discovery(["http://a:1", "http://b:1"], [], on_change=told.append)
    discovery.remove("a:1")
    discovery.set_sources(["http://a:1", "http://c:1"], [])
    discovery.add(ReplicaAddress.parse("http://d:1"))
    discovery.add(ReplicaAddress.parse("http://a:1"))
    assert told == [
        ("http://b:1",),
        ("http://c:1",),
        ("http://c:1", "http://d:1"),
        ("http://a:1", "http://c:1", "http://d:1"),
    ]


def test_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_module, "MAX_CALLS", 3)
    discovery = Discovery([], [], on_change=lambda urls: None)
    for number in (1, 2, 3, 3):
        discovery.add(ReplicaAddress.parse(f"http://10.0.0.1:{number}"))
    with pytest.raises(InvalidRequest, match="3 replicas were added"):
        discovery.add(ReplicaAddress.parse("http://10.0.0.1:4"))
    for number in (1, 2, 3):
        discovery.remove(f"10.0.0.1:{number}")
    with pytest.raises(InvalidRequest, match="3 replicas were removed"):
        discovery.remove("10.0.0.1:4")


async def test_what_is_known_of_a_name_that_stays_is_kept() -> None:
    told: list[Any] = []
    fails = False

    async def resolve(host: str, port: int) -> list[str]:
        if fails:
            raise OSError("gone")
        return ["10.0.0.1"]

    names = [DnsName("a", 1), DnsName("b", 2)]
    discovery = Discovery([], names, on_change=told.append, resolve=resolve)
    await discovery.refresh()
    fails = True
    discovery.set_sources([], names[1:])
    await discovery.refresh()
    assert told == [("http://10.0.0.1:1", "http://10.0.0.1:2"), ("http://10.0.0.1:2",)]


# --- the configuration, read again -----------------------------------------------------------


def test_what_can_change_is_taken_and_the_rest_is_named() -> None:
    old = RouterSettings(model="m", replica=("http://a:1",))
    new = replace(old, replica=("http://b:1",), port=1, max_attempts=7, model="n")
    settings, what = reloaded(old, new)
    assert settings == replace(old, replica=("http://b:1",), max_attempts=7)
    assert (what.changed, what.refused) == (["replica", "max_attempts"], ["model", "port"])


async def test_a_reload_changes_what_it_says(start_bench: StartBench) -> None:
    bench = await start_bench(2)
    router = bench.router
    one = bench.replicas[0]
    new = RouterSettings(
        model=MODEL, replica=(one.url,), max_attempts=2, request_timeout_s=7.0,
        first_token_timeout_s=6.0, token_timeout_s=5.0, max_queued=4, queue_timeout_s=3.0,
        lame_duck_s=2.0, drain_timeout_s=1.0, block_size=32,
    )  # fmt: skip
    router._reread = lambda: new
    status, answer = await change(bench, "POST", "/admin/reload")
    assert status == 200
    assert set(answer["changed"]) == RELOADABLE - {"log_level", "replica_dns"}
    assert "block_size" in answer["refused"]
    assert ready(bench) == {one.replica_id}
    assert (router.dispatcher.max_attempts, router.dispatcher.timeout_s) == (2, 7.0)
    limits = router._attempts.limits
    assert (limits.first_token_s, limits.token_s) == (6.0, 5.0)
    assert (router.admission.max_waiting, router.admission.timeout_s) == (4, 3.0)
    assert (await bench.chat())[0] == 200


async def test_a_configuration_that_is_none_changes_nothing(bench: Bench) -> None:
    def broken() -> RouterSettings:
        raise ConfigError(["--port must be 0 to 65535, got 70000"])

    bench.router._reread = broken
    status, answer = await change(bench, "POST", "/admin/reload")
    assert status == 400
    assert "got 70000" in answer["error"]["message"]
    assert (await bench.chat())[0] == 200
