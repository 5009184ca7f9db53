"""An engine with data-parallel ranks behind one address, each of which tells what it holds."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.e2e.routing import BLOCK, HELD, words
from tests.router.engine_publisher import removed, stored, two_ranks, vllm_maps

if TYPE_CHECKING:
    from tests.e2e.conftest import StartRouters
    from tests.router.conftest import Bench

PROMPT = words("ranks", 20 * BLOCK)
HASHES = range(100, 120)


async def matched(bench: Bench) -> int:
    """Sends the prompt, and returns how many of its blocks were known to be held."""
    body = {"model": "test-model", "prompt": PROMPT}
    async with bench.client.post(bench.api("/v1/completions"), json=body) as response:
        assert response.status == 200
        record = await bench.decision(response.headers)
    await bench.router.dispatcher.running.wait_idle()
    blocks: int = record["matched_tokens"] // BLOCK
    return blocks


async def until_told(bench: Bench, num_events: int) -> None:
    """Waits until so many events of all ranks together are in the index."""
    replica = bench.router.replicas.get(bench.replica.replica_id)
    assert replica is not None
    while replica.feed_stats.num_events < num_events:  # noqa: ASYNC110 - the sockets have a thread
        await asyncio.sleep(0.002)


async def test_what_is_expected_of_a_prompt_is_of_no_rank_until_one_tells(
    start_routers: StartRouters,
) -> None:
    """Siblings meet while it runs; then what a rank holds counts, and what it drops is gone."""
    async with two_ranks(vllm_maps) as (one, two):
        (bench,) = await start_routers(
            1, metrics=b"", probe_interval_s=0.05, kv_events=(f"{one.pub},ranks=2",)
        )
        name = bench.replica.replica_id
        await one.subscribed()
        await two.subscribed()
        await bench.router.replicas.wait_for(lambda: bench.router.replicas.is_fed(name))

        bench.replica.script(HELD)
        first = asyncio.create_task(matched(bench))
        await bench.replica.wait_for(lambda: len(bench.replica.requests) == 1)
        second = asyncio.create_task(matched(bench))
        await bench.replica.wait_for(lambda: len(bench.replica.requests) == 2)
        bench.replica.release()
        assert [await first, await second] == [0, 20]
        assert await matched(bench) == 0, "no rank said that it holds it"

        await two.publish(stored(HASHES, list(PROMPT.encode())), rank=1)
        await until_told(bench, 1)
        assert await matched(bench) == 20
        await two.publish(removed(*HASHES[10:]), rank=1)
        await until_told(bench, 2)
        assert await matched(bench) == 10
