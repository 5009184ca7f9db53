"""Where prompts go, through real sockets: what is shared is met again, and nobody is piled upon.

What is compared is work that replicas were given, in tokens, and never time.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.e2e.routing import BLOCK, chat, hold_all, num_requests, words, work

if TYPE_CHECKING:
    from tests.e2e.conftest import StartRouters


async def test_many_users_of_one_short_system_prompt_spread(start_routers: StartRouters) -> None:
    """What all share is little beside what each asks: no replica gets most of them."""
    (bench,) = await start_routers(4)
    system = words("rules", 20 * BLOCK)
    await hold_all([bench], [chat(system, words(f"user {n:03}", 2000)) for n in range(40)])
    counts = [len(replica.requests) for replica in bench.replicas]
    assert min(counts) >= 6
    assert max(counts) <= 14


@pytest.mark.parametrize("num_replicas", [2, 3])
async def test_one_prefix_is_never_slower_than_round_robin(
    start_routers: StartRouters, num_replicas: int
) -> None:
    """A burst of siblings: the busiest replica has no more to do than if they took turns."""
    (bench,) = await start_routers(num_replicas)
    shared = words("shared", 3000)
    num_siblings = 12 * num_replicas
    await hold_all([bench], [chat(shared, words(f"own {n:03}", 300)) for n in range(num_siblings)])
    in_turns = 3000 + 320 + (num_siblings / num_replicas - 1) * 320
    assert max(map(work, bench.replicas)) <= 1.1 * in_turns


async def test_a_hot_prefix_comes_back_to_one_replica_when_the_burst_is_over(
    start_routers: StartRouters,
) -> None:
    """Two have it then; one after the other goes to a holder, and no third computes it."""
    (bench,) = await start_routers(3)
    shared = words("shared", 3000)
    await hold_all([bench], [chat(shared, words(f"own {n:03}", 300)) for n in range(4)])
    holders = {replica.replica_id for replica in bench.replicas if replica.requests}
    assert len(holders) < 3
    for number in range(10):
        _, headers, _ = await bench.chat("", **chat(shared, words(f"later {number}", 300)))
        assert headers["x-kvway-replica"] in holders
        assert headers["x-kvway-reason"].startswith("prefix")


async def test_a_burst_of_slow_prefills_spreads_before_any_header(
    start_routers: StartRouters,
) -> None:
    (bench,) = await start_routers(4)
    await hold_all([bench], [chat("", words(f"prompt {n:03}", 3000)) for n in range(64)])
    assert [len(replica.requests) for replica in bench.replicas] == [16] * 4


async def test_sessions_stay_where_their_history_is(start_routers: StartRouters) -> None:
    """Eight conversations, turn by turn in no order: nothing is computed twice."""
    (bench,) = await start_routers(4)
    rng = random.Random(4)
    history = {n: words(f"session {n}", 800) for n in range(8)}
    turns = [n for n in history for _ in range(5)]
    rng.shuffle(turns)
    for number, session in enumerate(turns):
        history[session] += words(f" turn {number}", 160)
        status, _, _ = await bench.chat(history[session])
        assert status == 200
    once = sum(map(len, history.values()))
    assert sum(map(work, bench.replicas)) < 1.15 * once + 30 * len(turns)
    assert max(len(replica.requests) for replica in bench.replicas) <= len(turns) / 2


@pytest.mark.parametrize("num_routers", [2, 4, 8])
async def test_routers_that_do_not_talk_place_alike(
    start_routers: StartRouters, num_routers: int
) -> None:
    """Sixteen system prompts, users at any router: most are computed once, not once per router."""
    benches = await start_routers(4, num_routers)
    systems = [words(f"system {n:02}", 1600) for n in range(16)]
    rng = random.Random(7)
    for _ in range(6):
        for number in rng.sample(range(16), 16):
            bench = rng.choice(benches)
            status, _, _ = await bench.chat("", **chat(systems[number], words("user", 64)))
            assert status == 200
    replicas = benches[0].replicas
    assert num_requests(replicas) == 96
    placed = sum(
        any(system[:40] in request.body.decode() for request in replica.requests)
        for system in systems
        for replica in replicas
    )
    # One place each is 16; routers that draw lots would make so many:
    drawn = 16 * 4 * (1 - 0.75**num_routers)
    assert placed <= 0.95 * drawn
    assert max(len(replica.requests) for replica in replicas) <= 48


async def test_a_sticky_key_keeps_requests_together_that_share_nothing(
    start_routers: StartRouters,
) -> None:
    """As header and as field; and a key is no chain: who is busy is left."""
    benches = await start_routers(4, 2)
    homes = set()
    for number in range(6):
        bench = benches[number % 2]
        url = bench.api("/v1/chat/completions")
        body = {"model": "test-model", **chat("", words(f"topic {number}", 400))}
        if number % 3 == 0:
            body["prompt_cache_key"] = "mine"
        header = {} if number % 3 == 0 else {"x-kvway-sticky": "mine"}
        async with bench.client.post(url, json=body, headers=header) as response:
            assert response.status == 200
            record = await bench.decision(response.headers)
            assert record["sticky"] is True
            homes.add(response.headers["x-kvway-replica"])
    assert len(homes) <= 3, "one that holds more than its share is passed by"
    await hold_all(
        [benches[0]],
        [chat("", words(f"long {n}", 3000), prompt_cache_key="mine") for n in range(8)],
    )
    assert min(len(replica.requests) for replica in benches[0].replicas) >= 1
