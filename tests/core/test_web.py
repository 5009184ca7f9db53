"""The server's edge on real sockets: every answer is JSON, nothing sent is repeated."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from kvway_core.errors import ConfigError, InvalidRequest, ModelNotFound
from kvway_core.lifecycle import start_site
from kvway_core.web import HttpLimits, json_response, make_runner, new_app, read_body

ECHO = b"words-of-the-client"
HEAD = b"Host: localhost\r\n"
LIMIT = 1000


@dataclass
class Server:
    """A server under test and what its handlers saw."""

    port: int = 0
    started: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    bodies: list[bytes] = field(default_factory=list)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    state = Server()

    async def take(request: web.Request) -> web.Response:
        state.bodies.append(await read_body(request))
        return json_response(b'{"ok":true}', headers={"x-test": "1"})

    async def take_unread(request: web.Request) -> web.Response:
        state.bodies.append(await request.read())
        return json_response(b"{}")

    async def crash(_request: web.Request) -> web.Response:
        raise RuntimeError(ECHO.decode())

    async def refuse(_request: web.Request) -> web.Response:
        raise ModelNotFound("There is no such model.", param="model")

    async def break_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begun")
        raise InvalidRequest("too late")

    async def hang(_request: web.Request) -> web.Response:
        state.started.set()
        try:
            await state.release.wait()
        except asyncio.CancelledError:
            state.cancelled.set()
            raise
        return json_response(b"{}")

    app = new_app()
    app.router.add_post("/take", take)
    app.router.add_post("/take-unread", take_unread)
    app.router.add_get("/crash", crash)
    app.router.add_get("/refuse", refuse)
    app.router.add_get("/break-off", break_off)
    app.router.add_get("/hang", hang)
    runner = make_runner(app, HttpLimits(max_body_bytes=LIMIT))
    state.port = await start_site(runner, "127.0.0.1", 0)
    yield state
    await runner.cleanup()


async def exchange(server: Server, sent: bytes, *, half_close: bool = False) -> bytes:
    """Sends bytes and returns all that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(sent)
        if half_close:
            writer.write_eof()
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def request(method: bytes, path: bytes, headers: bytes = b"", body: bytes = b"") -> bytes:
    line = method + b" " + path + b" HTTP/1.1\r\n"
    return line + HEAD + b"Connection: close\r\n" + headers + b"\r\n" + body


def post(body: bytes, headers: bytes = b"", path: bytes = b"/take") -> bytes:
    return request(b"POST", path, headers + b"Content-Length: %d\r\n" % len(body), body)


def chunked(body: bytes, headers: bytes = b"Transfer-Encoding: chunked\r\n") -> bytes:
    return request(b"POST", b"/take", headers, body)


def status_and_error(answer: bytes) -> tuple[int, dict[str, object]]:
    """Returns the status and the OpenAI error of an answer, after checking its form."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.0 ", b"HTTP/1.1 "))
    status = int(head.split(b" ", 2)[1])
    assert b"content-type: application/json" in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert ECHO not in answer
    return status, error


async def test_a_request_is_served(server: Server) -> None:
    answer = await exchange(server, post(b"hello"))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"x-test: 1" in answer
    assert answer.endswith(b'{"ok":true}')
    assert server.bodies == [b"hello"]


async def test_a_chunked_body_is_served(server: Server) -> None:
    answer = await exchange(server, chunked(b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert server.bodies == [b"hello"]


REFUSED: dict[str, tuple[int, str, bytes]] = {
    "unknown route": (404, "not_found", request(b"GET", b"/" + ECHO)),
    "traversal": (404, "not_found", request(b"GET", b"/v1/../" + ECHO)),
    "trailing slash": (404, "not_found", request(b"POST", b"/take/")),
    "wrong method": (405, "method_not_allowed", request(b"GET", b"/take")),
    "strange method": (405, "method_not_allowed", request(b"PROPFIND", b"/take")),
    "refused by the handler": (404, "model_not_found", request(b"GET", b"/refuse")),
    "crash": (500, "internal_error", request(b"GET", b"/crash")),
    "gzip": (415, "unsupported_media_type", post(b"{}", b"Content-Encoding: gzip\r\n")),
    "lzma": (415, "unsupported_media_type", post(b"{}", b"Content-Encoding: lzma\r\n")),
    "encodings": (
        415,
        "unsupported_media_type",
        post(b"{}", b"Content-Encoding: identity, br\r\n"),
    ),
    "over the limit": (413, "payload_too_large", post(b"x" * (LIMIT + 1))),
    "chunks over the limit": (
        413,
        "payload_too_large",
        chunked(b"3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n"),
    ),
    "a body that never comes": (
        413,
        "payload_too_large",
        request(b"POST", b"/take", b"Content-Length: 99999999999\r\nExpect: 100-continue\r\n"),
    ),
    "expects something": (417, "expectation_failed", post(b"{}", b"Expect: " + ECHO + b"\r\n")),
    "expects two things": (
        417,
        "expectation_failed",
        post(b"{}", b"Expect: 100-continue\r\nExpect: " + ECHO + b"\r\n"),
    ),
    "tunnel": (501, "not_implemented", b"CONNECT x:80 HTTP/1.1\r\n" + HEAD + b"\r\n"),
    "not HTTP": (400, "malformed_http", ECHO + b"\x00\r\n\r\n"),
    "TLS": (400, "malformed_http", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    "bad header": (400, "malformed_http", request(b"GET", b"/refuse", ECHO + b" : x\r\n")),
    "long header": (
        431,
        "request_header_fields_too_large",
        request(b"GET", b"/refuse", b"x: " + ECHO * 1000 + b"\r\n"),
    ),
    "long path": (
        431,
        "request_header_fields_too_large",
        request(b"GET", b"/" + ECHO * 1000),
    ),
    "many headers": (400, "malformed_http", request(b"GET", b"/refuse", b"x: y\r\n" * 200)),
    "no host": (400, "malformed_http", b"GET /refuse HTTP/1.1\r\n\r\n"),
    "two lengths": (
        400,
        "malformed_http",
        request(b"POST", b"/take", b"Content-Length: 2\r\nContent-Length: 3\r\n", b"{}"),
    ),
    "length and chunks": (
        400,
        "malformed_http",
        chunked(b"0\r\n\r\n", b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"),
    ),
    "bad chunk size": (400, "malformed_http", chunked(b"zz\r\n" + ECHO)),
    "empty coding": (
        400,
        "malformed_http",
        chunked(b"0\r\n\r\n", b"Transfer-Encoding: ,chunked\r\n"),
    ),
    "chunks in HTTP/1.0": (
        400,
        "malformed_http",
        b"POST /take HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    "HTTP/2": (505, "http_version_not_supported", b"GET /refuse HTTP/2.0\r\n" + HEAD + b"\r\n"),
    "HTTP/0.9": (505, "http_version_not_supported", b"GET /refuse\r\n\r\n"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refusal_is_json_and_repeats_nothing(server: Server, name: str) -> None:
    status, code, sent = REFUSED[name]
    answer = await exchange(server, sent)
    got, error = status_and_error(answer)
    assert (got, error["code"]) == (status, code)
    assert b"100 Continue" not in answer
    assert not server.bodies


async def test_golden_refusals(server: Server, golden: Callable[[str, str], None]) -> None:
    lines = []
    for name, (_, _, sent) in REFUSED.items():
        head, _, body = (await exchange(server, sent)).partition(b"\r\n\r\n")
        lines.append(f"{name}: {head.split(b' ', 2)[1].decode()} {body.decode()}")
    golden("refused_requests.txt", "\n".join(lines) + "\n")


async def test_the_right_method_is_named(server: Server) -> None:
    assert b"\r\nAllow: OPTIONS, POST\r\n" in await exchange(server, request(b"GET", b"/take"))
    assert b"\r\nAllow: GET, HEAD, OPTIONS\r\n" in await exchange(
        server, request(b"POST", b"/refuse")
    )
    answer = await exchange(server, request(b"OPTIONS", b"/take"))
    assert answer.startswith(b"HTTP/1.1 204 ")
    assert b"\r\nAllow: OPTIONS, POST\r\n" in answer
    assert b"access-control" not in answer.lower()


@pytest.mark.parametrize("num_bytes", [0, 1, LIMIT])
async def test_a_body_up_to_the_limit_is_taken(server: Server, num_bytes: int) -> None:
    assert (await exchange(server, post(b"x" * num_bytes))).startswith(b"HTTP/1.1 200 ")
    assert server.bodies == [b"x" * num_bytes]


async def test_identity_is_no_encoding(server: Server) -> None:
    await exchange(server, post(b"a", b"Content-Encoding: Identity\r\n"))
    assert server.bodies == [b"a"]


async def test_a_compressed_body_is_never_inflated(server: Server) -> None:
    body = gzip.compress(b"x" * 10_000)
    await exchange(server, post(body, b"Content-Encoding: gzip\r\n", b"/take-unread"))
    assert server.bodies == [body]


async def test_continue_is_said_to_a_body_that_is_welcome(server: Server) -> None:
    answer = await exchange(server, post(b"{}", b"Expect: 100-continue\r\n"))
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")


async def test_a_broken_answer_has_no_end(server: Server) -> None:
    answer = await exchange(server, request(b"GET", b"/break-off"))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"5\r\nbegun\r\n")
    assert b"too late" not in answer


async def test_requests_in_one_connection_are_answered_in_order(server: Server) -> None:
    one = b"POST /take HTTP/1.1\r\n" + HEAD + b"Content-Length: 1\r\n\r\n"
    answer = await exchange(server, one + b"a" + one + b"b" + post(b"c"))
    assert answer.count(b"HTTP/1.1 200 ") == 3
    assert server.bodies == [b"a", b"b", b"c"]


async def test_a_refused_body_does_not_become_the_next_request(server: Server) -> None:
    smuggled = b"GET /refuse HTTP/1.1\r\n" + HEAD + b"\r\n"
    head = (
        b"POST /take HTTP/1.1\r\n" + HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    )
    answer = await exchange(server, head % len(smuggled) + smuggled)
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_a_handler_is_cancelled_when_its_client_leaves(server: Server) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request(b"GET", b"/hang"))
    await server.started.wait()
    writer.transport.abort()
    await server.cancelled.wait()


async def test_a_client_that_leaves_while_sending_is_no_error(server: Server) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request(b"POST", b"/take", b"Content-Length: 50\r\n", b"half"))
    await writer.drain()
    writer.transport.abort()
    assert (await exchange(server, post(b"next"))).startswith(b"HTTP/1.1 200 ")
    assert server.bodies == [b"next"]


async def test_an_idle_connection_is_closed() -> None:
    runner = make_runner(new_app(), HttpLimits(idle_timeout_s=0.01))
    port = await start_site(runner, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HT")
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    await runner.cleanup()


async def test_a_taken_port_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        runner = make_runner(new_app())
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: the port is taken; choose"):
            await start_site(runner, "127.0.0.1", port)
        await runner.cleanup()


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("127.0.0.1", 70_000)])
async def test_an_address_that_cannot_be_is_a_configuration_error(host: str, port: int) -> None:
    runner = make_runner(new_app())
    with pytest.raises(ConfigError, match=f"cannot listen on {host}:{port}"):
        await start_site(runner, host, port)
    await runner.cleanup()


def test_the_python_parser_is_refused() -> None:
    code = "from kvway_core.web import make_runner, new_app; make_runner(new_app())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"AIOHTTP_NO_EXTENSIONS": "1"},
        capture_output=True,
        check=False,
    )
    assert b"ConfigError: aiohttp has no C parser" in done.stderr
