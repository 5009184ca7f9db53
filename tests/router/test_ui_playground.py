"""The playground: what would be decided of a prompt, and the prompt sent from the page."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.conftest import MODEL, Bench, StartBench, chat_body

PREVIEW = "/admin/playground/v1/chat/completions"
SEND = "/admin/playground/send/v1/chat/completions"
TEXT = "Grüße, 世界! " * 20


async def post(bench: Bench, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with bench.client.post(bench.admin(path), json=body) as response:
        return response.status, await response.json()


async def test_a_preview_tells_tokens_holders_and_costs(start_bench: StartBench) -> None:
    bench = await start_bench(2)
    _, headers, _ = await bench.chat(TEXT)
    holder = headers["x-kvway-replica"]
    status, view = await post(bench, PREVIEW, chat_body(TEXT))
    assert status == 200
    assert "".join(view["tokens"]).startswith(f"<|im_start|>user\n{TEXT}<|im_end|>")
    assert len(view["tokens"]) == view["prompt_tokens"]
    assert view["replica_id"] == holder
    matched = {each["replica_id"]: each["matched_blocks"] for each in view["candidates"]}
    assert matched[holder] == view["prompt_tokens"] // view["block_size"]
    assert len(matched) == 2
    assert min(matched.values()) == 0


async def test_a_preview_sends_and_changes_nothing(start_bench: StartBench) -> None:
    bench = await start_bench(2, policy="round_robin")
    chosen = {(await post(bench, PREVIEW, chat_body("a")))[1]["replica_id"] for _ in range(4)}
    assert len(chosen) == 1
    assert not any(replica.requests for replica in bench.replicas)
    fleet = await bench.get(bench.admin("/admin/replicas"))
    assert [r["in_flight"] + r["blocks_held"] for r in fleet["replicas"]] == [0, 0]
    assert (await bench.get(bench.admin("/admin/decisions")))["decisions"] == []


async def test_completions_have_a_playground_too(bench: Bench) -> None:
    body = {"model": MODEL, "prompt": "once upon"}
    status, view = await post(bench, "/admin/playground/v1/completions", body)
    assert (status, "".join(view["tokens"])) == (200, "once upon")


async def test_a_long_prompt_is_read_to_its_end_though_nobody_holds_it(bench: Bench) -> None:
    message = {"role": "user", "content": "7" * 900}  # two are read before a choice
    body = chat_body("") | {"messages": 4 * [message]}
    _, view = await post(bench, PREVIEW, body)
    assert "".join(view["tokens"]).count("7") == 4 * 900


async def test_only_so_many_tokens_are_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvway_router.playground.MAX_TOKENS", 8)
    _, view = await post(bench, PREVIEW, chat_body("0123456789"))
    assert len(view["tokens"]) == 8
    assert view["prompt_tokens"] > 8


async def test_a_prompt_is_sent_from_the_page(bench: Bench) -> None:
    async with bench.client.post(bench.admin(SEND), json=chat_body("hi")) as response:
        assert response.status == 200
        request_id = response.headers["x-kvway-request-id"]
        assert (await response.json())["choices"]
    assert (await bench.get(bench.admin(f"/admin/decisions/{request_id}")))["status"] == 200
    assert len(bench.replica.requests) == 1


@pytest.mark.parametrize("path", [PREVIEW, SEND])
@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b'{"model": "test-model", "messages": [{"role": "user", "content": "x"}]}', "text/plain"),
        (b"{", "application/json"),
        (b'{"model": "test-model", "messages": 1}', "application/json"),
    ],
)
async def test_what_is_no_json_request_is_refused(
    bench: Bench, path: str, body: bytes, content_type: str
) -> None:
    headers = {"content-type": content_type}
    async with bench.client.post(bench.admin(path), data=body, headers=headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    assert not bench.replica.requests


async def test_a_prompt_that_is_too_long_is_refused(bench: Bench) -> None:
    limit = bench.router.max_model_len()
    assert limit is not None
    status, answer = await post(bench, PREVIEW, chat_body("z" * (limit + 10)))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
