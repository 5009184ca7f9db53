"""The text of /metrics: names, labels, buckets; and that its series stay bounded."""

from __future__ import annotations

import re
from collections.abc import Callable

from kvway_core.testing.fake_replica import Answer
from tests.router.conftest import Bench, StartBench

# What differs from run to run: times, the process, and the ports of the replicas.
_VARIES = re.compile(r"^(\S*(?:_seconds_bucket|_seconds_sum)\S*|process_\S+) .*$", re.MULTILINE)


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
