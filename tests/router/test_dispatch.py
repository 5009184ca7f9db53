"""A request from the client to a replica and back: choice, retries, faults, clients that leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from kvway_core.testing.fake_replica import Answer, FakeReplica
from tests.router.conftest import MODEL, Bench, StartBench, chat_body

RIVERS = "You know all about rivers. " * 20
PEAKS = "Mountains are what you speak of. " * 20
BROKEN = Answer(raw=b"")


async def until_idle(bench: Bench) -> None:
    """Waits until the router has settled every request."""
    await bench.router.dispatcher.running.wait_idle()


async def has_request(replica: FakeReplica) -> None:
    await replica.wait_for(lambda: bool(replica.requests))


def in_flight(metrics: dict[str, float]) -> float:
    return sum(v for name, v in metrics.items() if name.startswith("kvway_router_in_flight"))


# --- the choice ------------------------------------------------------------------------------


async def test_the_second_request_follows_its_prefix(start_bench: StartBench) -> None:
    bench = await start_bench(2)
    _, first, _ = await bench.chat(RIVERS + "first?")
    status, second, _ = await bench.chat(RIVERS + "second?")
    assert status == 200
    assert second["x-kvway-replica"] == first["x-kvway-replica"]
    assert second["x-kvway-reason"].startswith("prefix; ")
    record = await bench.decision(second)
    matched = {c["replica_id"]: c["matched_blocks"] for c in record["candidates"]}
    assert matched.pop(record["replica_id"]) == len("|user\n" + RIVERS) // 16
    assert list(matched.values()) == [0]


async def test_another_prompt_goes_to_the_other_replica(start_bench: StartBench) -> None:
    bench = await start_bench(2)
    _, first, _ = await bench.chat(RIVERS)
    _, second, _ = await bench.chat(PEAKS)
    assert second["x-kvway-replica"] != first["x-kvway-replica"]


async def test_siblings_meet_before_the_first_answer_begins(start_bench: StartBench) -> None:
    bench = await start_bench(2)
    for replica in bench.replicas:
        replica.answer = Answer(hold_head=True)
    first = asyncio.create_task(bench.chat(RIVERS + "first?"))
    arrivals = [asyncio.create_task(has_request(replica)) for replica in bench.replicas]
    _, waiting = await asyncio.wait(arrivals, return_when=asyncio.FIRST_COMPLETED)
    for arrival in waiting:
        arrival.cancel()
    (holder,) = (replica for replica in bench.replicas if replica.requests)
    second = asyncio.create_task(bench.chat(RIVERS + "second?"))
    await holder.wait_for(lambda: len(holder.requests) == 2)
    for replica in bench.replicas:
        replica.release()
    for _, headers, _ in await asyncio.gather(first, second):
        assert headers["x-kvway-replica"] == holder.replica_id


async def test_a_decision_shows_its_terms_and_what_happened(start_bench: StartBench) -> None:
    bench = await start_bench(2)
    bench.replicas[0].answer = bench.replicas[1].answer = Answer(cached_tokens=32)
    _, headers, _ = await bench.chat(RIVERS, stream=True)
    record = await bench.decision(headers)
    assert record["id"] == headers["x-kvway-request-id"]
    assert record["replica_id"] == headers["x-kvway-replica"]
    assert record["stream"] is True
    assert record["status"] == 200
    assert record["finish"] == "done"
    assert record["cached_tokens"] == 32
    assert record["prompt_blocks"] == record["prompt_tokens"] // 16
    assert 0 < record["ttft_s"] <= record["duration_s"]
    assert record["replica_id"] in record["detail"]
    for candidate in record["candidates"]:
        terms = ("queued_s", "step_s", "own_s", "reload_s", "price_s", "kv_s", "failing_s")
        assert candidate["cost_s"] == pytest.approx(sum(candidate[term] for term in terms))


# --- bytes -----------------------------------------------------------------------------------


async def test_the_body_reaches_the_replica_byte_for_byte(bench: Bench) -> None:
    body = (
        b'{ "model":"test-model", "x-unknown": {"a": 1.0}, "temperature":1.0,\n'
        b'"messages":[{"content":"\\u00e9 \xc3\xa9","role":"user"}] }'
    )
    headers = {"Authorization": "Bearer key", "Content-Type": "application/json", "X-Own": "1"}
    url = bench.api("/v1/chat/completions")
    async with bench.client.post(url, data=body, headers=headers) as response:
        assert response.status == 200
    (received,) = bench.replica.requests
    assert received.body == body
    assert received.headers["authorization"] == "Bearer key"
    assert received.headers["x-own"] == "1"
    assert received.headers["x-request-id"] == response.headers["x-kvway-request-id"]


@pytest.mark.parametrize("name", ['"cache_salt"', '"\\u0063ache_salt"'])
async def test_a_cache_salt_of_the_client_is_stripped(bench: Bench, name: str) -> None:
    plain = json.dumps(chat_body("hi", seed=7), separators=(",", ":"))
    salted = plain[:-1] + f',{name}:"mine"}}'
    url = bench.api("/v1/chat/completions")
    async with bench.client.post(url, data=salted) as response:
        assert response.status == 200
    assert bench.replica.requests[0].body == plain.encode()


async def test_an_answer_reaches_the_client_unchanged(bench: Bench) -> None:
    bench.replica.script(Answer(body=b'{"odd" : 1.50}', headers={"x-theirs": "yes"}))
    async with bench.client.post(
        bench.api("/v1/chat/completions"), json=chat_body("hi")
    ) as response:
        assert response.status == 200
        assert await response.read() == b'{"odd" : 1.50}'
        assert response.headers["x-theirs"] == "yes"
        assert response.headers["content-length"] == "14"


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_a_refusal_of_the_replica_is_the_clients_to_read(
    start_bench: StartBench, status: int
) -> None:
    bench = await start_bench(2)
    for replica in bench.replicas:
        replica.answer = Answer(status=status, body=b'{"error":"theirs"}')
    got, headers, body = await bench.chat(stream=True)
    assert (got, body) == (status, {"error": "theirs"})
    assert headers["content-type"] == "application/json"
    assert sum(len(replica.requests) for replica in bench.replicas) == 1
    assert bench.router.replicas.usable()


async def test_a_stream_is_passed_on_as_it_comes(bench: Bench) -> None:
    bench.replica.script(Answer(hold_after_pieces=1))
    async with bench.client.post(
        bench.api("/v1/chat/completions"), json=chat_body("hi", stream=True)
    ) as response:
        first = await response.content.readany()
        assert b"Hello" in first
        assert not bench.replica.requests[0].finished
        bench.replica.release()
        rest = await response.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_completions_with_several_prompts_count_them_all(bench: Bench) -> None:
    body = {"model": MODEL, "prompt": ["a" * 40, "b" * 100]}
    async with bench.client.post(bench.api("/v1/completions"), json=body) as response:
        assert response.status == 200
        record = await bench.decision(response.headers)
    assert record["num_prompts"] == 2
    assert record["prompt_tokens"] == 140
    assert record["prompt_blocks"] == 40 // 16


async def test_token_ids_are_taken_as_they_are(bench: Bench) -> None:
    body = {"model": MODEL, "prompt": list(b"c" * 33)}
    async with bench.client.post(bench.api("/v1/completions"), json=body) as response:
        record = await bench.decision(response.headers)
    assert (record["prompt_tokens"], record["prompt_blocks"]) == (33, 2)


# --- refusals before any replica -------------------------------------------------------------


async def test_an_unknown_model_is_not_found(bench: Bench) -> None:
    status, headers, body = await bench.chat(model="another")
    assert status == 404
    assert body["error"]["code"] == "model_not_found"
    assert headers["x-kvway-request-id"]
    assert not bench.replica.requests


async def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(
    bench: Bench,
) -> None:
    num_tokens = 9000 + len("|user\n|\n|assistant\n")
    status, _, body = await bench.chat("x" * 9000)
    assert status == 400
    assert body["error"]["code"] == "context_length_exceeded"
    assert f"{num_tokens} tokens" in body["error"]["message"]
    assert "8192" in body["error"]["message"]
    assert not bench.replica.requests


async def test_the_context_of_the_replicas_counts(start_bench: StartBench) -> None:
    bench = await start_bench(1)
    bench.replica.pages["/load"] = (200, bench.replica.load(max_model_len=100))
    await bench.router.replicas.wait_for(lambda: bench.router.max_model_len() == 100)
    status, _, body = await bench.chat("x" * 99)
    assert status == 400
    assert "100" in body["error"]["message"]


async def test_without_a_replica_the_answer_is_503(bench: Bench) -> None:
    await bench.replica.stop()
    await bench.router.replicas.wait_for(lambda: not bench.router.replicas.usable())
    status, headers, body = await bench.chat()
    assert status == 503
    assert body["error"]["code"] == "no_replica_available"
    assert int(headers["Retry-After"]) >= 1


# --- faults before the first byte ------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        ("stream_broken", BROKEN),
        ("stream_broken", Answer(raw=b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")),
        ("stream_broken", Answer(break_after_pieces=0)),
        ("protocol_error", Answer(raw=b"junk\r\n\r\n")),
        ("replica_rejected", Answer(status=503, body=b"{}")),
        ("replica_rejected", Answer(status=502, body=b"{}")),
        ("replica_rejected", Answer(status=429, body=b"{}")),
    ],
    ids=["closes", "half body", "cut", "junk", "503", "502", "429"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_before_the_first_byte_is_made_good_elsewhere(
    start_bench: StartBench, answer: Answer, error: str, *, stream: bool
) -> None:
    bench = await start_bench(2)
    _, headers, _ = await bench.chat(RIVERS)
    holder = bench.named(headers["x-kvway-replica"])
    holder.script(answer, answer)  # a broken pooled connection is replaced once
    status, headers, body = await bench.chat(RIVERS + "?", stream=stream)
    assert status == 200, body
    assert headers["x-kvway-replica"] != holder.replica_id
    assert headers["x-kvway-reason"].startswith("retry")
    record = await bench.decision(headers)
    assert [attempt["error"] for attempt in record["attempts"]] == [error, None]
    metrics = await bench.metrics()
    assert in_flight(metrics) == 0
    assert metrics["kvway_router_time_to_first_token_seconds_count"] == 0


async def test_a_failed_attempt_leaves_no_blocks_in_the_index(start_bench: StartBench) -> None:
    bench = await start_bench(2)
    bench.replicas[0].answer = bench.replicas[1].answer = BROKEN
    status, _, body = await bench.chat(RIVERS)
    assert (status, body["error"]["code"]) == (502, "stream_broken")
    view = await bench.get(bench.admin("/admin/replicas"))
    assert [replica["blocks_held"] for replica in view["replicas"]] == [0, 0]


async def test_a_refused_connection_takes_the_replica_out(start_bench: StartBench) -> None:
    bench = await start_bench(2, probe_interval_s=3600.0)
    _, headers, _ = await bench.chat(RIVERS)
    dead = bench.named(headers["x-kvway-replica"])
    await dead.stop()
    status, headers, _ = await bench.chat(RIVERS)
    assert status == 200
    assert headers["x-kvway-replica"] != dead.replica_id
    assert dead.replica_id not in {replica.id for replica in bench.router.replicas.usable()}


async def test_attempts_are_bounded(start_bench: StartBench) -> None:
    bench = await start_bench(4, max_attempts=3)
    for replica in bench.replicas:
        replica.answer = Answer(raw=b"junk\r\n\r\n")
    status, _, _ = await bench.chat()
    assert status == 502
    assert sorted(len(replica.requests) for replica in bench.replicas) == [0, 1, 1, 1]
    assert (await bench.metrics())["kvway_router_retries_total"] == 2


async def test_the_last_refusal_is_passed_on_when_all_refuse(start_bench: StartBench) -> None:
    bench = await start_bench(2)
    for replica in bench.replicas:
        replica.answer = Answer(status=503, body=b'{"error":"busy"}', headers={"Retry-After": "7"})
    status, headers, body = await bench.chat(stream=True)
    assert (status, body) == (503, {"error": "busy"})
    assert headers["Retry-After"] == "7"
    assert len(bench.router.replicas.usable()) == 2


async def test_a_refused_prompt_is_neither_held_nor_traffic(start_bench: StartBench) -> None:
    bench = await start_bench(1)
    refusal = Answer(status=400, body=b"{}", headers={"x-kvway-cached-tokens": "16"})
    bench.replicas[0].answer = refusal
    status, _, _ = await bench.chat(RIVERS)
    assert status == 400
    view = await bench.get(bench.admin("/admin/replicas"))
    assert view["replicas"][0]["blocks_held"] == 0
    assert view["totals"]["prompt_tokens"] == view["totals"]["cached_tokens"] == 0


@pytest.mark.parametrize("status", [500, 504])
async def test_a_request_that_failed_at_work_is_tried_elsewhere_once(
    start_bench: StartBench, status: int
) -> None:
    bench = await start_bench(3)
    for replica in bench.replicas:
        replica.answer = Answer(status=status, body=b'{"error":"broken"}')
    assert (await bench.chat())[::2] == (status, {"error": "broken"})
    assert sum(len(replica.requests) for replica in bench.replicas) == 2


@pytest.mark.parametrize(
    ("header", "cached"), [("9" * 5000, None), ("99999999", "all"), ("-5", None), ("16", 16)]
)
async def test_what_a_replica_says_it_had_cached_is_bounded(
    start_bench: StartBench, header: str, cached: int | str | None
) -> None:
    bench = await start_bench(1)
    bench.replicas[0].answer = Answer(headers={"x-kvway-cached-tokens": header}, body=b"{}")
    status, headers, _ = await bench.chat(RIVERS)
    assert status == 200
    record = await bench.decision(headers)
    expected = record["prompt_tokens"] if cached == "all" else cached
    assert record["cached_tokens"] == expected


async def test_silence_is_not_tried_elsewhere(start_bench: StartBench) -> None:
    bench = await start_bench(2, first_token_timeout_s=0.05)
    for replica in bench.replicas:
        replica.answer = Answer(hold_head=True)
    status, _, body = await bench.chat(stream=True)
    assert (status, body["error"]["code"]) == (504, "first_token_timeout")
    listed = await bench.get(bench.admin("/admin/decisions"))
    record = await bench.get(bench.admin(f"/admin/decisions/{listed['decisions'][0]['id']}"))
    assert [attempt["error"] for attempt in record["attempts"]] == ["first_token_timeout"]
    assert sum(len(replica.requests) for replica in bench.replicas) == 1


# --- faults in the middle --------------------------------------------------------------------


async def broken_stream(bench: Bench) -> bytes:
    """What a client receives of a stream whose end it can tell to be wrong."""
    async with bench.client.post(
        bench.api("/v1/chat/completions"), json=chat_body("hi", stream=True)
    ) as response:
        return await cut_off(response)


async def cut_off(response: aiohttp.ClientResponse) -> bytes:
    """The rest of an answer, which must end in a way that cannot pass for its end."""
    received: list[bytes] = []

    async def receive() -> None:
        async for chunk in response.content.iter_any():
            received.append(chunk)  # noqa: PERF401 (what came before the error counts)

    with pytest.raises(aiohttp.ClientPayloadError):
        await receive()
    return b"".join(received)


def last_event(stream: bytes) -> Any:
    *_, last = stream.removesuffix(b"\n\n").split(b"\n\n")
    return json.loads(last.removeprefix(b"data: "))


async def test_a_stream_that_breaks_ends_with_an_error_event(start_bench: StartBench) -> None:
    bench = await start_bench(2)
    for replica in bench.replicas:
        replica.answer = Answer(break_after_pieces=2)
    received = await broken_stream(bench)
    assert received.count(b"data:") == 3
    assert b"[DONE]" not in received
    assert last_event(received)["error"]["code"] == "stream_broken"
    assert sum(len(replica.requests) for replica in bench.replicas) == 1
    await until_idle(bench)
    (record,) = bench.router.decisions.latest(9)
    assert (record.status, record.finish, record.error) == (200, "failed", "stream_broken")
    assert record.attempts[-1].error == "stream_broken"


# --- clients that leave ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "answer", "phase"),
    [
        (True, Answer(hold_head=True), "before_first_byte"),
        (False, Answer(hold_head=True), "before_first_byte"),
        (True, Answer(hold_after_pieces=1), "in_stream"),
    ],
    ids=["stream, before", "whole", "stream, in it"],
)
async def test_a_client_that_leaves_frees_the_replica(
    bench: Bench, answer: Answer, phase: str, *, stream: bool
) -> None:
    replica = bench.replica
    replica.script(answer)
    begun = asyncio.Event()

    async def ask() -> None:
        url = bench.api("/v1/chat/completions")
        async with bench.client.post(url, json=chat_body(RIVERS, stream=stream)) as response:
            begun.set()
            await response.content.read()

    asking = asyncio.create_task(ask())
    await replica.wait_for(lambda: len(replica.requests) == 1)
    if phase == "in_stream":
        await begun.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await replica.wait_for(lambda: replica.num_disconnected == 1)
    await until_idle(bench)
    (record,) = bench.router.decisions.latest(9)
    assert (record.status, record.finish) == (499, "client_gone")
    metrics = await bench.metrics()
    assert metrics[f'kvway_router_client_disconnects_total{{phase="{phase}"}}'] == 1
    assert in_flight(metrics) == 0
    view = await bench.get(bench.admin("/admin/replicas"))
    assert (view["replicas"][0]["blocks_held"] > 0) is (phase == "in_stream")


# --- the end ---------------------------------------------------------------------------------


async def held_stream(bench: Bench, replica: FakeReplica) -> aiohttp.ClientResponse:
    """A stream that has begun and goes on when the replica is released."""
    replica.script(Answer(hold_after_pieces=1))
    response = await bench.client.post(
        bench.api("/v1/chat/completions"), json=chat_body("hi", stream=True)
    )
    await response.content.readany()
    return response


async def until_not_ready(bench: Bench) -> None:
    """Waits until the router says that it is about to stop."""
    status = 200
    while status == 200:
        async with bench.client.get(bench.admin("/ready")) as ready:
            status = ready.status


async def test_a_drain_lets_streams_end_and_takes_nothing_new(bench: Bench) -> None:
    response = await held_stream(bench, bench.replica)
    await bench.chat()  # leaves a connection open
    draining = asyncio.create_task(bench.router.drain())
    await until_not_ready(bench)
    status, headers, body = await bench.chat()
    assert (status, body["error"]["code"]) == (503, "shutting_down")
    assert int(headers["Retry-After"]) >= 1
    assert headers["Connection"] == "close"
    with pytest.raises(aiohttp.ClientConnectorError):
        await bench.chat()
    async with bench.client.get(bench.admin("/ready")) as ready:
        assert ready.status == 503
    assert not draining.done()
    bench.replica.release()
    assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
    await draining
    response.release()


async def test_before_a_drain_requests_are_taken_while_ready_says_no(
    start_bench: StartBench,
) -> None:
    bench = await start_bench(1, lame_duck_s=300.0)
    draining = asyncio.create_task(bench.router.drain())
    await until_not_ready(bench)
    async with bench.client.get(bench.api("/ready")) as ready:
        assert ready.status == 503
    status, headers, _ = await bench.chat()
    assert (status, headers["Connection"]) == (200, "close")
    draining.cancel()


async def test_a_drain_breaks_off_what_takes_too_long(start_bench: StartBench) -> None:
    bench = await start_bench(1, drain_timeout_s=0.0)
    response = await held_stream(bench, bench.replica)
    await bench.router.drain()
    received = await cut_off(response)
    assert last_event(received)["error"]["code"] == "shutting_down"
    assert b"[DONE]" not in received
    await bench.replica.wait_for(lambda: bench.replica.num_disconnected == 1)
    (record,) = bench.router.decisions.latest(9)
    assert record.finish == "shut_down"
    response.release()


# --- clients that read slowly ---------------------------------------------------------------


async def test_a_client_that_does_not_read_holds_the_replica_back(bench: Bench) -> None:
    body = bytes(32 * 1024 * 1024)
    bench.replica.script(Answer(body=body))
    response = await bench.client.post(bench.api("/v1/chat/completions"), json=chat_body("hi"))
    (received,) = bench.replica.requests
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await bench.replica.wait_for(lambda: received.finished)
    assert len(await response.read()) == len(body)
    await bench.replica.wait_for(lambda: received.finished)
    assert not received.disconnected


# --- what is counted -------------------------------------------------------------------------


async def test_tokens_are_counted_per_replica(bench: Bench) -> None:
    bench.replica.answer = Answer(cached_tokens=48)
    for _ in range(2):
        await bench.chat(RIVERS)
    bench.replica.answer = Answer(cached_tokens=None)
    await bench.chat(RIVERS)
    view = await bench.get(bench.admin("/admin/replicas"))
    num_tokens = len(RIVERS) + 19
    assert view["totals"]["requests"] == 3
    assert view["totals"]["prompt_tokens"] == 2 * num_tokens
    assert view["totals"]["cached_tokens"] == 96
    assert view["totals"]["matched_tokens"] == num_tokens // 16 * 16


async def test_only_streams_teach_the_prefill_rate(bench: Bench) -> None:
    bench.replica.pages["/load"] = (200, bench.replica.load(prefill_tokens_per_s=0.0))
    seen = bench.replica.probes["/load"]
    await bench.replica.wait_for(lambda: bench.replica.probes["/load"] > seen + 1)
    rates = []
    for text, stream in ((RIVERS, False), (PEAKS, True)):
        await bench.chat(text, stream=stream)
        view = await bench.get(bench.admin("/admin/replicas"))
        rates.append(view["replicas"][0]["prefill_tokens_per_s"])
    assert rates[0] == 1000.0  # from the first report
    assert rates[1] != 1000.0


async def test_comments_that_keep_a_stream_open_are_no_first_token(bench: Bench) -> None:
    bench.replica.pages["/load"] = (200, bench.replica.load(prefill_tokens_per_s=0.0))
    seen = bench.replica.probes["/load"]
    await bench.replica.wait_for(lambda: bench.replica.probes["/load"] > seen + 1)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    rates = []
    ping, done = b": ping\n\n: ping\n\n", b"data: {}\n\ndata: [DONE]\n\n"
    for text, events in ((RIVERS, ping), (PEAKS, done)):
        bench.replica.answer = Answer(raw=head + events)
        await bench.chat(text, stream=True)
        view = await bench.get(bench.admin("/admin/replicas"))
        rates.append(view["replicas"][0]["prefill_tokens_per_s"])
    assert rates[0] == 1000.0, "nothing was learned"
    assert rates[1] != 1000.0
