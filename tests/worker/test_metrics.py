"""The text of /metrics: vLLM's names, and numbers that mean what they say."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvway_core.testing.fake_clock import FakeClock
from tests.worker.http_worker import (
    GatedEngine,
    Running,
    ScriptedEngine,
    chat,
    completion,
    serving,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def value(running: Running, name: str, **labels: str) -> float | None:
    """One sample of a worker's registry."""
    registry = running.worker.metrics.registry
    return registry.get_sample_value(name, {"model_name": "tiny", **labels})


async def text_of(running: Running) -> str:
    """GET /metrics."""
    async with running.http.get(running.url + "/metrics") as response:
        assert response.status == 200
        assert response.content_type == "text/plain"
        return await response.text()


async def test_metrics_are_as_agreed(byte_model: Path, golden: Callable[[str, str], None]) -> None:
    """Names, labels, buckets and help, after one hit, one miss and one refusal."""
    async with serving(byte_model, ScriptedEngine(b"answer"), clock=FakeClock()) as running:
        for prompt in ("x" * 40, "x" * 40):
            await running.post(COMPLETIONS, completion(prompt, max_tokens=4))
        await running.post(COMPLETIONS, completion(n=3))
        text = await text_of(running)
    golden("worker_metrics.txt", re.sub(r"^(# \w+ )?process_.*\n", "", text, flags=re.MULTILINE))


async def test_tokens_are_counted(byte_model: Path) -> None:
    """Looked up, hit, prompt and generated: all in tokens."""
    async with serving(byte_model, ScriptedEngine(b"answer")) as running:
        for _ in range(2):
            await running.post(COMPLETIONS, completion("x" * 40, max_tokens=4))
        assert value(running, "vllm:prefix_cache_queries_total") == 80
        assert value(running, "vllm:prefix_cache_hits_total") == 32
        assert value(running, "vllm:prompt_tokens_total") == 80
        assert value(running, "vllm:generation_tokens_total") == 8
        assert value(running, "vllm:time_to_first_token_seconds_count") == 2
        assert value(running, "vllm:inter_token_latency_seconds_count") == 6
        assert value(running, "vllm:e2e_request_latency_seconds_count") == 2


async def test_times_are_from_arrival(byte_model: Path) -> None:
    """TTFT ends with the first token, e2e with the last, ITL is what lies between two."""
    clock, engine = FakeClock(), GatedEngine()
    async with serving(byte_model, engine, clock=clock) as running:
        task = asyncio.create_task(running.post(COMPLETIONS, completion(max_tokens=2)))
        await engine.step_waits()
        clock.advance(3.0)
        engine.let()
        await engine.step_waits()
        while value(running, "vllm:time_to_first_token_seconds_count") == 0:  # noqa: ASYNC110
            await asyncio.sleep(0)
        clock.advance(0.5)
        engine.let()
        await task
        assert value(running, "vllm:time_to_first_token_seconds_sum") == 3.0
        assert value(running, "vllm:inter_token_latency_seconds_sum") == 0.5
        assert value(running, "vllm:e2e_request_latency_seconds_sum") == 3.5


async def test_every_request_ends_once(byte_model: Path) -> None:
    """By why it ended; a client that left is an abort, a failed step an error."""
    engine = ScriptedEngine(b"abc", fails_at=frozenset({1}))
    async with serving(byte_model, engine) as running:
        await running.post(COMPLETIONS, completion())
        await running.post(COMPLETIONS, completion(max_tokens=1))
        await running.post(COMPLETIONS, completion(stop="b"))
        ended = {
            reason: value(running, "vllm:request_success_total", finished_reason=reason)
            for reason in ("length", "stop", "error", "abort")
        }
        assert value(running, "kvway_worker_failed_steps_total") == 1
    assert ended == {"length": 1, "stop": 1, "error": 1, "abort": None}


async def test_a_client_that_leaves_is_an_abort(byte_model: Path) -> None:
    """And has no e2e latency."""
    engine = GatedEngine()
    async with serving(byte_model, engine) as running:
        task = asyncio.create_task(running.post(CHAT, chat()))
        await engine.step_waits()
        task.cancel()
        await running.worker.wait_idle()
        assert value(running, "vllm:request_success_total", finished_reason="abort") == 1
        assert value(running, "vllm:e2e_request_latency_seconds_count") == 0


async def test_blocks_add_up_and_cached_ones_count_as_free(byte_model: Path) -> None:
    """Live + cached + free = total; usage is of live ones only."""
    engine = GatedEngine()
    async with serving(byte_model, engine) as running:

        def blocks() -> list[float | None]:
            states = ("live", "cached", "free")
            return [value(running, "kvway_worker_blocks", state=state) for state in states]

        assert blocks() == [0, 0, 64]
        task = asyncio.create_task(running.post(COMPLETIONS, completion("x" * 40, max_tokens=2)))
        await engine.step_waits()
        engine.let()
        await engine.step_waits()
        assert blocks() == [3, 0, 61]
        assert value(running, "vllm:kv_cache_usage_perc") == 3 / 64
        assert value(running, "vllm:num_requests_running") == 1
        engine.let()
        await task
        assert blocks() == [0, 2, 62]
        assert value(running, "vllm:kv_cache_usage_perc") == 0
    assert value(running, "vllm:cache_config_info", block_size="16", num_gpu_blocks="64") == 1


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [(CHAT, chat(n=2), "400"), (CHAT, chat(model="junk"), "404"), ("/junk", {}, "404")],
)
async def test_an_error_is_counted_by_status_and_by_nothing_a_client_sent(
    byte_model: Path, path: str, body: object, status: str
) -> None:
    """Junk makes no series."""
    async with serving(byte_model) as running:
        await running.post(path, body)
        assert value(running, "kvway_worker_http_errors_total", status=status) == 1
        assert "junk" not in await text_of(running)
