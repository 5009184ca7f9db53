"""The open-loop client: times count from when a request was due; what is not whole is said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from loadtests.load_wire import Answer, Connection, post_bytes
from loadtests.open_loop import OpenLoop, Shot, evenly, quantile

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
STREAM = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"9\r\ndata: 1\n\n\r\n5\r\ndata:\r\n5\r\n 22\n\n\r\n0\r\n\r\n"
)
Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(handle: Handle) -> AsyncIterator[str]:
    tasks: list[asyncio.Task[None]] = []

    async def handled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        try:
            await handle(reader, writer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # the client has left, or the test is over
        finally:
            writer.close()

    listening = await asyncio.start_server(handled, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    return await reader.readexactly(length)


def saying(*pieces: bytes) -> Handle:
    """Answers every request with the same bytes, each piece for itself."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)

    return handle


async def ask(url: str) -> Answer:
    connection = await Connection.connect(url)
    answer = await connection.ask(post_bytes(url, b"{}"))
    connection.close()
    return answer


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_an_answer_is_the_same_however_its_bytes_come(size: int) -> None:
    async with server(
        saying(*(STREAM[at : at + size] for at in range(0, len(STREAM), size)))
    ) as url:
        answer = await ask(url)
    assert answer.is_good
    assert (answer.num_events, answer.num_bytes) == (2, 19)


@pytest.mark.parametrize("data", [STREAM[:-5], WHOLE[:-1], WHOLE[:20]])
async def test_an_answer_that_breaks_off_is_not_whole(data: bytes) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(data)

    async with server(handle) as url:
        answer = await ask(url)
        (fate,) = await OpenLoop(url).run([Shot(0.0, b"{}")])
    assert not answer.is_complete
    assert not fate.answer.is_complete
    assert fate.problem


async def test_requests_go_out_while_earlier_ones_wait() -> None:
    arrived: list[bytes] = []
    all_here = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.append(await read_request(reader))
        if len(arrived) == 3:
            all_here.set()
        await all_here.wait()  # nobody is answered before the last one was sent
        writer.write(WHOLE)

    shots = [Shot(0.02, b"c"), Shot(0.0, b"a"), Shot(0.01, b"b")]
    async with server(handle) as url:
        fates = await OpenLoop(url).run(shots)
    assert sorted(arrived) == [b"a", b"b", b"c"]
    assert [fate.shot.body for fate in fates] == [b"a", b"b", b"c"]
    assert all(fate.answer.is_good and fate.was_sent for fate in fates)
    # The first one waited for the last: that is part of its time.
    assert fates[0].ended_s >= 0.02
    assert fates[0].ended_s > fates[2].ended_s


async def test_what_is_not_sent_is_said() -> None:
    release = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await release.wait()
        writer.write(WHOLE)

    async with server(handle) as url:
        running = asyncio.create_task(OpenLoop(url, max_open=2).run(evenly(1000.0, 0.005, b"{}")))
        asyncio.get_running_loop().call_later(0.05, release.set)
        fates = await running
    assert [fate.was_sent for fate in fates] == [True, True, False, False, False]
    assert fates[2].problem == "2 requests were open"


async def test_who_does_not_answer_is_given_up() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)  # until the client leaves

    async with server(handle) as url:
        (fate,) = await OpenLoop(url, deadline_s=0.02).run([Shot(0.0, b"{}")])
    assert "0.02" in fate.problem
    assert not fate.answer.is_complete


async def test_nobody_to_connect_to_is_a_problem_and_no_crash() -> None:
    async with server(saying()) as url:
        pass
    (fate,) = await OpenLoop(url).run([Shot(0.0, b"{}")])
    assert fate.problem.startswith("no connection")


async def test_connections_are_used_again_and_replaced_when_they_were_closed() -> None:
    num_connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        for _ in range(2):  # and closes without a word
            await read_request(reader)
            writer.write(WHOLE)
        await reader.readuntil(b"\r\n\r\n")

    async with server(handle) as url:
        fates = await OpenLoop(url).run([Shot(n * 0.02, b"{}") for n in range(4)])
    assert all(fate.answer.is_good for fate in fates)
    assert num_connections == 2


def test_quantiles_are_values_that_were_measured() -> None:
    assert quantile([], 0.5) == 0.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0
