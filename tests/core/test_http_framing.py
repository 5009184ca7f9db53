"""Chunks are found in the bytes of answers, however split, and nothing in what is none."""

from __future__ import annotations

import pytest

from kvway_core.testing.http_framing import Framing, Part

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ANSWER = HEAD + b"6\r\nabcdef\r\n4;x=1\r\nghij\r\n0\r\n\r\n"


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_framing_finds_sizes_and_data_wherever_the_bytes_are_split(step: int) -> None:
    """Of answers in a row: chunked, with a length, with none, chunked again."""
    plain = b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n5\r\nabcde\r\n\r\n"
    empty = b"HTTP/1.1 204 No Content\r\n\r\n"
    stream = ANSWER + plain + empty + ANSWER
    framing = Framing()
    parts: list[tuple[Part, bytes]] = []
    for at in range(0, len(stream), step):
        parts += framing.split(stream[at : at + step])
    assert b"".join(piece for _, piece in parts) == stream
    sizes = [piece for part, piece in parts if part is Part.SIZE]
    assert sizes == 2 * [b"6\r\n", b"4;x=1\r\n", b"0\r\n"]
    data = b"".join(piece for part, piece in parts if part is Part.DATA)
    assert data == 2 * b"abcdef\r\nghij\r\n"


def test_what_turns_out_to_be_no_http_is_one_rest() -> None:
    framing = Framing()
    junk = b"x" * 100_000
    parts = [*framing.split(junk), *framing.split(ANSWER)]
    assert parts == [(Part.REST, junk), (Part.REST, ANSWER)]
