"""Where prompts go, through real sockets: what is shared is met again, and nobody is piled upon.

What is compared is work that replicas were given, in tokens, and never time.
"""

from __future__ import annotations

import random
from itertools import count
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvway_core.blocks import Namespace
from kvway_core.prompts import PromptEncoder
from kvway_router.policy import rendezvous
from kvway_router.reading import Route, ServedModel, read_request
from tests.e2e.routing import BLOCK, chat, hold_all, text_of, words, work
from tests.router.conftest import MODEL

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvway_core.testing.fake_replica import FakeReplica
    from tests.e2e.conftest import StartRouters


@pytest.fixture
def encoder(byte_model: Path) -> PromptEncoder:
    return PromptEncoder.load(byte_model)


async def test_many_users_of_one_short_system_prompt_spread(start_routers: StartRouters) -> None:
    """What all share is little beside what each asks: no replica gets most of them."""
    (bench,) = await start_routers(4)
    system = words("rules", 20 * BLOCK)
    await hold_all([bench], [chat(system, words(f"user {n:03}", 2000)) for n in range(40)])
    counts = [len(replica.requests) for replica in bench.replicas]
    assert min(counts) >= 6
    assert max(counts) <= 14


async def test_a_hot_prefix_spreads_with_its_burst_and_comes_back_to_one(
    start_routers: StartRouters,
) -> None:
    """All have it then; later ones go to one of them, and other prompts push the others out."""
    room = {"free": 400, "cached": 0, "total": 400}
    (bench,) = await start_routers(3, load={"num_waiting": 0, "blocks": room})
    shared = words("shared", 3000)
    await hold_all([bench], [chat(shared, words(f"own {n:03}", 300)) for n in range(24)])
    assert all(replica.requests for replica in bench.replicas)
    holders = []
    for number in range(16):
        _, headers, _ = await bench.chat("", **chat(shared, words(f"later {number}", 300)))
        assert headers["x-kvway-reason"].startswith("prefix")
        candidates = (await bench.decision(headers))["candidates"]
        holders.append(sum(one["matched_blocks"] * BLOCK >= 2800 for one in candidates))
        for other in range(3):
            await bench.chat(words(f"other {number} {other}", 1600))
    assert (holders[0], holders[-1]) == (3, 1)


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


def texts_of_each(
    replicas: Sequence[FakeReplica], encoder: PromptEncoder, *, num_each: int
) -> list[list[str]]:
    """System prompts by the replica that the hash of their beginning points at."""
    served = ServedModel(MODEL, encoder, Namespace(MODEL, BLOCK))
    names = [replica.replica_id.encode() for replica in replicas]
    texts: list[list[str]] = [[] for _ in names]
    for number in count():
        text = words(f"system {number:03}", 1600)
        body = msgspec.json.encode({"model": MODEL, **chat(text, "")})
        key = read_request(body, route=Route.CHAT, model=served, max_model_len=None).prefix_key
        home = max(range(len(names)), key=lambda place: rendezvous(key, names[place]))
        texts[home].append(text)
        if all(len(found) >= num_each for found in texts):
            break
    return [found[:num_each] for found in texts]


@pytest.mark.parametrize("num_routers", [2, 4, 8])
async def test_routers_that_do_not_talk_place_alike(
    start_routers: StartRouters, encoder: PromptEncoder, num_routers: int
) -> None:
    """Sixteen system prompts, four of each replica by their hash, users at any router.

    No router ever sees a replica with more than its share, so each is computed once.
    """
    benches = await start_routers(4, num_routers, load={"num_waiting": 0})
    replicas = benches[0].replicas
    homes = texts_of_each(replicas, encoder, num_each=4)
    rng = random.Random(7)
    for _ in range(6):
        for group in zip(*homes, strict=True):
            bench = rng.choice(benches)
            for system in group:
                status, _, _ = await bench.chat("", **chat(system, words("user", 64)))
                assert status == 200
                await bench.router.dispatcher.running.wait_idle()
    for place, replica in enumerate(replicas):
        assert [len(replica.requests) for replica in replicas] == [24] * 4
        systems = {text_of(request).partition("|user")[0] for request in replica.requests}
        assert systems == {f"|system\n{system}" for system in homes[place]}


@pytest.mark.parametrize("num_routers", [4, 8])
async def test_cold_prompts_that_come_to_all_routers_at_once_do_not_meet(
    start_routers: StartRouters, encoder: PromptEncoder, num_routers: int
) -> None:
    """They share the words of the template, which must not point them all at one replica."""
    benches = await start_routers(4, num_routers, load={"num_waiting": 0}, probe_interval_s=30)
    replicas = benches[0].replicas
    homes = texts_of_each(replicas, encoder, num_each=num_routers // 4)
    await hold_all(benches, [chat(text, "") for home in homes for text in home])
    assert [len(replica.requests) for replica in replicas] == [num_routers // 4] * 4


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
