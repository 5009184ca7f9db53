"""A TCP proxy that breaks connections the way networks and dying processes do.

Put it between two real programs and say what is to happen to the next connections; each goes
through untouched unless a fault says otherwise. It is for tests and load tests on loopback: its
ledger of connections is never emptied.

    async with FaultProxy("127.0.0.1", worker_port) as proxy:
        proxy.script(Fault(End.RESET, answer_bytes=200))
        ...                                           # one connection through `proxy.url`
        await proxy.wait_for(lambda: proxy.connections[0].end is End.RESET)

What a fault counts are bytes of one connection, whatever requests they belong to. A real refusal
is the listener's and not a connection's: `refuse`. What befalls a host at once, whatever goes over
it: `freeze`, `cut`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, Final, Self

from kvway_core.testing.faults import Connection, End, Fault
from kvway_core.testing.http_framing import Framing, Part

_PIECE_BYTES: Final = 64 * 1024
_NO_LINGER: Final = struct.pack("ii", 1, 0)
_JUNK_SIZE: Final = b"-zz\r\n"
_THROTTLED_PIECES_PER_S: Final = 20


class FaultProxy:
    """Passes TCP connections on to one target, or breaks them. Open it as a context manager.

    Args:
        host: The target's.
        port: The target's.
        listen: Address and port of its own, 0 for any free one.
        sleep: Waits for `Fault.delay_s` and `Fault.bytes_per_s`.

    Attributes:
        fault: Of each connection that no script is left for.
        connections: All that were accepted, in their order.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        listen: tuple[str, int] = ("127.0.0.1", 0),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Takes the target; nothing is opened yet, and nothing need listen there yet."""
        self.fault = Fault()
        self.connections: list[Connection] = []
        self.target = (host, port)
        self._listen = listen
        self.sleep = sleep
        self._scripted: deque[Fault] = deque()
        self._server: asyncio.Server | None = None
        self._relays: dict[asyncio.Task[None], _Relay] = {}
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> Self:
        """Starts to listen."""
        await self.accept()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stops listening and resets what is open."""
        await self.refuse()
        tasks = list(self._relays)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def address(self) -> str:
        """Where it listens: `host:port`."""
        return f"{self._listen[0]}:{self._listen[1]}"

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._listen[1]

    @property
    def url(self) -> str:
        """The same as a URL."""
        return f"http://{self.address}"

    @property
    def open(self) -> list[Connection]:
        """The connections that are not over."""
        return [connection for connection in self.connections if not connection.closed]

    def script(self, *faults: Fault) -> None:
        """Uses `faults` for the next connections, in order, before the default one."""
        self._scripted.extend(faults)

    async def accept(self) -> None:
        """Listens: at first, or again after `refuse`, at the same port."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, *self._listen)
            self._listen = self._server.sockets[0].getsockname()[:2]

    async def refuse(self) -> None:
        """Stops listening, so that new connections are refused; those that are open go on."""
        if self._server is not None:
            self._server.close()
            self._server = None
            await asyncio.sleep(0)  # the loop closes the socket

    def freeze(self) -> None:
        """Lets nothing pass any more, either way, also of new connections, until `thaw`."""
        self._thawed.clear()

    def thaw(self) -> None:
        """Lets everything pass again, what was held back first."""
        self._thawed.set()

    def cut(self, end: End = End.RESET) -> int:
        """Ends every open connection now; returns how many there were."""
        assert end is not End.HALF_CLOSE, "nobody is being sent to"
        return sum(relay.strike(end) for relay in list(self._relays.values()))

    def afflict(self, fault: Fault) -> int:
        """Gives every open connection this fault, its bytes counted from now; returns how many.

        `Fault()` frees them of what they had.
        """
        if fault.at_accept and fault.end is not None:
            return self.cut(fault.end)
        for connection in self.open:
            connection.fault = fault.later(connection.request_bytes, connection.answer_bytes)
        return len(self.open)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Returns once `condition` holds; it is looked at whenever the ledger changes."""
        async with self._changed:
            await self._changed.wait_for(condition)

    # -- one connection -------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a stream handler runs in a task"
        connection = Connection(self._scripted.popleft() if self._scripted else self.fault)
        self.connections.append(connection)
        relay = _Relay(self, connection, reader, writer)
        self._relays[task] = relay
        try:
            await relay.run()
        except asyncio.CancelledError:
            relay.reset()  # the proxy is closed
        finally:
            connection.closed = True
            del self._relays[task]
            await self.notify()

    async def notify(self) -> None:
        """Has those who wait for something look again."""
        async with self._changed:
            self._changed.notify_all()

    async def pass_on(self, writer: asyncio.StreamWriter, piece: bytes) -> None:
        """Writes, once nothing is frozen."""
        await self._thawed.wait()
        if piece:
            writer.write(piece)
            await writer.drain()


class _Relay:
    """Carries one connection through its fault."""

    def __init__(
        self,
        proxy: FaultProxy,
        connection: Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._connection = connection
        self._reader = reader
        self._client = writer
        self._writers = [writer]
        self._struck = asyncio.Event()

    def strike(self, end: End) -> bool:
        """Has the connection end like this, if nothing ended it before; says whether it does."""
        if self._struck.is_set():
            return False
        self._connection.end = end
        self._struck.set()
        return True

    def reset(self) -> None:
        """Closes both sides so that the kernel sends RST and not FIN."""
        for writer in self._writers:
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            writer.transport.abort()

    async def run(self) -> None:
        """Passes bytes on until both sides or a fault end it."""
        await self._proxy.notify()
        try:
            fault = self._connection.fault
            if fault.at_accept and fault.end is not None:
                self.strike(fault.end)
            else:
                await self._talk()
            await self._proxy.notify()
            await self._end()
        except OSError:
            self.reset()  # one side ended like this, so the other one does

    async def _talk(self) -> None:
        reader, target = await asyncio.open_connection(*self._proxy.target)
        self._writers.append(target)
        directions = asyncio.gather(self._pass_request(target), self._pass_answer(reader))
        struck = asyncio.create_task(self._struck.wait())
        try:
            both: set[asyncio.Future[Any]] = {directions, struck}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if directions.done():
                directions.result()
        finally:
            directions.cancel()
            struck.cancel()
            await asyncio.gather(directions, struck, return_exceptions=True)

    async def _pass_request(self, target: asyncio.StreamWriter) -> None:
        connection = self._connection
        while piece := await self._reader.read(_PIECE_BYTES):
            fault = connection.fault
            if fault.reused and connection.answer_bytes:
                await self._ending(target, self._reader)
                return
            left = _left(fault.request_bytes, connection.request_bytes, len(piece))
            await self._proxy.pass_on(target, piece[:left])
            connection.request_bytes += len(piece[:left])
            await self._proxy.notify()
            if left is not None:
                await self._ending(target, self._reader)
                return
        target.write_eof()

    async def _pass_answer(self, reader: asyncio.StreamReader) -> None:
        connection = self._connection
        async for piece, is_last in self._pieces(reader):
            fault = connection.fault
            if fault.delay_s:
                await self._proxy.sleep(fault.delay_s)
            if fault.bytes_per_s is not None:
                await self._proxy.sleep(len(piece) / fault.bytes_per_s)
            await self._proxy.pass_on(self._client, piece)
            connection.answer_bytes += len(piece)
            await self._proxy.notify()
            if is_last:
                await self._ending(self._client, reader)
                return
        self._client.write_eof()

    async def _pieces(self, reader: asyncio.StreamReader) -> AsyncIterator[tuple[bytes, bool]]:
        """Yields what the client is to get of the answer, and whether the end comes behind it."""
        connection, framing = self._connection, Framing()
        while data := await reader.read(_piece_bytes(connection.fault)):
            for part, piece in framing.split(data):
                fault, passed = connection.fault, connection.answer_bytes
                left = _left(fault.answer_bytes, passed, len(piece))
                is_past = passed >= (fault.answer_bytes or 0)
                if part is Part.SIZE and is_past and fault.junk_chunk:
                    connection.fault = replace(fault, junk_chunk=False, answer_bytes=None)
                    yield _JUNK_SIZE, False
                elif part is Part.DATA and is_past and fault.in_chunk:
                    yield piece[: len(piece) // 2], True
                elif left is not None and fault.end and not fault.in_chunk:
                    yield piece[:left], True
                else:
                    yield piece, False

    async def _ending(self, to: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        """Ends the connection as its fault says; a half-closed one goes on the other way."""
        end = self._connection.fault.end
        assert end is not None, "where there is a point there is an end"
        if end is not End.HALF_CLOSE:
            self.strike(end)
            await asyncio.Event().wait()  # until `_talk` cancels it
        self._connection.end = end
        to.write_eof()
        await self._proxy.notify()
        while await reader.read(_PIECE_BYTES):
            pass

    async def _end(self) -> None:
        end = self._connection.end
        if end is End.SILENCE:
            while await self._reader.read(_PIECE_BYTES):
                pass
        if end in {End.RESET, End.SILENCE}:
            self.reset()
        for writer in self._writers:
            writer.close()


def _left(limit: int | None, passed: int, length: int) -> int | None:
    """Returns how much of the next bytes passes before a limit is reached; None if it is not."""
    return None if limit is None or passed + length < limit else limit - passed


def _piece_bytes(fault: Fault) -> int:
    """Returns how much is read at once: little of what is to pass slowly."""
    if fault.bytes_per_s is None:
        return _PIECE_BYTES
    return max(1, min(_PIECE_BYTES, int(fault.bytes_per_s / _THROTTLED_PIECES_PER_S)))
