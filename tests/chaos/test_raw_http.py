"""The client of load tests sees every byte of an answer, and whether it was whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from loadtests.raw_http import NoAnswer, post

CHUNKED = b"HTTP/1.1 200 OK\r\nX-A: b\r\nTransfer-Encoding: chunked\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n"


@asynccontextmanager
async def server(answer: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Answers one request with these bytes and closes."""
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readuntil(b"}"))
        writer.write(answer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1/x", received


@pytest.mark.parametrize(
    ("answer", "body", "is_complete"),
    [
        (CHUNKED + b"3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n", b"abcdef", True),
        (CHUNKED + b"3\r\nabc\r\n3\r\nd", b"abcd", False),
        (CHUNKED + b"3\r\nabc\r\n", b"abc", False),
        (CHUNKED + b"3\r\nabc\r\n0\r\n", b"abc", False),
        (CHUNKED + b"3\r\nabc\r\n-zz\r\n", b"abc", False),
        (CHUNKED + b"3\r\nabcdef\r\n0\r\n\r\n", b"abc", False),
        (PLAIN + b"abcdef", b"abcdef", True),
        (PLAIN + b"abc", b"abc", False),
        (b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n", b"", True),
    ],
)
async def test_what_came_and_whether_it_is_whole(
    answer: bytes, body: bytes, *, is_complete: bool
) -> None:
    async with server(answer) as (url, received):
        async with post(url, {"a": 1}, headers={"x-request-id": "n"}) as got:
            assert await got.read() == body
            assert got.is_complete is is_complete
            assert got.status == int(answer[9:12])
        head, _, sent = received[0].partition(b"\r\n\r\n")
    assert sent == b'{"a": 1}'
    assert b"content-length: 8" in head
    assert b"x-request-id: n" in head


async def test_lines_are_whole_wherever_chunks_end() -> None:
    async with (
        server(CHUNKED + b"4\r\nab\nc\r\n4\r\nd\n\nx\r\n0\r\n\r\n") as (url, _),
        post(url, {}) as got,
    ):
        assert [line async for line in got.lines()] == [b"ab", b"cd", b""]
        assert got.headers["x-a"] == "b"


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 20", b"junk\r\n\r\n", CHUNKED[:-2]])
async def test_no_head_is_no_answer(answer: bytes) -> None:
    async with server(answer) as (url, _):
        with pytest.raises(NoAnswer):
            async with post(url, {}):
                raise AssertionError("there was a head")


async def test_nobody_to_connect_to_is_no_answer(unused_tcp_port: int) -> None:
    with pytest.raises(NoAnswer, match="no connection"):
        async with post(f"http://127.0.0.1:{unused_tcp_port}/", {}):
            raise AssertionError("there was an answer")
