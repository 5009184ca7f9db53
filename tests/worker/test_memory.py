"""A worker that has served many requests keeps no more than one that has served some."""

from __future__ import annotations

from pathlib import Path

from kvway_worker.load import EngineLoad
from tests.objects import counted
from tests.worker.http_worker import Running, chat, serving

NUM_WARM = 200
NUM_REQUESTS = 600
NUM_OF_A_KIND = NUM_REQUESTS // 4
CACHE_BYTES = 4_000


async def serve(worker: Running, numbers: range) -> None:
    """Four kinds of ends by turns: answered whole, in a stream, left in the stream, refused."""
    for number in numbers:
        text = f"Question {number}: {number * 7919:x} " * 4
        kind = number % 4
        if kind == 0:
            status, _, _ = await worker.post("/v1/chat/completions", chat(text))
            assert status == 200
        elif kind == 1:
            assert await worker.events("/v1/chat/completions", chat(text))
        elif kind == 2:
            body = chat(text, stream=True, max_tokens=200)
            async with worker.http.post(worker.url + "/v1/chat/completions", json=body) as answer:
                assert await answer.content.readany()
                answer.close()
        else:
            status, _, _ = await worker.post("/v1/chat/completions", chat(text, stop=number))
            assert status == 400
    await worker.worker.wait_idle()
    worker.logs.clear()


def blocks_are_full(load: EngineLoad) -> bool:
    """Says whether every block was used, so that content was given up."""
    return sum(load.evictions.values()) > load.num_blocks


async def test_nothing_is_kept_of_each_request(byte_model: Path) -> None:
    async with serving(byte_model, num_blocks=64, tokenizer_cache_bytes=CACHE_BYTES) as worker:
        await serve(worker, range(NUM_WARM))
        assert blocks_are_full(worker.engine.load())
        before = counted()
        await serve(worker, range(NUM_WARM, NUM_WARM + NUM_REQUESTS))
        more = counted().more(before, than=NUM_OF_A_KIND * 3 // 4)
    assert more == {}
