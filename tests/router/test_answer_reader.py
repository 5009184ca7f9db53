"""Answers of replicas from their bytes: what is read, what is refused, where an answer ends."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpResponseParser
from aiohttp.http_exceptions import HttpProcessingError
from hypothesis import given
from hypothesis import strategies as st

from kvway_core.errors import ProtocolError, ReplicaError, StreamBroken
from kvway_router.answer_reader import (
    MAX_HEAD_BYTES,
    MAX_INTERIM,
    MAX_LINE_BYTES,
    MAX_TRAILER_BYTES,
    AnswerReader,
)

OK = b"HTTP/1.1 200 OK\r\n"
GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def read(*pieces: bytes, ends: bool = False, has_body: bool = True) -> AnswerReader:
    reader = AnswerReader(has_body=has_body)
    for piece in pieces:
        reader.feed(piece)
    if ends:
        reader.feed_end()
    return reader


GOOD = {
    "length": (OK + b"Content-Length: 5\r\n\r\nhello", b"hello", True),
    "empty": (OK + b"Content-Length: 0\r\n\r\n", b"", True),
    "chunked": (CHUNKED + b"5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n", b"hello!", True),
    "large chunk": (CHUNKED + b"1F4\r\n" + b"x" * 500 + b"\r\n0\r\n\r\n", b"x" * 500, True),
    "extension": (CHUNKED + b"5;a=b\r\nhello\r\n0\r\n\r\n", b"hello", True),
    "trailers": (CHUNKED + b"5\r\nhello\r\n0\r\nX: 1\r\nY: 2\r\n\r\n", b"hello", True),
    "no reason": (b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nhi", b"hi", True),
    "100 first": (GO_ON + OK + b"Content-Length: 2\r\n\r\nhi", b"hi", True),
    "close": (OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi", b"hi", False),
    "old": (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", b"hi", False),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", b"", False),
    "not modified": (b"HTTP/1.1 304 x\r\nContent-Length: 9\r\n\r\n", b"", True),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_an_answer_is_the_same_however_its_bytes_come(name: str) -> None:
    data, body, may_go_on = GOOD[name]
    for size in (1, 2, 3, 7, len(data)):
        reader = read(*(data[at : at + size] for at in range(0, len(data), size)))
        assert reader.head is not None
        assert reader.num_waiting == len(body)
        assert reader.take() == body
        assert reader.num_waiting == 0
        assert reader.has_ended
        assert reader.may_go_on is may_go_on


@pytest.mark.parametrize("name", GOOD)
def test_an_answer_that_breaks_off_is_broken_at_every_byte(name: str) -> None:
    data, _, _ = GOOD[name]
    for end in range(len(data)):
        with pytest.raises(StreamBroken):
            read(data[:end], ends=True)


def test_status_and_headers_are_those_that_were_sent() -> None:
    reader = read(OK + b"X-A: 1\r\nx-a:2 \r\nContent-Length: 0\r\nEmpty:\r\nU: \xc3\xa9\r\n\r\n")
    assert reader.head is not None
    assert reader.head.status == 200
    assert reader.head.headers.getall("x-a") == ["1", "2"]
    assert reader.head.headers["empty"] == ""
    assert reader.head.headers["u"] == "é"


def test_without_length_an_answer_ends_with_its_connection() -> None:
    reader = read(OK + b"\r\nhel", b"lo")
    with pytest.raises(StreamBroken):
        reader.feed_end(is_clean=False)
    reader.feed_end()
    assert reader.take() == b"hello"
    assert (reader.has_ended, reader.may_go_on) == (True, False)


def test_the_answer_to_a_head_has_no_body() -> None:
    reader = read(OK + b"Content-Length: 5\r\n\r\n", has_body=False)
    assert reader.has_ended
    assert reader.may_go_on


@pytest.mark.parametrize("more", [b"HTTP/1.1 200 OK\r\n", b"\n"])
@pytest.mark.parametrize("apart", [False, True], ids=["with it", "later"])
def test_what_follows_an_answer_ends_the_connection(more: bytes, *, apart: bool) -> None:
    data = OK + b"Content-Length: 2\r\n\r\nhi"
    reader = read(data, more) if apart else read(data + more)
    assert reader.take() == b"hi"
    assert reader.has_ended
    assert not reader.may_go_on


BAD = {
    "no HTTP": b"SSH-2.0-x\r\n",
    "HTTP/2": b"HTTP/2.0 200 OK\r\n\r\n",
    "status 99": b"HTTP/1.1 099 x\r\n\r\n",
    "status 600": b"HTTP/1.1 600 x\r\n\r\n",
    "status 9999": b"HTTP/1.1 9999 x\r\n\r\n",
    "switching": b"HTTP/1.1 101 x\r\n\r\n",
    "bare line feeds": b"HTTP/1.1 200 OK\nContent-Length: 2\n\nhi\r\n\r\n",
    "folded": OK + b"A: 1\r\n 2\r\n\r\n",
    "space before colon": OK + b"Content-Length : 2\r\n\r\n",
    "no colon": OK + b"Content-Length\r\n\r\n",
    "no name": OK + b": 1\r\n\r\n",
    "zero byte": OK + b"A: \0\r\n\r\n",
    "carriage return": OK + b"A: 1\rB: 2\r\n\r\n",
    "length and coding": OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
    "two lengths": OK + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n",
    "list of lengths": OK + b"Content-Length: 2, 2\r\n\r\n",
    "signed length": OK + b"Content-Length: +2\r\n\r\n",
    "huge length": OK + b"Content-Length: " + b"9" * 19 + b"\r\n\r\n",
    "empty length": OK + b"Content-Length:\r\n\r\n",
    "other coding": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
    "two codings": OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
    "old and chunked": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    "size 0x5": CHUNKED + b"0x5\r\nhello\r\n",
    "size -5": CHUNKED + b"-5\r\nhello\r\n",
    "size 1_0": CHUNKED + b"1_0\r\n",
    "no size": CHUNKED + b"\r\nhello",
    "huge size": CHUNKED + b"f" * 16 + b"\r\n",
    "line feed after size": CHUNKED + b"5\nhello\r\n",
    "chunk too long": CHUNKED + b"5\r\nhello!\r\n",
    "long extension": CHUNKED + b"5;" + b"x" * MAX_LINE_BYTES,
    "long trailers": CHUNKED + b"0\r\nX: " + b"x" * MAX_TRAILER_BYTES,
    "long head": OK + b"X: " + b"x" * MAX_HEAD_BYTES,
    "many heads": GO_ON * (MAX_INTERIM + 1),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in parts"])
def test_what_is_no_answer_is_refused(name: str, *, whole: bool) -> None:
    data = BAD[name]
    size = len(data) if whole else 5
    with pytest.raises(ProtocolError):
        read(*(data[at : at + size] for at in range(0, len(data), size)))


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """An answer, mostly a good one, with some bytes in it changed, taken out or doubled."""
    data = bytearray(draw(st.sampled_from([data for data, _, _ in GOOD.values()])))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data) - 1))
        data[at : at + draw(st.integers(0, 2))] = draw(
            st.sampled_from(
                [b"", b"\r", b"\n", b"\r\n", b" ", b"0", b"5", b"\0", b",", b"x", b":"]
            )
        )
    return bytes(data)


@pytest.mark.property
@given(answers(), st.integers(1, 9))
def test_no_bytes_are_read_otherwise_than_by_the_parser_of_aiohttp(data: bytes, size: int) -> None:
    """What is taken here is taken there, with the same body; and parts change nothing."""
    try:
        reader = read(data)
    except ReplicaError as exc:
        with pytest.raises(type(exc)):
            read(*(data[at : at + size] for at in range(0, len(data), size)))
        return
    again = read(*(data[at : at + size] for at in range(0, len(data), size)))
    body = reader.take()
    assert again.take() == body
    assert (again.has_ended, again.may_go_on) == (reader.has_ended, reader.may_go_on)
    if reader.head is not None and reader.has_ended and reader.may_go_on:
        status, theirs = parsed_by_aiohttp(data)
        assert (status, theirs) == (reader.head.status, body)


def parsed_by_aiohttp(data: bytes) -> tuple[int, bytes]:
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        protocol = BaseProtocol(loop, parser=None)
        parser = HttpResponseParser(protocol, loop, 2**16, read_until_eof=True)
        try:
            messages, _, _ = parser.feed_data(data)
        except HttpProcessingError as exc:
            raise AssertionError(f"aiohttp refuses {data!r}") from exc
        message, payload = messages[-1]
        body = b""
        while not payload.at_eof():
            body += payload.read_nowait()
        return message.code, body
