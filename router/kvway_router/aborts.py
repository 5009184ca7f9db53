"""Tells an engine that nobody waits for an answer any more, where a closed connection does not.

kvway workers and vLLM notice that the connection was closed. SGLang may generate on for nobody; it
ends a request that it is told the `rid` of, at ``POST /abort_request``. It compares ids by their
beginning, so the id is the router's own, of a fixed length and new for each attempt; it is put
into the body, the one field that the router adds there. A request that brings its own `rid`, or
asks for several answers, keeps its body as it is and is left to the closed connection.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Self

import aiohttp
import msgspec
import structlog

from kvway_core.errors import ConnectFailed, ReplicaFailed, ReplicaRejected

ABORT_PATH: Final = "/abort_request"
TIMEOUT_S: Final = 5.0
MAX_OPEN: Final = 256
"""Aborts on their way at a time; beyond, a closed connection has to do."""

_log = structlog.get_logger(__name__)


class _Fields(msgspec.Struct):
    rid: msgspec.Raw = msgspec.Raw()
    n: int | None = None


_decode = msgspec.json.Decoder(_Fields).decode


def with_rid(body: bytes, rid: str) -> bytes | None:
    """Returns the body of a request with an id to abort it by; None if it is to stay as it is.

    Args:
        body: A JSON object with at least one field.
        rid: The id, without anything that JSON escapes.
    """
    fields = _decode(body)
    if bytes(fields.rid) or (fields.n or 1) > 1:
        return None
    begin = body.index(b"{") + 1
    return b'%b"rid":"%b",%b' % (body[:begin], rid.encode(), body[begin:])


class Aborts:
    """Sends aborts and waits for none of them. Open it as an async context manager.

    Attributes:
        num_sent: Aborts that were sent.
        num_failed: Those that were not answered well; the engine may be at work for nobody.
    """

    def __init__(self) -> None:
        """Nothing is on its way."""
        self._session: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_sent = 0
        self.num_failed = 0

    async def __aenter__(self) -> Self:
        """Opens the session."""
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends what is on its way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    @contextmanager
    def unless_done(
        self, url: str, body: bytes, headers: Mapping[str, str], *, by_rid: bool
    ) -> Iterator[bytes]:
        """Gives the body to send, and aborts the request if the context is left by an exception.

        Args:
            url: Of the replica.
            body: Of the request.
            headers: Of the request; who may ask may also abort.
            by_rid: Whether the engine is one that wants to be told.
        """
        rid = secrets.token_hex(16)
        marked = with_rid(body, rid) if by_rid else None
        if marked is None:
            yield body
            return
        try:
            yield marked
        except (ConnectFailed, ReplicaRejected, ReplicaFailed):
            raise  # it has nothing to end
        except BaseException:
            self._send(url, rid, headers)
            raise

    def _send(self, url: str, rid: str, headers: Mapping[str, str]) -> None:
        if len(self._tasks) >= MAX_OPEN:
            self.num_failed += 1
            return
        allowed = {k: v for k, v in headers.items() if k.lower() == "authorization"}
        task = asyncio.create_task(self._post(url, rid, allowed), name=f"abort-{rid}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _post(self, url: str, rid: str, headers: Mapping[str, str]) -> None:
        if self._session is None:
            raise RuntimeError("aborts are not open")
        self.num_sent += 1
        try:
            async with self._session.post(
                url + ABORT_PATH, json={"rid": rid}, headers=headers, allow_redirects=False
            ) as answer:
                is_well = 200 <= answer.status < 300
        except (aiohttp.ClientError, OSError, ValueError):
            is_well = False  # TimeoutError is an OSError
        if not is_well:
            self.num_failed += 1
            _log.warning("abort_failed", replica=url)
