"""What becomes of routing when a replica is full, slow, new, or gone and back; real sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.e2e.routing import chat, hold_all, words

if TYPE_CHECKING:
    from kvway_core.testing.fake_replica import FakeReplica
    from tests.e2e.conftest import StartRouters
    from tests.router.conftest import Bench


async def reports(replica: FakeReplica, **load: Any) -> None:
    """Has a replica report something, and waits until it was asked twice since."""
    replica.pages["/load"] = (200, replica.load(**load))
    seen = replica.probes["/load"]
    await replica.wait_for(lambda: replica.probes["/load"] > seen + 1)


async def holder_of(bench: Bench, prompt: str) -> FakeReplica:
    _, headers, _ = await bench.chat(prompt)
    return bench.named(headers["x-kvway-replica"])


async def test_a_full_replica_is_left_though_it_holds_the_prompt(
    start_routers: StartRouters,
) -> None:
    (bench,) = await start_routers(2, probe_interval_s=0.05)
    prompt = words("full", 300)
    holder = await holder_of(bench, prompt)
    await reports(holder, blocks={"free": 0, "cached": 0, "total": 1000})
    _, headers, _ = await bench.chat(prompt)
    assert headers["x-kvway-replica"] != holder.replica_id
    assert headers["x-kvway-reason"].startswith("spill")
    chosen = next(
        c
        for c in (await bench.decision(headers))["candidates"]
        if c["replica_id"] == holder.replica_id
    )
    assert chosen["kv_s"] > 0.5


async def test_a_slow_replica_gets_less_of_the_same_load(start_routers: StartRouters) -> None:
    (bench,) = await start_routers(2)
    slow, fast = bench.replicas
    await reports(slow, prefill_tokens_per_s=250.0, num_waiting=1)
    await hold_all([bench], [chat("", words(f"prompt {n:03}", 2000)) for n in range(20)])
    assert len(slow.requests) <= 6 < len(fast.requests)


async def test_a_replica_that_is_gone_costs_nothing_and_is_used_again(
    start_routers: StartRouters,
) -> None:
    """Its prompts go elsewhere, are learned there, and it gets new ones once it is back."""
    (bench,) = await start_routers(2, probe_interval_s=0.05)
    prompt = words("gone", 800)
    holder = await holder_of(bench, prompt)
    (other,) = (replica for replica in bench.replicas if replica is not holder)
    await holder.stop()
    for _ in range(3):
        status, headers, _ = await bench.chat(prompt)
        assert (status, headers["x-kvway-replica"]) == (200, other.replica_id)
    await holder.restart()
    holder.pages["/load"] = (200, holder.load(boot_id="boot-2"))
    await bench.router.replicas.wait_for(lambda: len(bench.router.replicas.usable()) == 2)
    _, headers, _ = await bench.chat(prompt)
    assert headers["x-kvway-replica"] == other.replica_id, "its cache is empty now"
    _, headers, _ = await bench.chat(words("something else", 800))
    assert headers["x-kvway-replica"] == holder.replica_id


async def test_a_new_replica_gets_the_next_cold_prompt(start_routers: StartRouters) -> None:
    """The others hold two prompts each then, so both are passed by, wherever hashes point."""
    (bench,) = await start_routers(3, load={"num_waiting": 0})
    new = bench.replicas[-1]
    bench.router.replicas.set_replicas([replica.url for replica in bench.replicas[:2]])
    for number in range(4):
        await bench.chat(words(f"prompt {number}", 800))
        await bench.router.dispatcher.running.wait_idle()
    bench.router.replicas.set_replicas([replica.url for replica in bench.replicas])
    await bench.router.replicas.wait_for(lambda: len(bench.router.replicas.usable()) == 3)
    before = len(new.requests)
    await bench.chat(words("cold", 800))
    assert len(new.requests) == before + 1


async def test_who_was_not_usable_and_why_is_recorded_where_nobody_was_chosen(
    start_routers: StartRouters,
) -> None:
    (bench,) = await start_routers(3, probe_interval_s=0.05)
    gone, draining, starting = bench.replicas
    await reports(draining, state="draining")
    await reports(starting, state="starting")
    await gone.stop()
    await bench.router.replicas.wait_for(lambda: not bench.router.replicas.usable())
    status, headers, body = await bench.chat("hello")
    assert (status, body["error"]["code"]) == (503, "no_replica_available")
    record = await bench.decision(headers)
    assert (record["replica_id"], record["reason"]) == ("", "no_replica_available")
    assert (record["status"], record["finish"], record["attempts"]) == (503, "failed", [])
    whys = {unusable["replica_id"]: unusable["why"] for unusable in record["unusable"]}
    assert whys[gone.replica_id].startswith("unhealthy: cannot connect")
    assert whys[draining.replica_id] == "draining: it is draining"
    assert whys[starting.replica_id] == "starting: it is starting"
    listed = await bench.get(bench.admin("/admin/decisions"))
    assert listed["decisions"][0]["id"] == record["id"]
