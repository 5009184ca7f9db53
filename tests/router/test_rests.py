"""A prompt is read no further than somebody may hold it; the rest is read after the choice."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvway_core.blocks import Namespace, block_hashes, event_hash
from kvway_core.prompts import PromptEncoder
from kvway_core.testing.byte_model import write_byte_model
from kvway_core.testing.fake_replica import Answer
from kvway_router.index import BlockIndex
from kvway_router.reading import Reading, Route, ServedModel
from kvway_router.rests import SLICE_BLOCKS, ExpectedBlocks, RestReader
from tests.router.conftest import MODEL, Bench, StartBench, chat_body

PAGE = "the quick brown fox jumps over the lazy dog "


@pytest.fixture
def encoder(tmp_path: Path) -> PromptEncoder:
    """Returns one that has seen no text yet."""
    return PromptEncoder.load(write_byte_model(tmp_path / MODEL))


def reading_of(
    encoder: PromptEncoder, prompt: str | list[str], *, max_model_len: int | None = None
) -> Reading:
    model = ServedModel(name=MODEL, encoder=encoder, namespace=Namespace(MODEL))
    body = json.dumps({"model": MODEL, "prompt": prompt}).encode()
    return Reading(body, route=Route.COMPLETIONS, model=model, max_model_len=max_model_len)


def hashes_of(text: str) -> tuple[int, ...]:
    chain = block_hashes(list(text.encode()), parent=Namespace(MODEL).root(), block_size=16)
    return tuple(event_hash(block) for block in chain)


def test_each_step_reads_more_and_all_steps_are_the_whole(encoder: PromptEncoder) -> None:
    text = PAGE * 700
    reading = reading_of(encoder, text)
    reading.parse()
    assert (len(reading.request.hashes), reading.front_done) == (0, False)
    assert reading.request.prefix_key
    lengths = [0]
    while not reading.done:
        reading.advance()
        hashes = tuple(reading.request.hashes)
        assert hashes == hashes_of(text)[: len(hashes)]
        lengths.append(len(hashes))
    assert lengths[-1] == len(text) // 16
    steps = [after - before for before, after in pairwise(lengths)]
    assert max(steps[:2]) * 16 < 3000
    assert steps[-2] > 2 * steps[0]
    assert reading.request.num_tokens == len(text)
    assert reading.request.exact


def test_what_is_known_is_read_in_one_step(encoder: PromptEncoder) -> None:
    reading_of(encoder, PAGE * 700).finish()
    reading = reading_of(encoder, PAGE * 700 + "new " * 3000)
    reading.advance()
    assert len(reading.request.hashes) * 16 >= len(PAGE) * 700 - 3000
    assert not reading.front_done


def test_a_prompt_that_may_be_too_long_is_read_whole(encoder: PromptEncoder) -> None:
    text = PAGE * 200
    reading = reading_of(encoder, text, max_model_len=len(text))
    with pytest.raises(Exception, match=f"{len(text)} tokens") as caught:
        reading.advance()
    assert caught.value.code == "context_length_exceeded"  # type: ignore[attr-defined]
    fits = reading_of(encoder, "x" + text, max_model_len=len(text) * 10)
    fits.advance()
    assert not fits.front_done


@pytest.mark.parametrize("max_model_len", [None, 200_000])
def test_whose_time_is_up_is_read_no_further(
    encoder: PromptEncoder, *, max_model_len: int | None
) -> None:
    """Neither in a long step nor where the prompt may be too long; its rest is for others."""
    text = " ".join(f"word{number}" for number in range(18_000))
    reading = reading_of(encoder, text, max_model_len=max_model_len)
    reading._step_chars = 1 if max_model_len else 10**9
    encode, asked = encoder.texts._encode, 0

    def encode_once(text: str) -> Any:
        nonlocal asked
        asked += len(text)
        reading.overdue = True
        return encode(text)

    encoder.texts._encode = encode_once
    reading.advance()
    assert 0 < asked <= 16 * 1024 + 2048
    assert not reading.front_done
    reading.advance()
    assert asked <= 16 * 1024 + 2048
    reading.finish()
    assert reading.request.num_tokens == len(text)


def test_the_end_of_a_text_is_read_like_a_text(encoder: PromptEncoder) -> None:
    """Of a prompt that is to be truncated nothing is known before its end."""
    body = {"model": MODEL, "prompt": [PAGE * 200, "x"], "truncate_prompt_tokens": 40}
    model = ServedModel(name=MODEL, encoder=encoder, namespace=Namespace(MODEL))
    reading = Reading(
        json.dumps(body).encode(), route=Route.COMPLETIONS, model=model, max_model_len=None
    )
    gate = Gate(encoder)
    reading.parse()
    assert gate.texts == []
    assert reading.request.prefix_key
    gate.open.set()
    reading.advance()
    assert (reading.front_done, len(reading.request.hashes)) == (False, 0)
    while not reading.done:
        reading.advance()
    assert tuple(reading.request.hashes) == hashes_of((PAGE * 200)[-40:])
    assert reading.request.num_tokens == 41


def test_other_prompts_are_counted_by_estimate_until_they_are_read(
    encoder: PromptEncoder,
) -> None:
    reading = reading_of(encoder, ["short", PAGE * 500])
    reading.advance()
    assert reading.front_done
    assert not reading.done
    assert reading.next_key is None
    reading.finish()
    assert reading.request.num_tokens == len("short") + len(PAGE) * 500


# --- what is expected of a replica -------------------------------------------------------------


def held(index: BlockIndex) -> int:
    index.check_invariants()
    return index.match(hashes_of(PAGE * 20)).get("a", 0)


@pytest.mark.parametrize("confirmed_first", [True, False])
def test_a_rest_is_held_like_its_front(*, confirmed_first: bool) -> None:
    index, hashes = BlockIndex(), hashes_of(PAGE * 20)
    expected = ExpectedBlocks(index, "a", hashes[:10])
    assert held(index) == 10
    if confirmed_first:
        expected.confirm()
    expected.extend(hashes)
    assert held(index) == len(hashes)
    expected.confirm()
    expected.close()
    assert held(index) == len(hashes)


def test_what_was_not_confirmed_is_taken_back_with_its_rest() -> None:
    index, hashes = BlockIndex(), hashes_of(PAGE * 20)
    expected = ExpectedBlocks(index, "a", hashes[:10])
    expected.extend(hashes)
    expected.close()
    assert held(index) == 0
    expected.extend(hashes)
    assert held(index) == 0


def held_of(index: BlockIndex) -> int:
    index.check_invariants()
    return index.num_blocks("a")


async def test_very_many_blocks_are_listed_in_turns_of_the_loop() -> None:
    """Whatever happens between them counts for those still to come."""
    hashes = tuple(range(1, 2 * SLICE_BLOCKS + 100))
    index = BlockIndex()
    expected = ExpectedBlocks(index, "a", hashes[: SLICE_BLOCKS + 9])
    assert held_of(index) == SLICE_BLOCKS
    expected.extend(hashes)
    assert held_of(index) == SLICE_BLOCKS
    await asyncio.sleep(0)
    assert held_of(index) == 2 * SLICE_BLOCKS
    expected.confirm()
    await asyncio.sleep(0)
    assert held_of(index) == len(hashes)
    expected.close()
    assert held_of(index) == len(hashes)


async def test_slices_end_where_the_attempt_does_or_the_replica() -> None:
    hashes = tuple(range(1, 3 * SLICE_BLOCKS))
    index, lives = BlockIndex(), True
    expected = ExpectedBlocks(index, "a", hashes)
    await asyncio.sleep(0)
    expected.close()
    for _ in range(3):
        await asyncio.sleep(0)
    assert held_of(index) == 0
    expected = ExpectedBlocks(index, "a", hashes, still=lambda: lives)
    expected.confirm()
    lives = False
    index.clear("a")
    for _ in range(3):
        await asyncio.sleep(0)
    expected.extend(hashes)
    assert held_of(index) == 0


# --- the reader of rests -----------------------------------------------------------------------


class Gate:
    """Lets the tokenizer go on when the test says so, after so many pieces that are free."""

    def __init__(self, encoder: PromptEncoder, *, num_free: int = 0) -> None:
        self.num_free = num_free
        self.open = threading.Event()
        self.asked = threading.Event()
        self.texts: list[str] = []
        self._encode = encoder.texts._encode
        encoder.texts._encode = self

    def __call__(self, text: str) -> Any:
        self.texts.append(text)
        self.asked.set()
        assert len(self.texts) <= self.num_free or self.open.wait(30)
        return self._encode(text)


async def test_a_sibling_waits_for_the_rest_it_goes_on_as(encoder: PromptEncoder) -> None:
    first, sibling = reading_of(encoder, PAGE * 500), reading_of(encoder, PAGE * 500 + "other")
    stranger = reading_of(encoder, PAGE * 40 + "quite different" + PAGE * 500)
    for reading in (first, sibling, stranger):
        reading.advance()
    rests, gate, called = RestReader(), Gate(encoder), asyncio.Event()
    assert rests.of_sibling(sibling) is None
    rests.start(first, called.set)
    waited_for = rests.of_sibling(sibling)
    assert waited_for is not None
    assert rests.of_sibling(stranger) is None
    assert not called.is_set()
    gate.open.set()
    await asyncio.wait([waited_for])
    await called.wait()
    assert first.done
    assert rests.of_sibling(sibling) is None
    again = asyncio.Event()
    rests.start(first, again.set)
    assert again.is_set()
    rests.close()


async def test_the_line_of_rests_is_bounded(encoder: PromptEncoder) -> None:
    gate, rests, called = Gate(encoder), RestReader(max_waiting=1), asyncio.Event()
    gate.open.set()
    readings = [reading_of(encoder, f"{number}" + PAGE * 500) for number in range(2)]
    for reading in readings:
        reading.advance()
    gate.open.clear()
    rests.start(readings[0], called.set)
    rests.start(readings[1], pytest.fail)
    assert rests.num_dropped == 1
    gate.open.set()
    await called.wait()
    assert not readings[1].done
    rests.close()


# --- through a router --------------------------------------------------------------------------


async def until(bench: Bench, headers: Any, told: Callable[[Any], bool]) -> Any:
    """Returns a decision once it is as told; the test's own time limit ends a vain wait."""
    while not told(record := await bench.decision(headers)):
        pass
    return record


@pytest.fixture
def start_roomy(start_bench: StartBench) -> StartBench:
    """Starts a router over replicas with a long context."""

    async def start(num_replicas: int, **options: Any) -> Bench:
        bench = await start_bench(num_replicas, **options)
        for replica in bench.replicas:
            room = {"free": 20_000, "cached": 0, "total": 20_000}
            report = replica.load(max_model_len=1_000_000, blocks=room)
            replica.pages["/load"] = (200, report)
        await bench.router.replicas.wait_for(lambda: bench.router.max_model_len() == 1_000_000)
        return bench

    return start


async def test_a_cold_prompt_is_chosen_for_by_its_front(
    start_roomy: StartBench, encoder: PromptEncoder
) -> None:
    bench = await start_roomy(2)
    text = PAGE * 1500
    gate = Gate(encoder, num_free=1)
    status, headers, _ = await bench.chat(text, stream=True)
    assert status == 200
    gate.open.set()
    assert "of about " in headers["x-kvway-reason"]
    record = await until(bench, headers, lambda record: record["prompt_tokens_exact"])
    assert record["prompt_tokens"] == len(f"|user\n{text}|\n|assistant\n")
    assert record["prompt_blocks"] == record["prompt_tokens"] // 16
    _, second, _ = await bench.chat(text + " and more")
    assert second["x-kvway-replica"] == headers["x-kvway-replica"]
    matched = (await bench.decision(second))["matched_tokens"]
    assert matched >= len(text) // 16 * 16
    metrics = await bench.metrics()
    assert metrics['kvway_router_prompts_total{read="front"}'] == 1
    assert metrics['kvway_router_prompts_total{read="whole"}'] == 1


async def test_siblings_meet_while_the_rest_of_the_first_is_not_read(
    start_roomy: StartBench, encoder: PromptEncoder
) -> None:
    """Each is weighed knowing where the whole of the first one went, not its front alone."""
    bench = await start_roomy(4, tokenize_timeout_s=60.0)  # none is overdue on a busy machine
    answers = await asyncio.gather(*(bench.chat(PAGE * 1500 + str(n)) for n in range(6)))
    matched = []
    for _, headers, _ in answers:
        record = await bench.decision(headers)
        matched.append(max(one["matched_blocks"] for one in record["candidates"]))
    assert sorted(matched) == [0] + [len("|user\n" + PAGE * 1500) // 16] * 5


async def test_a_prompt_whose_time_is_up_goes_by_the_hash_of_its_text(
    start_roomy: StartBench, encoder: PromptEncoder
) -> None:
    """Several routers would place it alike, and the rest is read as soon as it can be."""
    bench = await start_roomy(3, tokenize_timeout_s=0.05)
    gate = Gate(encoder)
    status, headers, _ = await bench.chat(PAGE * 1500)
    assert status == 200
    assert headers["x-kvway-reason"].split("; ")[1].startswith("0 of about ")
    metrics = await bench.metrics()
    assert metrics['kvway_router_prompts_total{read="overdue"}'] == 1
    gate.open.set()
    record = await until(bench, headers, lambda record: record["prompt_tokens_exact"])
    assert record["prompt_blocks"] == record["prompt_tokens"] // 16
    _, second, _ = await bench.chat(PAGE * 1500)
    assert second["x-kvway-replica"] == headers["x-kvway-replica"]


async def test_a_malformed_body_is_refused_however_long_it_waits(
    start_roomy: StartBench, encoder: PromptEncoder
) -> None:
    bench = await start_roomy(1, tokenize_timeout_s=0.05, reader_threads=1)
    gate = Gate(encoder)
    slow = asyncio.create_task(bench.chat(PAGE * 100))
    await asyncio.to_thread(gate.asked.wait)
    status, _, answer = await bench.chat("x", temperature="hot")
    assert (status, answer["error"]["param"]) == (400, "temperature")
    status, _, _ = await slow
    assert status == 200
    gate.open.set()


@pytest.mark.parametrize("truncated", [True, False])
async def test_whose_time_is_up_waits_for_no_other_prompt(
    start_roomy: StartBench, encoder: PromptEncoder, *, truncated: bool
) -> None:
    """All threads are in the middle of a piece, and stay there."""
    bench = await start_roomy(1, tokenize_timeout_s=0.05, reader_threads=2)
    fields = {"truncate_prompt_tokens": 50} if truncated else {}
    gate = Gate(encoder)
    async with asyncio.timeout(30):
        answers = await asyncio.gather(
            *(bench.chat(PAGE * 100 + str(n), **fields) for n in range(6)), bench.chat("short")
        )
    assert [status for status, _, _ in answers] == [200] * 7
    metrics = await bench.metrics()
    assert metrics['kvway_router_prompts_total{read="overdue"}'] == 7
    gate.open.set()


async def test_a_replica_that_left_is_not_listed_again(
    start_roomy: StartBench, encoder: PromptEncoder
) -> None:
    bench = await start_roomy(1, tokenize_timeout_s=0.05)
    gate = Gate(encoder)
    status, headers, _ = await bench.chat(PAGE * 1500)
    assert status == 200
    bench.router.replicas.set_replicas([])
    gate.open.set()
    await until(bench, headers, lambda record: record["prompt_tokens_exact"])
    assert bench.router.index.num_blocks(bench.replica.replica_id) == 0


async def test_a_replica_that_started_anew_is_not_listed_what_the_one_before_had(
    start_roomy: StartBench, encoder: PromptEncoder
) -> None:
    bench = await start_roomy(1, tokenize_timeout_s=0.05)
    gate, replica = Gate(encoder), bench.replica
    status, headers, _ = await bench.chat(PAGE * 1500)
    assert status == 200
    report = replica.load(max_model_len=1_000_000, boot_id="boot-2")
    replica.pages["/load"] = (200, report)
    watched = bench.router.replicas.get(replica.replica_id)
    assert watched is not None
    await bench.router.replicas.wait_for(lambda: watched.boot_id == "boot-2")
    gate.open.set()
    await until(bench, headers, lambda record: record["prompt_tokens_exact"])
    assert bench.router.index.num_blocks(replica.replica_id) == 0


async def busy(bench: Bench) -> None:
    """Has the replica say that something waits, so that no report ends a prefill."""
    replica = bench.replica
    room = {"free": 20_000, "cached": 0, "total": 20_000}
    waits = {"num_waiting": 1, "waiting_uncached_tokens": 1}
    report = replica.load(max_model_len=1_000_000, blocks=room, **waits)
    replica.pages["/load"] = (200, report)
    watched = bench.router.replicas.get(replica.replica_id)
    assert watched is not None
    await bench.router.replicas.wait_for(
        lambda: watched.report is not None and watched.report.num_waiting == 1
    )


async def counted(bench: Bench, most_tokens: int) -> int:
    """Waits until no more is charged than so many tokens; the blocks that are charged then."""
    account = bench.router.dispatcher._ledger._accounts[bench.replica.replica_id]
    async with asyncio.timeout(20):
        while account.uncached_tokens > most_tokens:
            await bench.metrics()
    assert account.num_prefills == 1
    return account.num_blocks


async def test_an_overdue_prompt_that_is_cached_is_charged_for_what_is_not(
    start_roomy: StartBench, encoder: PromptEncoder
) -> None:
    bench = await start_roomy(1, tokenize_timeout_s=0.2)
    await busy(bench)
    _, headers, _ = await bench.chat(PAGE * 1500)
    await until(bench, headers, lambda record: record["prompt_tokens_exact"])
    encoder.texts.cache._entries.clear()
    gate = Gate(encoder)
    bench.replica.script(Answer(hold_head=True))
    asked = asyncio.create_task(bench.chat(PAGE * 1500, stream=True, max_tokens=32))
    await bench.replica.wait_for(lambda: len(bench.replica.requests) == 2)
    assert await counted(bench, 10**9) > 500
    gate.open.set()
    assert await counted(bench, 16) == 3
    bench.replica.release()
    status, _, _ = await asked
    assert status == 200


async def test_a_cold_prompt_is_charged_for_what_is_counted_not_for_what_its_front_lists(
    start_roomy: StartBench, encoder: PromptEncoder
) -> None:
    bench = await start_roomy(1)
    await busy(bench)
    encoder.texts._chars = encoder.texts._tokens / 4  # so it is taken for four times as long
    gate = Gate(encoder, num_free=1)
    bench.replica.script(Answer(hold_head=True))
    text = " ".join(f"word{number}" for number in range(6000))
    asked = asyncio.create_task(bench.chat(text, stream=True, max_tokens=32))
    await bench.replica.wait_for(lambda: len(bench.replica.requests) == 1)
    gate.open.set()
    num_tokens = len(f"|user\n{text}|\n|assistant\n")
    (record,) = bench.router.decisions.latest(1)
    headers = {"x-kvway-request-id": record.id}
    await until(bench, headers, lambda record: record["prompt_tokens_exact"])
    assert await counted(bench, num_tokens) == -(-(num_tokens + 32) // 16)
    account = bench.router.dispatcher._ledger._accounts[bench.replica.replica_id]
    assert account.uncached_tokens == num_tokens
    bench.replica.release()
    status, _, _ = await asked
    assert status == 200


async def test_what_is_read_between_the_choice_and_the_charge_is_counted_too(
    start_roomy: StartBench, encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of an overdue prompt may publish at any moment."""
    bench = await start_roomy(1, tokenize_timeout_s=0.05)
    await busy(bench)
    dispatcher, readings = bench.router.dispatcher, list[Reading]()
    read, choose = dispatcher._intake.read, dispatcher._chooser.choose

    async def read_and_keep(*args: Any, **named: Any) -> Reading:
        readings.append(await read(*args, **named))
        return readings[0]

    def choose_and_publish(*args: Any, **named: Any) -> Any:
        decision = choose(*args, **named)
        gate.open.set()
        readings[0].finish()
        return decision

    monkeypatch.setattr(dispatcher._intake, "read", read_and_keep)
    monkeypatch.setattr(dispatcher._chooser, "choose", choose_and_publish)
    gate = Gate(encoder)
    bench.replica.script(Answer(hold_head=True))
    text = PAGE * 1500
    asked = asyncio.create_task(bench.chat(text, stream=True, max_tokens=32))
    await bench.replica.wait_for(lambda: len(bench.replica.requests) == 1)
    num_tokens = len(f"|user\n{text}|\n|assistant\n")
    assert await counted(bench, 10**9) == -(-(num_tokens + 32) // 16)
    bench.replica.release()
    _, headers, _ = await asked
    assert (await bench.decision(headers))["prompt_tokens_exact"]


async def test_a_replica_cannot_report_more_than_the_prompt_while_that_is_an_estimate(
    start_roomy: StartBench, encoder: PromptEncoder
) -> None:
    bench = await start_roomy(1, tokenize_timeout_s=0.05)
    gate = Gate(encoder)
    bench.replica.script(Answer(cached_tokens=10**12))
    _, headers, _ = await bench.chat(PAGE * 1500)
    record = await bench.decision(headers)
    assert record["cached_tokens"] == record["prompt_tokens"]
    gate.open.set()
    record = await until(bench, headers, lambda record: record["prompt_tokens_exact"])
    total = len(f"|user\n{PAGE * 1500}|\n|assistant\n")
    assert record["cached_tokens"] == record["prompt_tokens"] == total
    metrics = await bench.metrics()
    name = f'{{replica="{bench.replica.replica_id}"}}'
    for what in ("cached", "prompt"):
        assert metrics[f"kvway_router_{what}_tokens_total{name}"] == total


async def test_a_body_over_a_megabyte_arrives_as_it_is(start_roomy: StartBench) -> None:
    bench = await start_roomy(1)
    raw = json.dumps(chat_body("hi")).encode()
    raw = raw[:-1] + b" " * 1_500_000 + b"}"
    sent = {"content-type": "application/json"}
    path = bench.api("/v1/chat/completions")
    async with bench.client.post(path, data=io.BytesIO(raw), headers=sent) as response:
        assert response.status == 200
    (received,) = bench.replica.requests
    assert received.body == raw
    assert received.headers["content-type"] == "application/json"
    assert received.headers["content-length"] == str(len(raw))
    assert "content-disposition" not in received.headers
