"""How a request ended, in two letters: each pair once for real, and every error in the table."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aiohttp
import pytest

from kvway_core import errors
from kvway_core.errors import KvwayError
from kvway_core.testing.fake_replica import Answer
from kvway_router.ends import Where, end_of_answer, end_of_failure
from tests.router.conftest import Bench, StartBench, chat_body

LETTERS = {
    errors.ConnectFailed: "P",
    errors.ContextLengthExceeded: "B",
    errors.DeadlineExceeded: "L",
    errors.FirstTokenTimeout: "P",
    errors.InternalError: "I",
    errors.InvalidRequest: "B",
    errors.ModelNotFound: "B",
    errors.NoReplicaAvailable: "P",
    errors.Overloaded: "L",
    errors.PayloadTooLarge: "B",
    errors.ProtocolError: "P",
    errors.QueueTimeout: "L",
    errors.ReplicaLost: "P",
    errors.RequestCrashedReplica: "P",
    errors.RequestTimeout: "B",
    errors.ShuttingDown: "S",
    errors.StreamBroken: "P",
    errors.TokenTimeout: "P",
    errors.UnsupportedMediaType: "B",
}


@pytest.mark.parametrize(("error", "letter"), LETTERS.items())
@pytest.mark.parametrize("where", Where)
def test_each_error_has_its_letter(error: type[KvwayError], letter: str, where: Where) -> None:
    made = error() if error is errors.InternalError else error("why")
    assert end_of_failure(made, where) == letter + where.value


@pytest.mark.parametrize(("status", "end"), [(200, "OK"), (302, "OK"), (400, "OE"), (503, "OE")])
def test_a_whole_answer_has_ended_well_or_with_the_replicas_error(status: int, end: str) -> None:
    assert end_of_answer(status) == end


async def end_of(bench: Bench, headers: Any) -> str:
    await bench.router.dispatcher.running.wait_idle()
    return str((await bench.decision(headers))["end"])


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (Answer(), "OK"),
        (Answer(status=422, body=b"{}"), "OE"),
        (Answer(raw=b""), "PW"),
        (Answer(status=500, body=b"{}"), "PW"),
        (Answer(break_after_pieces=2), "PD"),
    ],
    ids=["whole", "refused", "broken before", "error", "broken in"],
)
async def test_an_end_tells_what_the_replica_did(bench: Bench, answer: Answer, end: str) -> None:
    bench.replica.answer = answer
    body = chat_body("x", stream=True)
    async with bench.client.post(bench.api("/v1/chat/completions"), json=body) as response:
        with contextlib.suppress(aiohttp.ClientPayloadError):
            await response.read()
        assert await end_of(bench, response.headers) == end


async def test_an_end_tells_where_the_client_left(bench: Bench) -> None:
    bench.replica.answer = Answer(hold_head=True)
    asked = asyncio.create_task(bench.chat())
    await bench.replica.wait_for(lambda: bool(bench.replica.requests))
    asked.cancel()
    await bench.router.dispatcher.running.wait_idle()
    bench.replica.answer = Answer(hold_after_pieces=1)
    url = bench.api("/v1/chat/completions")
    async with bench.client.post(url, json=chat_body("x", stream=True)) as response:
        await response.content.readany()
        response.close()
    await bench.router.dispatcher.running.wait_idle()
    ids = [summary.id for summary in bench.router.decisions.summaries(2)]
    ends = [(await bench.get(bench.admin(f"/admin/decisions/{name}")))["end"] for name in ids]
    assert ends == ["CD", "CW"]


async def test_an_end_tells_that_there_was_no_room_and_no_time(start_bench: StartBench) -> None:
    bench = await start_bench(queue_timeout_s=0.05)
    bench.replica.pages["/load"] = (200, bench.replica.load(max_num_seqs=1))
    await bench.router.replicas.wait_for(
        lambda: bench.router.replicas.slots(bench.replica.replica_id) == 1
    )
    bench.replica.answer = Answer(hold_head=True)
    running = [asyncio.create_task(bench.chat(str(number))) for number in range(2)]
    await bench.replica.wait_for(lambda: len(bench.replica.requests) == 2)
    status, headers, _ = await bench.chat("late")
    assert status == 503
    assert (await bench.decision(headers))["end"] == "LQ"
    bench.replica.release()
    await asyncio.gather(*running)
