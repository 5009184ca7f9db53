"""One attempt at one replica: what is sent, what comes back, what each fault is called."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from multidict import CIMultiDict

from kvway_core.errors import (
    ConnectFailed,
    KvwayError,
    ProtocolError,
    StreamBroken,
)
from kvway_core.testing.fake_replica import Answer, FakeReplica
from kvway_router.passing import Passing
from kvway_router.proxy import ReplicaClient, request_headers

PATH = "/v1/chat/completions"
PLAIN = b'{"model":"test-model"}'
STREAM = b'{"model":"test-model","stream":true}'
OK_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@pytest.fixture
async def replica() -> AsyncIterator[FakeReplica]:
    async with FakeReplica() as fake:
        yield fake


@pytest.fixture
async def client() -> AsyncIterator[ReplicaClient]:
    async with ReplicaClient(connect_timeout_s=5) as opened:
        yield opened


async def ask(client: ReplicaClient, replica: FakeReplica, body: bytes = PLAIN) -> bytes:
    async with client.attempt(replica.url + PATH, headers={}, body=body) as answer:
        return await answer.read(limit_bytes=1 << 20)


async def test_the_body_arrives_byte_for_byte(client: ReplicaClient, replica: FakeReplica) -> None:
    body = b'{ "b":1.0, "a":"\\u00e9\xc3\xa9", "a2":[1,2] }'
    await ask(client, replica, body)
    assert replica.requests[0].body == body


async def test_a_stream_comes_through_as_it_was_sent(
    client: ReplicaClient, replica: FakeReplica
) -> None:
    answer = await ask(client, replica, STREAM)
    assert answer.startswith(b"data: {")
    assert answer.endswith(b"data: [DONE]\n\n")


async def test_a_stream_is_not_held_back_until_its_end(
    client: ReplicaClient, replica: FakeReplica
) -> None:
    replica.script(Answer(hold_after_pieces=1))
    async with client.attempt(replica.url + PATH, headers={}, body=STREAM) as answer:
        assert b"Hello" in await answer.read_chunk()
        replica.release()
        rest = await answer.read(limit_bytes=1 << 20)
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_an_error_answer_is_an_answer(client: ReplicaClient, replica: FakeReplica) -> None:
    replica.script(Answer(status=422, body=b"no", headers={"x-why": "because"}))
    async with client.attempt(replica.url + PATH, headers={}, body=PLAIN) as answer:
        assert answer.status == 422
        assert answer.headers["x-why"] == "because"
        assert await answer.read(limit_bytes=100) == b"no"


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        (StreamBroken, Answer(raw=b"")),
        (StreamBroken, Answer(raw=OK_HEAD + b"content-length: 9\r\n\r\nhalf")),
        (StreamBroken, Answer(break_after_pieces=0)),
        (ProtocolError, Answer(raw=b"\x16\x03\x01 not HTTP at all\r\n\r\n")),
        (ProtocolError, Answer(raw=b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n")),
    ],
    ids=["closes", "short body", "cut body", "junk", "status 999"],
)
async def test_each_fault_has_its_name(
    client: ReplicaClient, replica: FakeReplica, expected: type[KvwayError], answer: Answer
) -> None:
    replica.script(answer)
    with pytest.raises(expected):
        await ask(client, replica)


async def test_a_cut_stream_is_noticed(client: ReplicaClient, replica: FakeReplica) -> None:
    replica.script(Answer(break_after_pieces=2))
    received: list[bytes] = []

    async def receive() -> None:
        async with client.attempt(replica.url + PATH, headers={}, body=STREAM) as answer:
            while chunk := await answer.read_chunk():
                received.append(chunk)

    with pytest.raises(StreamBroken):
        await receive()
    assert b"".join(received).count(b"data:") == 2


async def test_a_refused_connection_is_a_failed_connect(
    client: ReplicaClient, replica: FakeReplica
) -> None:
    await replica.stop()
    with pytest.raises(ConnectFailed):
        await ask(client, replica)


async def test_a_pooled_connection_that_broke_is_replaced_once(
    client: ReplicaClient, replica: FakeReplica
) -> None:
    await ask(client, replica)
    replica.script(Answer(raw=b""), Answer(pieces=("again",)))
    assert b"again" in await ask(client, replica)
    assert len(replica.requests) == 3


async def test_a_new_connection_that_broke_is_not_tried_again_here(
    client: ReplicaClient, replica: FakeReplica
) -> None:
    replica.script(Answer(raw=b""))
    with pytest.raises(StreamBroken):
        await ask(client, replica)
    assert len(replica.requests) == 1


async def test_leaving_an_answer_early_closes_its_connection(
    client: ReplicaClient, replica: FakeReplica
) -> None:
    replica.script(Answer(hold_after_pieces=1))
    async with client.attempt(replica.url + PATH, headers={}, body=STREAM) as answer:
        await answer.read_chunk()
    await replica.wait_for(lambda: replica.num_disconnected == 1)


async def test_redirects_are_answers(client: ReplicaClient, replica: FakeReplica) -> None:
    replica.script(Answer(status=302, body=b"", headers={"location": "http://192.0.2.1/"}))
    async with client.attempt(replica.url + PATH, headers={}, body=PLAIN) as answer:
        assert answer.status == 302


def test_headers_of_the_connection_stay_behind() -> None:
    received = CIMultiDict(
        {
            "Host": "router",
            "Connection": "keep-alive, X-Mine",
            "X-Mine": "1",
            "Keep-Alive": "5",
            "Transfer-Encoding": "chunked",
            "Content-Length": "3",
            "Accept-Encoding": "gzip",
            "X-Kvway-Anything": "spoofed",
            "Authorization": "Bearer key",
            "Content-Type": "application/json",
        }
    )
    assert dict(request_headers(received, request_id="r1")) == {
        "Authorization": "Bearer key",
        "Content-Type": "application/json",
        "X-Request-Id": "r1",
    }


def test_a_request_id_of_the_client_is_kept() -> None:
    headers = request_headers(CIMultiDict({"x-request-id": "mine"}), request_id="r1")
    assert headers.getall("X-Request-Id") == ["mine"]


async def test_hop_by_hop_headers_of_the_answer_stay_behind(
    client: ReplicaClient, replica: FakeReplica
) -> None:
    replica.script(Answer(headers={"Connection": "x-hop", "x-hop": "1", "x-end": "2"}))
    async with client.attempt(replica.url + PATH, headers={}, body=PLAIN) as answer:
        assert "x-end" in answer.headers
        assert not {"connection", "x-hop"} & {name.lower() for name in answer.headers}


USAGE = b'{"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":7}}}'


@pytest.mark.parametrize(
    ("expected", "headers", "chunks"),
    [
        (5, {"x-kvway-cached-tokens": "5"}, [b"data: " + USAGE + b"\n\n"]),
        (7, {}, [b"data: " + USAGE + b"\n\n", b"data: [DONE]\n\n"]),
        (7, {}, [b"data: " + USAGE[:40], USAGE[40:] + b"\n\ndata: [DONE]\n\n"]),
        (7, {}, [b"x" * 100_000, b"\n\ndata: " + USAGE + b"\r\n\r\n"]),
        (7, {"x-kvway-cached-tokens": "-1"}, [b"data: " + USAGE + b"\n\n"]),
        (None, {}, [b'data: {"choices":[],"usage":null}\n\ndata: [DONE]\n\n']),
        (None, {}, [b'data: {"usage":{"prompt_tokens_details":{"cached_tokens":"x"}}}\n\n']),
        (None, {}, []),
    ],
    ids=["header", "event", "split", "long", "bad header", "null", "wrong type", "empty"],
)
def test_cached_tokens_of_a_stream(
    expected: int | None, headers: dict[str, str], chunks: list[bytes]
) -> None:
    seen = Passing(CIMultiDict(headers), is_event_stream=True)
    for chunk in chunks:
        seen.push(chunk)
    assert seen.cached_tokens() == expected


@pytest.mark.parametrize(
    ("expected", "body"),
    [(7, USAGE), (None, b"{}"), (None, b"[" * 9999), (None, b" " * (1 << 20) + USAGE)],
    ids=["usage", "none", "junk", "too long"],
)
def test_cached_tokens_of_a_body(expected: int | None, body: bytes) -> None:
    seen = Passing(CIMultiDict(), is_event_stream=False)
    seen.push(body[:10])
    seen.push(body[10:])
    assert seen.cached_tokens() == expected


@pytest.mark.parametrize(
    ("chunks", "found"),
    [
        ([b"data: 1\n\n", b"data: 2\n\n"], [True, True]),
        ([b": ping\n\n", b":\r\n\r\n", b"data: 1\n\n"], [False, False, True]),
        ([b": data: no\n\n", b"event: x\r\ndata: 1\r\n\r\n"], [False, True]),
        ([b"da", b"ta: 1\n\n", b": pi", b"ng\n"], [False, True, False, False]),
        ([b": ping\n", b"\ndata", b":2"], [False, False, True]),
    ],
)
def test_only_data_of_events_count_as_content(chunks: list[bytes], found: list[bool]) -> None:
    data = Passing(CIMultiDict(), is_event_stream=True)
    assert [data.push(chunk) for chunk in chunks] == found
