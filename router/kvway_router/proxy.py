"""One attempt at one replica: send the request, stream the answer, say what went wrong.

Every failure of the replica leaves here as one of three errors; nothing of the HTTP library does.
Whether to try another replica is not decided here (dispatch does), and the client's side of the
connection is not touched here either, so a client that leaves can never look like a replica that
failed.

Leaving the context of an attempt before the end of its answer closes the connection at once,
which is how the replica learns that nobody waits any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Self, TypeAlias

from multidict import CIMultiDict, CIMultiDictProxy

from kvway_core.errors import ProtocolError, StreamBroken
from kvway_router.answer_reader import AnswerHead
from kvway_router.upstream import Connection, Pool, origin_of, request_head

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
_INTERNAL_PREFIX: Final = "x-kvway-"

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
    _connection: Connection

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        kind = self.headers.get("Content-Type", "").partition(";")[0]
        return kind.strip().lower() == "text/event-stream"

    async def read_chunk(self) -> bytes:
        """Returns the next bytes of the body as they arrive, none at its end.

        Nothing is read ahead of a slow consumer; a call that is cancelled loses nothing.

        Raises:
            StreamBroken: The connection ended before the body did.
            ProtocolError: The body's framing cannot be understood.
        """
        return await self._connection.read()

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
    """The router's way to replicas: one pool of connections, shared by all attempts.

    Nothing in it queues: the number of connections is bounded by the requests that the router
    admits, never by the pool. Use it as an async context manager.
    """

    def __init__(self, *, connect_timeout_s: float) -> None:
        """Sets the one limit that is kept here.

        Args:
            connect_timeout_s: A connection takes at most this long. How long a replica may be
                silent is for its caller to say, who knows what it is waiting for.
        """
        self._pool = Pool(connect_timeout_s=connect_timeout_s)

    async def __aenter__(self) -> Self:
        """Returns itself; connections are opened when they are needed."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes every connection that rests."""
        self._pool.close()
        await asyncio.sleep(0)  # they close in the next turn of the loop

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
            may_be_repeated: Whether the replica may get it twice. What may not is sent over a new
                connection.

        Raises:
            ConnectFailed: No connection; nothing was sent.
            StreamBroken: The connection ended without an answer.
            ProtocolError: The answer's head cannot be understood.
        """
        scheme, _, rest = url.partition("://")
        netloc, slash, target = rest.partition("/")
        origin = origin_of(scheme, netloc)
        length = len(body) if body or method == "POST" else None
        sent = request_head(method, slash + target, origin, headers, length=length)
        has_body = method != "HEAD"
        head: AnswerHead | None = None
        connection = self._pool.take(origin) if may_be_repeated else None
        if connection is not None:
            try:
                head = await connection.ask(sent, body, has_body=has_body)
            except StreamBroken:
                if not connection.was_silent:
                    raise
        if connection is None or head is None:
            connection = await self._pool.connect(origin)
            head = await connection.ask(sent, body, has_body=has_body)
        try:
            yield ReplicaAnswer(head.status, end_to_end(head.headers), connection)
        finally:
            self._pool.give_back(connection)  # or closed, if its answer was not read to the end
