"""What a step that fails costs: its own requests; the loop, if the engine cannot go on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvway_core.errors import EngineFailed
from kvway_core.events import KVEvent
from kvway_worker.scheduling.step import StepPlan, StepResult
from tests.worker.batching import answer, request
from tests.worker.looping import tokens, worker

PROMPT = range(40)


async def test_a_step_that_raises_fails_its_requests_and_no_others() -> None:
    async with worker(max_num_seqs=2) as w:
        w.engine.poison = {"bad"}
        w.engine.gate.clear()
        asked = [
            w.start(request(name, range(start, start + 40), max_tokens=3))
            for start, name in ((0, "bad"), (0, "beside"), (300, "later"), (0, "same prompt"))
        ]
        await w.engine.step_begins()
        w.engine.gate.set()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(result) for result in results] == [EngineFailed, EngineFailed, list, list]
        assert not any("out of memory" in str(result) for result in results[:2])
        later, same = results[2], results[3]
        assert isinstance(later, list)
        assert isinstance(same, list)
        assert tokens(later) == answer(range(300, 340), 3)
        assert tokens(same) == answer(range(40), 3)
        assert same[0].cached_tokens == 0, "what the failed step was to compute is not found"
        assert w.loop.failed is None
        assert w.loop.load().num_failed_steps == 1
        assert await w.loop.reset_prefix_cache()


async def test_an_engine_that_forgets_a_token_has_failed_the_step() -> None:
    async with worker() as w:
        w.engine.mute = {"0"}
        with pytest.raises(EngineFailed):
            await w.ask(request("0", PROMPT))
        assert tokens(await w.ask(request("1", PROMPT))) == answer(PROMPT, 1)


async def test_two_failures_and_a_success_are_not_three_failures() -> None:
    async with worker() as w:
        w.engine.poison = {"bad"}
        for name in ("bad", "bad", "good", "bad", "bad"):
            if name == "bad":
                with pytest.raises(EngineFailed):
                    await w.ask(request(name, PROMPT))
            else:
                await w.ask(request(name, PROMPT))
        assert w.loop.failed is None
        assert w.engine.num_steps == 1, "nothing was probed"


async def test_an_engine_that_fails_its_probe_too_is_given_up() -> None:
    async with worker(max_num_seqs=1) as w:
        w.engine.broken = RuntimeError("out of memory")
        w.engine.gate.clear()
        asked = [w.start(request(str(index), PROMPT)) for index in range(5)]
        await w.engine.step_begins()
        w.engine.gate.set()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(result) for result in results] == [EngineFailed] * 5
        await asyncio.to_thread(w.loop._steps._thread.join)  # type: ignore[union-attr]
        assert isinstance(w.loop.failed, EngineFailed)
        assert isinstance(w.loop.failed.__cause__, RuntimeError)
        assert w.loop.load().num_failed_steps == 3
        with pytest.raises(EngineFailed, match="given up"):
            await w.ask(request("9", PROMPT))
        with pytest.raises(EngineFailed, match="given up"):
            await w.loop.reset_prefix_cache()


async def test_requests_that_always_fail_do_not_give_up_the_engine() -> None:
    """A probe tells them from an engine that fails."""
    async with worker(num_blocks=3) as w:
        w.engine.poison = {"bad"}
        await w.ask(request("good", range(48)))
        for _ in range(7):
            with pytest.raises(EngineFailed):
                await w.ask(request("bad", range(100, 110)))
        assert tokens(await w.ask(request("good", PROMPT))) == answer(PROMPT, 1)
        assert w.loop.failed is None
        assert await w.loop.reset_prefix_cache(), "the probe's block was given back"


async def test_a_step_that_exits_gives_the_engine_up() -> None:
    """Whatever ends the step thread, the loop says so."""
    async with worker() as w:
        w.engine.broken = SystemExit(1)
        with pytest.raises(EngineFailed, match="given up"):
            await w.ask(request("0", PROMPT))
        assert isinstance(w.loop.failed, SystemExit)


async def test_books_that_do_not_add_up_give_the_engine_up() -> None:
    async with worker() as w:
        w.pool.allocate(1)  # a leak
        with pytest.raises(EngineFailed, match="given up"):
            await w.ask(request("0", PROMPT, max_tokens=5))
        assert "4: requests hold" in str(w.loop.failed)


@pytest.mark.parametrize("poison", [set(), {"0"}])
async def test_who_ends_in_the_step_that_spoils_the_books_is_told(
    poison: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the step gave a last token or failed."""
    async with worker() as w:
        w.engine.poison = poison
        execute = w.engine.execute

        def leak(plan: StepPlan) -> StepResult:
            w.pool.allocate(1)
            return execute(plan)

        monkeypatch.setattr(w.engine, "execute", leak)
        with pytest.raises(EngineFailed, match="given up"):
            await w.ask(request("0", PROMPT))
        assert "4: requests hold" in str(w.loop.failed)


async def test_who_ends_in_a_step_whose_events_cannot_be_told_gets_the_answer() -> None:
    async with worker() as w:

        def publish(events: Sequence[KVEvent]) -> None:
            raise OSError(f"{len(events)} events are lost")

        w.loop._steps._on_kv_events = publish
        assert tokens(await w.ask(request("0", PROMPT))) == answer(PROMPT, 1)
        await asyncio.to_thread(w.loop._steps._thread.join)  # type: ignore[union-attr]
        assert isinstance(w.loop.failed, OSError)
