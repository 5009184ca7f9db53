"""What clients may take of a server: connections, time for each part of a request, and bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from kvway_core.lifecycle import start_site
from kvway_core.web import HttpLimits, json_response, make_runner, new_app, read_body
from kvway_core.web_server import Server

HEAD = b"Host: x\r\n"
MIB = 2**20


@dataclass
class Served:
    """A server, what its handlers took, and what ends them."""

    port: int
    server: Server
    bodies: list[int] = field(default_factory=list)
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    sockets: list[socket.socket] = field(default_factory=list)

    @asynccontextmanager
    async def connect(
        self, sent: bytes = b""
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Opens a connection, and sends."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(sent)
            yield reader, writer
        finally:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def answer(self, sent: bytes = b"") -> tuple[int, dict[str, str], Any]:
        """Sends, and returns status, headers and body of the answer."""
        async with self.connect(sent) as (reader, _):
            return await read_answer(reader)

    async def serves(self, sent: bytes) -> None:
        """Sends until it is served: nothing tells when the server notices that others left."""
        status = 0
        while status != 200:
            status, _, _ = await self.answer(sent)


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    """Reads one answer of JSON."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii")
    line, *lines = head.split("\r\n")[:-2]
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
    body = await reader.readexactly(int(headers["content-length"]))
    return int(line.split(" ")[1]), headers, json.loads(body)


def post(body: bytes = b"", path: bytes = b"/take", length: int | None = None) -> bytes:
    """A request, of which there may be less of the body than it announces."""
    num_bytes = len(body) if length is None else length
    line = b"POST " + path + b" HTTP/1.1\r\n"
    return line + HEAD + b"Content-Length: %d\r\n\r\n" % num_bytes + body


@asynccontextmanager
async def serving(**limits: Any) -> AsyncIterator[Served]:
    """Serves with these limits."""
    served: Served

    async def take(request: web.Request) -> web.Response:
        served.bodies.append(len(await read_body(request)))
        return json_response(b"{}")

    async def hold(request: web.Request) -> web.Response:
        response = await take(request)
        served.taken.set()
        await served.release.wait()
        return response

    async def pour(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        assert request.transport is not None
        served.sockets.append(request.transport.get_extra_info("socket"))
        try:
            while not served.release.is_set():
                await response.write(b"x" * MIB * int(request.query.get("mib", "1")))
            await response.write_eof()
            return response
        finally:
            served.ended.set()

    app = new_app()
    app.router.add_post("/take", take)
    app.router.add_post("/hold", hold)
    app.router.add_get("/pour", pour)
    runner = make_runner(app, HttpLimits(**limits))
    port = await start_site(runner, "127.0.0.1", 0)
    assert isinstance(runner.server, Server)
    served = Served(port, runner.server)
    try:
        yield served
    finally:
        await runner.cleanup()
    assert served.server.bodies.num_bytes == 0


# --- time ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"POST /ta", post()[:-2], b"\r\n"], ids=["line", "head", "none"])
async def test_headers_that_do_not_come_are_408(sent: bytes) -> None:
    async with serving(headers_timeout_s=0.05) as served, served.connect(sent) as (reader, _):
        status, headers, body = await read_answer(reader)
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert headers["connection"] == "close"
        assert await reader.read() == b""


async def test_headers_that_drip_are_408_nevertheless() -> None:
    """The time is that of the whole head, not that between two bytes."""
    async with serving(headers_timeout_s=0.05) as served, served.connect() as (reader, writer):
        answer = asyncio.create_task(read_until_it_breaks(reader))
        sent = 0
        writer.write(b"POST /take HTTP/1.1\r\nx: ")
        while not answer.done() and sent < 5000:
            writer.write(b"y")
            sent += 1
            await asyncio.sleep(0.001)
        # What it is still sending may reset the connection, and the answer with it.
        assert (await answer)[:12] in {b"HTTP/1.1 408", b""}
        assert sent < 5000


async def test_the_time_of_headers_runs_anew_for_every_request() -> None:
    async with (
        serving(headers_timeout_s=0.05) as served,
        served.connect(post()) as (reader, writer),
    ):
        assert (await read_answer(reader))[0] == 200
        writer.write(b"POST /take HT")
        assert (await read_answer(reader))[0] == 408
    assert served.bodies == [0]


async def test_a_connection_that_says_nothing_is_closed_without_an_answer() -> None:
    async with serving(headers_timeout_s=0.05) as served, served.connect() as (reader, _):
        assert await reader.read() == b""


async def test_a_connection_between_requests_may_wait_longer_than_headers_take() -> None:
    async with serving(headers_timeout_s=0.02, idle_timeout_s=20) as served:
        async with served.connect(post()) as (reader, writer):
            assert (await read_answer(reader))[0] == 200
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.1)
            writer.write(post(b"ab"))
            assert (await read_answer(reader))[0] == 200
        assert served.bodies == [0, 2]


async def test_a_body_that_does_not_come_is_408() -> None:
    async with serving(body_timeout_s=0.05) as served:
        async with served.connect(post(b"half", length=5)) as (reader, _):
            status, headers, body = await read_answer(reader)
            assert (status, body["error"]["code"]) == (408, "request_timeout")
            assert headers["connection"] == "close"
        assert served.bodies == []


async def test_a_long_body_that_comes_fast_enough_has_more_time() -> None:
    """64 KiB are another second."""
    half = b"x" * 2**17
    async with serving(body_timeout_s=0.05) as served:
        async with served.connect(post(half, length=2**18)) as (reader, writer):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.2)
            writer.write(half)
            assert (await read_answer(reader))[0] == 200
        assert served.bodies == [2**18]


async def test_a_client_that_takes_nothing_is_cut_off() -> None:
    """While its answer waits for it; the handler ends, and there is a line of log."""
    async with serving(stall_timeout_s=0.05) as served:
        with capture_logs() as logs:
            async with served.connect(b"GET /pour HTTP/1.1\r\n" + HEAD + b"\r\n") as (reader, _):
                await served.ended.wait()
                received = len(await read_until_it_breaks(reader))
        assert [line["event"] for line in logs] == ["stalled_client_cut"]
        assert logs[0]["waiting_bytes"] <= 2 * MIB
        assert received > 0


async def test_a_client_that_reads_slowly_is_not_cut_off() -> None:
    """However long it takes for all that waits for it, as long as it takes something."""
    async with (
        serving(stall_timeout_s=0.2) as served,
        served.connect(b"GET /pour?mib=32 HTTP/1.1\r\n" + HEAD + b"\r\n") as (reader, _),
    ):
        for _ in range(12):
            await reader.readexactly(2 * MIB)
            await asyncio.sleep(0.04)
        served.release.set()
        tail = b""
        while not tail.endswith(b"\r\n0\r\n\r\n"):
            chunk = await reader.read(MIB)
            assert chunk, "cut off"
            tail = (tail + chunk)[-7:]


async def test_what_a_dead_peer_was_sent_does_not_wait_for_ever() -> None:
    """Nor does an answer that is complete but never taken: the system gives both up."""
    async with (
        serving(stall_timeout_s=7) as served,
        served.connect(b"GET /pour HTTP/1.1\r\n" + HEAD + b"\r\n") as (reader, _),
    ):
        await reader.readexactly(1)
        (sock,) = served.sockets
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000


async def read_until_it_breaks(reader: asyncio.StreamReader) -> bytes:
    """Reads what there is of an answer that was cut off."""
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(MIB):
            received += chunk
    return bytes(received)


# --- bytes --------------------------------------------------------------------------------


def overloaded(answer: tuple[int, dict[str, str], Any]) -> bool:
    """Whether an answer is a 503 that says when to come back."""
    status, headers, body = answer
    return (status, headers["retry-after"], body["error"]["code"]) == (503, "1", "overloaded")


async def test_bodies_of_all_requests_together_are_bounded() -> None:
    """A body counts until its request has ended."""
    async with serving(max_body_bytes=1000, max_bodies_bytes=1500) as served:
        async with served.connect(post(b"x" * 1000, path=b"/hold")) as (reader, _):
            await served.taken.wait()
            assert overloaded(await served.answer(post(b"y" * 501)))
            assert (await served.answer(post(b"z" * 500)))[0] == 200
            served.release.set()
            assert (await read_answer(reader))[0] == 200
        assert (await served.answer(post(b"y" * 501)))[0] == 200
        assert served.bodies == [1000, 500, 501]


async def test_a_body_of_unknown_length_is_refused_when_there_is_no_room_for_more() -> None:
    async with (
        serving(max_body_bytes=1000, max_bodies_bytes=1500) as served,
        served.connect(post(b"x" * 1000, path=b"/hold")),
    ):
        await served.taken.wait()
        head = b"POST /take HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
        assert overloaded(await served.answer(head + b"1f5\r\n" + b"y" * 501 + b"\r\n"))
        assert served.server.bodies.num_bytes == 1000


async def test_a_body_there_is_no_room_for_is_not_even_asked_for() -> None:
    async with (
        serving(max_body_bytes=1000, max_bodies_bytes=1500) as served,
        served.connect(post(b"x" * 1000, path=b"/hold")),
    ):
        await served.taken.wait()
        sent = post(length=1000).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")
        assert overloaded(await served.answer(sent))


async def test_a_client_that_leaves_gives_back_what_its_body_took() -> None:
    async with serving(max_body_bytes=1000, max_bodies_bytes=1000) as served:
        async with served.connect(post(b"x" * 1000, path=b"/hold")):
            await served.taken.wait()
            assert served.server.bodies.num_bytes == 1000
        await served.serves(post(b"y" * 1000))


# --- connections --------------------------------------------------------------------------


async def test_a_connection_too_many_is_told_so_and_closed() -> None:
    """Whether it says something or not; the others are served, and there is one line of log."""
    async with serving(max_connections=2) as served:
        with capture_logs() as logs:
            async with (
                served.connect(post(path=b"/hold")) as (held, _),
                served.connect(post()) as (
                    reader,
                    writer,
                ),
            ):
                await served.taken.wait()
                assert (await read_answer(reader))[0] == 200
                for _ in range(3):
                    assert overloaded(await served.answer())
                writer.write(post())
                assert (await read_answer(reader))[0] == 200
                served.release.set()
                assert (await read_answer(held))[0] == 200
        assert [line["event"] for line in logs] == ["connections_full"]
        await served.serves(post())
