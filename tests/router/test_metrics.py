"""The text of /metrics: names, labels, buckets; and that its series stay bounded."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from kvway_core.testing.fake_replica import Answer, FakeReplica
from tests.router.conftest import Bench, StartBench
from tests.router.zmq_worker import ZmqWorker, stored

# What differs from run to run: times, the process, and the ports of the replicas.
_VARIES = re.compile(
    r"^(\S*(?:_seconds_bucket|_seconds_sum|ttft\w*_seconds_total|_cache_bytes)\S*|process_\S+) "
    r".*$",
    re.MULTILINE,
)


async def test_metrics_are_as_agreed(bench: Bench, golden: Callable[[str, str], None]) -> None:
    bench.replica.answer = Answer(cached_tokens=16)
    await bench.chat("x" * 100, stream=True)
    await bench.chat("x" * 100)
    async with bench.client.get(bench.api("/metrics")) as response:
        assert response.content_type == "text/plain"
        text = await response.text()
    text = _VARIES.sub(r"\1 _", text).replace(bench.replica.replica_id, "REPLICA")
    ours = re.sub(r"^(# \w+ )?process_.*\n", "", text, flags=re.MULTILINE)
    golden("router_metrics.txt", re.sub(r'version="[^"]+"', 'version="_"', ours))


async def test_junk_makes_no_series(bench: Bench) -> None:
    before = set(await bench.metrics())
    for number in range(50):
        await bench.chat(model=f"junk-{number}")
        async with bench.client.get(bench.api(f"/junk/{number}")) as response:
            assert response.status == 404
    new = set(await bench.metrics()) - before
    assert new == {'kvway_router_requests_total{code="404",route="/v1/chat/completions"}'}


async def test_a_replica_that_leaves_takes_its_series_with_it(start_bench: StartBench) -> None:
    bench = await start_bench(2)
    gone, stays = bench.replicas
    assert any(gone.replica_id in name for name in await bench.metrics())
    bench.router.replicas.set_replicas([stays.url])
    assert not any(gone.replica_id in name for name in await bench.metrics())


async def test_predicted_and_reported_tokens_can_be_compared(bench: Bench) -> None:
    bench.replica.answer = Answer(cached_tokens=32)
    for _ in range(2):
        await bench.chat("x" * 100)
    metrics = await bench.metrics()
    label = f'{{replica="{bench.replica.replica_id}"}}'
    num_tokens = 100 + len("|user\n|\n|assistant\n")
    assert metrics[f"kvway_router_prompt_tokens_total{label}"] == 2 * num_tokens
    assert metrics[f"kvway_router_cached_tokens_total{label}"] == 64
    assert metrics[f"kvway_router_matched_tokens_total{label}"] == num_tokens // 16 * 16


async def test_reachable_chosen_and_reported_hits_stand_side_by_side(
    start_bench: StartBench,
) -> None:
    """The holder is too busy, so what could be reached is more than what was chosen."""
    bench = await start_bench(2, probe_interval_s=0.05)
    for replica in bench.replicas:
        replica.answer = Answer(cached_tokens=16)
    _, headers, _ = await bench.chat("x" * 400)
    holder = bench.named(headers["x-kvway-replica"])
    holder.pages["/load"] = (
        200,
        holder.load(num_running=8, num_waiting=50, waiting_uncached_tokens=90_000),
    )
    seen = holder.probes["/load"]
    await holder.wait_for(lambda: holder.probes["/load"] > seen + 1)
    _, headers, _ = await bench.chat("x" * 400)
    assert headers["x-kvway-reason"].startswith("spill")
    (other,) = (r for r in bench.replicas if r is not holder)
    assert headers["x-kvway-replica"] == other.replica_id
    metrics = await bench.metrics()
    num_tokens = 400 + len("|user\n|\n|assistant\n")

    def counted(name: str, replica: FakeReplica) -> float:
        return metrics[f'kvway_router_{name}_total{{replica="{replica.replica_id}"}}']

    assert counted("prompt_tokens", other) == num_tokens
    assert counted("reachable_tokens", other) == num_tokens // 16 * 16
    assert counted("matched_tokens", other) == 0
    assert counted("cached_tokens", other) == 16
    assert (counted("reachable_tokens", holder), counted("cached_tokens", holder)) == (0, 16)
    record = await bench.decision(headers)
    assert record["reachable_tokens"] == num_tokens // 16 * 16


async def test_predicted_and_real_times_to_first_token_are_told_per_replica(bench: Bench) -> None:
    _, headers, _ = await bench.chat("x" * 400, stream=True)
    await bench.chat("x" * 400)
    record = await bench.decision(headers)
    metrics = await bench.metrics()

    def counted(name: str) -> float:
        return metrics[f'kvway_router_{name}_total{{replica="{bench.replica.replica_id}"}}']

    assert counted("predicted_streams") == 1, "a whole answer shows no first token"
    assert counted("predicted_ttft_seconds") == pytest.approx(record["predicted_ttft_s"])
    assert counted("real_ttft_seconds") == pytest.approx(record["ttft_s"])
    error_s = abs(record["predicted_ttft_s"] - record["ttft_s"])
    assert counted("ttft_error_seconds") == pytest.approx(error_s)


async def test_each_feed_is_shown_while_its_replica_is_there(bench: Bench) -> None:
    async with ZmqWorker() as worker:
        await worker.publish(stored(11, 12), stored(13, block_size=32))
        info = worker.info
        ports = {"pub_port": info.pub_port, "replay_port": info.replay_port, "topic": info.topic}
        assert not any(name.startswith("kvway_router_kv_feed") for name in await bench.metrics())
        bench.replica.pages["/load"] = (200, bench.replica.load(kv_events=ports))
        replicas, name = bench.router.replicas, bench.replica.replica_id
        await replicas.wait_for(lambda: replicas.is_fed(name))
        metrics = await bench.metrics()
        shown = {
            what: metrics[f'kvway_router_kv_feed_{what}{{replica="{name}"}}']
            for what in ("up", "batches_total", "events_total", "bad_total", "replays_total")
        }
        assert shown == {
            "up": 1,
            "batches_total": 1,
            "events_total": 2,
            "bad_total": 1,
            "replays_total": 1,
        }
        assert metrics[f'kvway_router_kv_feed_age_seconds{{replica="{name}"}}'] >= 0
        replicas.set_replicas([])
        assert not any(name.startswith("kvway_router_kv_feed") for name in await bench.metrics())
