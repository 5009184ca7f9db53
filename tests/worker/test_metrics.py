"""The text of /metrics: vLLM's names, and numbers that mean what they say."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvway_core.blocks import HashChain, Namespace
from kvway_core.testing.fake_clock import FakeClock
from kvway_worker.cache.cache_stats import MISS_REASONS
from kvway_worker.load import AttentionReading
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
ATTENDS = AttentionReading(
    implementation="sdpa",
    reason="asked for",
    cascade="on",
    num_shared_steps=3,
    num_passes=5,
    num_tokens_once=640,
    num_tokens_saved=1600,
    costs_s={"paged_key": 2e-8, "run": 1e-5},
)


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
    engine = ScriptedEngine(b"answer")
    engine.attends = ATTENDS
    async with serving(byte_model, engine, clock=FakeClock()) as running:
        for prompt in ("x" * 40, "x" * 40):
            await running.post(COMPLETIONS, completion(prompt, max_tokens=4))
        await running.post(COMPLETIONS, completion(max_tokens=-1))
        text = await text_of(running)
    golden("worker_metrics.txt", re.sub(r"^(# \w+ )?process_.*\n", "", text, flags=re.MULTILINE))


async def test_what_attends_is_told_and_what_was_read_once_is_counted(byte_model: Path) -> None:
    """In /metrics and in /load; of an engine that computes no attention, nothing."""
    engine = ScriptedEngine(b"answer")
    async with serving(byte_model, engine) as running:
        assert "attention" not in await text_of(running)
        assert (await running.get("/load"))[1]["attention"] is None
        engine.attends = ATTENDS
        await running.post(COMPLETIONS, completion(max_tokens=1))
        named = {"implementation": "sdpa", "reason": "asked for", "cascade": "on"}
        assert (await running.get("/load"))[1]["attention"] == named
        assert value(running, "kvway_attention_info", **named) == 1
        assert value(running, "kvway_cascade_steps_total") == 3
        assert value(running, "kvway_cascade_passes_total") == 5
        assert value(running, "kvway_cascade_tokens_read_once_total") == 640
        assert value(running, "kvway_cascade_tokens_saved_total") == 1600
        assert value(running, "kvway_cascade_cost_seconds", term="run") == 1e-5


async def test_tokens_are_counted(byte_model: Path) -> None:
    """Looked up, hit, prompt and generated: all in tokens."""
    async with serving(byte_model, ScriptedEngine(b"answer")) as running:
        for _ in range(2):
            await running.post(COMPLETIONS, completion("x" * 40, max_tokens=4))
        assert value(running, "vllm:prefix_cache_queries_total") == 80
        assert value(running, "vllm:prefix_cache_hits_total") == 39
        assert value(running, "vllm:prompt_tokens_cached_total") == 39
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
        assert blocks() == [0, 3, 61], "the partly filled block stays too"
        assert value(running, "vllm:kv_cache_usage_perc") == 0
    assert value(running, "vllm:cache_config_info", block_size="16", num_gpu_blocks="64") == 1


async def test_misses_have_reasons_and_with_the_hits_they_are_the_queries(
    byte_model: Path,
) -> None:
    """Section 6 no 16: a hit rate of 0 says why."""
    async with serving(byte_model, ScriptedEngine(b"answer", num_blocks=8)) as running:
        for prompt in ("x" * 40, "x" * 40, "short", *(c * 50 for c in "abc"), "x" * 40):
            await running.post(COMPLETIONS, completion(prompt, max_tokens=1))
        for salt in ("a", "b"):
            body = completion("y" * 16, max_tokens=1, cache_salt=salt)
            await running.post(COMPLETIONS, body)
        await running.post(COMPLETIONS, completion("z" * 20, max_tokens=1, prompt_logprobs=0))
        misses = {
            reason: value(running, "kvway_worker_prefix_cache_misses_total", reason=reason)
            for reason in MISS_REASONS
        }
        hits = value(running, "vllm:prefix_cache_hits_total")
        queries = value(running, "vllm:prefix_cache_queries_total")
    assert queries == 40 + 40 + 5 + 150 + 40 + 32 + 20
    assert hits == 39
    assert misses == {
        "cold": 32 + 3 * 48 + 16,
        "evicted": 32,
        "too_short": 5,
        "salted": 16,
        "bypassed": 20,
        "partial": 8 + 1 + 3 * 2 + 8,
    }


async def test_evictions_are_counted_by_tier_and_lives_are_measured(byte_model: Path) -> None:
    """New content pushes out what was used once before what was used again and again."""
    clock = FakeClock()
    async with serving(byte_model, ScriptedEngine(b"a", num_blocks=8), clock=clock) as running:
        for prompt in ("x" * 48, *(c * 48 for c in "abc")):
            await running.post(COMPLETIONS, completion(prompt, max_tokens=1))
            clock.advance(1.0)

        def evictions(tier: str) -> float | None:
            return value(running, "kvway_worker_evictions_total", tier=tier)

        assert evictions("probation") == 4
        assert value(running, "vllm:kv_block_lifetime_seconds_count") == 4
        assert (evictions("protected"), evictions("pinned")) == (0, 0)
        assert value(running, "vllm:kv_block_idle_before_evict_seconds_sum")
        assert value(running, "vllm:kv_block_reuse_gap_seconds_count") == 0


async def test_what_other_pools_would_hit_is_told(byte_model: Path) -> None:
    """Two prompts of 6 blocks that take turns: 8 blocks keep the first two of the other one."""
    async with serving(byte_model, ScriptedEngine(b"a", num_blocks=8)) as running:
        for _ in range(5):
            for prompt in ("x" * 96, "y" * 96):
                await running.post(COMPLETIONS, completion(prompt, max_tokens=1))
        rates = {
            pool: value(running, "kvway_worker_expected_hit_rate", pool=pool)
            for pool in ("1x", "2x", "4x")
        }
        assert rates["1x"] == pytest.approx(8 * 2 / 60)
        assert rates["2x"] == rates["4x"] == pytest.approx(0.8)
        assert value(running, "kvway_worker_reuse_distance_count") == 60
        assert value(running, "kvway_worker_reuse_distance_bucket", le="2.0") == 48


async def test_guesses_and_those_the_model_agreed_with_are_counted(byte_model: Path) -> None:
    """An answer that says "ab" again and again, of an engine that checks no guess: none is."""
    engine = ScriptedEngine(b"ab")
    async with serving(byte_model, engine, speculate_ngram=2, ngram_min_match=2) as running:
        await running.post(COMPLETIONS, completion("abababab", max_tokens=6))
        drafts = value(running, "vllm:spec_decode_num_drafts_total")
        assert drafts
        assert value(running, "vllm:spec_decode_num_draft_tokens_total") == pytest.approx(
            2 * drafts, abs=2
        )
        assert value(running, "vllm:spec_decode_num_accepted_tokens_total") == 0


async def test_times_and_lengths_of_requests_are_measured(byte_model: Path) -> None:
    """Queue, prefill and decode; prompts, answers and steps in tokens."""
    clock, engine = FakeClock(), GatedEngine()
    async with serving(byte_model, engine, clock=clock) as running:
        task = asyncio.create_task(running.post(COMPLETIONS, completion("x" * 40, max_tokens=2)))
        for seconds in (3.0, 0.5):
            await engine.step_waits()
            clock.advance(seconds)
            engine.let()
        await task
        sums = {
            name: value(running, f"vllm:{name}_sum")
            for name in (
                *("request_queue_time_seconds", "request_prefill_time_seconds"),
                *("request_decode_time_seconds", "request_prompt_tokens"),
                *("request_generation_tokens", "iteration_tokens_total"),
            )
        }
    assert list(sums.values()) == [0.0, 3.0, 0.5, 40, 2, 41]


async def test_pinned_blocks_are_counted(byte_model: Path) -> None:
    """Those that are there."""
    async with serving(byte_model, ScriptedEngine(b"a")) as running:
        chain = HashChain(Namespace("tiny").root())
        chain.extend(list(b"x" * 48))
        await running.engine.pin("p", chain.hashes, ttl_s=60.0)
        await running.post(COMPLETIONS, completion("x" * 40, max_tokens=1))
        assert value(running, "kvway_worker_pinned_blocks") == 2


async def test_the_page_of_metrics_lists_each_of_them(byte_model: Path) -> None:
    """docs/worker-metrics.md: every name, and no other."""
    engine = ScriptedEngine(b"answer")
    engine.attends = ATTENDS
    async with serving(byte_model, engine) as running:
        names = set(re.findall(r"^# TYPE (\S+)", await text_of(running), flags=re.MULTILINE))
    page = (Path(__file__).parents[2] / "docs" / "worker-metrics.md").read_text()
    listed = set(re.findall(r"^\| `([\w:]+)", page, flags=re.MULTILINE))
    assert listed == {name for name in names if not name.startswith("process_")}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [(CHAT, chat(n=9), "400"), (CHAT, chat(model="junk"), "404"), ("/junk", {}, "404")],
)
async def test_an_error_is_counted_by_status_and_by_nothing_a_client_sent(
    byte_model: Path, path: str, body: object, status: str
) -> None:
    """Junk makes no series."""
    async with serving(byte_model) as running:
        await running.post(path, body)
        assert value(running, "kvway_worker_http_errors_total", status=status) == 1
        assert "junk" not in await text_of(running)
