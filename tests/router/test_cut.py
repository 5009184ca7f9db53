"""Work that is ended from outside, and the clock that does it."""

from __future__ import annotations

import asyncio

import pytest

from kvway_core.errors import Overloaded, ShuttingDown, TokenTimeout
from kvway_router.cut import Cut, Watch

SILENT = TokenTimeout("silent")


async def cut_short(cut: Cut) -> None:
    async with cut:
        await asyncio.Event().wait()


async def test_the_first_reason_is_what_the_work_ends_with() -> None:
    cut = Cut()
    work = asyncio.create_task(cut_short(cut))
    await asyncio.sleep(0)
    cut.cut(ShuttingDown("first"))
    cut.cut(Overloaded("second"))
    with pytest.raises(ShuttingDown, match="first"):
        await work


async def test_a_cancelled_task_stays_cancelled() -> None:
    cut = Cut()
    work = asyncio.create_task(cut_short(cut))
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work


async def test_work_that_has_ended_is_not_cut() -> None:
    cut = Cut()
    cut.cut(ShuttingDown("too early"))
    async with cut:
        pass
    cut.cut(ShuttingDown("too late"))
    await asyncio.sleep(0)


async def test_an_error_of_the_work_is_its_own() -> None:
    with pytest.raises(TimeoutError):
        async with Cut():
            raise TimeoutError


async def test_only_the_inner_one_of_two_ends() -> None:
    async with Cut():
        inner = Cut()
        work = asyncio.create_task(cut_short(inner))
        await asyncio.sleep(0)
        inner.cut(SILENT)
        with pytest.raises(TokenTimeout):
            await work


async def wait_for_ever(*limits_s: float | None) -> None:
    """Winds a watch some times, and then nothing happens any more; None is a rest."""
    async with Cut() as cut:
        with Watch(cut) as watch:
            for limit_s in limits_s:
                if limit_s is None:
                    watch.rest()
                else:
                    watch.expect(limit_s, SILENT)
                await asyncio.sleep(0)
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    "limits_s",
    [[0.01], [3600.0, 0.01], [0.02, 0.01], [0.01, None, 0.01], [0.01, None, 3600, 0.01]],
)
async def test_silence_ends_the_work(limits_s: list[float | None]) -> None:
    with pytest.raises(TokenTimeout):
        await wait_for_ever(*limits_s)


@pytest.mark.parametrize("limits_s", [[], [0.01, None], [0.01, 3600.0], [3600.0, None]])
async def test_who_is_heard_from_or_rests_goes_on(limits_s: list[float | None]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await wait_for_ever(*limits_s)


async def test_a_watch_that_was_left_leaves_no_timer() -> None:
    async with Cut() as cut:
        with Watch(cut) as watch:
            watch.expect(0.01, SILENT)
        await asyncio.sleep(0.03)
