"""What the router learns of an answer that passes by; it changes nothing in it.

Of an event stream: where the data begin, whether it came to its end, and the error it may tell
of. Of both kinds: how much of the prompt the engine had cached. Held are the last 8 KiB of a
stream, 16 at most, and a body up to 1 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
from multidict import CIMultiDict
from typing_extensions import override

from kvway_core.errors import ReplicaError, ReplicaFailed, StreamBroken

_TAIL_BYTES: Final = 8 * 1024
_BODY_BYTES: Final = 1024 * 1024
_MAX_DIGITS: Final = 18
_DONE: Final = b"[DONE]"
_ENDS: Final = (b"\n\n", b"\r\n\r\n")
"""What ends an event."""


class _UsageDetails(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens_details: _UsageDetails | None = None


class _WithUsage(msgspec.Struct):
    usage: _Usage | None = None


class _Error(msgspec.Struct):
    code: int | str | None = None


class _WithError(msgspec.Struct):
    error: _Error | str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, object] | None = None
    finish_reason: str | None = None


class _WithChoices(msgspec.Struct):
    choices: list[_Choice]


_decode_usage = msgspec.json.Decoder(_WithUsage).decode
_decode_error = msgspec.json.Decoder(_WithError).decode
_decode_choices = msgspec.json.Decoder(_WithChoices).decode
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Passing:
    """Looks at an answer piece by piece.

    Args:
        headers: Of the answer.
        is_event_stream: Whether its body is a stream of server-sent events.
    """

    def __init__(self, headers: CIMultiDict[str], *, is_event_stream: bool) -> None:
        """Nothing of the body has passed."""
        header = headers.get("x-kvway-cached-tokens", "")
        is_count = header.isascii() and header.isdigit() and len(header) <= _MAX_DIGITS
        self._header = int(header) if is_count else None
        self._is_event_stream = is_event_stream
        self._kept = bytearray()
        self._wants_body = not is_event_stream and self._header is None
        self._end = b"\n"

    def push(self, chunk: bytes) -> bool:
        """Looks at the next bytes.

        Returns:
            Whether the data of an event begin in them; comments, which keep a stream open, are
            no data.
        """
        if not self._is_event_stream:
            if self._wants_body:
                self._kept += chunk
                if len(self._kept) > _BODY_BYTES:
                    self._wants_body = False
                    self._kept.clear()
            return False
        self._kept += chunk
        if len(self._kept) > 2 * _TAIL_BYTES:
            del self._kept[:-_TAIL_BYTES]
        seen = self._end + chunk
        self._end = seen[-5:]  # one byte less than what is looked for
        return b"\ndata:" in seen

    def cached_tokens(self) -> int | None:
        """Returns the prompt tokens that the engine says it had cached; None if it does not say.

        It reads the ``x-kvway-cached-tokens`` header, else the ``usage`` of a JSON body or of the
        last event of a stream that has one. Not below 0, but as large as it may be.
        """
        reported = self._reported()
        return None if reported is None else max(0, reported)

    def failure(self) -> ReplicaError | None:
        """Returns what is wrong with an event stream that is over; None if nothing is.

        It is only whole with ``[DONE]`` at its end, and has failed when it told of an error, with
        or without that: engines send the one after the other.
        """
        if not self._is_event_stream:
            return None
        last = None
        for payload in _payloads_backwards(self._kept):
            last = payload if last is None else last
            error = error_in(payload)
            if error is not None:
                return error
        if last != _DONE:
            return StreamBroken("The replica's stream stopped before its end.")
        return None

    def _reported(self) -> int | None:
        if self._header is not None:
            return self._header
        if not self._is_event_stream:
            return _cached_in(self._kept)
        for payload in _payloads_backwards(self._kept):
            cached = _cached_in(payload)
            if cached is not None:
                return cached
        return None


class Opaque(Passing):
    """An answer that is not looked at: what it means is between the client and the replica."""

    def __init__(self) -> None:
        """Nothing of it is ever kept."""
        super().__init__(CIMultiDict(), is_event_stream=False)
        self._wants_body = False

    @override
    def cached_tokens(self) -> int | None:
        return None


class WholeEvents:
    """Lets an event stream pass in whole events only.

    A replica that dies leaves half an event; behind it the client could not read why. An event
    that is longer than `MAX_BYTES` passes in parts.
    """

    MAX_BYTES: Final = 64 * 1024

    def __init__(self) -> None:
        """Nothing is held back."""
        self._half = b""

    def push(self, chunk: bytes) -> bytes:
        """Takes the next bytes of the stream; returns those that may pass, maybe none."""
        if not self._half and chunk.endswith(b"\n\n"):
            return chunk
        data = self._half + chunk
        ends = [at + len(mark) for mark in _ENDS if (at := data.rfind(mark)) >= 0]
        end = max(ends, default=0)
        if len(data) - end > self.MAX_BYTES:
            end = len(data)
        self._half = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """Returns what is held back: the stream is over, and was whole."""
        return self._half


@dataclass(frozen=True, slots=True)
class Opening:
    """What the first events of a stream bring.

    Attributes:
        has_content: Whether there is more than comments and events that only announce an answer.
        error: The error that they tell of; None for none.
    """

    has_content: bool = False
    error: ReplicaFailed | None = None


def opening(events: bytes | bytearray) -> Opening:
    """Says what the beginning of an event stream brings, as far as its lines are whole."""
    whole, newline, _ = bytes(events).rpartition(b"\n")
    if newline:
        for line in whole.splitlines():
            payload = _payload_of(line)
            if payload is None:
                continue
            error = error_in(payload)
            if error is not None or _has_content(payload):
                return Opening(has_content=True, error=error)
    return Opening()


def error_in(payload: bytes) -> ReplicaFailed | None:
    """Returns the error that the payload of an event is; None if it is none."""
    if b'"error"' not in payload:
        return None
    try:
        error = _decode_error(payload).error
    except _UNREADABLE:
        return None
    if error is None:
        return None
    code = error.code if isinstance(error, _Error) else None
    if isinstance(code, str):
        code = int(code) if code.isascii() and code.isdigit() and len(code) == 3 else None
    return ReplicaFailed("The replica's answer ended with an error.", status=code)


def _has_content(payload: bytes) -> bool:
    """Says whether an event brings more than a role; what cannot be read counts as content."""
    if payload == _DONE:
        return True
    try:
        choices = _decode_choices(payload).choices
    except _UNREADABLE:
        return True
    if not choices:
        return True  # usage
    return any(
        choice.text
        or choice.finish_reason is not None
        or any(value for name, value in (choice.delta or {}).items() if name != "role")
        for choice in choices
    )


def _payload_of(line: bytes) -> bytes | None:
    return line[5:].strip() if line.startswith(b"data:") else None


def _payloads_backwards(tail: bytearray) -> Iterator[bytes]:
    """Yields the data of events, the last one first."""
    for line in reversed(bytes(tail).splitlines()):
        payload = _payload_of(line)
        if payload is not None:
            yield payload


def _cached_in(payload: bytes | bytearray) -> int | None:
    try:
        usage = _decode_usage(payload).usage
    except _UNREADABLE:
        return None  # half an event at the cut, "[DONE]", or not ours to judge
    if usage is None or usage.prompt_tokens_details is None:
        return None
    return usage.prompt_tokens_details.cached_tokens
