"""An HTTP/1.1 client that shows how an answer ended: every byte that came, and what was missing.

HTTP libraries throw away what they had read when an answer breaks. Here the last event before a
break is seen, and whether the body ended as its framing says. One connection for each request.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from multidict import CIMultiDict


class NoAnswer(Exception):
    """The connection ended before there was a head, or there was none."""


@dataclass(slots=True)
class RawAnswer:
    """An answer as it comes.

    Attributes:
        status: Of its head.
        headers: Of its head.
        is_complete: Whether the body has ended as its framing says.
    """

    status: int
    headers: CIMultiDict[str]
    _reader: asyncio.StreamReader
    is_complete: bool = False

    async def body(self) -> AsyncIterator[bytes]:
        """Yields what comes of the body, up to where it ends or breaks; raises for neither."""
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            async for data in self._chunks():
                yield data
            return
        left = int(self.headers.get("content-length", "0"))
        while left and (data := await _some(self._reader, left)):
            left -= len(data)
            yield data
        self.is_complete = left == 0

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size_line := await _line(self._reader):
            try:
                left = int(size_line, 16)
            except ValueError:
                return
            if left == 0:
                self.is_complete = await _line(self._reader) == b"\r\n"
                return
            while left and (data := await _some(self._reader, left)):
                left -= len(data)
                yield data
            if left or await _line(self._reader) != b"\r\n":
                return

    async def lines(self) -> AsyncIterator[bytes]:
        """Yields the whole lines of the body."""
        rest = b""
        async for data in self.body():
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                yield line

    async def read(self) -> bytes:
        """Returns what came of the body."""
        return b"".join([data async for data in self.body()])


@asynccontextmanager
async def post(
    url: str,
    body: object,
    *,
    headers: Mapping[str, str] | None = None,
    receive_bytes: int | None = None,
) -> AsyncIterator[RawAnswer]:
    """Posts JSON and gives the answer once its head is there; leaving closes the connection.

    Args:
        url: Whole.
        body: Becomes JSON.
        headers: More of them.
        receive_bytes: Of the kernel's buffer and of ours: few, for a client that reads slowly.

    Raises:
        NoAnswer: There is none.
    """
    parts = urlsplit(url)
    sock = socket.socket()
    sock.setblocking(False)
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    try:
        address = (parts.hostname, parts.port)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException as exc:
        sock.close()
        if isinstance(exc, OSError):
            raise NoAnswer(f"no connection: {exc}") from exc
        raise
    reader, writer = await asyncio.open_connection(sock=sock, limit=receive_bytes or 65536)
    try:
        payload = json.dumps(body).encode()
        fields = {
            "host": parts.netloc,
            "content-type": "application/json",
            "content-length": str(len(payload)),
            **(headers or {}),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        writer.write(f"POST {parts.path} HTTP/1.1\r\n{head}\r\n".encode() + payload)
        yield await _head(reader)
    finally:
        writer.transport.abort()


async def _head(reader: asyncio.StreamReader) -> RawAnswer:
    first = await _line(reader)
    if not first.startswith(b"HTTP/1.1 "):
        raise NoAnswer(f"the answer begins with {first[:40]!r}")
    headers = CIMultiDict[str]()
    while (line := await _line(reader)) != b"\r\n":
        name, colon, value = line.decode("latin-1").partition(":")
        if not colon:
            raise NoAnswer("the head of the answer has no end")
        headers.add(name, value.strip())
    return RawAnswer(int(first[9:12]), headers, reader)


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Returns the next line with its end, or what there is; nothing when the connection broke."""
    try:
        return await reader.readline()
    except (ConnectionError, ValueError):
        return b""


async def _some(reader: asyncio.StreamReader, limit: int) -> bytes:
    """Returns the next bytes; nothing when there are none any more."""
    try:
        return await reader.read(limit)
    except ConnectionError:
        return b""
