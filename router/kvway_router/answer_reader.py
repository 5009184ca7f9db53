"""An HTTP/1.1 answer from the bytes of a replica: its head, its body piece by piece, its end.

Strict where two readers could differ (RFC 9112, section 6): a length and a coding together, two
lengths, any coding but ``chunked``, line ends without a carriage return. What is refused here ends
the connection; nothing is guessed. Pure: it is fed, and never waits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from multidict import CIMultiDict

from kvway_core.errors import ProtocolError, StreamBroken

MAX_HEAD_BYTES: Final = 64 * 1024
"""Of all heads of one answer, the informational ones before it included."""
MAX_INTERIM: Final = 16
"""Informational answers (1xx) before the one that counts."""
MAX_LINE_BYTES: Final = 1024
"""Of a chunk's size with its extensions."""
MAX_TRAILER_BYTES: Final = 8 * 1024
_MAX_LENGTH_DIGITS: Final = 18

_BEGIN: Final = b"HTTP/1."
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([0-9]{3})(?: [^\r\n\0]*)?")
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CONTROL: Final = re.compile(rb"[\0\r\n]")
_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n\0]*)?\r\n")
_BODILESS: Final = frozenset({204, 304})
_NOT_HTTP: Final = "The replica's answer is not valid HTTP."


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What an answer begins with.

    Attributes:
        status: Three digits, not below 200.
        headers: All of them, as they were sent.
    """

    status: int
    headers: CIMultiDict[str]


class AnswerReader:
    """Reads one answer.

    Attributes:
        head: None until it is whole.
        num_waiting: Bytes of the body that were fed and not taken.
        has_ended: Whether the body has come to its end.
        may_go_on: Whether another request may follow on the connection, once it has ended.
        is_silent: Whether not a byte has come.

    Args:
        has_body: Whether the request was one whose answer may have a body; false for HEAD.
    """

    __slots__ = (
        "_after_chunk",
        "_buffer",
        "_has_body",
        "_left",
        "_num_head_bytes",
        "_num_interim",
        "_parts",
        "_step",
        "has_ended",
        "head",
        "is_silent",
        "may_go_on",
        "num_waiting",
    )

    def __init__(self, *, has_body: bool = True) -> None:
        """Nothing has come."""
        self.head: AnswerHead | None = None
        self.num_waiting = 0
        self.has_ended = False
        self.may_go_on = False
        self.is_silent = True
        self._has_body = has_body
        self._parts: list[bytes] = []
        self._buffer = b""
        self._num_head_bytes = 0
        self._num_interim = 0
        self._left = 0
        self._after_chunk = False
        self._step: Callable[[bytes], None] = self._read_head

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the connection.

        Raises:
            ProtocolError: They cannot be understood.
        """
        self.is_silent = False
        self._step(data)

    def feed_end(self, *, is_clean: bool = True) -> None:
        """The connection has ended, `is_clean` if the replica closed it.

        Raises:
            StreamBroken: The answer had not.
        """
        if is_clean and self._step == self._read_rest:
            self.has_ended = True
        if not self.has_ended:
            raise StreamBroken("The replica closed the connection before its answer ended.")

    def take(self) -> bytes:
        """Returns what has come of the body and was not taken yet; maybe nothing."""
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self.num_waiting = 0
        return data

    # -- head -------------------------------------------------------------------------------------

    def _read_head(self, data: bytes) -> None:
        before = self._buffer
        data = before + data if before else data
        if not data.startswith(_BEGIN) and not _BEGIN.startswith(data):
            raise ProtocolError(_NOT_HTTP)
        at = data.find(b"\r\n\r\n", max(0, len(before) - 3))
        size = at + 4 if at >= 0 else len(data)
        if self._num_head_bytes + size > MAX_HEAD_BYTES:
            raise ProtocolError(
                f"The head of the replica's answer has over {MAX_HEAD_BYTES} bytes."
            )
        if at < 0:
            self._buffer = data
            return
        self._buffer = b""
        self._num_head_bytes += size
        status_line, *lines = data[:at].split(b"\r\n")
        found = _STATUS_LINE.fullmatch(status_line)
        if found is None:
            raise ProtocolError(_NOT_HTTP)
        status = int(found[2])
        headers = CIMultiDict(map(_field, lines))
        if 100 <= status < 200 and status != 101 and self._num_interim < MAX_INTERIM:
            self._num_interim += 1
            self._read_head(data[size:])
            return
        if not 200 <= status <= 599:
            raise ProtocolError(f"The replica answered with status {status}.")
        self._frame(status, headers, is_old=found[1] == b"0")
        self.head = AnswerHead(status, headers)
        self._step(data[size:])

    def _frame(self, status: int, headers: CIMultiDict[str], *, is_old: bool) -> None:
        """Finds out how the body ends."""
        connection = headers.get("Connection", "")
        self.may_go_on = not is_old and not (connection and "close" in connection.lower())
        lengths = headers.getall("Content-Length", ())
        codings = headers.getall("Transfer-Encoding", ())
        if codings:
            if lengths or is_old or len(codings) > 1 or codings[0].lower() != "chunked":
                raise ProtocolError(_NOT_HTTP)
            self._step = self._read_chunks
        elif lengths:
            length = lengths[0]
            is_number = length.isascii() and length.isdigit() and len(length) <= _MAX_LENGTH_DIGITS
            if len(lengths) > 1 or not is_number:
                raise ProtocolError(_NOT_HTTP)
            self._left = int(length)
            self._step = self._read_length
        else:
            self.may_go_on = False
            self._step = self._read_rest
        if not self._has_body or status in _BODILESS:
            self._left = 0
            self._step = self._read_length

    # -- body -------------------------------------------------------------------------------------

    def _put(self, part: bytes) -> None:
        self._parts.append(part)
        self.num_waiting += len(part)

    def _end(self, rest: bytes) -> None:
        self.has_ended = True
        self._step = self._read_nothing
        if rest:
            self.may_go_on = False  # nobody asked for it

    def _read_nothing(self, data: bytes) -> None:
        if data:
            self.may_go_on = False

    def _read_rest(self, data: bytes) -> None:
        if data:
            self._put(data)

    def _read_length(self, data: bytes) -> None:
        part = data[: self._left]
        self._left -= len(part)
        if part:
            self._put(part)
        if not self._left:
            self._end(data[len(part) :])

    def _read_chunks(self, data: bytes) -> None:
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        at, end = 0, len(data)
        while at < end:
            if self._left:
                part = data[at : at + self._left]
                at += len(part)
                self._left -= len(part)
                self._after_chunk = not self._left
                self._put(part)
            elif self._after_chunk:
                if end - at < 2:
                    break
                if not data.startswith(b"\r\n", at):
                    raise ProtocolError(_NOT_HTTP)
                at += 2
                self._after_chunk = False
            else:
                line = _SIZE_LINE.match(data, at)
                if line is None:
                    if end - at > MAX_LINE_BYTES or b"\n" in data[at:]:
                        raise ProtocolError(_NOT_HTTP)
                    break
                at = line.end()
                self._left = int(line[1], 16)
                if not self._left:
                    self._step = self._read_trailers
                    self._read_trailers(data[at:])
                    return
        self._buffer = data[at:]

    def _read_trailers(self, data: bytes) -> None:
        """Passes over what follows the last chunk, up to an empty line."""
        data = self._buffer + data
        at = 2 if data.startswith(b"\r\n") else data.find(b"\r\n\r\n") + 4
        if at >= 4 or data.startswith(b"\r\n"):
            self._buffer = b""
            self._end(data[at:])
        elif len(data) > MAX_TRAILER_BYTES:
            raise ProtocolError(_NOT_HTTP)
        else:
            self._buffer = data


def _field(line: bytes) -> tuple[str, str]:
    name, colon, value = line.partition(b":")
    if not colon or _NAME.fullmatch(name) is None or _CONTROL.search(value):
        raise ProtocolError(_NOT_HTTP)
    return name.decode(), value.strip(b" \t").decode("utf-8", "surrogateescape")
