"""What reaches a replica and comes back: every byte, of every path below /v1, by raw sockets."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvway_core.testing.fake_replica import Answer
from tests.router.conftest import Bench, StartBench, chat_body

CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
STORED = "/v1/responses"
SOUND = bytes(range(256)) * 40
UPLOAD = (
    b'--b0\r\nContent-Disposition: form-data; name="file"; filename="a\xc3\xa9.wav"\r\n\r\n'
    + SOUND
    + b"\r\n--b0--\r\n"
)


async def exchange(bench: Bench, request: bytes) -> tuple[bytes, bytes]:
    """Sends bytes to the API listener; returns head and body of the answer, as they came."""
    reader, writer = await asyncio.open_connection(
        *bench.router.addresses.api.removeprefix("http://").split(":")
    )
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


def post(target: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    """Returns a whole request on a connection that ends with it."""
    lines = [
        f"{method} {target} HTTP/1.1",
        "Host: router",
        "Connection: close, X-Hop",
        "X-Hop: mine",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def status_of(head: bytes) -> int:
    return int(head.split(b" ", 2)[1])


@pytest.mark.parametrize(
    "body",
    [
        b'{ "stream":false ,"model":"test-model","messages":[{"role":"user","content":"x"}]}',
        (
            b'{"zz":1.0,"model":"test-model","aa":1,"x":1e2,"y":-0.0,"temperature":1.0,"messages":'
            rb'[{"content":"\u0041A\/ \ud83d\ude00'
            b' \xf0\x9f\x98\x80","role":"user"}]}'
        ),
        b'\r\n\t{"model":"test-model","messages":[{"role":"user","content":"x"}],"n":1,"":{}}',
    ],
    ids=["order", "escapes and numbers", "white space"],
)
async def test_a_body_is_passed_on_as_it_was_spelled(bench: Bench, body: bytes) -> None:
    head, _ = await exchange(bench, post(CHAT, body, "Content-Type: application/json"))
    assert status_of(head) == 200, head
    assert bench.replica.requests[0].body == body


async def test_headers_pass_but_for_those_of_the_connection(bench: Bench) -> None:
    body = json.dumps(chat_body("hi")).encode()
    headers = (
        "X-Own: a  b",
        "Authorization: Bearer k",
        "Keep-Alive: 5",
        "TE: trailers",
        "x-kvway-timeout-s: 30",
        "Accept: text/plain;q=0.5",
        "OpenAI-Beta: assistants=v2",
    )
    answer = Answer(
        body=b'{"a" :1.0}',
        headers={"x-theirs": "Yes, 1.0", "keep-alive": "timeout=5", "content-type": "text/x; a=1"},
    )
    bench.replica.script(answer)
    head, got = await exchange(bench, post(CHAT + "?api-version=1&x=%20", body, *headers))
    received = bench.replica.requests[0]
    assert received.path == CHAT + "?api-version=1&x=%20"
    kept = ("x-own", "authorization", "accept", "openai-beta")
    assert [received.headers[name] for name in kept] == [
        "a  b", "Bearer k", "text/plain;q=0.5", "assistants=v2"
    ]  # fmt: skip
    assert not {"x-hop", "keep-alive", "te", "x-kvway-timeout-s"} & received.headers.keys()
    assert got == b'{"a" :1.0}'
    lines = {name.lower(): value for name, value in
             (line.split(b": ", 1) for line in head.split(b"\r\n")[1:])}  # fmt: skip
    assert lines[b"x-theirs"] == b"Yes, 1.0"
    assert lines[b"content-type"] == b"text/x; a=1"
    assert b"keep-alive" not in lines


@pytest.mark.parametrize("status", [400, 404, 422, 500])
@pytest.mark.parametrize("path", [CHAT, EMBEDDINGS])
async def test_an_error_keeps_its_body_and_its_type(bench: Bench, status: int, path: str) -> None:
    bench.replica.answer = Answer(
        status=status, body=b"<p>no</p>\xff", headers={"content-type": "text/html"}
    )
    head, body = await exchange(bench, post(path, json.dumps(chat_body("hi")).encode()))
    assert status_of(head) == status
    assert b"\r\ncontent-type: text/html\r\n" in head.lower() + b"\r\n"
    assert body == b"<p>no</p>\xff"


@pytest.mark.parametrize(
    ("method", "target", "body", "content_type"),
    [
        ("POST", EMBEDDINGS, b'{"input":"x", "model":"another","d":1.0}', "application/json"),
        ("POST", "/v1/audio/transcriptions?x=1", UPLOAD, "multipart/form-data; boundary=b0"),
        ("POST", "/v1/anything/new-1", b"", "text/plain"),
        ("GET", "/v1/responses/resp_1?include=a&b=%2F", b"", "text/plain"),
        ("DELETE", "/v1/files/file-1", b"", "text/plain"),
    ],
)
async def test_other_paths_are_passed_on_and_counted(
    bench: Bench, method: str, target: str, body: bytes, content_type: str
) -> None:
    bench.replica.answer = Answer(body=SOUND, headers={"content-type": "audio/wav"})
    asked = post(target, body, f"Content-Type: {content_type}", method=method)
    head, got = await exchange(bench, asked)
    assert status_of(head) == 200, (head, got)
    assert got == SOUND
    assert b"x-kvway-replica: " in head
    received = bench.replica.requests[0]
    assert (received.method, received.path, received.body) == (method, target, body)
    assert received.headers["content-type"] == content_type
    metrics = await bench.metrics()
    assert metrics['kvway_router_requests_total{code="200",route="/v1/*"}'] == 1


async def test_what_is_at_a_replica_counts_as_its_load(start_bench: StartBench) -> None:
    bench = await start_bench(2)
    for replica in bench.replicas:
        replica.answer = Answer(hold_head=True, body=b"{}")
    asked = [
        asyncio.create_task(exchange(bench, post(EMBEDDINGS, b'{"input":"%d"}' % number)))
        for number in range(8)
    ]
    one, other = bench.replicas
    await one.wait_for(lambda: len(one.requests) == 4)
    await other.wait_for(lambda: len(other.requests) == 4)
    for replica in bench.replicas:
        assert bench.router.replicas.num_in_flight(replica.replica_id) == 4
        replica.release()
    for head, _ in await asyncio.gather(*asked):
        assert status_of(head) == 200


async def test_a_sound_is_heard_as_it_comes(bench: Bench) -> None:
    bench.replica.answer = Answer(hold_after_pieces=1)
    body = b'{"input":"x","stream":true}'
    async with bench.client.post(bench.api("/v1/audio/speech"), data=body) as response:
        assert b"Hello" in await response.content.readany()
        bench.replica.release()
        assert (await response.read()).endswith(b"[DONE]\n\n")


async def test_an_event_stream_of_another_kind_needs_no_done(bench: Bench) -> None:
    events = b"event: response.completed\ndata: {}\n\n"
    bench.replica.answer = Answer(body=events, headers={"content-type": "text/event-stream"})
    head, got = await exchange(bench, post(STORED, b'{"input":"x","stream":true}'))
    assert (status_of(head), got) == (200, events)


@pytest.mark.parametrize("path", [EMBEDDINGS, STORED])
async def test_only_what_leaves_nothing_behind_is_sent_twice(
    start_bench: StartBench, path: str
) -> None:
    bench = await start_bench(2)
    for replica in bench.replicas:
        replica.script(Answer(raw=b""))
    head, _ = await exchange(bench, post(path, b'{"input":"x"}'))
    num_sent = sum(len(replica.requests) for replica in bench.replicas)
    assert status_of(head) == 502
    assert num_sent == (1 if path == STORED else 2)


async def test_what_is_kept_goes_over_no_used_connection(bench: Bench) -> None:
    await exchange(bench, post(EMBEDDINGS, b'{"input":"x"}'))
    bench.replica.script(Answer(raw=b""))
    head, _ = await exchange(bench, post(STORED, b'{"input":"x"}'))
    assert status_of(head) == 502
    assert len(bench.replica.requests) == 2


async def test_a_busy_replica_has_not_begun_so_another_is_asked(start_bench: StartBench) -> None:
    bench = await start_bench(2)
    for replica in bench.replicas:
        replica.script(Answer(status=503, body=b"{}"))
    head, _ = await exchange(bench, post(STORED, b'{"input":"x"}'))
    assert status_of(head) == 503
    assert [len(replica.requests) for replica in bench.replicas] == [1, 1]


@pytest.mark.parametrize(
    "body", [b'{"cache_salt":"a","input":"x"}', b' {"\\u0063ache_salt":"a","input":"x"}']
)
async def test_a_salt_is_stripped_here_too(bench: Bench, body: bytes) -> None:
    head, _ = await exchange(bench, post(STORED, body))
    assert status_of(head) == 200
    assert bench.replica.requests[0].body == b'{"input":"x"}'


@pytest.mark.parametrize(
    "body",
    [b'{"cache_salt":', b'\xef\xbb\xbf{"cache_salt":"a"}', '{"cache_salt":"a"}'.encode("utf-16")],
)
async def test_what_is_nearly_json_is_refused(bench: Bench, body: bytes) -> None:
    head, answer = await exchange(bench, post(STORED, body))
    assert status_of(head) == 400
    assert json.loads(answer)["error"]["code"] == "invalid_json"
    assert not bench.replica.requests


@pytest.mark.parametrize(
    "target",
    [
        "/v1/",
        "/v1/chat/completions/",
        "/v1/Chat/Completions",
        "/v1/chat%2Fcompletions",
        "/v1//chat/completions",
        "/v1/../admin/replicas",
        "/v1/./chat/completions",
        "/v1/a/..",
        "/v1/%2e%2e/load",
        "/v1/a%00b",
        "/v1/a;b",
        "/v1/a\\b",
        "/v1/load_lora_adapter",
        "/v1/Unload_lora_adapter",
        "/v2/embeddings",
        "/embeddings",
        "/reset_prefix_cache",
    ],
)
@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_a_path_that_two_servers_could_read_differently_is_refused(
    bench: Bench, target: str, method: str
) -> None:
    head, body = await exchange(bench, post(target, b"{}", method=method))
    assert status_of(head) in (400, 404), head
    assert "error" in json.loads(body)
    assert not bench.replica.requests
    assert target.rsplit("/", maxsplit=1)[-1] not in bench.replica.probes


@pytest.mark.parametrize(
    ("method", "target", "allow"),
    [
        ("GET", CHAT, "OPTIONS, POST"),
        ("POST", "/v1/models", "GET, HEAD, OPTIONS"),
        ("PROPFIND", EMBEDDINGS, "DELETE, GET, OPTIONS, PATCH, POST, PUT"),
    ],
)
async def test_a_wrong_method_touches_no_replica(
    bench: Bench, method: str, target: str, allow: str
) -> None:
    head, _ = await exchange(bench, post(target, b"", method=method))
    assert status_of(head) == 405
    assert f"\r\nAllow: {allow}\r\n".encode() in head + b"\r\n"
    assert not bench.replica.requests


async def test_junk_names_make_no_new_metrics(bench: Bench) -> None:
    bench.replica.answer = Answer(status=404, body=b"{}")

    async def series() -> set[str]:
        for path in ("/v1/warm", "/warm"):
            await exchange(bench, post(path, b"{}"))
        await exchange(bench, post(CHAT, b'{"model":"warm","messages":[]}'))
        return {name.split(" ")[0] for name in await bench.metrics()}

    before = await series()
    for number in range(50):
        await exchange(bench, post(f"/v1/junk{number}", b"{}", method=f"JUNK{number}"))
        await exchange(bench, post(f"/v1/junk{number}", b"{}", f"X-Junk{number}: 1"))
        junk = json.dumps(chat_body("x", model=f"junk{number}", user=f"junk{number}"))
        await exchange(bench, post(f"{CHAT}?junk{number}", junk.encode()))
    after = await series()
    assert not [name for name in after if "junk" in name.lower()]
    codes = {name for name in after - before if "requests_total" not in name}
    assert not codes
