"""Requests as bytes on a connection, with what must come back: framing, good and bad.

`CANARY` stands in whatever of a request might be repeated: path, headers, field names, texts. It
must appear in no answer to a bad request and in no log.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MODEL: Final = "tiny"
CANARY: Final = b"canary-7c1f"
CHAT: Final = b"/v1/chat/completions"
GOOD_BODY: Final = (
    b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"max_tokens":1,"user":"%b"}'
    % CANARY
)
MAX_BODY_BYTES: Final = 100_000
"""What the servers must be told, so that bodies over the limit are short."""


@dataclass(frozen=True, slots=True)
class Vector:
    """Bytes for one connection.

    Attributes:
        name: Group and case.
        sent: The bytes.
        status: Of the first answer.
        code: Of its error; None for what is no error.
        closes: Whether the server closes the connection behind that answer. If not, the next
            request on the connection is served.
        num_generated: Requests that reach the engine.
    """

    name: str
    sent: bytes
    status: int
    code: str | None
    closes: bool
    num_generated: int = 0


def message(
    line: bytes = b"POST " + CHAT + b" HTTP/1.1",
    headers: bytes = b"",
    body: bytes = b"",
    *,
    host: bytes = b"Host: x\r\n",
) -> bytes:
    """Returns one message; its length is not added."""
    return line + b"\r\n" + host + headers + b"\r\n" + body


def length(body: bytes) -> bytes:
    """Returns the header for a body."""
    return b"Content-Length: %d\r\n" % len(body)


def post(body: bytes = GOOD_BODY, headers: bytes = b"") -> bytes:
    """Returns a well-framed message with a body and more headers."""
    return message(headers=length(body) + headers, body=body)


def get(target: bytes, method: bytes = b"GET") -> bytes:
    """Returns a message without a body."""
    return message(method + b" " + target + b" HTTP/1.1")


def good(name: str, sent: bytes, *, closes: bool = False, num_generated: int = 1) -> Vector:
    """Returns what must be served."""
    return Vector(name, sent, 200, None, closes, num_generated)


def malformed(name: str, sent: bytes) -> Vector:
    """Returns what is no HTTP: nobody knows where the next request begins."""
    return Vector(name, sent, 400, "malformed_http", closes=True)


CHUNKED: Final = b"Transfer-Encoding: chunked\r\n"
CHUNKS: Final = b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD_BODY), GOOD_BODY)
SIZE: Final = b"%x" % len(GOOD_BODY)
SMUGGLED: Final = post()


def framing() -> Iterator[Vector]:
    """Yields what servers and proxies in front of them may read differently."""
    yield good("length", post())
    yield good(
        "length with zeros",
        message(headers=b"Content-Length: 00%d\r\n" % len(GOOD_BODY), body=GOOD_BODY),
    )
    yield good("chunks", message(headers=CHUNKED, body=CHUNKS))
    yield good("chunks, coding in capitals", message(headers=CHUNKED.upper(), body=CHUNKS))
    yield good(
        "chunks with an extension",
        message(headers=CHUNKED, body=CHUNKS.replace(b"\r\n", b";a=b\r\n", 1)),
    )
    yield good(
        "chunks with a trailer", message(headers=CHUNKED, body=CHUNKS[:-2] + b"x: y\r\n\r\n")
    )
    yield good("empty lines before", b"\r\n\r\n" + post())
    yield good("two in one piece", post() * 2, num_generated=2)
    for name, value in {
        "signed": b"+%d",
        "negative": b"-%d",
        "with an underscore": b"1_%d",
        "listed": b"%d, %d",
        "with a blank": b"%d 0",
        "with a fraction": b"%d.0",
        "with a semicolon": b"%d;",
        "after a no-break space": b"\xa0%d",
    }.items():
        number = value % ((len(GOOD_BODY),) * value.count(b"%d"))
        yield malformed(
            f"length {name}",
            message(headers=b"Content-Length: " + number + b"\r\n", body=GOOD_BODY),
        )
    for name, value in {
        "in hexadecimal": b"0x5",
        "empty": b"",
        "of 30 digits": b"9" * 30,
        "beyond 64 bits": b"%d" % (2**64 + len(GOOD_BODY)),
    }.items():
        yield malformed(
            f"length {name}",
            message(headers=b"Content-Length: " + value + b"\r\n", body=GOOD_BODY),
        )
    yield malformed("length twice", post(headers=length(GOOD_BODY)))
    yield malformed("two lengths", post(headers=b"Content-Length: 3\r\n"))
    yield malformed("length and chunks", message(headers=length(GOOD_BODY) + CHUNKED, body=CHUNKS))
    yield malformed("chunks and length", message(headers=CHUNKED + length(CHUNKS), body=CHUNKS))
    for value in (
        *(b"xchunked", b"chunked, identity", b",chunked", b"chunked,", b"chunked, chunked"),
        *(
            b"gzip, chunked",
            b'"chunked"',
            b"\x0bchunked",
            b"identity",
            b"chunked;q=1",
            b"",
            CANARY,
        ),
    ):
        name = value.decode("ascii").replace("\x0b", "VT ")
        yield malformed(
            f"coding {name}",
            message(headers=b"Transfer-Encoding: " + value + b"\r\n", body=CHUNKS),
        )
    yield malformed("coding twice", message(headers=CHUNKED * 2, body=CHUNKS))
    yield malformed(
        "two codings", message(headers=b"Transfer-Encoding: identity\r\n" + CHUNKED, body=CHUNKS)
    )
    yield malformed(
        "coding, blank before the colon",
        message(headers=b"Transfer-Encoding : chunked\r\n", body=CHUNKS),
    )
    yield malformed(
        "coding on a folded line",
        message(headers=b"Transfer-Encoding:\r\n chunked\r\n", body=CHUNKS),
    )
    yield malformed("chunks in HTTP/1.0", message(b"POST " + CHAT + b" HTTP/1.0", CHUNKED, CHUNKS))
    for name, line in {
        "negative": b"-1\r\n",
        "0x": b"0x" + SIZE + b"\r\n",
        "signed": b"+" + SIZE + b"\r\n",
        "with an underscore": b"0_" + SIZE + b"\r\n",
        "after a blank": b" " + SIZE + b"\r\n",
        "before a blank": SIZE + b" \r\n",
        "empty": b"\r\n",
        "beyond 64 bits": b"f" * 17 + b"\r\n",
        "before LF": SIZE + b"\n",
        "before CR": SIZE + b"\r",
        "with NUL": SIZE + b"\0\r\n",
        "not hexadecimal": b"zz" + CANARY + b"\r\n",
        "with an extension before LF": SIZE + b";a=b\n",
        "with an extension before CR CR": SIZE + b";a\r\r\n",
        "with an open quote": SIZE + b';a="b\r\n',
        "too small": b"3\r\n",
        "too large": b"%x\r\n" % (len(GOOD_BODY) + 1),
    }.items():
        yield malformed(
            f"chunk size {name}",
            message(headers=CHUNKED, body=line + GOOD_BODY + b"\r\n0\r\n\r\n"),
        )
    yield malformed(
        "chunk without an end",
        message(headers=CHUNKED, body=SIZE + b"\r\n" + GOOD_BODY + b"0\r\n\r\n"),
    )
    yield malformed(
        "chunk that ends in LF",
        message(headers=CHUNKED, body=SIZE + b"\r\n" + GOOD_BODY + b"\n0\n\n"),
    )
    yield malformed(
        "trailer with a length",
        message(headers=CHUNKED, body=CHUNKS[:-2] + b"Content-Length: 5\r\n\r\n"),
    )
    yield malformed("trailer of NUL", message(headers=CHUNKED, body=CHUNKS[:-2] + b"\0\r\n\r\n"))
    yield malformed(
        "trailers without end", message(headers=CHUNKED, body=CHUNKS[:-2] + b"x: y\r\n" * 20_000)
    )
