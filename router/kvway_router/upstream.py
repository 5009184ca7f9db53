"""Connections to replicas: opened, used by one request at a time, kept for a while, used again.

It is a client of its own because most of what relaying costs is spent here: a general HTTP client
takes several times as much for the same bytes (lab notes). The bounds are the caller's: nothing is
queued, and as many connections are open as requests are on their way, and at most `MAX_IDLE` per
replica that rest.

A connection is read no further ahead of its consumer than `HIGH_BYTES` and what one read brings,
`READ_BYTES` at most.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple, cast

from typing_extensions import override

from kvway_core.errors import ConnectFailed, ProtocolError, ReplicaError, StreamBroken
from kvway_router.answer_reader import AnswerHead, AnswerReader

IDLE_S: Final = 10.0
"""Idle connections are closed after this; every server's keep-alive must be longer."""
MAX_IDLE: Final = 1024
"""Connections to one replica that rest; more are closed instead."""
HIGH_BYTES: Final = 16 * 1024
READ_BYTES: Final = 32 * 1024
_READ_INTO: Final = memoryview(bytearray(READ_BYTES))
"""Where all connections read into: what is there is copied before anything else runs."""


class Origin(NamedTuple):
    """Where a connection goes."""

    host: str
    port: int
    is_tls: bool
    netloc: str


@lru_cache(maxsize=4096)
def origin_of(scheme: str, netloc: str) -> Origin:
    """Returns where `scheme://netloc` is, which must name a port."""
    host, _, port = netloc.rpartition(":")
    return Origin(host.strip("[]"), int(port), scheme == "https", netloc)


class Connection(asyncio.BufferedProtocol):
    """One connection to a replica, and the answer that it waits for or brings.

    Attributes:
        origin: Where it goes.
        idle_since_s: When its last answer had ended, by the loop's clock.
    """

    __slots__ = ("_error", "_is_paused", "_loop", "_reader", "_transport", "_waiter",
                 "idle_since_s", "origin")  # fmt: skip

    def __init__(self, origin: Origin, loop: asyncio.AbstractEventLoop) -> None:
        """It is not open."""
        self.origin = origin
        self.idle_since_s = 0.0
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._reader: AnswerReader | None = None
        self._error: ReplicaError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_paused = False

    # -- what its user does -----------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def was_silent(self) -> bool:
        """Whether not a byte came of the answer that was asked for last."""
        return self._reader is None or self._reader.is_silent

    @property
    def may_go_on(self) -> bool:
        """Whether request and answer have ended and another request may follow."""
        reader, transport = self._reader, self._transport
        if reader is None or transport is None or transport.is_closing():
            return False
        return reader.has_ended and reader.may_go_on and not transport.get_write_buffer_size()

    async def ask(self, head: bytes, body: bytes, *, has_body: bool) -> AnswerHead:
        """Sends a request and returns the head of its answer.

        When it raises, or is cancelled, the connection is closed.

        Raises:
            StreamBroken: The connection ended without one.
            ProtocolError: It cannot be understood.
        """
        reader = self._reader = AnswerReader(has_body=has_body)
        if self._transport is None:
            raise StreamBroken("The replica closed the connection.")
        self._transport.writelines((head, body) if body else (head,))
        try:
            while reader.head is None:
                await self._wait()
        except BaseException:
            self.close()
            raise
        return reader.head

    async def read(self) -> bytes:
        """Returns the next bytes of the body as they arrive, none at its end.

        A call that is cancelled loses nothing.

        Raises:
            StreamBroken: The connection ended before the body did.
            ProtocolError: The body's framing cannot be understood.
        """
        reader = self._reader
        if reader is None:
            raise RuntimeError("nothing was asked")
        while not reader.num_waiting:
            if reader.has_ended:
                return b""
            await self._wait()
        data = reader.take()
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def close(self) -> None:
        """Closes it at once; what was not sent is not sent any more."""
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        """Returns when something has come."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # -- what happens to it -----------------------------------------------------------------------

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast("asyncio.Transport", transport)

    @override
    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns where to read into."""
        return _READ_INTO

    @override
    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have come: of the answer, or such as nobody asked for."""
        data = bytes(_READ_INTO[:nbytes])
        reader = self._reader
        if reader is None or reader.has_ended:
            self.close()
            return
        try:
            reader.feed(data)
        except ProtocolError as exc:
            self._fail(exc)
            self.close()
            return
        if reader.num_waiting > HIGH_BYTES and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended, or is broken."""
        self._transport = None
        if self._reader is None:
            return
        try:
            self._reader.feed_end(is_clean=exc is None)
        except StreamBroken as error:
            self._fail(error)
        else:
            self._wake()

    def _fail(self, error: ReplicaError) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Pool:
    """All connections that rest. Close it when they are not needed any more.

    Args:
        connect_timeout_s: A connection takes at most this long.
    """

    def __init__(self, *, connect_timeout_s: float) -> None:
        """Nothing is open."""
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[Origin, deque[Connection]] = {}
        self._tls: ssl.SSLContext | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def close(self) -> None:
        """Closes all that rest; those in use are closed when they are given back."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for line in self._idle.values():
            for connection in line:
                connection.close()
        self._idle.clear()

    def take(self, origin: Origin) -> Connection | None:
        """Returns a connection that rests, the one that was used last; None if there is none."""
        line = self._idle.get(origin)
        while line:
            connection = line.pop()
            if connection.is_open:
                return connection
        return None

    async def connect(self, origin: Origin) -> Connection:
        """Opens a connection.

        Raises:
            ConnectFailed: It takes too long, or nobody is there.
        """
        loop = asyncio.get_running_loop()
        if origin.is_tls and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(origin, loop),
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.is_tls else None,
                )
        except (OSError, UnicodeError) as exc:  # TimeoutError is an OSError
            raise ConnectFailed("No connection to the replica.") from exc
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keeps a connection whose answer has ended, and closes any other."""
        line = self._idle.setdefault(connection.origin, deque())
        if not connection.may_go_on or self._is_closed or len(line) >= MAX_IDLE:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        line.append(connection)
        if self._timer is None:
            self._timer = loop.call_later(IDLE_S, self._sweep)

    def _sweep(self) -> None:
        """Closes those that have rested for long, the oldest of each replica first."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() - IDLE_S
        for origin, line in tuple(self._idle.items()):
            while line and (line[0].idle_since_s <= until_s or not line[0].is_open):
                line.popleft().close()
            if not line:
                del self._idle[origin]
        oldest_s = min((line[0].idle_since_s for line in self._idle.values()), default=None)
        self._timer = None
        if oldest_s is not None:
            self._timer = loop.call_at(oldest_s + IDLE_S, self._sweep)


def request_head(
    method: str, target: str, origin: Origin, headers: Mapping[str, str], *, length: int | None
) -> bytes:
    """Returns the head of a request.

    Args:
        method: Of the request.
        target: Path and query, as they are sent.
        origin: Where it goes.
        headers: Without those of the connection, the host and the length.
        length: Bytes of the body; None if there is none.

    Raises:
        ValueError: A line end is in one of them.
    """
    lines = [f"{method} {target} HTTP/1.1", f"Host: {origin.netloc}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    lines += ("", "")
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1:
        raise ValueError("a line end in the head of a request")
    return text.encode("utf-8", "surrogateescape")
