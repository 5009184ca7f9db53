"""Both listeners as a client sees them: routes, methods, bad input, and what is on which."""

from __future__ import annotations

import asyncio
import threading
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvway_core.errors import ConfigError
from tests.router.conftest import MODEL, Bench, StartBench, chat_body


async def error_of(bench: Bench, method: str, url: str, **kwargs: Any) -> tuple[int, Any, str]:
    async with bench.client.request(method, url, **kwargs) as response:
        assert response.content_type == "application/json"
        error = (await response.json())["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return response.status, response.headers, error["code"]


async def test_models_names_the_served_one(bench: Bench) -> None:
    models = await bench.get(bench.api("/v1/models"))
    (card,) = models["data"]
    assert (models["object"], card["id"], card["max_model_len"]) == ("list", MODEL, 8192)


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
async def test_probes_answer_on_both_listeners(bench: Bench, path: str) -> None:
    for url in (bench.api(path), bench.admin(path)):
        async with bench.client.get(url) as response:
            assert response.status == 200


async def test_not_ready_without_a_replica_but_healthy(bench: Bench) -> None:
    await bench.replica.stop()
    await bench.router.replicas.wait_for(lambda: not bench.router.replicas.usable())
    async with bench.client.get(bench.api("/ready")) as ready:
        assert ready.status == 503
    async with bench.client.get(bench.api("/health")) as health:
        assert health.status == 200


@pytest.mark.parametrize("path", ["/", "/v2", "/v1/chat/completions/", "/admin/decisions"])
async def test_an_unknown_route_is_a_json_404(bench: Bench, path: str) -> None:
    assert (await error_of(bench, "GET", bench.api(path)))[::2] == (404, "not_found")


@pytest.mark.parametrize(
    "path", ["/v1/../admin/decisions", "/v1/%2e%2e/admin/decisions", "//admin/decisions"]
)
async def test_no_path_on_the_api_listener_leads_to_the_admin_api(bench: Bench, path: str) -> None:
    address = urlsplit(bench.router.addresses.api)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize(
    ("allowed", "method", "path"),
    [
        ("POST", "GET", "/v1/chat/completions"),
        ("POST", "PUT", "/v1/completions"),
        ("GET", "POST", "/v1/models"),
        ("GET", "DELETE", "/health"),
    ],
)
async def test_a_wrong_method_is_told_the_right_one(
    bench: Bench, allowed: str, method: str, path: str
) -> None:
    status, headers, code = await error_of(bench, method, bench.api(path))
    assert (status, code) == (405, "method_not_allowed")
    assert allowed in headers["Allow"]


@pytest.mark.parametrize(
    ("code", "body"),
    [
        ("invalid_json", b""),
        ("invalid_json", b"{"),
        ("invalid_json", b"\xff\xfe{\x00"),
        ("invalid_request", b"[]"),
        ("invalid_request", b'{"model":"test-model"}'),
        ("invalid_request", b'{"model":"test-model","messages":[]}'),
        ("invalid_request", b'{"model":1,"messages":[{"role":"user","content":"x"}]}'),
    ],
)
async def test_malformed_bodies_are_400_and_reach_no_replica(
    bench: Bench, code: str, body: bytes
) -> None:
    url = bench.api("/v1/chat/completions")
    status, headers, got = await error_of(bench, "POST", url, data=body)
    assert (status, got) == (400, code)
    assert len(headers["x-kvway-request-id"]) == 32
    assert not bench.replica.requests
    metrics = await bench.metrics()
    assert metrics['kvway_router_requests_total{code="400",route="/v1/chat/completions"}'] == 1


async def test_a_body_over_the_limit_is_413(start_bench: StartBench) -> None:
    bench = await start_bench(1, max_body_bytes=200)
    url = bench.api("/v1/chat/completions")
    frame = len('{"model": "test-model", "messages": [{"role": "user", "content": ""}]}')
    fits = chat_body("x" * (200 - frame))
    async with bench.client.post(url, json=fits) as response:
        assert response.status == 200
    over = chat_body("x" * (201 - frame))
    assert (await error_of(bench, "POST", url, json=over))[::2] == (413, "payload_too_large")


async def test_a_body_that_never_comes_is_408(start_bench: StartBench) -> None:
    bench = await start_bench(1, body_timeout_s=0.05)
    address = urlsplit(bench.router.addresses.api)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
    assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_a_compressed_body_is_415(bench: Bench) -> None:
    url = bench.api("/v1/chat/completions")
    headers = {"Content-Encoding": "gzip"}
    status, _, code = await error_of(bench, "POST", url, data=b"\x1f\x8b", headers=headers)
    assert (status, code) == (415, "unsupported_media_type")


async def test_too_many_waiting_prompts_are_503(start_bench: StartBench) -> None:
    bench = await start_bench(1, max_waiting_prompts=0, reader_threads=1)
    started, finish = threading.Event(), threading.Event()

    def occupy() -> None:
        started.set()
        finish.wait()

    occupying = asyncio.create_task(bench.router.readers.run(occupy))
    await asyncio.to_thread(started.wait)
    status, headers, body = await bench.chat()
    assert (status, body["error"]["code"]) == (503, "overloaded")
    assert int(headers["Retry-After"]) >= 1
    finish.set()
    await occupying
    assert (await bench.chat())[0] == 200


async def test_a_taken_port_is_a_configuration_error(
    bench: Bench, start_bench: StartBench
) -> None:
    port = urlsplit(bench.router.addresses.api).port
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        await start_bench(1, port=port)
