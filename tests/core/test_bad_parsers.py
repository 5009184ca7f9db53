"""aiohttp's two parsers over the same bytes: why only the one in C may run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import http_parser
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from tests.core.bad_framing import Vector
from tests.core.bad_requests import VECTORS

CONNECT = next(vector for vector in VECTORS if vector.name == "CONNECT")
"""Its body is the next request if it comes later: refused before any parser could be asked."""
SHORT = [vector for vector in VECTORS if len(vector.sent) < 2500 and vector is not CONNECT]
"""Longer ones are about sizes, not about framing."""

Message = tuple[str, str, bytes]


async def reading(parser_type: Any, pieces: Sequence[bytes]) -> list[Message] | None:
    """Returns the whole messages that a parser finds (method, path, body), None if it refuses."""
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    parser = parser_type(
        protocol,
        loop,
        2**16,
        max_line_size=8190,
        max_field_size=8190,
        max_headers=128,
        payload_exception=RequestPayloadError,
        auto_decompress=False,
    )
    protocol._parser = parser
    found: list[tuple[Any, Any]] = []
    for piece in pieces:
        try:
            messages, _, _ = parser.feed_data(piece)
        except HttpProcessingError:
            return None
        found += messages
    if any(payload.exception() is not None for _, payload in found):
        return None
    return [
        (message.method, message.path, b"".join(getattr(payload, "_buffer", ())))
        for message, payload in found
        if payload.is_eof()
    ]


@pytest.mark.parametrize("vector", SHORT, ids=lambda vector: vector.name)
async def test_a_request_reads_the_same_however_it_is_cut(vector: Vector) -> None:
    whole = await reading(http_parser.HttpRequestParserC, [vector.sent])
    bytewise = [vector.sent[at : at + 1] for at in range(len(vector.sent))]
    assert await reading(http_parser.HttpRequestParserC, bytewise) == whole


TAKEN_BY_PYTHON_ONLY = {
    "chunk size with an extension before CR CR",
    "chunk size with an open quote",
    "coding chunked, chunked",
    "trailer with a length",
    "a method in small letters",
    "no such method",
    "target /\xff",
    "version HTTP/1.2",
}
"""The first four are how requests are smuggled past a proxy that reads them as the other does."""
ELSE_READ_DIFFERENTLY = {
    "CONNECT",
    "chunk size beyond 64 bits",
    "length beyond 64 bits",
    "length of 30 digits",
    "version HTTP/0.9",
}


async def test_where_the_parsers_differ_is_known() -> None:
    """A release of aiohttp that changes it should be looked at."""
    different, taken = set(), set()
    for vector in (*SHORT, CONNECT):
        in_c = await reading(http_parser.HttpRequestParserC, [vector.sent])
        in_python = await reading(http_parser.HttpRequestParserPy, [vector.sent])
        if in_c is None and in_python:
            taken.add(vector.name)
        elif in_c != in_python:
            different.add(vector.name)
    assert taken == TAKEN_BY_PYTHON_ONLY
    assert different == ELSE_READ_DIFFERENTLY
