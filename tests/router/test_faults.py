"""Faults of replicas, through sockets: what the client sees, and what is held against whom.

More of them, with real processes, are in tests/e2e and tests/chaos.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from kvway_core.testing.fake_replica import Answer, FakeReplica
from kvway_router import admission, attempts
from kvway_router.rotation import FAILURES_IN_A_ROW, Outcome
from tests.router.conftest import MODEL, Bench, StartBench, chat_body
from tests.router.test_dispatch import broken_stream, last_event, until_idle

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
WORD = b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"theirs","type":"x","code":500}}\n\n'
REFUSAL = b'data: {"error":{"message":"theirs","type":"x","code":400}}\n\n'
BREAKS = Answer(raw=b"")


def all_answer(bench: Bench, answer: Answer) -> None:
    for replica in bench.replicas:
        replica.answer = answer


def num_requests(bench: Bench) -> int:
    return sum(len(replica.requests) for replica in bench.replicas)


async def last_record(bench: Bench) -> Any:
    await until_idle(bench)
    (record,) = bench.router.decisions.latest(1)
    return record


def failing_s(bench: Bench) -> list[float]:
    return [load.failing_s for load in bench.router.replicas.loads()]


# --- streams that end as none may ------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "code", "told"),
    [
        (WORD, "stream_broken", "stream_broken"),
        (WORD + b'data: {"choices":[{"delta":{"con', "stream_broken", "stream_broken"),
        (WORD + ERROR, "replica_failed", 500),
        (WORD + ERROR + DONE, "replica_failed", None),
    ],
    ids=["no end", "half an event", "error", "error and end"],
)
async def test_a_stream_without_a_good_end_has_failed_and_the_client_can_tell(
    start_bench: StartBench, stream: bytes, code: str, told: int | str | None
) -> None:
    """[DONE] is demanded: the end of a connection says nothing of the end of an answer."""
    bench = await start_bench(2)
    all_answer(bench, Answer(raw=HEAD + stream))
    received = await broken_stream(bench)
    whole = stream[: stream.rfind(b"\n\n") + 2]
    assert received.startswith(whole), "what came is unchanged, and there is no half event"
    if told is not None:
        assert last_event(received)["error"]["code"] == told
        assert b"[DONE]" not in received
    assert received.count(b'"error"') == 1
    record = await last_record(bench)
    assert (record.status, record.finish, record.error) == (200, "failed", code)
    assert num_requests(bench) == 1


async def test_a_stream_that_is_silent_between_two_tokens_ends_with_an_error_event(
    start_bench: StartBench,
) -> None:
    bench = await start_bench(2, token_timeout_s=0.05)
    all_answer(bench, Answer(hold_after_pieces=1))
    received = await broken_stream(bench)
    assert last_event(received)["error"]["code"] == "token_timeout"
    record = await last_record(bench)
    assert record.error == "token_timeout"
    replica = bench.named(record.replica_id)
    await replica.wait_for(lambda: replica.num_disconnected == 1)


async def test_one_that_breaks_in_a_stream_is_looked_at_at_once(start_bench: StartBench) -> None:
    bench = await start_bench(1, probe_interval_s=3600.0)
    bench.replica.answer = Answer(break_after_pieces=1)
    seen = bench.replica.probes["/load"]
    await broken_stream(bench)
    await bench.replica.wait_for(lambda: bench.replica.probes["/load"] > seen)


async def test_comments_are_no_sign_of_life(start_bench: StartBench) -> None:
    bench = await start_bench(1, first_token_timeout_s=0.2)

    async def pings(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        with suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b": ping\n\n")
                await writer.drain()
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1 << 16), 0.01)
        writer.close()

    async with await asyncio.start_server(pings, "127.0.0.1", 0) as server:
        name = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        bench.router.replicas.set_replicas([f"http://{name}"])
        replica = bench.router.replicas.get(name)
        assert replica is not None
        replica.on_good(None)
        status, _, body = await bench.chat(stream=True)
        server.close()
    assert (status, body["error"]["code"]) == (504, "first_token_timeout")


# --- held back until there is content ---------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        Answer(raw=HEAD),
        Answer(raw=HEAD + b": ping\n\n"),
        Answer(raw=HEAD + ROLE),
        Answer(raw=HEAD + ROLE + WORD[:20]),
        Answer(raw=HEAD + ERROR),
        Answer(raw=HEAD + ROLE + ERROR + DONE),
        Answer(status=500, body=b"{}"),
        Answer(status=504, body=b"{}"),
    ],
    ids=["head", "comment", "role", "half", "error", "error and end", "500", "504"],
)
async def test_a_stream_that_fails_before_its_content_is_made_good_elsewhere(
    start_bench: StartBench, answer: Answer
) -> None:
    bench = await start_bench(2)
    _, headers, _ = await bench.chat("prompt")
    bench.named(headers["x-kvway-replica"]).script(answer)
    status, headers, body = await bench.chat("prompt", stream=True)
    assert status == 200
    assert body.count(DONE) == 1
    assert b"error" not in body
    assert len((await bench.decision(headers))["attempts"]) == 2


async def test_an_error_that_is_the_clients_is_not_taken_elsewhere(
    start_bench: StartBench,
) -> None:
    bench = await start_bench(2)
    all_answer(bench, Answer(raw=HEAD + REFUSAL + DONE))
    received = await broken_stream(bench)
    assert received == REFUSAL + DONE
    assert num_requests(bench) == 1
    assert (await last_record(bench)).finish == "failed"
    assert failing_s(bench) == [0.0, 0.0]


async def test_a_stream_is_not_held_back_for_ever(
    start_bench: StartBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "HOLD_S", 0.05)
    bench = await start_bench(1)
    bench.replica.answer = Answer(pieces=("", "late"), hold_after_pieces=1)
    url = bench.api("/v1/chat/completions")
    async with bench.client.post(url, json=chat_body("hi", stream=True)) as response:
        assert await response.content.readany(), "it has begun without content"
        bench.replica.release()
        assert (await response.content.read()).endswith(DONE)


async def test_a_first_token_has_its_own_time_also_once_the_stream_has_begun(
    start_bench: StartBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "HOLD_S", 0.01)
    bench = await start_bench(1, token_timeout_s=0.05, first_token_timeout_s=20.0)
    bench.replica.answer = Answer(pieces=("", "late"), hold_after_pieces=1)
    url = bench.api("/v1/chat/completions")
    async with bench.client.post(url, json=chat_body("hi", stream=True)) as response:
        await response.content.readany()
        await asyncio.sleep(0.15)  # longer than between two tokens
        bench.replica.release()
        assert (await response.content.read()).endswith(DONE)


# --- who is to blame --------------------------------------------------------------------------


async def test_a_prompt_that_fails_everywhere_is_held_against_nobody(
    start_bench: StartBench,
) -> None:
    bench = await start_bench(3)
    all_answer(bench, Answer(status=500, body=b'{"error":"theirs"}'))
    for _ in range(6):
        assert (await bench.chat())[::2] == (500, {"error": "theirs"})
    await until_idle(bench)
    assert failing_s(bench) == pytest.approx([0.0] * 3, abs=0.1)
    assert bench.router.replicas.rotation.num_ejections == 0


async def test_one_that_fails_what_others_answer_is_dear_and_then_out(
    start_bench: StartBench,
) -> None:
    """F9: all are answered, and after five in a row nothing is sent there any more."""
    bench = await start_bench(3, policy="round_robin")
    sick = bench.replicas[0]
    sick.answer = Answer(status=500, body=b"{}")
    for _ in range(30):
        assert (await bench.chat())[0] == 200
    await until_idle(bench)
    assert bench.router.replicas.rotation.is_ejected(sick.replica_id)
    assert len(sick.requests) == FAILURES_IN_A_ROW
    assert (await bench.metrics())["kvway_router_ejections_total"] == 1


async def test_a_refusal_of_the_clients_request_opens_no_breaker(
    start_bench: StartBench,
) -> None:
    bench = await start_bench(2)
    all_answer(bench, Answer(status=400, body=b"{}"))
    for _ in range(20):
        await bench.chat()
    assert bench.router.replicas.rotation.num_ejections == 0
    assert failing_s(bench) == [0.0, 0.0]


async def test_a_prompt_that_kills_workers_kills_two(start_bench: StartBench) -> None:
    """F30: and then it is kept away from the others, however often it comes."""
    bench = await start_bench(4, probe_interval_s=0.05)
    poison = chat_body("poison")

    async def die(replica: FakeReplica) -> None:
        await replica.wait_for(lambda: bool(replica.requests))
        await replica.stop()

    all_answer(bench, Answer(hold_head=True))
    deaths = [asyncio.create_task(die(replica)) for replica in bench.replicas]
    url = bench.api("/v1/chat/completions")
    for _ in range(3):
        async with bench.client.post(url, json=poison) as response:
            assert response.status == 500
            assert (await response.json())["error"]["code"] == "request_crashed_replica"
    assert sum(bool(replica.requests) for replica in bench.replicas) == 2
    all_answer(bench, Answer())
    for death in deaths:
        death.cancel()
    assert (await bench.chat("another"))[0] == 200


async def test_where_all_fail_retries_do_not_multiply_the_load(start_bench: StartBench) -> None:
    """G4: a tenth of the requests, and what was stored."""
    bench = await start_bench(2)
    all_answer(bench, Answer(status=503, body=b"{}"))
    for _ in range(60):
        assert (await bench.chat())[0] == 503
    assert num_requests(bench) <= 60 + 10 + 6 + 1
    name = 'kvway_router_retries_refused_total{why="budget"}'
    assert (await bench.metrics())[name] >= 43


async def test_in_a_panic_the_sick_are_asked_rather_than_nobody(
    start_bench: StartBench,
) -> None:
    bench = await start_bench(4, probe_interval_s=0.05)
    names = [replica.replica_id for replica in bench.replicas]
    replicas = bench.router.replicas
    for name in names[:2] * FAILURES_IN_A_ROW:
        replicas.record(name, Outcome.FAILURE)
    assert [replica.id for replica in replicas.usable()] == names[2:]
    await bench.replicas[2].stop()
    await replicas.wait_for(lambda: names[2] not in replicas.ready())
    assert [replica.id for replica in replicas.usable()] == [*names[:2], names[3]]
    assert (await bench.chat())[0] == 200


async def test_one_that_comes_back_is_not_stampeded(start_bench: StartBench) -> None:
    """Though it has nothing to do, and the other has: its share grows with the seconds."""
    bench = await start_bench(2, probe_interval_s=0.05)
    other, back = bench.replicas
    replicas = bench.router.replicas
    await back.stop()
    await replicas.wait_for(lambda: back.replica_id not in replicas.ready())
    await back.restart()
    await replicas.wait_for(lambda: back.replica_id in replicas.ready())
    all_answer(bench, Answer(hold_head=True))
    asked = [asyncio.create_task(bench.chat(f"{number}" * 60)) for number in range(12)]
    await until_sent(bench, 12)
    assert len(back.requests) <= 2, "an even share would be six"
    for replica in (other, back):
        replica.release()
    await asyncio.gather(*asked)


async def until_sent(bench: Bench, number: int) -> None:
    while num_requests(bench) < number:
        await bench.metrics()


# --- nobody there -----------------------------------------------------------------------------


async def test_when_none_can_be_reached_the_first_to_notice_gets_503(
    start_bench: StartBench,
) -> None:
    bench = await start_bench(3, probe_interval_s=3600.0)
    for replica in bench.replicas:
        await replica.stop()
    for _ in range(2):
        status, headers, body = await bench.chat()
        assert (status, body["error"]["code"]) == (503, "no_replica_available")
        assert 1 <= int(headers["Retry-After"]) <= 5


async def test_a_429_of_all_replicas_is_no_429_of_the_client(start_bench: StartBench) -> None:
    bench = await start_bench(2)
    all_answer(bench, Answer(status=429, body=b"{}"))
    status, headers, body = await bench.chat()
    assert (status, body["error"]["code"]) == (503, "overloaded")
    assert int(headers["Retry-After"]) >= 1
    assert bench.router.replicas.rotation.num_ejections == 0


async def test_who_says_when_to_come_back_is_left_alone_until_then(
    start_bench: StartBench,
) -> None:
    bench = await start_bench(2)
    _, headers, _ = await bench.chat("prompt" * 50)
    busy = bench.named(headers["x-kvway-replica"])
    busy.script(Answer(status=503, body=b"{}", headers={"Retry-After": "5"}))
    for _ in range(4):
        assert (await bench.chat("prompt" * 50))[0] == 200
    assert len(busy.requests) == 2


async def test_a_frozen_replica_is_left_for_another_before_its_first_token(
    start_bench: StartBench,
) -> None:
    """F5: it takes connections, and neither tokens nor answers to looks come."""
    bench = await start_bench(2, probe_interval_s=0.02, probe_timeout_s=0.1)
    all_answer(bench, Answer(hold_head=True))
    asked = asyncio.create_task(bench.chat("prompt", stream=True))
    arrivals = [
        asyncio.create_task(replica.wait_for(lambda r=replica: bool(r.requests)))  # type: ignore[misc]
        for replica in bench.replicas
    ]
    await asyncio.wait(arrivals, return_when=asyncio.FIRST_COMPLETED)
    frozen, other = sorted(bench.replicas, key=lambda replica: -len(replica.requests))
    other.answer = Answer()
    frozen.pages["/load"] = frozen.pages["/health"] = (None, None)
    status, headers, _ = await asked
    assert (status, headers["x-kvway-replica"]) == (200, other.replica_id)
    attempts_made = (await bench.decision(headers))["attempts"]
    assert [attempt["error"] for attempt in attempts_made] == ["replica_lost", None]
    await frozen.wait_for(lambda: frozen.num_disconnected == 1)
    await asyncio.gather(*arrivals)


async def test_a_stream_that_has_begun_is_not_cut_for_looks_that_are_not_answered(
    start_bench: StartBench,
) -> None:
    """Its tokens say whether the replica lives."""
    bench = await start_bench(1, probe_interval_s=0.02)
    replica = bench.replica
    replica.answer = Answer(hold_after_pieces=1)
    url = bench.api("/v1/chat/completions")
    async with bench.client.post(url, json=chat_body("hi", stream=True)) as response:
        await response.content.readany()
        replica.pages["/load"] = replica.pages["/health"] = (None, None)
        replicas = bench.router.replicas
        await replicas.wait_for(lambda: not replicas.ready())
        replica.release()
        assert (await response.content.read()).endswith(DONE)


async def test_what_is_lost_goes_to_one_that_is_alive_and_not_to_the_cheapest(
    start_bench: StartBench,
) -> None:
    """Whatever took one replica may have taken another, that no look has found out about yet."""
    bench = await start_bench(3, probe_interval_s=3600.0)
    all_answer(bench, Answer(hold_head=True))
    asked = asyncio.create_task(bench.chat("prompt"))
    await until_sent(bench, 1)
    dies, *others = sorted(bench.replicas, key=lambda replica: -len(replica.requests))
    loads = {load.replica_id: load for load in bench.router.replicas.loads()}
    assert all(loads[other.replica_id].queued_prefill_s == 0 for other in others)
    silent, alive = sorted(others, key=lambda replica: replica.replica_id)
    busy = alive.load(num_waiting=9, waiting_uncached_tokens=9000)
    alive.pages["/load"] = (200, busy)
    silent.pages["/load"] = silent.pages["/health"] = (None, None)
    all_answer(bench, Answer())
    await dies.stop()
    status, headers, _ = await asked
    assert (status, headers["x-kvway-replica"]) == (200, alive.replica_id)
    assert not silent.requests


# --- room and time ----------------------------------------------------------------------------


SMALL = {"max_num_seqs": 1}


async def small_bench(start_bench: StartBench, **options: Any) -> Bench:
    """One replica of one slot, so with room for two requests, and both are there and held."""
    bench = await start_bench(1, **options)
    replica = bench.replica
    replica.pages["/load"] = (200, replica.load(**SMALL))
    await bench.router.replicas.wait_for(
        lambda: bench.router.replicas.slots(replica.replica_id) == 1
    )
    replica.answer = Answer(hold_head=True)
    return bench


async def fill(bench: Bench) -> list[asyncio.Task[Any]]:
    asked = [asyncio.create_task(bench.chat(f"prompt {number}")) for number in range(2)]
    await bench.replica.wait_for(lambda: len(bench.replica.requests) == 2)
    return asked


async def until_waiting(bench: Bench, number: int) -> None:
    while (await bench.metrics())["kvway_router_queued_requests"] != number:
        pass


async def test_what_a_replica_has_no_room_for_waits_here_and_not_there(
    start_bench: StartBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes as soon as another is done, whether or not anything else looks for room."""
    monkeypatch.setattr(admission, "RECHECK_S", 3600.0)
    bench = await small_bench(start_bench)
    bench.router.replicas.watcher.on_change = lambda: None
    asked = await fill(bench)
    asked += [asyncio.create_task(bench.chat(f"later {number}")) for number in range(2)]
    await until_waiting(bench, 2)
    assert (await bench.metrics())["kvway_router_queued_requests"] == 2
    assert len(bench.replica.requests) == 2
    bench.replica.release()
    assert [status for status, _, _ in await asyncio.gather(*asked)] == [200] * 4


async def test_a_client_that_leaves_the_queue_is_never_sent(start_bench: StartBench) -> None:
    bench = await small_bench(start_bench)
    asked = await fill(bench)
    leavers = [asyncio.create_task(bench.chat("leaves")) for _ in range(3)]
    await until_waiting(bench, 3)
    for leaver in leavers:
        leaver.cancel()
    await asyncio.gather(*leavers, return_exceptions=True)
    await until_waiting(bench, 0)
    bench.replica.release()
    await asyncio.gather(*asked)
    await until_idle(bench)
    assert len(bench.replica.requests) == 2


async def test_beyond_the_queue_the_answer_is_503_and_when_to_come_back(
    start_bench: StartBench,
) -> None:
    bench = await small_bench(start_bench, max_queued=1)
    asked = await fill(bench)
    asked.append(asyncio.create_task(bench.chat("waits")))
    await until_waiting(bench, 1)
    read = (await bench.metrics())["kvway_router_prompt_read_seconds_count"]
    status, headers, body = await bench.chat("too many")
    assert (status, body["error"]["code"]) == (503, "overloaded")
    assert 1 <= int(headers["Retry-After"]) <= 5
    metrics = await bench.metrics()
    assert metrics['kvway_router_shed_requests_total{why="full"}'] == 1
    assert metrics["kvway_router_prompt_read_seconds_count"] == read, "it was not even read"
    bench.replica.release()
    await asyncio.gather(*asked)


async def test_nobody_waits_longer_than_the_option_says(start_bench: StartBench) -> None:
    bench = await small_bench(start_bench, queue_timeout_s=0.05)
    asked = await fill(bench)
    status, _, body = await bench.chat("waits")
    assert (status, body["error"]["code"]) == (503, "queue_timeout")
    bench.replica.release()
    await asyncio.gather(*asked)


async def timed(bench: Bench, seconds: str) -> tuple[int, Any]:
    url, headers = bench.api("/v1/chat/completions"), {"x-kvway-timeout-s": seconds}
    async with bench.client.post(url, json=chat_body("hi"), headers=headers) as response:
        return response.status, await response.json()


async def test_a_client_may_ask_for_less_time(bench: Bench) -> None:
    bench.replica.answer = Answer(hold_head=True)
    status, body = await timed(bench, "0.05")
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
    await bench.replica.wait_for(lambda: bench.replica.num_disconnected == 1)
    assert "x-kvway-timeout-s" not in bench.replica.requests[0].headers


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "nan", "", "1" * 17])
async def test_a_time_that_is_none_is_refused(bench: Bench, seconds: str) -> None:
    status, body = await timed(bench, seconds)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert not bench.replica.requests


async def test_a_request_that_takes_too_long_ends_with_an_event(start_bench: StartBench) -> None:
    bench = await start_bench(1, request_timeout_s=0.2)
    bench.replica.answer = Answer(hold_after_pieces=1)
    received = await broken_stream(bench)
    assert last_event(received)["error"]["code"] == "deadline_exceeded"
    assert (await last_record(bench)).model == MODEL


# --- engines that have to be told -------------------------------------------------------------


async def sglang_bench(start_bench: StartBench) -> Bench:
    """A replica that is known to be SGLang by its metrics."""
    bench = await start_bench(1)
    replica = bench.replica
    replica.pages["/load"] = (404, {})
    replica.pages["/get_server_info"] = (200, {"max_total_num_tokens": 64_000})
    replica.pages["/abort_request"] = (200, {})
    known = bench.router.replicas.get(replica.replica_id)
    assert known is not None
    await bench.router.replicas.wait_for(lambda: known.is_sglang)
    return bench


async def leave(bench: Bench, *, stream: bool, **fields: Any) -> None:
    """Asks, and leaves before the first token."""
    before = len(bench.replica.requests)
    bench.replica.script(Answer(hold_head=True))
    asked = asyncio.create_task(bench.chat("hi", stream=stream, **fields))
    await bench.replica.wait_for(lambda: len(bench.replica.requests) > before)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await bench.replica.wait_for(lambda: bench.replica.requests[-1].disconnected)
    await until_idle(bench)


@pytest.mark.parametrize("stream", [False, True])
async def test_sglang_is_told_of_a_client_that_left(
    start_bench: StartBench, *, stream: bool
) -> None:
    bench = await sglang_bench(start_bench)
    await leave(bench, stream=stream)
    replica = bench.replica
    await replica.wait_for(lambda: "/abort_request" in replica.probes)
    rid = replica.requests[0].json()["rid"]
    assert isinstance(rid, str)
    assert len(rid) == 32
    assert replica.requests[0].body.startswith(b'{"rid":')


async def test_sglang_is_told_nothing_of_what_is_done_or_has_an_id_of_its_own(
    start_bench: StartBench,
) -> None:
    bench = await sglang_bench(start_bench)
    assert (await bench.chat())[0] == 200
    bench.replica.script(Answer(status=400, body=b"{}"))
    assert (await bench.chat())[0] == 400
    await leave(bench, stream=True, rid="mine")
    await leave(bench, stream=True, n=2)
    assert [request.json().get("rid") for request in bench.replica.requests[2:]] == ["mine", None]
    assert bench.router.aborts.num_sent == 0
    assert "/abort_request" not in bench.replica.probes


async def test_other_engines_get_the_body_as_it_is(bench: Bench) -> None:
    await leave(bench, stream=True)
    assert b"rid" not in bench.replica.requests[0].body
    assert bench.router.aborts.num_sent == 0
