"""Bad input at the doors of both programs: refused by name, nothing repeated, nobody disturbed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from kvway_core.testing.fake_replica import Answer, FakeReplica
from kvway_worker.api.app import build_app
from tests.core.bad_framing import CANARY, MAX_BODY_BYTES, MODEL, Vector, post
from tests.core.bad_requests import VECTORS
from tests.e2e.conftest import StartRouters
from tests.e2e.harness import Cluster, Process
from tests.router.conftest import chat_body
from tests.worker.http_worker import serving

pytestmark = pytest.mark.e2e

ANSWER_LIMIT_S = 60.0
PAUSE_S = 0.05
MAX_CONNECTIONS = 16
NEXT = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LIMITS = ("--max-body-bytes", str(MAX_BODY_BYTES), "--max-bodies-bytes", "50000000")
FORM = {"message", "type", "param", "code"}


async def outcome(port: int, vector: Vector, *, cut: int) -> str | None:
    """Sends a vector on a connection of its own; returns what is wrong with the answer.

    Args:
        port: Of the server.
        vector: What to send.
        cut: Where the bytes are cut in two pieces that come one after the other, 0 for nowhere.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            return await _outcome(reader, writer, vector, cut=cut)
    except TimeoutError:
        return "hangs"
    finally:
        writer.transport.abort()


async def _outcome(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, vector: Vector, *, cut: int
) -> str | None:
    writer.write(vector.sent[:cut])
    if cut:
        await asyncio.sleep(PAUSE_S)
    writer.write(vector.sent[cut:])
    try:
        status, code, answer = await read_answer(reader, vector)
        if (status, code) != (vector.status, vector.code):
            return f"is {status} {code}, not {vector.status} {vector.code}"
        if code is not None and CANARY in answer:
            return "repeats what was sent"
        for _ in range(vector.num_generated - 1):
            await read_answer(reader, vector)
        if vector.closes:
            rest = await reader.read()
            return f"goes on with {rest!r}" if rest else None
        writer.write(NEXT)
        status, _, _ = await read_answer(reader, vector, is_next=True)
    except (asyncio.IncompleteReadError, ConnectionError) as exc:
        return f"breaks off: {exc!r}"
    return None if status == 200 else f"has {status} for the next request"


async def read_answer(
    reader: asyncio.StreamReader, vector: Vector, *, is_next: bool = False
) -> tuple[int, str | None, bytes]:
    """Reads one answer, checks its form, and returns status, code of the error, and its bytes."""
    head = await reader.readuntil(b"\r\n\r\n")
    line, *lines = head.decode("ascii").split("\r\n")[:-2]
    assert line.startswith(("HTTP/1.1 ", "HTTP/1.0 ")), line
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
    status = int(line.split(" ")[1])
    if vector.sent.startswith(b"HEAD") and not is_next:
        return status, vector.code, head
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    if status < 400:
        return status, None, head + body
    assert headers["content-type"].startswith("application/json"), headers
    error = json.loads(body)["error"]
    assert set(error) == FORM
    assert ("retry-after" in headers) == (status == 503)
    return status, error["code"], head + body


async def failures(port: int) -> list[str]:
    """Sends all vectors, each whole and in two pieces; returns what went wrong."""
    gate = asyncio.Semaphore(MAX_CONNECTIONS)

    async def send(vector: Vector, cut: int) -> str | None:
        async with gate:
            try:
                problem = await outcome(port, vector, cut=cut)
            except AssertionError as exc:
                problem = f"has no good form: {exc}"
        return problem and f"{vector.name} (cut at {cut}) {problem}"

    cuts = [(vector, vector.sent.find(b"\r\n\r\n") + 4) for vector in VECTORS]
    problems = await asyncio.gather(
        *(send(vector, 0) for vector in VECTORS), *(send(vector, cut) for vector, cut in cuts)
    )
    return [problem for problem in problems if problem]


def indiscretions(process: Process) -> list[str]:
    """Returns the lines of a log that say more than they should, or what was sent."""
    text = process.log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if CANARY.decode() in line or "Traceback" in line]
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            lines.append(line)
            continue
        if entry.get("level") in {"warning", "error", "critical"}:
            lines.append(line)
    return lines


def port_of(url: str) -> int:
    """Returns the port in a URL."""
    port = urlsplit(url).port
    assert port is not None
    return port


NUM_GENERATED = 2 * sum(vector.num_generated for vector in VECTORS)
GOOD = Vector("afterwards", post(), 200, None, closes=False)


async def test_the_router_refuses_bad_input_and_touches_no_replica(cluster: Cluster) -> None:
    async with FakeReplica(model=MODEL) as replica:
        router = await cluster.start(
            "router",
            *("router", "--model", str(cluster.model), "--served-model-name", MODEL),
            *("--port", "0", "--admin-port", "0", "--replica", replica.url, *LIMITS),
        )
        await cluster.replicas_ready(router, 1)
        port = port_of(router.ready["api"])
        assert not (problems := await failures(port)), "\n".join(problems)
        assert len(replica.requests) == NUM_GENERATED
        assert await outcome(port, GOOD, cut=0) is None
        assert indiscretions(router) == []


async def test_the_worker_refuses_bad_input_and_computes_nothing(cluster: Cluster) -> None:
    worker = await cluster.worker("worker", *LIMITS)
    port = port_of(worker.ready["url"])
    assert not (problems := await failures(port)), "\n".join(problems)
    assert worker.log.read_text().count("request_finished") == NUM_GENERATED
    assert await outcome(port, GOOD, cut=0) is None
    assert indiscretions(worker) == []


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500, 501])
async def test_an_engines_own_errors_pass_unchanged(
    start_routers: StartRouters, status: int
) -> None:
    """Whatever they are: only the router's own are always JSON in OpenAI's form."""
    (bench,) = await start_routers(1)
    for content_type, body in {
        "text/html; charset=ISO-8859-1": b"<h1>\xe9</h1>",
        "application/json": b'{"detail":[{"loc":["body"],"msg":"x"}]}',
        "application/problem+json": b"{not json",
        "application/octet-stream": bytes(range(256)),
        "text/plain": b"",
    }.items():
        bench.replica.answer = Answer(
            status=status, body=body, headers={"content-type": content_type, "x-engine": "a, b"}
        )
        url = bench.api("/v1/chat/completions")
        async with bench.client.post(url, json=chat_body("hi")) as response:
            assert response.status == status
            assert response.headers["Content-Type"] == content_type
            assert response.headers["x-engine"] == "a, b"
            assert await response.read() == body


async def test_a_replica_gets_headers_as_they_came_but_none_that_could_pass_for_ours(
    start_routers: StartRouters,
) -> None:
    """Engines behind CGI-like interfaces read an underscore as a hyphen."""
    (bench,) = await start_routers(1)
    sent = (
        b"x-a: \xc3\xa9 b\r\nX-Under_Score: 1\r\n"
        b"x_kvway_tenant: 1\r\nX-kvway_Tenant: 1\r\nContent_Length: 1\r\nTransfer_Encoding: x\r\n"
    )
    vector = Vector("headers", post(chat_bytes(), sent), 200, None, closes=False)
    assert await outcome(port_of(bench.api("")), vector, cut=0) is None
    (request,) = bench.replica.requests
    assert request.headers["x-a"] == "\xc3\xa9 b"
    assert request.headers["x-under_score"] == "1"
    assert {name for name in request.headers if "_" in name} == {"x-under_score"}


def chat_bytes() -> bytes:
    """A chat for the scripted replicas."""
    return json.dumps(chat_body("hi")).encode()


def routes(app: web.Application) -> set[tuple[str, str]]:
    """Returns methods and paths of an application; what answers GET answers HEAD.

    Not so what is passed on, by any method: it is the replica's to describe.
    """
    resources = ((route.method, route.resource) for route in app.router.routes())
    return {
        (method.lower(), resource.canonical)
        for method, resource in resources
        if resource is not None and method not in ("HEAD", "*")
    }


def documented(document: dict[str, Any]) -> set[tuple[str, str]]:
    """Returns methods and paths of an OpenAPI document."""
    return {(method, path) for path, item in document["paths"].items() for method in item}


async def test_the_openapi_documents_have_every_route(
    start_routers: StartRouters, byte_model: Path
) -> None:
    (bench,) = await start_routers(1)
    assert documented(await bench.get(bench.api("/openapi.json"))) == routes(bench.router._api.app)
    async with serving(byte_model) as running:
        status, document = await running.get("/openapi.json")
        assert status == 200
        assert documented(document) == routes(build_app(running.worker))
