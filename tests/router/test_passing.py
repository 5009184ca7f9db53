"""What is seen of an answer that passes by: where content begins, and how a stream ends."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from kvway_router.passing import Passing, WholeEvents, opening

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
WORD = b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\n'
TOOL = b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"no","type":"x","code":500}}\n\n'
REFUSAL = b'data: {"error":{"message":"no","code":"400"}}\n\n'


@pytest.mark.parametrize(
    ("events", "has_content"),
    [
        (b"", False),
        (b": ping\n\n", False),
        (ROLE, False),
        (ROLE + WORD[:-2], False),
        (ROLE + WORD[:-1], True),
        (ROLE + WORD, True),
        (ROLE.replace(b"\n", b"\r\n") + WORD.replace(b"\n", b"\r\n"), True),
        (TOOL, True),
        (b'data: {"choices":[{"text":""}]}\n\n', False),
        (b'data: {"choices":[{"text":"H"}]}\n\n', True),
        (b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n', True),
        (b'data: {"choices":[],"usage":{}}\n\n', True),
        (b"data: not ours to judge\n\n", True),
        (DONE, True),
        (ERROR, True),
    ],
)
def test_where_content_begins(events: bytes, *, has_content: bool) -> None:
    assert opening(events).has_content is has_content


def test_an_error_at_the_beginning_is_told_from_content() -> None:
    error = opening(b": ping\n\n" + ERROR).error
    assert error is not None
    assert (error.status, error.is_clients) == (500, False)
    assert opening(WORD + ERROR).error is None
    refusal = opening(REFUSAL).error
    assert refusal is not None
    assert refusal.is_clients
    word = b'data: {"choices":[{"delta":{"content":"the \\"error\\" key"}}]}\n\n'
    assert opening(word).error is None


@pytest.mark.parametrize(
    ("stream", "code"),
    [
        (WORD + DONE, None),
        (WORD + b"data:[DONE]\r\n\r\n", None),
        (WORD + b"data: [DONE]", None),
        (DONE + b": bye\n\n", None),
        (WORD, "stream_broken"),
        (b"", "stream_broken"),
        (WORD + DONE + WORD, "stream_broken"),
        (WORD + ERROR, "replica_failed"),
        (WORD + ERROR + DONE, "replica_failed"),
        (b'data: {"error":"no"}\n\n' + DONE, "replica_failed"),
        (b'data: {"error":null,"choices":[]}\n\n' + DONE, None),
        (b'data: {"text":"\\"error\\": it"}\n\n' + DONE, None),
        (WORD * 1000 + DONE, None),
        (WORD * 1000 + ERROR + DONE, "replica_failed"),
    ],
)
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_how_a_stream_ends(stream: bytes, code: str | None, piece: int) -> None:
    passing = Passing(CIMultiDict(), is_event_stream=True)
    for start in range(0, len(stream), piece):
        passing.push(stream[start : start + piece])
    failure = passing.failure()
    assert (failure.code if failure else None) == code


def test_an_answer_that_is_no_stream_has_its_end_in_its_framing() -> None:
    passing = Passing(CIMultiDict(), is_event_stream=False)
    passing.push(b'{"error":"theirs"}')
    assert passing.failure() is None


@pytest.mark.parametrize(
    ("chunks", "passed", "rest"),
    [
        ([WORD, DONE], [WORD, DONE], b""),
        ([WORD[:9], WORD[9:]], [b"", WORD], b""),
        ([WORD + DONE[:4], DONE[4:]], [WORD, DONE], b""),
        ([WORD[:-1], b"\n"], [b"", WORD], b""),
        (
            [b"data: 1\r\n\r\nda", b"ta: 2\r\n\r", b"\n"],
            [b"data: 1\r\n\r\n", b"", b"data: 2\r\n\r\n"],
            b"",
        ),
        ([WORD + b"data: {half"], [WORD], b"data: {half"),
        ([b"\n\nx"], [b"\n\n"], b"x"),
        ([b"x"], [b""], b"x"),
        ([b"x" * 70_000, b"\n\n"], [b"x" * 70_000, b"\n\n"], b""),
    ],
)
def test_only_whole_events_pass(chunks: list[bytes], passed: list[bytes], rest: bytes) -> None:
    events = WholeEvents()
    assert [events.push(chunk) for chunk in chunks] == passed
    assert events.rest() == rest
