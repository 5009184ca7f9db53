"""What vLLM and SGLang say of their load in /metrics, and what becomes of routing.

Through real sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

from kvway_core.clock import SystemClock
from kvway_router.probe import MAX_PAGE_BYTES
from tests.e2e.routing import BLOCK, chat, hold_all, words
from tests.e2e.test_routing_states import holder_of
from tests.router.engine_publisher import EnginePublisher, stored, vllm_maps

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from kvway_core.testing.fake_replica import FakeReplica
    from tests.e2e.conftest import StartRouters

    Says: TypeAlias = Callable[..., bytes]


def vllm(running: int = 0, waiting: int = 0, usage: float = 0.0) -> bytes:
    labels = 'engine="0",model_name="test-model"'
    return f"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{labels}}} {running:.1f}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{{labels}}} {waiting:.1f}
vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} not a number
vllm:kv_cache_usage_perc{{{labels}}} {usage}
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="1000"}} 1.0
process_start_time_seconds 1.7e+09
""".encode()


def sglang(running: int = 0, waiting: int = 0, usage: float = 0.0) -> bytes:
    labels = 'engine_type="unified",model_name="test-model",pp_rank="0",tp_rank="0"'
    return f"""# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{{labels}}} {running:.1f}
sglang:num_queue_reqs{{{labels}}} {waiting:.1f}
sglang:cache_hit_rate{{ broken
sglang:token_usage{{{labels}}} {usage}
sglang:max_total_num_tokens{{{labels}}} 16000.0
""".encode()


ENGINES = pytest.mark.parametrize("says", [vllm, sglang], ids=["vllm", "sglang"])


async def tells(replica: FakeReplica, page: bytes, *, status: int = 200) -> None:
    """Has an engine say something, and waits until it was asked twice since."""
    replica.pages["/metrics"] = (status, page)
    seen = replica.probes["/metrics"]
    await replica.wait_for(lambda: replica.probes["/metrics"] > seen + 1)


class Ahead(SystemClock):
    """The machine's clock, some time ahead."""

    ahead_s = 0.0

    @override
    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


@ENGINES
async def test_a_queue_that_others_made_sends_cold_prompts_elsewhere(
    start_routers: StartRouters, says: Says
) -> None:
    (bench,) = await start_routers(2, metrics=says(), probe_interval_s=0.05)
    busy, idle = bench.replicas
    await tells(busy, says(running=8, waiting=5))
    for number in range(3):
        _, headers, _ = await bench.chat(words(f"cold {number}", 800))
        assert headers["x-kvway-replica"] == idle.replica_id
        candidates = (await bench.decision(headers))["candidates"]
        seen = {c["replica_id"]: (c["in_flight"], c["queued_s"]) for c in candidates}
        assert seen[idle.replica_id] == (0, 0.0)
        assert seen[busy.replica_id][0] == 13
        assert seen[busy.replica_id][1] > 0.5
    await tells(busy, says())
    await tells(idle, says(waiting=5))
    _, headers, _ = await bench.chat(words("later", 800))
    assert headers["x-kvway-replica"] == busy.replica_id


@ENGINES
async def test_pressure_decides_between_a_deep_and_a_shallow_holder(
    start_routers: StartRouters, says: Says
) -> None:
    """The deep one while neither waits; the shallow one once the wait is longer than the rest."""
    (bench,) = await start_routers(2, metrics=says(), probe_interval_s=0.05)
    head, tail = words("head", 1600), words("tail", 400)
    deep = await holder_of(bench, head + tail)
    (shallow,) = (replica for replica in bench.replicas if replica is not deep)
    await tells(deep, says(waiting=9))
    _, headers, _ = await bench.chat(head)
    assert headers["x-kvway-replica"] == shallow.replica_id
    await tells(deep, says())
    _, headers, _ = await bench.chat(head + tail)
    assert headers["x-kvway-replica"] == deep.replica_id
    await tells(deep, says(waiting=9))
    _, headers, _ = await bench.chat(head + tail + "?")
    assert headers["x-kvway-replica"] == shallow.replica_id
    assert headers["x-kvway-reason"].startswith("spill")


@ENGINES
async def test_the_owner_is_kept_while_nobody_else_has_room(
    start_routers: StartRouters, says: Says
) -> None:
    """When all queue alike, another one would wait as long and compute all of it besides."""
    (bench,) = await start_routers(3, metrics=says(), probe_interval_s=0.05)
    prompt = words("owned", 1600)
    owner = await holder_of(bench, prompt)
    for replica in bench.replicas:
        await tells(replica, says(running=8, waiting=6))
    for number in range(3):
        _, headers, _ = await bench.chat(prompt + str(number))
        assert headers["x-kvway-replica"] == owner.replica_id
        assert headers["x-kvway-reason"].startswith("prefix")


@ENGINES
@pytest.mark.parametrize("status", [500, 404])
async def test_what_an_engine_said_too_long_ago_sends_nothing_elsewhere(
    start_routers: StartRouters, says: Says, status: int
) -> None:
    """And a page of metrics that fails is no failure of its engine."""
    clock = Ahead()
    (bench,) = await start_routers(2, metrics=says(), probe_interval_s=0.05, clock=clock)
    prompt = words("owned", 1600)
    owner = await holder_of(bench, prompt)
    await tells(owner, says(waiting=9))
    owner.pages["/metrics"] = (status, b"")
    seen = owner.probes["/health"]
    await owner.wait_for(lambda: owner.probes["/health"] > seen + 2)
    _, headers, _ = await bench.chat(prompt)
    assert headers["x-kvway-replica"] != owner.replica_id
    assert headers["x-kvway-reason"].startswith("spill")
    clock.ahead_s = 5.1
    _, headers, _ = await bench.chat(prompt)
    candidates = (await bench.decision(headers))["candidates"]
    assert {(c["in_flight"], c["queued_s"]) for c in candidates} == {(0, 0.0)}


@ENGINES
async def test_memory_that_requests_hold_makes_an_engine_dear(
    start_routers: StartRouters, says: Says
) -> None:
    (bench,) = await start_routers(2, metrics=says(), probe_interval_s=0.05)
    full, other = bench.replicas
    await tells(full, says(running=1, usage=0.97))
    for number in range(3):
        _, headers, _ = await bench.chat(words(f"cold {number}", 800))
        assert headers["x-kvway-replica"] == other.replica_id
        cost = {c["replica_id"]: c for c in (await bench.decision(headers))["candidates"]}
        assert cost[full.replica_id]["kv_s"] > 3.0 * (0.97 - 0.8)
        assert cost[other.replica_id]["kv_s"] == 0.0


@ENGINES
async def test_our_own_requests_are_not_taken_for_those_of_others(
    start_routers: StartRouters, says: Says
) -> None:
    """Not while they run, and SGLang still counts them for a while once they are over."""
    (bench,) = await start_routers(2, metrics=says(), probe_interval_s=0.05)
    await hold_all([bench], [chat("", words(f"prompt {n:03}", 320)) for n in range(8)])
    await bench.router.dispatcher.running.wait_idle()
    one, other = bench.replicas
    await tells(one, says(running=len(one.requests)))
    await tells(other, says(running=len(other.requests)))
    view = await bench.get(bench.admin("/admin/replicas"))
    if says is sglang:
        assert [replica["in_flight"] for replica in view["replicas"]] == [0, 0]
    assert [replica["num_prefills"] for replica in view["replicas"]] == [0, 0]


async def test_blocks_on_the_host_cost_what_the_option_says(start_routers: StartRouters) -> None:
    prompt = words("host", 20 * BLOCK)
    async with EnginePublisher(vllm_maps) as engine:
        events = f"{engine.pub},replay={engine.replay}"
        (bench,) = await start_routers(
            1, metrics=vllm(), kv_events=(events,), host_reload_us=500.0
        )
        name = bench.replica.replica_id
        tokens = list(prompt.encode())
        await engine.publish(stored(range(100, 110), tokens[: 10 * BLOCK]))
        on_host = stored(range(110, 120), tokens[10 * BLOCK :], parent=109, medium="CPU")
        await engine.publish(on_host)
        await bench.router.replicas.wait_for(lambda: bench.router.replicas.is_fed(name))
        body = {"model": "test-model", "prompt": prompt + "and more"}
        async with bench.client.post(bench.api("/v1/completions"), json=body) as response:
            (chosen,) = (await bench.decision(response.headers))["candidates"]
        assert (chosen["matched_blocks"], chosen["slow_blocks"]) == (20, 10)
        assert chosen["reload_s"] == pytest.approx(10 * BLOCK * 500e-6)


async def test_a_page_without_end_is_given_up(start_routers: StartRouters) -> None:
    """What it said before the limit counts as little as what comes behind it."""
    page = vllm(waiting=9) + b"# more\n" * (MAX_PAGE_BYTES // 7)
    (bench,) = await start_routers(2, metrics=page, probe_interval_s=0.05)
    loud, other = bench.replicas
    assert loud.probes["/metrics"] >= 1
    _, headers, _ = await bench.chat(words("cold", 800))
    candidates = (await bench.decision(headers))["candidates"]
    assert {c["in_flight"] for c in candidates} == {0}
    assert {c["replica_id"] for c in candidates} == {loud.replica_id, other.replica_id}
