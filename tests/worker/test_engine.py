"""The engine loop with its real thread, scheduler and pool; the engine is told when to fail."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest

from kvway_core.clock import SystemClock
from kvway_core.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    Overloaded,
    ShuttingDown,
)
from kvway_core.events import AllBlocksCleared, BlockStored
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.engine import EngineLoop
from kvway_worker.scheduling.scheduler import Scheduler
from kvway_worker.sim import CostModel, SimEngine
from tests.worker.batching import Replay, answer, request
from tests.worker.looping import LoopWorker, tokens, worker

PROMPT = range(40)


async def test_answers_are_those_of_a_request_alone() -> None:
    async with worker(num_blocks=14, max_num_seqs=4, budget=48) as w:
        prompts = [range(start, start + 60) for start in (0, 7, 0, 100, 7, 0, 200, 300)]
        asked = [
            w.ask(request(str(index), prompt, max_tokens=20))
            for index, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*asked)
        for prompt, parts in zip(prompts, answers, strict=True):
            assert tokens(parts) == answer(prompt, 20)
            assert [part.finish_reason for part in parts] == [None] * 19 + ["length"]
            assert len({part.cached_tokens for part in parts}) == 1
        assert w.loop.failed is None
        assert w.loop.load().num_free_blocks == 14


async def test_the_second_request_says_what_it_found_in_the_cache() -> None:
    async with worker() as w:
        first = await w.ask(request("0", PROMPT, max_tokens=3))
        second = await w.ask(request("1", [*range(32), *[99] * 9], max_tokens=3))
        assert [part.cached_tokens for part in first] == [0, 0, 0]
        assert [part.cached_tokens for part in second] == [32, 32, 32]
        load = w.loop.load()
        assert (load.cache.queries, load.cache.hits) == (81, 32)
        assert load.generated_tokens == 6
        assert load.num_steps == 6
        assert load.step_time_s > 0


async def test_a_reader_that_leaves_in_the_middle_frees_its_blocks() -> None:
    async with worker() as w:
        async with aclosing(w.loop.generate(request("0", PROMPT, max_tokens=900))) as parts:
            async for _ in parts:
                break
        assert await w.loop.reset_prefix_cache(), "the commands are in order: nobody holds blocks"
        load = w.loop.load()
        assert (load.num_running, load.num_free_blocks) == (0, 100)


async def test_a_reader_that_is_cancelled_before_its_first_token_frees_its_blocks() -> None:
    async with worker() as w:
        w.engine.gate.clear()
        task = w.start(request("0", PROMPT, max_tokens=900))
        await w.engine.step_begins()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        w.engine.gate.set()
        assert await w.loop.reset_prefix_cache()
        assert w.loop.load().generated_tokens == 1, "what the step gave went to nobody"


async def test_a_reader_that_leaves_the_queue_never_runs() -> None:
    async with worker(max_num_seqs=1) as w:
        w.engine.gate.clear()
        first = w.start(request("0", PROMPT, max_tokens=2))
        await w.engine.step_begins()
        second = w.start(request("1", range(100, 140), max_tokens=2))
        await asyncio.sleep(0)
        assert w.loop.load().num_waiting == 1
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        w.engine.gate.set()
        assert tokens(await first) == answer(PROMPT, 2)
        assert await w.loop.reset_prefix_cache()
        assert w.loop.load().cache.queries == 40


async def test_leaving_after_the_end_is_nothing_special() -> None:
    async with worker() as w:
        parts = w.loop.generate(request("0", PROMPT, max_tokens=2))
        assert [await anext(parts), await anext(parts)][1].finish_reason == "length"
        await parts.aclose()
        assert tokens(await w.ask(request("0", PROMPT, max_tokens=2))) == answer(PROMPT, 2)


async def test_an_id_that_is_used_again_gets_only_its_own_tokens() -> None:
    async with worker() as w:
        w.engine.gate.clear()
        first = w.start(request("0", PROMPT, max_tokens=900))
        await w.engine.step_begins()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        again = w.start(request("0", range(100, 140), max_tokens=5))
        await asyncio.sleep(0)
        w.engine.gate.set()
        assert tokens(await again) == answer(range(100, 140), 5)


async def test_what_can_never_run_is_refused_at_once() -> None:
    async with worker() as w:
        with pytest.raises(ContextLengthExceeded):
            await w.ask(request("0", range(999), max_tokens=2))
        assert w.loop.load().num_steps == 0


async def test_an_id_in_use_is_refused() -> None:
    async with worker() as w:
        w.engine.gate.clear()
        first = w.start(request("0", PROMPT, max_tokens=2))
        await w.engine.step_begins()
        with pytest.raises(InvalidRequest, match="use another id"):
            await w.ask(request("0", PROMPT))
        w.engine.gate.set()
        assert tokens(await first) == answer(PROMPT, 2)


async def test_more_requests_than_may_wait_are_refused() -> None:
    async with worker(max_num_seqs=1, max_waiting=2) as w:
        w.engine.gate.clear()
        asked = [w.start(request(str(index), PROMPT)) for index in range(3)]
        await w.engine.step_begins()
        with pytest.raises(Overloaded, match="3 requests"):
            await w.ask(request("3", PROMPT))
        w.engine.gate.set()
        await asyncio.gather(*asked)
        assert len(await w.ask(request("3", PROMPT))) == 1


async def test_load_counts_what_was_just_handed_over() -> None:
    async with worker(max_num_seqs=1) as w:
        w.engine.gate.clear()
        first = w.start(request("0", PROMPT, max_tokens=2))
        await w.engine.step_begins()
        second = w.start(request("1", range(200), max_tokens=2))
        await asyncio.sleep(0)
        load = w.loop.load()
        assert (load.num_running + load.num_waiting, load.waiting_uncached_tokens) == (2, 240)
        w.engine.gate.set()
        await asyncio.gather(first, second)
        load = w.loop.load()
        assert (load.num_running, load.num_waiting, load.waiting_uncached_tokens) == (0, 0, 0)
        assert (load.num_free_blocks, load.num_cached_blocks, load.num_blocks) == (100, 14, 100)
        assert load.prefill_tokens_per_s > 0
        assert load.decode_step_s > 0


async def test_events_come_in_order_and_before_the_answer_ends() -> None:
    async with worker(num_blocks=6) as w:
        replay = Replay()
        for index in range(4):
            await w.ask(request(str(index), range(10 * index, 10 * index + 60), max_tokens=20))
            replay.apply(w.events)
            w.events.clear()
            assert len(replay.parents) == len(w.pool.committed())
        assert await w.loop.reset_prefix_cache()
        assert w.pool.committed() == {}
        await w.ask(request("9", range(16)))
        assert isinstance(w.events[0], AllBlocksCleared)
        assert isinstance(w.events[1], BlockStored)


async def test_events_of_a_step_are_published_before_its_answers_go_out() -> None:
    """So that who got an answer and sends the next request finds a router that knows of it."""
    async with worker() as w:
        entered, go_on = threading.Event(), threading.Event()

        def publish(_: object) -> None:
            entered.set()
            go_on.wait()

        w.loop._steps._on_kv_events = publish
        task = w.start(request("0", PROMPT))
        await asyncio.to_thread(entered.wait)
        for _ in range(10):  # whatever was sent before has arrived
            await asyncio.sleep(0)
        arrived = task.done()
        go_on.set()
        assert not arrived
        assert tokens(await task) == answer(PROMPT, 1)


async def test_reset_says_no_while_a_request_runs() -> None:
    async with worker() as w:
        w.engine.gate.clear()
        first = w.start(request("0", PROMPT, max_tokens=2))
        await w.engine.step_begins()
        reset = asyncio.create_task(w.loop.reset_prefix_cache())
        await asyncio.sleep(0)
        w.engine.gate.set()  # the reset comes after this step, with one more to do
        assert not await reset
        await first
        assert await w.loop.reset_prefix_cache()


async def test_reset_of_running_requests_lets_them_begin_again() -> None:
    """P35: they are preempted, and say the same."""
    async with worker() as w:
        w.engine.gate.clear()
        first = w.start(request("0", PROMPT, max_tokens=5))
        await w.engine.step_begins()
        reset = asyncio.create_task(w.loop.reset_prefix_cache(reset_running=True))
        await asyncio.sleep(0)
        w.engine.gate.set()
        assert await reset
        assert any(isinstance(event, AllBlocksCleared) for event in w.events)
        parts = await first
        assert tokens(parts) == answer(PROMPT, 5)
        assert {part.cached_tokens for part in parts} == {0}
        assert w.loop.load().preemptions == 1


async def test_closing_ends_running_waiting_and_new_requests() -> None:
    async with worker(max_num_seqs=1) as w:
        w.engine.gate.clear()
        asked = [w.start(request(str(index), PROMPT, max_tokens=900)) for index in range(3)]
        await w.engine.step_begins()
        await w.loop.close()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(result) for result in results] == [ShuttingDown] * 3
        with pytest.raises(ShuttingDown):
            await w.ask(request("9", PROMPT))
        with pytest.raises(ShuttingDown):
            await w.loop.reset_prefix_cache()
        assert w.loop.failed is None
        await w.loop.close()  # again is nothing


async def test_closing_interrupts_a_long_step() -> None:
    pool = BlockPool(10, 16)
    engine = SimEngine(num_blocks=10, block_size=16, costs=CostModel(step_overhead_s=3600.0))
    scheduler = Scheduler(pool, max_num_seqs=1, max_num_batched_tokens=99, max_model_len=99)
    loop = EngineLoop(engine, scheduler, clock=SystemClock())
    loop.start()
    asked = asyncio.create_task(anext(loop.generate(request("0", PROMPT))))
    await asyncio.sleep(0)
    await loop.close()
    with pytest.raises(ShuttingDown):
        await asked


async def test_a_loop_that_never_started_closes_too() -> None:
    made = LoopWorker()
    asked = made.start(request("0", PROMPT))
    await asyncio.sleep(0)
    await made.loop.close()
    with pytest.raises(ShuttingDown):
        await asked


async def test_an_engine_of_another_size_than_the_pool_is_refused() -> None:
    scheduler = Scheduler(
        BlockPool(10, 16), max_num_seqs=1, max_num_batched_tokens=99, max_model_len=99
    )
    with pytest.raises(ValueError, match="engine of 10 blocks of 8 tokens, pool of 10 of 16"):
        EngineLoop(SimEngine(num_blocks=10, block_size=8), scheduler, clock=SystemClock())


async def test_who_comes_while_the_loop_closes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not taken, to fail a moment later."""
    refused: list[ShuttingDown] = []
    async with worker() as w:
        close = w.engine.close

        def while_closing() -> None:
            with pytest.raises(ShuttingDown) as raised:
                w.loop.submit(request("late", PROMPT))
            refused.append(raised.value)
            close()

        monkeypatch.setattr(w.engine, "close", while_closing)
        w.engine.gate.clear()
        running = w.start(request("0", PROMPT))
        await w.engine.step_begins()  # it stays there until the engine is closed
        await w.loop.close()
        assert len(refused) == 1
        with pytest.raises(ShuttingDown):
            await running
        monkeypatch.undo()
