"""Long work on the loop: a little at a time, in turns."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

from kvway_core.testing.fake_clock import FakeClock
from kvway_router.pacing import Pace


async def test_works_take_turns_and_the_loop_goes_on_in_between() -> None:
    clock = FakeClock()
    pace = Pace(clock, budget_s=0.005)
    turn = 0
    done: list[tuple[int, str]] = []

    def steps(name: str, num_steps: int) -> Generator[None, None, str]:
        for _ in range(num_steps):
            clock.advance(0.002)
            done.append((turn, name))
            yield
        return name

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    names = ("a", "b", "c")
    assert await asyncio.gather(*(pace.work(steps(name, 9)) for name in names)) == list(names)
    counting.cancel()
    assert len(done) == 27
    # Never more than the budget and a step in one turn, whoever it is.
    assert max(sum(at == each for at, _ in done) for each in range(turn + 1)) == 3
    # The others are not kept waiting until the first is done.
    first = {name: next(at for at, who in done if who == name) for name in names}
    last = {name: max(at for at, who in done if who == name) for name in names}
    assert max(first.values()) < min(last.values())


async def test_many_short_works_of_one_caller_yield_as_a_long_one_does() -> None:
    clock = FakeClock()
    pace = Pace(clock, budget_s=0.005)
    num_turns = 0

    def short() -> Generator[None, None, None]:
        clock.advance(0.002)
        yield

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    for _ in range(30):
        await pace.work(short())
    counting.cancel()
    assert num_turns >= 10
