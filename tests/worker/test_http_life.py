"""A worker's life at its endpoints: starting, busy, left by clients, draining, failed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from kvway_core.clock import SystemClock
from kvway_core.errors import Overloaded
from kvway_core.lifecycle import start_site
from kvway_core.web import make_runner
from kvway_worker.api.app import build_app
from kvway_worker.api.state import Worker
from kvway_worker.executor import BoundedExecutor
from tests.worker.http_worker import (
    GatedEngine,
    Running,
    ScriptedEngine,
    chat,
    completion,
    decode_events,
    make_settings,
    serving,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def states(running: Running) -> tuple[Any, Any, str]:
    """What /health, /ready and /load say."""
    health, ready = await running.get("/health"), await running.get("/ready")
    status, load = await running.get("/load")
    assert status == 200
    return health, ready, load["state"]


async def test_before_the_model_is_loaded_everything_says_starting(byte_model: Path) -> None:
    """503 on /health, /ready and requests; /load answers, so that a router sees the state."""
    settings = make_settings(byte_model)
    worker = Worker(settings, boot_id="b", clock=SystemClock(), registry=CollectorRegistry())
    runner = make_runner(build_app(worker))
    port = await start_site(runner, "127.0.0.1", 0)
    base = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as http:
        for path in ("/health", "/ready"):
            async with http.get(base + path) as response:
                assert (response.status, await response.json()) == (503, {"status": "starting"})
        async with http.get(base + "/load") as response:
            load = await response.json()
        assert (load["state"], load["blocks"]["total"], load["boot_id"]) == ("starting", 0, "b")
        for path, body in ((CHAT, chat()), (COMPLETIONS, completion()), ("/tokenize", {})):
            async with http.post(base + path, json=body) as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "starting"
        async with http.get(base + "/v1/models") as response:
            assert response.status == 503
        async with http.get(base + "/metrics") as response:
            assert response.status == 200
    await runner.cleanup()
    worker.executor.close()


async def test_a_ready_worker_says_so(byte_model: Path) -> None:
    """200 everywhere; /load has what a router needs."""
    async with serving(byte_model, num_blocks=32) as running:
        assert await states(running) == (
            (200, {"status": "ready"}),
            (200, {"status": "ready"}),
            "ready",
        )
        _, load = await running.get("/load")
    assert load["model"] == "tiny"
    assert load["block_size"] == 16
    assert load["hash_scheme"] == "kvway-1"
    assert load["blocks"] == {"free": 32, "cached": 0, "total": 32}
    assert load["max_model_len"] == 32 * 16


async def test_load_counts_what_runs_and_what_is_cached(byte_model: Path) -> None:
    """Free + cached + held = total, before, during and after a request."""
    engine = GatedEngine()
    async with serving(byte_model, engine) as running:
        request = asyncio.create_task(
            running.post(COMPLETIONS, completion("x" * 200, max_tokens=2))
        )
        await engine.step_waits()
        _, during = await running.get("/load")
        engine.let(2)
        await request
        await running.worker.wait_idle()
        _, after = await running.get("/load")
    assert during["num_running"] + during["num_waiting"] == 1
    assert after["num_running"] == after["num_waiting"] == 0
    assert after["blocks"] == {"free": 64 - 13, "cached": 13, "total": 64}
    assert after["decode_step_s"] >= 0
    assert after["prefill_tokens_per_s"] > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_steps_before", [0, 3])
async def test_a_client_that_leaves_frees_its_blocks_with_the_current_step(
    byte_model: Path, num_steps_before: int, *, stream: bool
) -> None:
    """Streamed or not, before the first token or after some: not one more step is computed."""
    engine = GatedEngine()
    async with serving(byte_model, engine) as running:
        body = chat(max_tokens=500, stream=stream)
        request = asyncio.create_task(running.post(CHAT, body))
        for _ in range(num_steps_before):
            engine.let()
            await engine.step_waits()
        await engine.step_waits()
        assert running.worker.num_in_flight == 1
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await running.worker.wait_idle()
        engine.let()
        assert await running.nothing_is_held()
        assert running.engine.load().num_steps == num_steps_before + 1


async def test_a_client_that_leaves_takes_all_its_prompts_along(byte_model: Path) -> None:
    """One request of several prompts is aborted whole."""
    engine = GatedEngine()
    async with serving(byte_model, engine) as running:
        body = completion(["a", "b", "c"], max_tokens=100)
        request = asyncio.create_task(running.post(COMPLETIONS, body))
        await engine.step_waits()
        request.cancel()
        await running.worker.wait_idle()
        engine.let(2)  # the step that waits, and one if not all three were in it
        assert await running.nothing_is_held()


async def test_too_many_waiting_requests_are_refused(byte_model: Path) -> None:
    """503 overloaded; what was accepted goes on."""
    engine = GatedEngine(b"ok")
    async with serving(byte_model, engine, max_num_seqs=1, max_waiting=1) as running:
        accepted = [
            asyncio.create_task(running.post(COMPLETIONS, completion(text, max_tokens=2)))
            for text in ("one", "two")
        ]
        while (load := running.engine.load()).num_running + load.num_waiting < 2:  # noqa: ASYNC110 - a thread counts
            await asyncio.sleep(0)
        status, body, headers = await running.post(COMPLETIONS, completion("three", stream=True))
        assert (status, body["error"]["code"]) == (503, "overloaded")
        assert int(headers["Retry-After"]) >= 1
        engine.let(20)
        assert [(await task)[0] for task in accepted] == [200, 200]


async def test_a_prefix_cache_in_use_is_not_reset(byte_model: Path) -> None:
    """False while a request holds blocks."""
    engine = GatedEngine()
    async with serving(byte_model, engine) as running:
        request = asyncio.create_task(running.post(COMPLETIONS, completion(max_tokens=900)))
        await engine.step_waits()
        reset = asyncio.create_task(running.post("/reset_prefix_cache", b""))
        while not reset.done():
            engine.let()
            await engine.step_waits()
        assert (await reset)[:2] == (200, {"success": False})
        request.cancel()


async def test_a_reset_prefix_cache_is_cold(byte_model: Path) -> None:
    """True when nothing runs, and the next request misses."""
    async with serving(byte_model) as running:
        cached: list[int] = []
        for reset in (False, False, True):
            if reset:
                assert (await running.post("/reset_prefix_cache", b""))[1] == {"success": True}
            _, body, _ = await running.post(COMPLETIONS, completion("x" * 40))
            cached.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 39, 0]


async def test_a_draining_worker_finishes_what_runs_and_takes_no_more(
    byte_model: Path,
) -> None:
    """Still healthy, not ready; the stream that runs gets its end."""
    engine = GatedEngine(b"abc")
    async with serving(byte_model, engine) as running:
        engine.let()
        url = running.url + COMPLETIONS
        async with running.http.post(url, json=completion(max_tokens=3, stream=True)) as response:
            assert response.status == 200
            running.worker.begin_drain()
            assert await states(running) == (
                (200, {"status": "draining"}),
                (503, {"status": "draining"}),
                "draining",
            )
            status, body, _ = await running.post(CHAT, chat())
            assert (status, body["error"]["code"]) == (503, "shutting_down")
            idle = asyncio.create_task(running.worker.wait_idle())
            engine.let(2)
            events = decode_events(await response.read())
        await idle
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "abc"
    assert events[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_output_has_its_own_status(
    byte_model: Path, *, stream: bool
) -> None:
    """500 engine_failed as JSON, also for a stream; the next request is served."""
    async with serving(byte_model, ScriptedEngine(b"ok", fails_at=frozenset({1}))) as running:
        status, body, headers = await running.post(CHAT, chat(max_tokens=2, stream=stream))
        assert (status, body["error"]["code"]) == (500, "engine_failed")
        assert headers["Content-Type"].startswith("application/json")
        assert (await running.post(CHAT, chat(max_tokens=2)))[0] == 200


async def test_a_failure_in_the_middle_of_a_stream_is_its_last_event(byte_model: Path) -> None:
    """An error event, no [DONE], and the connection still works; blocks are free."""
    async with serving(byte_model, ScriptedEngine(b"abcdef", fails_at=frozenset({3}))) as running:
        url = running.url + COMPLETIONS
        async with running.http.post(url, json=completion(stream=True)) as response:
            *chunks, last = decode_events(await response.read())
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
        assert last["error"]["code"] == "engine_failed"
        assert await running.nothing_is_held()
        registry = running.worker.metrics.registry
        labels = {"model_name": "tiny", "code": "engine_failed"}
        assert registry.get_sample_value("kvway_worker_broken_streams_total", labels) == 1


async def test_an_engine_that_was_given_up_is_unhealthy(byte_model: Path) -> None:
    """503 failed on both probes and 500 for requests: the process is to be replaced."""
    async with serving(byte_model, ScriptedEngine(b"x", fails_at=frozenset(range(99)))) as running:
        while running.engine.failed is None:
            status, _, _ = await running.post(CHAT, chat())
            assert status == 500
        assert await states(running) == (
            (503, {"status": "failed"}),
            (503, {"status": "failed"}),
            "failed",
        )
        status, body, _ = await running.post(CHAT, chat())
        assert (status, body["error"]["code"]) == (500, "engine_failed")


async def test_a_slow_reader_slows_nobody_else(byte_model: Path) -> None:
    """A stream that is not read does not keep another request from its answer."""
    async with serving(byte_model) as running:
        url = running.url + COMPLETIONS
        body = completion(max_tokens=2000, stream=True, ignore_eos=True)
        async with running.http.post(url, json=body):
            status, _, _ = await running.post(CHAT, chat())
            assert status == 200


async def test_the_executor_bounds_what_piles_up() -> None:
    """At `max_pending` it refuses; a cancelled caller's place is free when its function ends."""
    executor = BoundedExecutor(num_threads=1, max_pending=2, name="test")
    gate, ran = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait_for_gate() -> str:
        loop.call_soon_threadsafe(ran.set)
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        return "done"

    first = asyncio.create_task(executor.run(wait_for_gate))
    await ran.wait()
    second = asyncio.create_task(executor.run(lambda: "second"))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(Overloaded):
        await executor.run(lambda: "third")
    gate.set()
    assert await second == "second"
    assert await executor.run(lambda: "fourth") == "fourth"
    executor.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_log_line_without_its_text(
    byte_model: Path, *, stream: bool
) -> None:
    """How it ended and what it cost, and not a word of prompt or answer."""
    async with serving(byte_model, ScriptedEngine(b"zebra answer")) as running:
        body = chat("giraffe prompt", max_tokens=12, stream=stream, user="okapi")
        async with running.http.post(running.url + CHAT, json=body) as response:
            await response.read()
        await running.worker.wait_idle()
        lines = [line for line in running.logs if line["event"] == "request_finished"]
        text = repr(running.logs)
    [line] = lines
    assert (line["outcome"], line["stream"], line["num_output_tokens"]) == ("ok", stream, 12)
    assert not [word for word in ("giraffe", "zebra", "okapi") if word in text]


async def outcomes(running: Running) -> list[str]:
    """How the requests so far ended, as logged."""
    await running.worker.wait_idle()
    return [line["outcome"] for line in running.logs if line["event"] == "request_finished"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_not_logged_as_a_client_that_left(
    byte_model: Path, *, stream: bool
) -> None:
    """It is an internal error, in the log as in the answer."""
    async with serving(byte_model) as running:
        del running.worker.metrics.ttft_s
        status, body, _ = await running.post(CHAT, chat(stream=stream))
        assert (status, body["error"]["code"]) == (500, "internal_error")
        assert await outcomes(running) == ["internal_error"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_left_is_logged_as_that(byte_model: Path, *, stream: bool) -> None:
    """Whether it asked for a stream or not."""
    engine = GatedEngine()
    async with serving(byte_model, engine) as running:
        body = chat(max_tokens=200, stream=stream)
        asked = asyncio.create_task(running.post(CHAT, body))
        await engine.step_waits()
        asked.cancel()
        await asyncio.wait((asked,))
        engine.let(10_000)
        assert await outcomes(running) == ["client_disconnected"]
