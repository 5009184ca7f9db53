"""What others' routers were tested for or failed at, replayed through real sockets.

docs/routing-tests.md says what each of them comes from.
"""

from __future__ import annotations

import asyncio
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import pytest
from typing_extensions import override

from kvway_core.clock import SystemClock
from kvway_core.testing.fake_replica import Answer
from tests.e2e.routing import (
    BLOCK,
    HELD,
    Frozen,
    chat,
    hold_all,
    num_requests,
    until,
    words,
    work,
)
from tests.e2e.test_routing_states import holder_of, reports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvway_core.testing.fake_replica import FakeReplica
    from tests.e2e.conftest import StartRouters
    from tests.router.conftest import Bench

IDLE: dict[str, Any] = {"num_waiting": 0}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "description": words("tool", 900), "parameters": {}},
    }
]


class Ahead(SystemClock):
    """The machine's clock, some time ahead."""

    ahead_s = 0.0

    @override
    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


def counts(replicas: Sequence[FakeReplica]) -> list[int]:
    return [len(replica.requests) for replica in replicas]


async def load_of(bench: Bench, replica: FakeReplica) -> tuple[int, int]:
    """Requests and prefills there, as the router counts them."""
    view = await bench.get(bench.admin("/admin/replicas"))
    (found,) = (one for one in view["replicas"] if one["replica_id"] == replica.replica_id)
    return found["in_flight"], found["num_prefills"]


@pytest.mark.parametrize("num_replicas", [2, 3])
async def test_one_prompt_again_and_again_is_of_one_replica(
    start_routers: StartRouters, num_replicas: int
) -> None:
    (bench,) = await start_routers(num_replicas, load=IDLE)
    homes = {(await holder_of(bench, words("same", 800))).replica_id for _ in range(12)}
    assert len(homes) == 1


async def test_an_agents_prefix_is_of_one_replica_whatever_it_is_asked(
    start_routers: StartRouters,
) -> None:
    """System prompt and tools are the same, each user's question is another one."""
    (bench,) = await start_routers(3, load=IDLE)
    for number in range(12):
        body = chat(words("agent", 900), words(f"question {number}", 60), tools=TOOLS)
        status, _, _ = await bench.chat("", **body)
        assert status == 200
    assert sorted(counts(bench.replicas)) == [0, 0, 12]


async def test_prompts_that_share_nothing_are_of_all_replicas(start_routers: StartRouters) -> None:
    (bench,) = await start_routers(3)
    await hold_all([bench], [chat("", words(f"{n * 7919} is mine", 400)) for n in range(40)])
    assert min(counts(bench.replicas)) >= 10
    assert max(counts(bench.replicas)) < 20


@pytest.mark.parametrize("share", [0.45, 0.5, 0.55])
async def test_half_a_match_is_worth_what_it_saves_and_no_more(
    start_routers: StartRouters, share: float
) -> None:
    """There is no threshold: the holder is left once its queue is longer than what it saves."""
    (bench,) = await start_routers(2, load=IDLE, probe_interval_s=0.05)
    num_shared = int(2000 * share)
    shared = words("shared", num_shared)
    holder = await holder_of(bench, shared)
    # At 1000 tokens per second, a second is a thousand tokens.
    for queued, is_kept in ((num_shared // 2, True), (2 * num_shared, False)):
        await reports(holder, num_waiting=1, waiting_uncached_tokens=queued)
        _, headers, _ = await bench.chat(shared + words(f"{queued} own", 2000 - num_shared))
        assert (headers["x-kvway-replica"] == holder.replica_id) is is_kept
        assert headers["x-kvway-reason"].startswith("prefix" if is_kept else "spill")


@pytest.mark.parametrize("waiting", [[1, 6, 1, 0], [11, 16, 11, 10], [0, 0, 0, 3]])
async def test_unequal_queues_are_made_equal_and_none_is_piled_upon(
    start_routers: StartRouters, waiting: list[int]
) -> None:
    """Twelve cold prompts go where fewest of the same length wait, at each moment."""
    loads = [{"num_waiting": num, "waiting_uncached_tokens": num * 800} for num in waiting]
    # Asked once; a later report would have to count ours.
    (bench,) = await start_routers(4, loads=loads, probe_interval_s=600.0, clock=Frozen())
    await hold_all([bench], [chat("", words(f"{n:03} cold", 800)) for n in range(12)])
    filled = list(waiting)
    for _ in range(12):
        filled[filled.index(min(filled))] += 1
    expected = [after - before for after, before in zip(filled, waiting, strict=True)]
    assert all(abs(a - b) <= 1 for a, b in zip(counts(bench.replicas), expected, strict=True))


@pytest.mark.parametrize(("one", "two"), [("中", "丮"), ("🚀", "🚁"), ("e\u0301", "e\u0300")])
async def test_prompts_that_part_within_a_letter_match_up_to_there(
    start_routers: StartRouters, one: str, two: str
) -> None:
    """Tokens here are bytes, and these letters begin with the same ones."""
    (bench,) = await start_routers(1, load=IDLE)
    same = "漢字とかな " * 30
    status, _, _ = await bench.chat(same + one + " end" * 20)
    assert status == 200
    _, headers, _ = await bench.chat(same + two + " end" * 20)
    record = await bench.decision(headers)
    pairs = zip(one.encode(), two.encode(), strict=True)
    num_alike = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
    num_same = len("^user\n") + len(same.encode()) + num_alike  # the first is a special token
    assert record["matched_tokens"] == num_same // BLOCK * BLOCK


async def test_a_slow_engine_shows_in_its_streams_and_gets_less(
    start_routers: StartRouters,
) -> None:
    """It reports nothing: how long its first tokens took is all there is."""
    clock = Ahead()
    (bench,) = await start_routers(2, metrics=b"", clock=clock, probe_interval_s=600.0)
    slow, fast = bench.replicas
    for replica in bench.replicas:
        replica.answer = HELD
    asking = [
        asyncio.create_task(bench.chat(words(f"{n} probe", 2000), stream=True)) for n in range(2)
    ]
    await until(bench.replicas, lambda: counts(bench.replicas) == [1, 1])
    for replica, seconds in ((fast, 1.0), (slow, 7.0)):
        clock.ahead_s += seconds
        replica.release()
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        asking = [task for task in asking if not task.done()]
    for replica in bench.replicas:
        replica.hold()
    await hold_all([bench], [chat("", words(f"{n:03} cold", 2000)) for n in range(18)])
    assert len(slow.requests) - 1 <= 4
    assert len(fast.requests) - 1 >= 14


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("mode", ["stream", "whole"])
async def test_load_counts_from_the_choice_to_the_last_byte_at_every_endpoint(
    start_routers: StartRouters, path: str, mode: str
) -> None:
    (bench,) = await start_routers(1)
    (replica,) = bench.replicas
    replica.script(Answer(cached_tokens=None, hold_head=True))
    body: dict[str, Any] = {"model": "test-model", "stream": mode == "stream"}
    body |= {"prompt": words("p", 400)} if path == "/v1/completions" else chat("", words("p", 400))

    async def ask() -> bytes:
        async with bench.client.post(bench.api(path), json=body) as response:
            return await response.read()

    asking = asyncio.create_task(ask())
    await replica.wait_for(lambda: len(replica.requests) == 1)
    assert await load_of(bench, replica) == (2, 2), "ours, and one that the replica reports"
    replica.release()
    assert b"Hello" in await asking
    await bench.router.dispatcher.running.wait_idle()
    assert (await load_of(bench, replica))[1] == 1


async def test_replicas_may_come_and_go_under_load_and_sessions_stay(
    start_routers: StartRouters,
) -> None:
    """No request fails, and only the sessions of who left move."""
    (bench,) = await start_routers(3, load=IDLE)
    history = {n: words(f"session {n}", 800) for n in range(9)}
    homes = {n: await holder_of(bench, text) for n, text in history.items()}
    (leaver, *stayers) = sorted(bench.replicas, key=lambda r: -len(r.requests))
    leaver.script(Answer(cached_tokens=None, hold_head=True))
    mine = next(n for n, home in homes.items() if home is leaver)
    running = asyncio.create_task(bench.chat(history[mine] + "?"))
    seen = len(leaver.requests)
    await leaver.wait_for(lambda: len(leaver.requests) == seen + 1)
    bench.router.replicas.set_replicas([replica.url for replica in stayers])
    for number, text in history.items():
        status, headers, _ = await bench.chat(text + "!")
        assert status == 200
        if homes[number] is not leaver:
            assert headers["x-kvway-replica"] == homes[number].replica_id
    leaver.release()
    status, _, _ = await running
    assert status == 200


async def test_routers_that_see_one_idle_replica_do_not_all_go_there(
    start_routers: StartRouters,
) -> None:
    """Four that do not talk, and none hears of the others' requests while these wait."""
    benches = await start_routers(4, 4, probe_interval_s=30.0)
    replicas = benches[0].replicas
    await hold_all(benches, [chat("", words(f"{n:03} cold", 800)) for n in range(32)])
    assert max(counts(replicas)) <= 12


async def test_many_requests_at_once_are_all_answered_and_evenly_spread(
    start_routers: StartRouters,
) -> None:
    (bench,) = await start_routers(4, load=IDLE)
    bodies = [chat("", words(f"{n:04} short", 64)) for n in range(400)]
    answers = await asyncio.gather(*(bench.chat("", **body) for body in bodies))
    assert {status for status, _, _ in answers} == {200}
    assert num_requests(bench.replicas) == 400
    assert min(counts(bench.replicas)) >= 50


async def test_the_work_of_chats_that_go_on_is_that_of_one_large_cache(
    start_routers: StartRouters,
) -> None:
    """Hit rates themselves: two routers reach what one would, as the longest match counts."""
    benches = await start_routers(3, 2, load=IDLE)
    replicas = benches[0].replicas
    texts = {n: words(f"chat {n}", 640) for n in range(6)}
    for turn in range(4):
        for number, text in texts.items():
            bench = benches[(turn + number) % 2]
            status, _, _ = await bench.chat("", **chat("", text))
            assert status == 200
            texts[number] = text + words(f" turn {turn}", 160)
    once = sum(len(text) for text in texts.values())
    assert sum(map(work, replicas)) < 1.3 * once


async def test_an_address_given_twice_is_one_replica_and_unknown_holders_are_no_candidates(
    start_routers: StartRouters,
) -> None:
    (bench,) = await start_routers(2, load=IDLE)
    one, other = bench.replicas
    prompt = words("held by a stranger", 400)
    holder = await holder_of(bench, prompt)
    bench.router.index.store("10.9.9.9:1", None, [*bench.router.index.blocks(holder.replica_id)])
    bench.router.replicas.set_replicas([one.url, other.url, one.url, other.url + "/"])
    _, headers, _ = await bench.chat(prompt)
    record = await bench.decision(headers)
    named = [candidate["replica_id"] for candidate in record["candidates"]]
    assert sorted(named) == sorted([one.replica_id, other.replica_id])
    assert record["replica_id"] == holder.replica_id
