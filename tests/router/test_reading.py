"""Phase 1 of a request: what routing knows of a body, and the threads that find it out."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from kvway_core.blocks import Namespace, block_hashes, event_hash
from kvway_core.errors import InvalidRequest, Overloaded
from kvway_core.prompts import PromptEncoder
from kvway_router.reader_pool import ReaderPool
from kvway_router.reading import (
    KEY_BLOCKS,
    ReadRequest,
    Route,
    ServedModel,
    read_request,
)
from tests.router.conftest import MODEL

TEXT = "the quick brown fox jumps over the lazy dog and on"


def read(encoder: PromptEncoder, route: Route = Route.COMPLETIONS, **fields: Any) -> ReadRequest:
    model = ServedModel(name=MODEL, encoder=encoder, namespace=Namespace(MODEL))
    body = json.dumps({"model": MODEL, **fields}).encode()
    return read_request(body, route=route, model=model, max_model_len=None)


def expected_hashes(text: str) -> list[int]:
    chain = block_hashes(list(text.encode()), parent=Namespace(MODEL).root(), block_size=16)
    return [event_hash(block) for block in chain]


def test_hashes_are_those_of_the_worker(encoder: PromptEncoder) -> None:
    assert list(read(encoder, prompt=TEXT).hashes) == expected_hashes(TEXT)


def test_a_chat_is_rendered_by_the_models_template(encoder: PromptEncoder) -> None:
    chat = read(encoder, Route.CHAT, messages=[{"role": "user", "content": TEXT}])
    rendered = f"|user\n{TEXT}|\n|assistant\n"
    assert chat.num_tokens == len(rendered)
    assert len(chat.hashes) == len(rendered) // 16


@pytest.mark.parametrize("text", ['caf\u00e9 \\ "cache_salt"', "plain"])
@pytest.mark.parametrize("fields", [{}, {"cache_salt": None}])
def test_a_body_without_a_salt_is_the_clients_own(
    encoder: PromptEncoder, text: str, fields: dict[str, None]
) -> None:
    model = ServedModel(name=MODEL, encoder=encoder, namespace=Namespace(MODEL))
    body = json.dumps({"prompt": text, "model": MODEL} | fields).encode()
    request = read_request(body, route=Route.COMPLETIONS, model=model, max_model_len=None)
    assert request.body is body


def test_a_prompt_below_one_block_has_no_hashes(encoder: PromptEncoder) -> None:
    request = read(encoder, prompt="x" * 15)
    assert (list(request.hashes), request.prefix_key) == ([], b"")


def test_equal_beginnings_have_equal_keys(encoder: PromptEncoder) -> None:
    begins = "x" * 16 * KEY_BLOCKS
    keys = {read(encoder, prompt=begins + rest).prefix_key for rest in ("", "a", "b" * 40)}
    assert len(keys) == 1


def test_prompts_that_share_a_template_only_have_keys_of_their_own(encoder: PromptEncoder) -> None:
    """Else they all meet at the replica that its words point at."""
    keys = {read(encoder, prompt="x" * 16 + rest * 20).prefix_key for rest in "abc"}
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("expected", "fields"),
    [
        (16, {}),
        (7, {"max_tokens": 7}),
        (256, {"max_tokens": 4000}),
        (21, {"max_tokens": 7, "n": 3}),
    ],
)
def test_expected_output_is_what_is_allowed_within_reason(
    encoder: PromptEncoder, expected: int, fields: dict[str, Any]
) -> None:
    assert read(encoder, prompt="x", **fields).num_output_tokens == expected


@pytest.mark.parametrize(
    ("code", "param", "body"),
    [
        ("invalid_json", None, b"{"),
        ("invalid_request", None, b"[]"),
        ("invalid_request", "model", b'{"prompt":"x"}'),
        ("invalid_request", "prompt", b'{"model":"test-model"}'),
        ("invalid_request", "temperature", b'{"model":"m","prompt":"x","temperature":"1"}'),
    ],
)
def test_malformed_bodies_are_refused(
    encoder: PromptEncoder, code: str, param: str | None, body: bytes
) -> None:
    model = ServedModel(name=MODEL, encoder=encoder, namespace=Namespace(MODEL))
    with pytest.raises(InvalidRequest) as caught:
        read_request(body, route=Route.COMPLETIONS, model=model, max_model_len=None)
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(("fits", "num_tokens"), [(True, 99), (False, 100), (False, 101)])
def test_a_prompt_leaves_room_for_one_token(
    encoder: PromptEncoder, num_tokens: int, *, fits: bool
) -> None:
    model = ServedModel(name=MODEL, encoder=encoder, namespace=Namespace(MODEL))
    body = json.dumps({"model": MODEL, "prompt": ["short", "x" * num_tokens]}).encode()
    if fits:
        read_request(body, route=Route.COMPLETIONS, model=model, max_model_len=100)
        return
    with pytest.raises(Exception, match=rf"{num_tokens} tokens .* 100") as caught:
        read_request(body, route=Route.COMPLETIONS, model=model, max_model_len=100)
    assert caught.value.code == "context_length_exceeded"  # type: ignore[attr-defined]


async def test_the_pool_returns_results_and_raises_errors() -> None:
    pool = ReaderPool(num_threads=1, max_waiting=1)
    assert await pool.run(lambda: 42) == 42
    with pytest.raises(ZeroDivisionError):
        await pool.run(lambda: 1 // 0)
    assert await pool.run(threading.get_ident) != threading.get_ident()
    pool.close()


async def test_the_line_before_the_pool_is_bounded_and_who_leaves_frees_a_place() -> None:
    pool = ReaderPool(num_threads=1, max_waiting=1)
    started, finish = threading.Event(), threading.Event()

    def block() -> None:
        started.set()
        finish.wait()

    running = asyncio.create_task(pool.run(block))
    await asyncio.to_thread(started.wait)
    waiting = asyncio.create_task(pool.run(lambda: "first"))
    await asyncio.sleep(0)
    assert pool.num_waiting == 1
    with pytest.raises(Overloaded):
        await pool.run(lambda: "refused")

    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert pool.num_waiting == 0
    second = asyncio.create_task(pool.run(lambda: "second"))
    running.cancel()  # its thread goes on, and so does the line behind it
    await asyncio.gather(running, return_exceptions=True)
    await asyncio.sleep(0)
    assert pool.num_waiting == 1
    finish.set()
    assert await second == "second"
    pool.close()
