"""Connections to replicas: opened, kept, replaced, closed, and never read far ahead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvway_core.errors import ConnectFailed, ProtocolError, StreamBroken
from kvway_router import upstream
from kvway_router.upstream import (
    HIGH_BYTES,
    READ_BYTES,
    Connection,
    Origin,
    Pool,
    origin_of,
    request_head,
)

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Replica:
    """Takes connections, shows them to the test, and answers nothing by itself."""

    def __init__(self) -> None:
        self.taken: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        self.taken = asyncio.Queue()
        self.writers: list[asyncio.StreamWriter] = []
        self.origin = Origin("127.0.0.1", 0, is_tls=False, netloc="127.0.0.1:0")

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        self.taken.put_nowait((reader, writer))


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    made = Replica()
    server = await asyncio.start_server(made.handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        made.origin = origin_of("http", f"127.0.0.1:{port}")
        yield made
        for writer in made.writers:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    made = Pool(connect_timeout_s=5.0)
    yield made
    made.close()
    await asyncio.sleep(0)


async def until_closed(connection: Connection) -> None:
    while connection.is_open:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0)


async def asked(pool: Pool, replica: Replica, answer: bytes) -> Connection:
    """Opens a connection, asks, and gives it the answer."""
    connection = await pool.connect(replica.origin)
    reader, writer = await replica.taken.get()
    asking = asyncio.create_task(connection.ask(HEAD, b"{}", has_body=True))
    assert await reader.readexactly(len(HEAD) + 2) == HEAD + b"{}"
    writer.write(answer)
    await writer.drain()
    await asking
    return connection


async def test_a_connection_is_used_again_and_the_last_one_first(
    pool: Pool, replica: Replica
) -> None:
    connections = [await asked(pool, replica, OK) for _ in range(2)]
    for connection in connections:
        assert await connection.read() == b"ok"
        assert await connection.read() == b""
        pool.give_back(connection)
    assert pool.take(replica.origin) is connections[1]
    assert pool.take(replica.origin) is connections[0]
    assert pool.take(replica.origin) is None


@pytest.mark.parametrize(
    "answer",
    [
        OK[:-1],
        OK + b"!",
        OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
        OK.replace(b"/1.1", b"/1.0"),
    ],
    ids=["not ended", "goes on", "close", "old"],
)
async def test_what_cannot_go_on_is_closed(pool: Pool, replica: Replica, answer: bytes) -> None:
    connection = await asked(pool, replica, answer)
    await connection.read()
    pool.give_back(connection)
    assert pool.take(replica.origin) is None
    assert not connection.is_open


async def test_a_request_that_was_not_sent_whole_ends_its_connection(
    pool: Pool, replica: Replica
) -> None:
    connection = await pool.connect(replica.origin)
    _, writer = await replica.taken.get()
    writer.write(OK)  # it answers without reading
    await connection.ask(HEAD, b"x" * 50_000_000, has_body=True)
    assert await connection.read() == b"ok"
    pool.give_back(connection)
    assert pool.take(replica.origin) is None


async def test_what_comes_unasked_ends_the_connection(pool: Pool, replica: Replica) -> None:
    connection = await asked(pool, replica, OK)
    await connection.read()
    pool.give_back(connection)
    replica.writers[0].write(OK)
    await until_closed(connection)
    assert pool.take(replica.origin) is None


async def test_a_connection_that_the_replica_closes_is_not_taken(
    pool: Pool, replica: Replica
) -> None:
    connection = await asked(pool, replica, OK)
    await connection.read()
    pool.give_back(connection)
    replica.writers[0].close()
    await until_closed(connection)
    assert pool.take(replica.origin) is None
    with pytest.raises(StreamBroken):
        await connection.ask(HEAD, b"{}", has_body=True)
    assert connection.was_silent


@pytest.fixture
def short_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "IDLE_S", 0.01)


@pytest.mark.usefixtures("short_idle")
async def test_what_rests_too_long_is_closed(pool: Pool, replica: Replica) -> None:
    connection = await asked(pool, replica, OK)
    await connection.read()
    pool.give_back(connection)
    assert await reader_end(replica) == b""
    assert not connection.is_open
    assert pool.take(replica.origin) is None
    again = await asked(pool, replica, OK)
    await again.read()
    pool.give_back(again)  # the clock runs again
    assert await reader_end(replica) == b""


async def reader_end(replica: Replica) -> bytes:
    """Waits for the end of the connection that was opened last."""
    transport = replica.writers[-1].transport
    protocol = transport.get_protocol()
    assert isinstance(protocol, asyncio.StreamReaderProtocol)
    reader = protocol._stream_reader  # type: ignore[attr-defined]
    data: bytes = await reader.read()
    return data


async def test_no_more_than_so_many_rest(
    pool: Pool, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "MAX_IDLE", 1)
    first, second = [await asked(pool, replica, OK) for _ in range(2)]
    for connection in (first, second):
        await connection.read()
        pool.give_back(connection)
    assert first.is_open
    assert not second.is_open


async def test_a_pool_that_is_closed_keeps_nothing(pool: Pool, replica: Replica) -> None:
    first, second = [await asked(pool, replica, OK) for _ in range(2)]
    for connection in (first, second):
        await connection.read()
    pool.give_back(first)
    pool.close()
    pool.give_back(second)
    assert not first.is_open
    assert not second.is_open


async def test_a_slow_reader_is_not_read_ahead_for(pool: Pool, replica: Replica) -> None:
    size = 64 * 1024 * 1024
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
    connection = await asked(pool, replica, head)
    writer = replica.writers[0]
    writer.write(b"x" * size)
    left = size
    while True:  # until nothing moves any more
        await asyncio.sleep(0.02)
        if (now := writer.transport.get_write_buffer_size()) == left:
            break
        left = now
    first = await connection.read()
    assert len(first) <= HIGH_BYTES + READ_BYTES
    assert left > size // 2
    num_bytes = len(first)
    while data := await connection.read():
        num_bytes += len(data)
    assert num_bytes == size
    assert connection.may_go_on


async def test_a_read_that_is_cancelled_loses_nothing(pool: Pool, replica: Replica) -> None:
    connection = await asked(pool, replica, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
    reading = asyncio.create_task(connection.read())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    replica.writers[0].write(b"ok")
    assert await connection.read() == b"ok"


async def test_a_question_that_is_cancelled_closes_its_connection(
    pool: Pool, replica: Replica
) -> None:
    connection = await pool.connect(replica.origin)
    asking = asyncio.create_task(connection.ask(HEAD, b"{}", has_body=True))
    reader, _ = await replica.taken.get()
    await reader.readexactly(len(HEAD) + 2)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert await reader.read() == b""


async def test_what_had_come_before_a_break_is_read_before_the_break(
    pool: Pool, replica: Replica
) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
    connection = await asked(pool, replica, head)
    replica.writers[0].write(b"junk\r\n")
    await until_closed(connection)
    assert await connection.read() == b"hello"
    for _ in range(2):
        with pytest.raises(ProtocolError):
            await connection.read()


async def test_nobody_there_is_a_failed_connect(pool: Pool) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    with pytest.raises(ConnectFailed):
        await pool.connect(origin_of("http", f"127.0.0.1:{port}"))


async def test_who_does_not_take_the_connection_in_time_has_failed(replica: Replica) -> None:
    pool = Pool(connect_timeout_s=0.02)
    with pytest.raises(ConnectFailed):  # plain HTTP there: TLS is never agreed on
        await pool.connect(origin_of("https", replica.origin.netloc))


def test_an_origin_is_read_from_a_url() -> None:
    assert origin_of("http", "[::1]:80") == Origin("::1", 80, is_tls=False, netloc="[::1]:80")
    assert origin_of("https", "a.b:4430") == Origin("a.b", 4430, is_tls=True, netloc="a.b:4430")


def test_a_head_is_what_it_is_made_of() -> None:
    origin = origin_of("http", "h:1")
    assert request_head("POST", "/a?b", origin, {"X": "é"}, length=3) == (
        b"POST /a?b HTTP/1.1\r\nHost: h:1\r\nX: \xc3\xa9\r\nContent-Length: 3\r\n\r\n"
    )
    assert b"Content-Length" not in request_head("GET", "/", origin, {}, length=None)


@pytest.mark.parametrize("value", ["a\r\nEvil: 1", "a\nb", "a\rb"])
def test_no_line_end_comes_into_a_head(value: str) -> None:
    origin = origin_of("http", "h:1")
    with pytest.raises(ValueError, match="line end"):
        request_head("POST", "/", origin, {"X": value}, length=0)
    with pytest.raises(ValueError, match="line end"):
        request_head("POST", value, origin, {}, length=0)
