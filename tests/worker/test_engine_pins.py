"""Pins through the engine loop: kept while they last, and ended by the clock."""

from __future__ import annotations

import asyncio

import pytest

from kvway_core.errors import PinQuotaExceeded, ShuttingDown
from kvway_core.testing.fake_clock import FakeClock
from kvway_worker.api.pins_api import PinJob, _compute_and_pin
from kvway_worker.scheduling.sequence import Sequence
from tests.worker.batching import request
from tests.worker.looping import LoopWorker, worker

PREFIX = range(32)


def prompt(name: str, *, start: int = 0) -> Sequence:
    return request(name, range(start, start + 33))


async def cached(w: LoopWorker, name: str) -> int:
    """Asks for the prefix and returns how much of it was there."""
    (part,) = await w.ask(prompt(name))
    return part.cached_tokens


async def fill(w: LoopWorker) -> None:
    """Sends more prompts than the pool holds."""
    for index in range(10):
        await w.ask(prompt(f"other {index}", start=1000 * (index + 1)))


async def test_a_pinned_prefix_stays_until_its_time_is_over() -> None:
    clock = FakeClock()
    async with worker(num_blocks=8, clock=clock) as w:
        seq = prompt("first")
        await w.ask(seq)
        info = await w.loop.pin("p", seq.chain.hashes, ttl_s=60.0)
        assert (info.num_blocks, info.num_cached_blocks) == (2, 2)
        await fill(w)
        clock.advance(59.0)
        assert await w.loop.pins() == [info]
        assert info.expires_s == clock.monotonic() + 1.0
        assert await cached(w, "second") == 32
        clock.advance(1.0)
        assert await w.loop.pins() == []
        assert not await w.loop.unpin("p")
        await fill(w)
        assert await cached(w, "third") == 0


async def test_a_pin_that_expired_leaves_its_share_to_the_next() -> None:
    clock = FakeClock()
    async with worker(num_blocks=8, clock=clock) as w:
        await w.loop.pin("p", prompt("a").chain.hashes, ttl_s=60.0)
        with pytest.raises(PinQuotaExceeded):
            await w.loop.pin("q", prompt("b", start=1000).chain.hashes, ttl_s=60.0)
        clock.advance(60.0)
        assert (await w.loop.pin("q", prompt("b", start=1000).chain.hashes, ttl_s=1.0)).num_blocks


async def test_a_pin_that_is_ended_is_given_up_like_others() -> None:
    async with worker(num_blocks=8) as w:
        seq = prompt("first")
        await w.ask(seq)
        await w.loop.pin("p", seq.chain.hashes, ttl_s=60.0)
        assert await w.loop.unpin("p")
        assert not await w.loop.unpin("p")
        await fill(w)
        assert await cached(w, "second") == 0


async def test_who_waits_for_a_pin_when_the_loop_closes_is_told() -> None:
    async with worker() as w:
        w.engine.gate.clear()
        task = w.start(request("a", PREFIX, max_tokens=9))
        await w.engine.step_begins()
        asked = asyncio.create_task(w.loop.pins())
        await asyncio.sleep(0)
        await w.loop.close()
        with pytest.raises(ShuttingDown):
            await asked
        with pytest.raises(ShuttingDown):
            await task
        with pytest.raises(ShuttingDown):
            await w.loop.pin("p", [], ttl_s=1.0)


async def test_what_nobody_waits_for_any_more_is_not_done() -> None:
    """A client that leaves while its pin waits for the step leaves no pin behind."""
    async with worker() as w:
        w.engine.gate.clear()
        task = w.start(request("a", PREFIX, max_tokens=2))
        await w.engine.step_begins()
        asked = asyncio.create_task(w.loop.pin("p", prompt("p").chain.hashes, ttl_s=60.0))
        await asyncio.sleep(0)
        asked.cancel()
        w.engine.gate.set()
        await task
        assert await w.loop.pins() == []


async def test_a_pin_ends_in_time_though_nobody_asks_for_anything() -> None:
    async with worker() as w:
        await w.ask(prompt("first"))
        await w.loop.pin("p", prompt("p").chain.hashes, ttl_s=0.2)
        assert w.loop.load().num_pinned_blocks == 2
        while w.loop.load().num_pinned_blocks:  # noqa: ASYNC110 - a thread counts
            await asyncio.sleep(0.01)


async def test_whoever_leaves_while_a_pin_is_answered_leaves_none_behind() -> None:
    async with worker() as w:
        job = PinJob("p", prompt("p"), ttl_s=60.0)
        task = asyncio.create_task(_compute_and_pin(job, w.loop))
        await asyncio.sleep(0)  # it asks
        while not w.pool._pins._pins:
            pass  # the step thread pins, and this loop has not heard of it
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await w.loop.pins() == []
