"""Pins, aborts, request ids and resets at a worker's endpoints."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from kvway_core.testing.fake_clock import FakeClock
from kvway_worker.scheduling.step import StepPlan, StepResult
from tests.worker.http_worker import (
    GatedEngine,
    Running,
    chat,
    completion,
    decode_events,
    serving,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BLOCK = 16


async def delete(running: Running, path: str) -> tuple[int, Any]:
    async with running.http.delete(running.url + path) as response:
        return response.status, await response.json()


# --- pins --------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_pinned_prefix_is_computed_and_outlasts_a_scan(
    byte_model: Path, *, as_ids: bool
) -> None:
    """Full blocks only; others' prompts of twice the pool do not push it out."""
    prefix = "p" * 40
    prompt: Any = list(prefix.encode()) if as_ids else prefix
    async with serving(byte_model, num_blocks=32, pin_quota=0.5) as running:
        status, pin, _ = await running.post("/pins", {"prompt": prompt})
        assert status == 200, pin
        for index in range(16):
            await running.post(COMPLETIONS, completion(chr(65 + index) * 64, max_tokens=1))
        _, body, _ = await running.post(COMPLETIONS, completion(prefix + "x" * 20))
        _, listed = await running.get("/pins")
        deleted = await delete(running, f"/pins/{pin['id']}")
        again = await delete(running, f"/pins/{pin['id']}")
        _, after = await running.get("/pins")
    assert pin["id"].startswith("pin-")
    assert (pin["num_tokens"], pin["num_blocks"], pin["num_cached_blocks"]) == (32, 2, 2)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    assert [one["id"] for one in listed["pins"]] == [pin["id"]]
    assert deleted == (200, {"id": pin["id"], "deleted": True})
    assert (again[0], again[1]["error"]["code"]) == (404, "not_found")
    assert after == {"pins": []}


async def test_a_pin_of_messages_ends_before_the_answer(byte_model: Path) -> None:
    """So it is a prefix of every conversation that begins with them."""
    messages = [{"role": "system", "content": "s" * 60}]
    async with serving(byte_model, pin_quota=0.5) as running:
        _, pin, _ = await running.post("/pins", {"messages": messages})
        longer = [*messages, {"role": "user", "content": "hi"}]
        _, body, _ = await running.post(CHAT, chat(messages=longer))
        _, tokens, _ = await running.post(
            "/tokenize", {"messages": messages, "add_generation_prompt": False}
        )
    assert pin["num_blocks"] == tokens["count"] // BLOCK
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= pin["num_tokens"]


async def test_a_pin_ends_when_its_time_is_over(byte_model: Path) -> None:
    """`expires_at` is in Unix seconds."""
    clock = FakeClock()
    async with serving(byte_model, clock=clock, pin_quota=0.5) as running:
        _, pin, _ = await running.post("/pins", {"prompt": "p" * 40, "ttl_s": 5})
        _, hour, _ = await running.post("/pins", {"prompt": "q" * 40})
        assert pin["expires_at"] == pytest.approx(clock.time() + 5)
        assert hour["expires_at"] == pytest.approx(clock.time() + 3600)
        clock.advance(6)
        await running.post(COMPLETIONS, completion())
        _, listed = await running.get("/pins")
    assert [one["id"] for one in listed["pins"]] == [hour["id"]]


async def test_a_pin_over_the_quota_is_refused_and_nothing_is_computed(byte_model: Path) -> None:
    async with serving(byte_model, num_blocks=32, pin_quota=0.1) as running:
        status, body, _ = await running.post("/pins", {"prompt": "p" * 100})
        _, listed = await running.get("/pins")
        num_steps = running.engine.load().num_steps
    assert (status, body["error"]["code"]) == (409, "pin_quota_exceeded")
    assert (listed, num_steps) == ({"pins": []}, 0)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": "x" * 20, "messages": []}, 400, "prompt"),
        ({"prompt": "x" * 15}, 400, "prompt"),
        ({"prompt": "x" * 64}, 400, "prompt"),
        ({"prompt": [300] * 20}, 400, "prompt"),
        ({"prompt": "x" * 20, "ttl_s": 0}, 400, "ttl_s"),
        ({"prompt": "x" * 20, "n": 1}, 400, "n"),
        ({"prompt": "x" * 20, "model": "other"}, 404, "model"),
        ({"messages": [{"role": "user", "content": "x" * 100}]}, 400, "messages"),
    ],
)
async def test_a_malformed_pin_is_refused_by_name(
    byte_model: Path, body: Any, status: int, param: str
) -> None:
    """Too short for a block, too long for the context of 64 tokens, or not a prefix at all."""
    async with serving(byte_model, max_model_len=64) as running:
        got, answer, _ = await running.post("/pins", body)
    assert (got, answer["error"]["param"]) == (status, param)


async def test_a_pin_that_cannot_be_computed_is_not_kept(byte_model: Path) -> None:
    """The step fails, the answer says so, and no pin is left."""

    class Failing(GatedEngine):
        @override
        def execute(self, plan: StepPlan) -> StepResult:
            raise RuntimeError("as scripted")

    async with serving(byte_model, Failing(), pin_quota=0.5) as running:
        status, body, _ = await running.post("/pins", {"prompt": "p" * 40})
        _, listed = await running.get("/pins")
    assert (status, body["error"]["code"]) == (500, "engine_failed")
    assert listed == {"pins": []}


@pytest.mark.parametrize("how", ["deleted", "expired", "kept"])
async def test_a_pin_that_ends_while_its_prefix_is_computed_does_not_come_back(
    byte_model: Path, how: str
) -> None:
    """The one who asked for it is told; no pin is left. Its time begins when it is computed."""
    engine, clock = GatedEngine(), FakeClock()

    async def let() -> None:
        engine.let()

    fields = {"pin_quota": 0.5, "max_num_batched_tokens": 32}
    async with serving(byte_model, engine, clock=clock, **fields) as running:
        task = asyncio.create_task(running.post("/pins", {"prompt": "p" * 40, "ttl_s": 5}))
        await engine.step_waits()
        (pin,), _ = await asyncio.gather(running.engine.pins(), let())
        await engine.step_waits()
        clock.advance(6 if how == "expired" else 3)
        if how == "deleted":
            await asyncio.gather(running.engine.unpin(pin.pin_id), let())
        else:
            engine.let()
        status, body, _ = await task
        _, listed = await running.get("/pins")
    if how == "kept":
        assert status == 200
        assert [one["expires_at"] for one in listed["pins"]] == [pytest.approx(clock.time() + 5)]
    else:
        assert (status, body["error"]["code"]) == (409, "pin_ended")
        assert listed == {"pins": []}


async def test_nothing_is_pinned_without_a_cache(byte_model: Path) -> None:
    """Refused with the option's name, and nothing is computed."""
    async with serving(byte_model, prefix_caching=False) as running:
        status, body, _ = await running.post("/pins", {"prompt": "p" * 40})
        num_steps = running.engine.load().num_steps
    assert (status, body["error"]["code"], num_steps) == (400, "prefix_caching_off", 0)
    assert "--no-prefix-caching" in body["error"]["message"]


# --- aborts and ids ----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["header", "field", "answer"])
async def test_a_running_request_is_aborted_by_its_id(byte_model: Path, where: str) -> None:
    """All its answers end with "abort" and what there is of them; the blocks come back."""
    engine = GatedEngine(b"abc")
    async with serving(byte_model, engine) as running:
        engine.let()
        fields = {"request_id": "job-7"} if where == "field" else {}
        headers = {"x-request-id": "job-7"} if where == "header" else {}
        url = running.url + COMPLETIONS
        body = completion(n=2, stream=True, stream_options={"include_usage": True}, **fields)
        async with running.http.post(url, json=body, headers=headers) as response:
            request_id = response.headers["x-request-id"]
            assert (request_id == "job-7") == (where != "answer")
            await engine.step_waits()
            await engine.step_waits()
            _, told, _ = await running.post(
                "/abort_requests", {"request_ids": [request_id, "no-such-request", request_id]}
            )
            engine.let(10)
            *events, usage, done = decode_events(await response.read())
        assert await running.nothing_is_held()
        _, late, _ = await running.post("/abort_requests", {"request_ids": [request_id]})
    assert told == {"aborted": [request_id], "not_running": ["no-such-request"]}
    assert late == {"aborted": [], "not_running": [request_id]}
    assert done == "[DONE]"
    ends = [
        choice["finish_reason"]
        for event in events
        for choice in event["choices"]
        if choice["finish_reason"]
    ]
    assert ends == ["abort", "abort"]
    spent = usage["usage"]
    assert spent["total_tokens"] == spent["prompt_tokens"] + spent["completion_tokens"]
    assert 2 <= spent["completion_tokens"] <= 4


async def test_a_request_that_waits_is_aborted_before_its_first_token(byte_model: Path) -> None:
    """Not streamed: an answer without text, and not a token counted."""
    engine = GatedEngine()
    async with serving(byte_model, engine, max_num_seqs=2) as running:
        first = asyncio.create_task(running.post(COMPLETIONS, completion(max_tokens=2, n=2)))
        await engine.step_waits()
        task = asyncio.create_task(running.post(COMPLETIONS, completion(request_id="r", n=2)))
        told: dict[str, list[str]] = {"aborted": []}
        while not told["aborted"]:
            _, told, _ = await running.post("/abort_requests", {"request_ids": ["r"]})
        engine.let(10)
        status, body, _ = await task
        await first
        assert await running.nothing_is_held()
    assert status == 200
    assert [(c["text"], c["finish_reason"]) for c in body["choices"]] == [("", "abort")] * 2
    assert body["usage"]["completion_tokens"] == 0


async def test_two_running_requests_have_no_id_in_common(byte_model: Path) -> None:
    """The second is refused; when the first has ended, its id is free."""
    engine = GatedEngine()
    async with serving(byte_model, engine) as running:
        task = asyncio.create_task(running.post(CHAT, chat(request_id="same")))
        await engine.step_waits()
        for fields, headers in (({"request_id": "same"}, {}), ({}, {"x-request-id": "same"})):
            status, body, _ = await running.post(
                COMPLETIONS, completion(**fields), headers=headers
            )
            assert (status, body["error"]["param"]) == (400, "request_id")
        engine.let(100)
        first, _, headers_back = await task
        again, _, _ = await running.post(CHAT, chat(request_id="same"))
    assert (first, again) == (200, 200)
    assert headers_back["x-request-id"] == "same"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "request_ids"),
        ({"request_ids": []}, "request_ids"),
        ({"request_ids": ["a"] * 257}, "request_ids"),
        ({"request_ids": ["a", "b c"]}, "request_ids[1]"),
        ({"request_ids": ["a"], "all": True}, "all"),
    ],
)
async def test_a_malformed_abort_is_refused_by_name(
    byte_model: Path, body: Any, param: str
) -> None:
    async with serving(byte_model) as running:
        status, answer, _ = await running.post("/abort_requests", body)
    assert (status, answer["error"]["param"]) == (400, param)


# --- resets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset_running", [False, True])
async def test_a_reset_may_let_running_requests_begin_again(
    byte_model: Path, *, reset_running: bool
) -> None:
    """P35: without the switch it fails while one runs; with it the answer is the same."""
    engine = GatedEngine(b"abc")
    async with serving(byte_model, engine) as running:
        request = completion("x" * 40, max_tokens=600)
        task = asyncio.create_task(running.post(COMPLETIONS, request))
        await engine.step_waits()
        query = f"?reset_running_requests={str(reset_running).lower()}"
        reset = asyncio.create_task(running.post("/reset_prefix_cache" + query, b""))
        while not reset.done():
            engine.let()
            await engine.step_waits()
        engine.let(1000)
        _, told, _ = await reset
        _, body, _ = await task
    assert told == {"success": reset_running}
    assert body["choices"][0]["text"] == "abc" * 200


@pytest.mark.parametrize("query", ["reset_running_requests=maybe", "reset_all=true"])
async def test_a_reset_with_an_unknown_switch_is_refused(byte_model: Path, query: str) -> None:
    async with serving(byte_model) as running:
        status, body, _ = await running.post("/reset_prefix_cache?" + query, b"")
    assert (status, body["error"]["param"]) == (400, "reset_running_requests")
