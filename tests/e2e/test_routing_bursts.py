"""Siblings that come truly at once, through real sockets, at replicas that compute one by one.

Every replica holds its answers until all requests have arrived somewhere. When each would have had
its first token follows from the order in which they arrived: a replica computes one prompt after
the other, of each what it has not had before. So time is counted in tokens, and nobody waits.
"""

from __future__ import annotations

import asyncio
from statistics import fmean
from typing import TYPE_CHECKING

import pytest

from tests.e2e.routing import BLOCK, HELD, Frozen, chat, first_tokens, num_requests, until, words

if TYPE_CHECKING:
    from tests.e2e.conftest import StartRouters

SHARED, OWN = 3000, 300


async def burst(
    start_routers: StartRouters, num_siblings: int, num_replicas: int, *, policy: str, own: int
) -> list[int]:
    """Sends siblings at once to an idle fleet; returns when each has its first token."""
    (bench,) = await start_routers(num_replicas, policy=policy, clock=Frozen())
    for replica in bench.replicas:
        replica.answer = HELD
    shared = words("shared", SHARED)
    bodies = [chat(shared, words(f"own {n:03}", own)) for n in range(num_siblings)]
    asking = [asyncio.create_task(bench.chat("", **body)) for body in bodies]
    await until(bench.replicas, lambda: num_requests(bench.replicas) == num_siblings)
    for replica in bench.replicas:
        replica.release()
    assert {status for status, _, _ in await asyncio.gather(*asking)} == {200}
    return [done for replica in bench.replicas for done in first_tokens(replica)]


@pytest.mark.parametrize(
    ("num_siblings", "num_replicas"), [(6, 3), (8, 2), (12, 2), (12, 3), (24, 2), (16, 4)]
)
@pytest.mark.parametrize("own", [OWN, 100])
async def test_siblings_that_come_at_once_take_no_longer_than_in_turns(
    start_routers: StartRouters, num_siblings: int, num_replicas: int, own: int
) -> None:
    """One prefix at several replicas: the mean, and with it the last, is that of round robin.

    The median of three bursts. Prompts are read by several threads: now and then most siblings are
    chosen for before what one replica has of the prefix is read, and go to the other.
    """
    bursts = [
        await burst(start_routers, num_siblings, num_replicas, policy="cost", own=own)
        for _ in range(3)
    ]
    ours = sorted(bursts, key=fmean)[1]
    in_turns = await burst(
        start_routers, num_siblings, num_replicas, policy="round_robin", own=own
    )
    assert fmean(ours) <= 1.05 * fmean(in_turns)
    assert max(ours) <= max(in_turns) + 0.1 * SHARED + BLOCK


async def test_siblings_with_little_of_their_own_are_computed_once(
    start_routers: StartRouters,
) -> None:
    """Eight at once at two replicas: the beginning is computed at one of them."""
    done = await burst(start_routers, 8, 2, policy="cost", own=16)
    assert len(done) == 8
    assert sum(at > SHARED for at in done) == 8, "all of them wait for it"
    assert max(done) < SHARED + 8 * 64


async def test_a_record_tells_what_the_price_of_work_comes_from(
    start_routers: StartRouters,
) -> None:
    (bench,) = await start_routers(2)
    _, headers, _ = await bench.chat(words("first", 400))
    assert (await bench.decision(headers))["mean_work_s"] is None
    _, headers, _ = await bench.chat(words("second", 400))
    record = await bench.decision(headers)
    assert record["mean_work_s"] == pytest.approx(0.4, rel=0.2)
    assert 0.0 <= record["busy_share"] <= 1.0
    assert record["price_of_work"] >= 0.0
