"""A client's connection that costs little, for one that shares the cores with its server.

One request at a time on a connection that is kept. Times are those of `time.perf_counter`, taken
when bytes arrive. Framing is checked: an answer that ends otherwise than its head says is not
complete.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final, Self, cast
from urllib.parse import urlsplit

from typing_extensions import override

MAX_KEPT_BYTES: Final = 4096
"""Of a body that is not 200: what it says is kept."""


@dataclass(slots=True)
class Answer:
    """An answer as it comes.

    Attributes:
        status: 0 while there is none.
        headers: Names in lower case.
        first_s: When the first bytes of the body came; None before that.
        ended_s: When the answer, or the connection, had ended; None before that.
        num_bytes: Of the body.
        num_events: Events of a stream, its last one included.
        error: The body of an answer that is not 200, as far as it is kept.
        is_complete: Whether it ended as its framing says.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    first_s: float | None = None
    ended_s: float | None = None
    num_bytes: int = 0
    num_events: int = 0
    error: bytes = b""
    is_complete: bool = False

    @property
    def is_good(self) -> bool:
        """Whether it is a whole answer with status 200."""
        return self.status == 200 and self.is_complete


class Connection(asyncio.Protocol):
    """One connection. Open it with `connect`.

    Attributes:
        takes_bytes: Of a body; once so many have come it reads no more. None for all.
    """

    def __init__(self) -> None:
        """It is not connected."""
        self.takes_bytes: int | None = None
        self._transport: asyncio.Transport | None = None
        self._answer = Answer()
        self._ended: asyncio.Future[None] | None = None
        self._buffer = b""
        self._left: int | None = None
        self._is_chunked = False
        self._last = b""

    @classmethod
    async def connect(cls, url: str) -> Self:
        """Connects; raises OSError if nobody listens."""
        parts = urlsplit(url)
        _, made = await asyncio.get_running_loop().create_connection(
            cls, str(parts.hostname), int(parts.port or 80)
        )
        return made

    @property
    def is_usable(self) -> bool:
        """Whether another request may be sent."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and self._ended is None

    async def ask(self, request: bytes, answer: Answer | None = None) -> Answer:
        """Sends a request and returns its answer once that, or the connection, has ended.

        To be cancelled closes the connection.

        Args:
            request: Head and body.
            answer: Filled in as it comes.
        """
        if not self.is_usable or self._transport is None:
            raise ConnectionError("the connection is closed, or busy")
        self._answer = answer or Answer()
        self._buffer, self._last, self._left, self._is_chunked = b"", b"", None, False
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._ended = None
        return self._answer

    def close(self) -> None:
        """Closes it at once."""
        if self._transport is not None:
            self._transport.abort()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end(is_complete=False)

    @override
    def data_received(self, data: bytes) -> None:
        if self._ended is None or self._ended.done():
            self.close()  # nothing was asked
            return
        if not self._answer.status:
            head, found, data = (self._buffer + data).partition(b"\r\n\r\n")
            if not found:
                self._buffer = head
                return
            self._buffer = b""
            self._read_head(head)
        if self._is_chunked:
            self._read_chunks(data)
        else:
            self._read_length(data)

    def _read_head(self, head: bytes) -> None:
        status_line, *lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        self._answer.headers = {name.lower(): value.strip() for name, _, value in pairs}
        self._answer.status = int(status_line[9:12])
        self._is_chunked = self._answer.headers.get("transfer-encoding", "").lower() == "chunked"
        self._left = 0 if self._is_chunked else int(self._answer.headers["content-length"])

    def _read_length(self, data: bytes) -> None:
        self._see(data)
        self._left = (self._left or 0) - len(data)
        if self._left <= 0:
            self._end(is_complete=self._left == 0)

    def _read_chunks(self, data: bytes) -> None:
        data, at = self._buffer + data, 0
        left = self._left or 0
        while True:
            if left:
                part = data[at : at + left]
                at += len(part)
                left -= len(part)
                # The chunk's own line end is counted in `left`, and is no part of the body.
                self._see(part[: len(part) - max(0, 2 - left)])
                if left:
                    break
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                break
            size = int(data[at:line_end], 16)
            if size == 0:
                if data.startswith(b"\r\n", line_end + 2):
                    self._end(is_complete=len(data) == line_end + 4)
                break
            at, left = line_end + 2, size + 2
        self._left, self._buffer = left, data[at:]

    def _see(self, body: bytes) -> None:
        """Notes bytes of the body."""
        if not body:
            return
        answer = self._answer
        if answer.first_s is None:
            answer.first_s = time.perf_counter()
        answer.num_bytes += len(body)
        if self.takes_bytes is not None and answer.num_bytes >= self.takes_bytes:
            self._stop_reading()
        answer.num_events += (self._last + body).count(b"\n\n")
        self._last = b"\n" if body.endswith(b"\n") and not body.endswith(b"\n\n") else b""
        if answer.status != 200 and len(answer.error) < MAX_KEPT_BYTES:
            answer.error += body

    def _stop_reading(self) -> None:
        if self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()

    def _end(self, *, is_complete: bool) -> None:
        if self._ended is None or self._ended.done():
            return
        self._answer.ended_s = time.perf_counter()
        self._answer.is_complete = is_complete
        if self._answer.headers.get("connection", "").lower() == "close":
            self.close()
        self._ended.set_result(None)


def post_bytes(url: str, body: bytes, *, path: str = "/v1/chat/completions") -> bytes:
    """Returns the bytes of a request with a JSON body."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
