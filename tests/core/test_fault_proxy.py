"""The fault proxy does to connections what it says, seen from both of their ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from kvway_core.testing.fault_proxy import FaultProxy
from kvway_core.testing.faults import End, Fault

REQUEST = b"GET / HTTP/1.1\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKS = [b"6\r\nabcdef\r\n", b"4;x=1\r\nghij\r\n", b"0\r\n\r\n"]
ANSWER = HEAD + b"".join(CHUNKS)


@dataclass
class Target:
    """A server that answers each request at once, and what it saw of each connection."""

    answer: bytes = ANSWER
    received: list[bytearray] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers when the whole request is there, and again for the next one."""
        seen = bytearray()
        self.received.append(seen)
        end = "eof"
        try:
            while data := await reader.read(65536):
                seen += data
                async with self.changed:
                    self.changed.notify_all()
                if seen.endswith(b"\r\n\r\n"):
                    writer.write(self.answer)
                    await writer.drain()
        except ConnectionError:
            end = "reset"
        writer.close()
        self.ends.append(end)
        async with self.changed:
            self.changed.notify_all()

    async def ended(self, count: int = 1) -> list[str]:
        """Returns how connections ended, once so many have."""
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.ends) >= count)
        return self.ends


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
async def proxy(target: Target) -> AsyncIterator[FaultProxy]:
    server = await asyncio.start_server(target.serve, "127.0.0.1", 0)
    async with server, FaultProxy(*server.sockets[0].getsockname()) as proxy:
        yield proxy
    server.close()


async def ask(proxy: FaultProxy, request: bytes = REQUEST) -> tuple[bytes, str]:
    """Sends a request on a connection of its own; returns what came, and how it ended."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(request)
            await writer.drain()
        return await read_to_end(reader)
    finally:
        writer.close()


async def read_to_end(reader: asyncio.StreamReader) -> tuple[bytes, str]:
    got = bytearray()
    try:
        while data := await reader.read(65536):
            got += data
    except ConnectionResetError:
        return bytes(got), "reset"
    return bytes(got), "eof"


async def exactly(reader: asyncio.StreamReader, expected: bytes) -> None:
    """Reads these bytes and no more."""
    assert await reader.readexactly(len(expected)) == expected


async def test_without_a_fault_bytes_and_half_closes_pass_unchanged(
    proxy: FaultProxy, target: Target
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    for _ in range(2):
        writer.write(REQUEST)
        await exactly(reader, ANSWER)
    writer.write_eof()
    assert await reader.read() == b""
    assert await target.ended() == ["eof"]
    writer.close()
    await proxy.wait_for(lambda: not proxy.open)
    (connection,) = proxy.connections
    assert (connection.request_bytes, connection.answer_bytes) == (2 * 18, 2 * len(ANSWER))
    assert connection.end is None
    assert target.received == [2 * REQUEST]


async def test_a_refusing_proxy_refuses_and_what_is_open_goes_on(proxy: FaultProxy) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    await proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(REQUEST)
    await exactly(reader, ANSWER)
    writer.close()
    await proxy.accept()
    again, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(REQUEST)
    await exactly(again, ANSWER)
    writer.close()


async def test_reset_at_accept_never_reaches_the_target(proxy: FaultProxy, target: Target) -> None:
    proxy.script(Fault(End.RESET))
    assert await ask(proxy) == (b"", "reset")
    assert target.received == []
    assert proxy.connections[0].end is End.RESET


async def test_accept_and_hang_keeps_the_connection_and_says_nothing(
    proxy: FaultProxy, target: Target
) -> None:
    proxy.script(Fault(End.SILENCE))
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(REQUEST)
    await proxy.wait_for(lambda: [c.end for c in proxy.connections] == [End.SILENCE])
    assert len(proxy.open) == 1
    writer.write_eof()  # what a client does that has waited long enough
    with pytest.raises(ConnectionResetError):
        await reader.read()
    await proxy.wait_for(lambda: not proxy.open)
    assert target.received == []


@pytest.mark.parametrize("num_bytes", [0, 5, len(REQUEST)])
async def test_reset_after_bytes_of_the_request(
    proxy: FaultProxy, target: Target, num_bytes: int
) -> None:
    """The target gets exactly these and an RST; the client no byte of an answer."""
    proxy.script(Fault(End.RESET, request_bytes=num_bytes))
    assert (await ask(proxy))[1] == "reset"
    assert await target.ended() == ["reset"]
    assert target.received == [REQUEST[:num_bytes]] or num_bytes == len(REQUEST)
    assert proxy.connections[0].request_bytes == num_bytes


@pytest.mark.parametrize("num_bytes", [0, 1, len(HEAD), len(HEAD) + 5])
@pytest.mark.parametrize(("end", "seen"), [(End.RESET, "reset"), (End.CLOSE, "eof")])
async def test_an_end_after_bytes_of_the_answer(
    proxy: FaultProxy, target: Target, end: End, seen: str, num_bytes: int
) -> None:
    """The client may lose to an RST what it had not read; it never gets more."""
    proxy.script(Fault(end, answer_bytes=num_bytes))
    got, how = await ask(proxy)
    assert how == seen
    assert ANSWER[:num_bytes].startswith(got)
    if end is End.CLOSE:
        assert got == ANSWER[:num_bytes]
    assert proxy.connections[0].answer_bytes == num_bytes
    assert len(await target.ended()) == 1
    assert target.received == [REQUEST]


async def test_silence_in_the_middle_holds_both_sides(proxy: FaultProxy, target: Target) -> None:
    proxy.script(Fault(End.SILENCE, answer_bytes=30))
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(REQUEST)
    await exactly(reader, ANSWER[:30])
    await proxy.wait_for(lambda: proxy.connections[0].end is End.SILENCE)
    writer.write(b"more")
    await writer.drain()
    assert target.ends == []
    writer.transport.abort()
    assert await target.ended() == ["reset"]
    assert target.received == [REQUEST]


async def test_half_close_towards_the_client(proxy: FaultProxy, target: Target) -> None:
    """The client reads an end of file; what it sends still arrives."""
    proxy.script(Fault(End.HALF_CLOSE, answer_bytes=len(HEAD)))
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(REQUEST)
    assert await reader.read() == HEAD
    writer.write(b"bye")
    writer.write_eof()
    assert await target.ended() == ["eof"]
    assert target.received == [REQUEST + b"bye"]
    writer.close()


async def test_half_close_towards_the_target(proxy: FaultProxy, target: Target) -> None:
    """The target reads an end of file behind the request; its answer still arrives."""
    proxy.script(Fault(End.HALF_CLOSE, request_bytes=len(REQUEST)))
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(REQUEST)
    assert await reader.read() == ANSWER
    assert await target.ended() == ["eof"]
    writer.close()


@pytest.mark.parametrize(
    ("after", "expected"),
    [(None, HEAD + b"6\r\nabcd"), (len(HEAD) + 4, HEAD + CHUNKS[0] + b"4;x=1\r\nghi")],
)
async def test_cut_in_a_chunk(proxy: FaultProxy, after: int | None, expected: bytes) -> None:
    """The size of a chunk was promised, and only some of it comes."""
    proxy.script(Fault(End.CLOSE, answer_bytes=after, in_chunk=True))
    assert await ask(proxy) == (expected, "eof")


async def test_junk_in_place_of_the_size_of_a_chunk(proxy: FaultProxy) -> None:
    """Only one; all else is as it was, and the connection is not ended."""
    proxy.script(Fault(junk_chunk=True, answer_bytes=len(HEAD) + 1))
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(REQUEST)
    await exactly(reader, HEAD + CHUNKS[0] + b"-zz\r\nghij\r\n" + CHUNKS[2])
    writer.write(REQUEST)
    await exactly(reader, ANSWER)
    writer.close()


async def test_a_kept_alive_connection_is_given_up_when_it_is_used_again(
    proxy: FaultProxy, target: Target
) -> None:
    proxy.script(Fault(End.RESET, reused=True))
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(REQUEST)
    await exactly(reader, ANSWER)
    assert proxy.connections[0].end is None
    writer.write(REQUEST)
    assert await read_to_end(reader) == (b"", "reset")
    writer.close()
    assert await target.ended() == ["reset"]
    assert target.received == [REQUEST], "the second one never came through"


async def test_cut_resets_what_is_open_and_no_more(proxy: FaultProxy, target: Target) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(REQUEST)
    await exactly(reader, ANSWER)
    assert proxy.cut() == 1
    assert await read_to_end(reader) == (b"", "reset")
    await proxy.wait_for(lambda: not proxy.open)
    assert proxy.cut() == 0
    writer.close()
    again, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(REQUEST)
    await exactly(again, ANSWER)
    writer.close()
    assert await target.ended(2) == ["reset", "eof"]


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (Fault(End.CLOSE, answer_bytes=30), (ANSWER[:30], "eof")),
        (Fault(End.CLOSE, in_chunk=True), (HEAD + b"6\r\nabcd", "eof")),
        (Fault(End.RESET), (b"", "reset")),
    ],
)
async def test_an_open_connection_gets_a_fault_that_counts_from_then(
    proxy: FaultProxy, fault: Fault, seen: tuple[bytes, str]
) -> None:
    """And is freed of it by one that is none; later connections are not meant."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(REQUEST)
    await exactly(reader, ANSWER)
    proxy.afflict(Fault(End.RESET, request_bytes=0))
    proxy.afflict(Fault())
    writer.write(REQUEST)
    await exactly(reader, ANSWER)
    assert proxy.afflict(fault) == 1
    writer.write(REQUEST)
    assert await read_to_end(reader) == seen
    writer.close()
    again, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(REQUEST)
    await exactly(again, ANSWER)
    writer.close()


async def test_bytes_of_the_request_count_from_then_too(proxy: FaultProxy, target: Target) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(REQUEST)
    await exactly(reader, ANSWER)
    proxy.afflict(Fault(End.CLOSE, request_bytes=5))
    writer.write(REQUEST)
    assert await read_to_end(reader) == (b"", "eof")
    await target.ended()
    assert target.received == [REQUEST + REQUEST[:5]]
    writer.close()


async def test_what_is_no_http_passes_unchanged(proxy: FaultProxy, target: Target) -> None:
    target.answer = bytes(range(256)) * 1024
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(REQUEST)
    await exactly(reader, target.answer)
    writer.close()


async def test_frozen_nothing_passes_and_thawed_all_of_it_does(
    proxy: FaultProxy, target: Target
) -> None:
    proxy.freeze()
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(REQUEST)
    await writer.drain()
    await proxy.wait_for(lambda: len(proxy.connections) == 1)
    past, direct = await asyncio.open_connection(*proxy.target)
    for _ in range(10):  # what goes past the proxy shows that there was time enough
        direct.write(REQUEST)
        await exactly(past, ANSWER)
    direct.close()
    assert proxy.connections[0].request_bytes == 0
    proxy.thaw()
    await exactly(reader, ANSWER)
    assert REQUEST in target.received
    writer.close()


async def test_delay_and_speed(target: Target) -> None:
    """Each piece waits, and slow pieces are small: 100 bytes at 1000 a second take 0.1 s."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    server = await asyncio.start_server(target.serve, "127.0.0.1", 0)
    async with server, FaultProxy(*server.sockets[0].getsockname(), sleep=sleep) as proxy:
        proxy.fault = Fault(delay_s=0.25)
        again, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(REQUEST)
        await exactly(again, ANSWER)
        assert set(waits) == {0.25}
        writer.close()
        waits.clear()
        proxy.fault = Fault(bytes_per_s=1000)
        target.answer = HEAD + b"%x\r\n" % 200 + 200 * b"x" + b"\r\n0\r\n\r\n"
        slow, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(REQUEST)
        await exactly(slow, target.answer)
        assert sum(waits) == pytest.approx(len(target.answer) / 1000)
        assert max(waits) <= 1 / 20
        writer.close()
    server.close()


async def test_a_target_that_is_not_there_is_a_reset(unused_tcp_port: int) -> None:
    async with FaultProxy("127.0.0.1", unused_tcp_port) as proxy:
        assert await ask(proxy) == (b"", "reset")


async def test_closing_the_proxy_resets_what_is_open(target: Target) -> None:
    server = await asyncio.start_server(target.serve, "127.0.0.1", 0)
    async with server:
        async with FaultProxy(*server.sockets[0].getsockname()) as proxy:
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(REQUEST)
            await exactly(reader, ANSWER)
        assert await read_to_end(reader) == (b"", "reset")
        writer.close()
        assert await target.ended() == ["reset"]
        assert proxy.open == []
    server.close()


@pytest.mark.parametrize(
    "fault",
    [
        {"answer_bytes": 5},
        {"request_bytes": 5},
        {"in_chunk": True},
        {"reused": True},
        {"end": End.HALF_CLOSE},
        {"end": End.RESET, "answer_bytes": -1},
        {"end": End.RESET, "junk_chunk": True},
        {"bytes_per_s": 0},
    ],
)
def test_a_fault_without_a_meaning_is_refused(fault: dict[str, object]) -> None:
    with pytest.raises(AssertionError):
        Fault(**fault)  # type: ignore[arg-type]
