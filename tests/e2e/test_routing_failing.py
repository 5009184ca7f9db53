"""What becomes of routing when replicas fail fast, fall silent or report what makes no sense.

Through real sockets.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvway_core.testing.fake_replica import Answer, FakeReplica
from tests.e2e.routing import HELD, num_requests, until, words
from tests.e2e.test_routing_states import holder_of, reports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.e2e.conftest import StartRouters
    from tests.router.conftest import Bench

IDLE: dict[str, Any] = {"num_waiting": 0}

FAILURES = {
    "429": Answer(status=429, body=b"{}"),
    "500": Answer(status=500, body=b"{}"),
    "503": Answer(status=503, body=b"{}"),
    "closed": Answer(raw=b""),
    "junk": Answer(raw=b"\x00\xff junk\r\n\r\n"),
}


async def ask_cold(bench: Bench, good: Sequence[FakeReplica], number: int) -> asyncio.Task[Any]:
    """Asks for something that nobody holds; returns once a good replica has it or it is over."""
    before = num_requests(good)
    asking = asyncio.create_task(bench.chat(words(f"{number:03} prompt", 2000)))
    arrived = asyncio.create_task(until(good, lambda: num_requests(good) > before))
    await asyncio.wait([asking, arrived], return_when=asyncio.FIRST_COMPLETED)
    arrived.cancel()
    await asyncio.gather(arrived, return_exceptions=True)
    return asking


@pytest.mark.parametrize("failure", FAILURES)
async def test_who_fails_at_once_is_no_magnet(start_routers: StartRouters, failure: str) -> None:
    """It is always idle, as it does nothing: that must not give it all cold prompts."""
    (bench,) = await start_routers(3, load=IDLE)
    bad, *good = bench.replicas
    bad.answer = FAILURES[failure]
    for replica in good:
        replica.answer = HELD
    asking = [await ask_cold(bench, good, number) for number in range(30)]
    for replica in good:
        replica.release()
    await asyncio.gather(*asking)
    assert len(bad.requests) <= 10, "no more than its share"
    view = await bench.get(bench.admin("/admin/decisions"))
    record = await bench.get(bench.admin(f"/admin/decisions/{view['decisions'][0]['id']}"))
    cost = {c["replica_id"]: c["failing_s"] for c in record["candidates"]}
    if bad.requests and bad.replica_id in cost:
        assert cost[bad.replica_id] > 0


async def test_an_owner_that_refuses_is_not_asked_first_by_every_request(
    start_routers: StartRouters,
) -> None:
    (bench,) = await start_routers(2, load=IDLE)
    prompt = words("owned", 800)
    owner = await holder_of(bench, prompt)
    owner.answer = FAILURES["503"]
    before = len(owner.requests)
    for _ in range(10):
        status, _, _ = await bench.chat(prompt)
        assert status == 200
    assert len(owner.requests) - before <= 3


async def test_blocks_of_another_size_are_counted_in_tokens(start_routers: StartRouters) -> None:
    """64 free blocks of 256 tokens are as much as 1024 of 16."""
    (bench,) = await start_routers(2, load=IDLE, probe_interval_s=0.05)
    big = bench.replicas[0]
    await reports(
        big, num_waiting=0, block_size=256, blocks={"free": 64, "cached": 0, "total": 64}
    )
    _, headers, _ = await bench.chat(words("long", 3000))
    record = await bench.decision(headers)
    assert [c["kv_s"] for c in record["candidates"]] == [0.0, 0.0]


async def test_a_report_of_no_context_does_not_refuse_the_whole_fleets_prompts(
    start_routers: StartRouters,
) -> None:
    (bench,) = await start_routers(2, load=IDLE, probe_interval_s=0.05)
    await reports(bench.replicas[0], max_model_len=0)
    status, _, _ = await bench.chat(words("fine", 300))
    assert status == 200


async def test_a_prompt_goes_where_the_context_is_long_enough_for_it(
    start_routers: StartRouters,
) -> None:
    """Though the other holds its beginning; it is refused where it is too long for all."""
    (bench,) = await start_routers(2, load=IDLE, probe_interval_s=0.05)
    small, large = bench.replicas
    prompt = words("long", 800)
    holder = await holder_of(bench, prompt)
    if holder is large:
        small, large = large, small
    await reports(small, num_waiting=0, max_model_len=1000)
    _, headers, _ = await bench.chat(prompt)
    assert headers["x-kvway-replica"] == small.replica_id
    for number in range(3):
        status, headers, _ = await bench.chat(prompt + words(f"more {number}", 1000))
        assert (status, headers["x-kvway-replica"]) == (200, large.replica_id)
    status, _, body = await bench.chat(words("too long", 9000))
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert "8192" in body["error"]["message"]


@pytest.mark.parametrize("page", [(404, {}), (200, {"junk": 1}), (500, {}), (None, {})])
async def test_reports_that_fail_everywhere_are_no_outage(
    start_routers: StartRouters, page: tuple[int | None, Any]
) -> None:
    (bench,) = await start_routers(2, load=IDLE, probe_interval_s=0.05)
    for replica in bench.replicas:
        replica.pages["/load"] = page
        seen = replica.probes["/load"]
        await replica.wait_for(lambda r=replica, n=seen: r.probes["/load"] > n + 5)  # type: ignore[misc]
    status, _, _ = await bench.chat("hello")
    assert status == 200
    view = await bench.get(bench.admin("/admin/replicas"))
    shown = [bool(replica["no_report"]) for replica in view["replicas"]]
    assert shown == [page[0] != 404] * 2


async def test_hit_rates_leave_out_requests_of_several_prompts(
    start_routers: StartRouters,
) -> None:
    """Only the first prompt is matched, the engine reports them all."""
    (bench,) = await start_routers(1, load=IDLE)
    prompts = [words("one", 320), words("two", 320)]
    counted = []
    for asked in (prompts, prompts, prompts[0]):
        bench.replica.answer = Answer(cached_tokens=300)
        body = {"model": "test-model", "prompt": asked}
        async with bench.client.post(bench.api("/v1/completions"), json=body) as response:
            assert response.status == 200
        await bench.router.dispatcher.running.wait_idle()
        metrics = await bench.metrics()
        label = f'{{replica="{bench.replica.replica_id}"}}'
        names = ("prompt", "cached", "matched", "reachable")
        counted.append([metrics[f"kvway_router_{name}_tokens_total{label}"] for name in names])
    assert counted == [[0, 0, 0, 0], [0, 0, 0, 0], [320, 300, 320, 320]]
