"""One attempt at one replica: send the request, stream the answer, say what went wrong.

Every failure of the replica leaves here as one of three errors; nothing of the HTTP library does.
Whether to try another replica is not decided here (dispatch does), and the client's side of the
connection is not touched here either, so a client that leaves can never look like a replica that
failed.

Leaving the context of an attempt before the end of its answer closes the connection at once,
which is how the replica learns that nobody waits any more.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final, Self, TypeAlias

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from kvway_core.errors import (
    ConnectFailed,
    ProtocolError,
    ReplicaError,
    StreamBroken,
)

POOL_IDLE_S: Final = 10.0
"""Idle connections are dropped after this; every server's keep-alive must be longer."""

HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# What the client sends for the connection to the router, not for the replica behind it. Without
# accept-encoding an answer is never compressed, so its usage can be read.
_NOT_FORWARDED: Final = frozenset({"host", "content-length", "accept-encoding", "expect"})
_LARGE_BYTES: Final = 1024 * 1024
"""A longer body is sent in parts: in one it would block the loop, as the HTTP library warns."""
_INTERNAL_PREFIX: Final = "x-kvway-"

# What the HTTP library raises while it talks to a replica; which of that is a lost connection.
_FAULTS: Final = (aiohttp.ClientError, ConnectionError)
_BROKEN: Final = (
    aiohttp.ClientPayloadError,
    aiohttp.ServerDisconnectedError,
    aiohttp.ClientOSError,
    ConnectionError,
)

_Headers: TypeAlias = CIMultiDict[str] | CIMultiDictProxy[str]


def request_headers(received: _Headers, *, request_id: str) -> CIMultiDict[str]:
    """Returns the headers for the replica: the client's, less what is not the replica's.

    Dropped are hop-by-hop headers (also those that ``Connection`` names), ``Host``,
    ``Content-Length``, ``Accept-Encoding``, ``Expect`` and everything named ``x-kvway-...``, also
    with underscores in place of hyphens. The client's ``x-request-id`` is kept; without one the
    router's own id is sent.
    """
    headers = end_to_end(received)
    for name in {name for name in headers if _is_not_for_replica(_plain(name))}:
        headers.popall(name, None)
    headers.setdefault("X-Request-Id", request_id)
    return headers


def _is_not_for_replica(name: str) -> bool:
    return name in _NOT_FORWARDED or name.startswith(_INTERNAL_PREFIX)


def end_to_end(headers: _Headers) -> CIMultiDict[str]:
    """Returns headers without those of the connection, and without those that these name."""
    dropped = set(HOP_BY_HOP)
    for value in headers.getall("connection", ()):
        dropped.update(name.strip().lower() for name in value.split(","))
    return CIMultiDict((k, v) for k, v in headers.items() if _plain(k) not in dropped)


def _plain(name: str) -> str:
    """Returns a header's name as servers read it that take an underscore for a hyphen."""
    return name.lower().replace("_", "-")


@dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    """The head of a replica's answer, and its body as it comes.

    Attributes:
        status: 200 to 599.
        headers: End-to-end headers, unchanged.
    """

    status: int
    headers: CIMultiDict[str]
    _response: aiohttp.ClientResponse

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return self._response.content_type == "text/event-stream"

    async def read_chunk(self) -> bytes:
        """Returns the next bytes of the body as they arrive, none at its end.

        Nothing is read ahead of a slow consumer; a call that is cancelled loses nothing.

        Raises:
            StreamBroken: The connection ended before the body did.
            ProtocolError: The body's framing cannot be understood.
        """
        try:
            return await self._response.content.readany()
        except _FAULTS as exc:
            raise _meaning(exc) from exc

    async def read(self, *, limit_bytes: int) -> bytes:
        """Returns the whole body.

        Raises:
            ProtocolError: It is longer than `limit_bytes`, or as for `read_chunk`.
            StreamBroken: As for `read_chunk`.
        """
        body = bytearray()
        while chunk := await self.read_chunk():
            body += chunk
            if len(body) > limit_bytes:
                raise ProtocolError(f"The replica's answer is longer than {limit_bytes} bytes.")
        return bytes(body)


class ReplicaClient:
    """The router's HTTP client: one pool of connections, shared by all attempts.

    Nothing in it queues: the number of connections is bounded by the requests that the router
    admits, never by the pool.
    """

    def __init__(self, *, connect_timeout_s: float) -> None:
        """Sets the one limit that is kept here.

        Args:
            connect_timeout_s: A connection takes at most this long. How long a replica may be
                silent is for its caller to say, who knows what it is waiting for.
        """
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        self._pooled: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Opens the pool."""
        self._pooled = self._session(aiohttp.TCPConnector(limit=0, keepalive_timeout=POOL_IDLE_S))
        self._fresh = self._session(aiohttp.TCPConnector(limit=0, force_close=True))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes every connection."""
        for session in (self._pooled, self._fresh):
            if session is not None:
                await session.close()

    def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            trace_configs=[_note_reuse()],
        )

    @asynccontextmanager
    async def attempt(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes,
        method: str = "POST",
        may_be_repeated: bool = True,
    ) -> AsyncIterator[ReplicaAnswer]:
        """Sends a request and gives the answer once its head is there.

        A pooled connection that the replica had already closed costs nothing but a new one: when a
        reused connection breaks before the first byte of an answer, the request is sent once more.

        Args:
            url: `http://host:port` and what follows, which is sent as it is.
            headers: Of the request.
            body: Of the request.
            method: Of the request.
            may_be_repeated: Whether the replica may get it twice. What may not is sent over a
                connection of its own.

        Raises:
            ConnectFailed: No connection; nothing was sent.
            StreamBroken: The connection ended without an answer.
            ProtocolError: The answer's head cannot be understood.
        """
        sessions = (self._pooled, self._fresh) if may_be_repeated else (self._fresh,)
        response = await self._send(sessions, method, url, headers=headers, body=body)
        try:
            if not 200 <= response.status <= 599:
                raise ProtocolError(f"The replica answered with status {response.status}.")
            yield ReplicaAnswer(response.status, end_to_end(response.headers), response)
        finally:
            response.close()  # gives a connection back only when its answer was read to the end

    async def _send(
        self,
        sessions: Sequence[aiohttp.ClientSession | None],
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes,
    ) -> aiohttp.ClientResponse:
        trace = SimpleNamespace(reused=False)
        for session in sessions:
            if session is None:
                raise RuntimeError("the client is not open")
            try:
                return await session.request(
                    method,
                    URL(url, encoded=True),
                    headers=headers,
                    # A new one each time: sending closes it.
                    data=io.BytesIO(body) if len(body) > _LARGE_BYTES else body or None,
                    allow_redirects=False,
                    trace_request_ctx=trace,
                )
            except _FAULTS as exc:
                error = _meaning(exc)
                was_stale = trace.reused and isinstance(error, StreamBroken)
                if session is self._fresh or not was_stale:
                    raise error from exc
        raise AssertionError("a fresh connection either answers or raises")


def _note_reuse() -> aiohttp.TraceConfig:
    async def note(
        _session: aiohttp.ClientSession,
        context: SimpleNamespace,
        _params: aiohttp.TraceConnectionReuseconnParams,
    ) -> None:
        context.trace_request_ctx.reused = True

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(note)
    return config


def _meaning(exc: Exception) -> ReplicaError:
    """Returns the error that one of `_FAULTS` means."""
    if isinstance(exc, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return ConnectFailed("No connection to the replica.")
    if isinstance(exc, _BROKEN):
        return StreamBroken("The replica closed the connection before its answer ended.")
    return ProtocolError("The replica's answer is not valid HTTP.")
