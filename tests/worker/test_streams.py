"""What a request's buffer takes, and what ends it."""

from __future__ import annotations

import pytest

from kvway_core.errors import EngineFailed, InvalidRequest
from kvway_worker.streams import Streams, TokenOut
from tests.worker.batching import request


async def test_nothing_follows_an_end() -> None:
    streams = Streams(2)
    (stream,) = streams.open([request("a", [1], max_tokens=2)], now_s=0.0)
    end = TokenOut(7, "length", 0)
    streams.put([(stream, end), (stream, EngineFailed("late")), (stream, TokenOut(8, None, 0))])
    assert (stream.outputs.get_nowait(), stream.outputs.qsize()) == (end, 0)


async def test_an_id_is_free_again_when_its_request_has_ended() -> None:
    streams = Streams(2)
    (first,) = streams.open([request("a", [1])], now_s=0.0)
    with pytest.raises(InvalidRequest):
        streams.open([request("a", [1])], now_s=0.0)
    streams.put([(first, EngineFailed("failed"))])
    (second,) = streams.open([request("a", [1])], now_s=0.0)
    assert not streams.leave(first), "it has ended"
    assert streams.find("a") is second
    streams.put([(first, TokenOut(1, None, 0))])
    assert second.outputs.empty()


async def test_a_buffer_has_room_for_an_answer_an_end_and_a_reader_that_leaves() -> None:
    streams = Streams(2)
    (stream,) = streams.open([request("a", [1], max_tokens=3)], now_s=0.0)
    streams.put([(stream, TokenOut(index, None, 0)) for index in range(3)])
    assert streams.leave(stream)
    assert stream.outputs.maxsize == 5
