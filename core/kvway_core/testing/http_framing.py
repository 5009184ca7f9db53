"""Finds the chunks in the bytes of HTTP answers, for whoever wants to break them."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Final

_MAX_HEAD_BYTES: Final = 64 * 1024
_END_OF_HEAD: Final = b"\r\n\r\n"
_END_OF_LINE: Final = b"\r\n"


class Part(Enum):
    """What some bytes of an answer are."""

    SIZE = "size"
    """The size line of a chunk, whole."""
    DATA = "data"
    """Bytes of a chunk, or the end of line behind it."""
    REST = "rest"
    """A head, or a body without chunks."""


class Framing:
    """Splits the bytes of HTTP/1.1 answers, one after the other, into their parts.

    It trusts the server that it listens to: no trailers, and no body that ends with the
    connection. What turns out to be no HTTP is one REST.
    """

    def __init__(self) -> None:
        """Starts before a head."""
        self._kept = b""
        self._until: bytes | None = _END_OF_HEAD
        self._left = 0
        self._is_chunked = False
        self._is_foreign = False

    def split(self, data: bytes) -> Iterator[tuple[Part, bytes]]:
        """Yields the parts of the next bytes; a size line that has not ended is kept back."""
        while data:
            if self._is_foreign:
                yield Part.REST, data
                return
            if self._until is None:
                taken, data = data[: self._left], data[self._left :]
                yield Part.DATA if self._is_chunked else Part.REST, taken
                self._body(len(taken))
                continue
            num_before, seen = len(self._kept), self._kept + data
            line, end, data = seen.partition(self._until)
            if not end:
                self._kept = seen
                self._is_foreign = len(seen) > _MAX_HEAD_BYTES
                if not self._is_chunked:
                    yield Part.REST, seen[num_before:]
                return
            self._kept = b""
            if self._is_chunked:
                self._size(line)
                yield Part.SIZE, line + end
            else:
                self._head(line)
                yield Part.REST, (line + end)[num_before:]

    def _head(self, head: bytes) -> None:
        lines = head.lower().split(_END_OF_LINE)
        self._is_chunked = b"transfer-encoding: chunked" in lines
        self._left = sum(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
        if self._is_chunked:
            self._until = _END_OF_LINE
        elif self._left:
            self._until = None

    def _size(self, line: bytes) -> None:
        size = int(line.partition(b";")[0], 16)
        self._left = size + len(_END_OF_LINE)
        self._until = None
        self._is_chunked = size > 0  # behind the last one come two bytes, then another answer

    def _body(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if not self._left:
            self._until = _END_OF_LINE if self._is_chunked else _END_OF_HEAD
