"""A router that has served many requests keeps no more than one that has served some.

Everything that fills up to a bound gets a small one and is full before the first count. Then what
is there is counted, object by object, before and after some hundred requests that end in every
way; whatever keeps something of each of them shows.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvway_core.prompts import PromptEncoder
from kvway_core.testing.byte_model import write_byte_model
from kvway_core.testing.fake_replica import Answer
from kvway_router import accounts, history, locator, recent, rotation
from kvway_router.index import MIN_BYTES
from kvway_router.prefixes import finder, watch
from kvway_router.recent import RecentPrompts, SentPrompt
from tests.objects import counted
from tests.router.conftest import MODEL, Bench, StartBench, chat_body

NUM_WARM = 400
NUM_REQUESTS = 1000
NUM_OF_A_KIND = NUM_REQUESTS // 4
CACHE_BYTES = 4_000


@pytest.fixture
def encoder(tmp_path: Path) -> PromptEncoder:
    return PromptEncoder.load(write_byte_model(tmp_path / MODEL), cache_bytes=CACHE_BYTES)


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, bound in (
        (recent, "MAX_PROMPTS", 4),
        (locator, "_MIN_WAITING", 16),
        (watch, "MAX_WAITING", 4),
        (finder, "MAX_PROMPTS", 4),
        (finder, "MAX_SUSPECTS", 4),
        (rotation, "_MAX_OUTCOMES", 8),
        (accounts, "_MAX_PROMISES", 8),
        (history, "MAX_TTFTS", 8),
    ):
        monkeypatch.setattr(module, name, bound)


async def serve(bench: Bench, numbers: range) -> None:
    """Four kinds of ends by turns: answered whole, in a stream, left in the stream, refused."""
    url = bench.api("/v1/chat/completions")
    for number in numbers:
        text = f"Question {number}: {number * 7919:x} " * 4
        kind = number % 4
        if kind < 2:
            status, _, _ = await bench.chat(text, stream=kind == 1)
            assert status == 200
        elif kind == 2:
            bench.replica.script(Answer(hold_after_pieces=1))
            async with bench.client.post(url, json=chat_body(text, stream=True)) as answer:
                assert await answer.content.readany()
                answer.close()
        else:
            status, _, _ = await bench.chat(text, stop=number)
            assert status == 400
    await bench.router.dispatcher.running.wait_idle()
    bench.replica.requests.clear()


@pytest.mark.usefixtures("small_bounds")
async def test_nothing_is_kept_of_each_request(
    start_bench: StartBench, encoder: PromptEncoder
) -> None:
    bench = await start_bench(
        max_decisions=4, max_replica_blocks=32, max_index_bytes=4 * MIN_BYTES
    )
    await serve(bench, range(NUM_WARM))
    before = counted()
    await serve(bench, range(NUM_WARM, NUM_WARM + NUM_REQUESTS))
    more = counted().more(before, than=NUM_OF_A_KIND * 3 // 4)
    assert more == {}
    assert 0 < encoder.texts.cache.size_bytes <= CACHE_BYTES


def test_the_ceiling_has_a_budget() -> None:
    kept = RecentPrompts(max_ceiling_bytes=4 * MIN_BYTES)
    most = 0
    for number in range(300):
        kept.add(SentPrompt(str(number), "a:1", [10 * number + block for block in range(9)]))
        assert kept.ceiling_bytes <= 4 * MIN_BYTES
        most = max(most, kept.ceiling_bytes)
    assert most > 3 * MIN_BYTES  # the bound was reached
    assert kept.add(SentPrompt("again", "a:1", [10 * 299 + block for block in range(9)])) == 9
    assert kept.add(SentPrompt("old", "a:1", list(range(9)))) == 0


def test_texts_are_kept_as_far_as_there_is_memory_for_them(tmp_path: Path) -> None:
    folder = write_byte_model(tmp_path / MODEL)
    for cache_bytes in (0, CACHE_BYTES):
        texts = PromptEncoder.load(folder, cache_bytes=cache_bytes).texts
        for number in range(50):
            texts.encode(f"text {number}")
        assert cache_bytes // 2 <= texts.cache.size_bytes <= cache_bytes
