"""What the worker refuses, and how: a 4xx that names the field, and nothing is computed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvway_core.testing.byte_model import write_byte_model
from tests.worker.http_worker import Running, chat, completion, serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture
async def running(byte_model: Path) -> AsyncIterator[Running]:
    """A worker with a context of 64 tokens."""
    async with serving(byte_model, max_model_len=64, max_body_bytes=2048) as running:
        yield running


def refused(status: int, body: Any) -> tuple[int, str, str | None]:
    """Status, code and param of an error, whose form is checked."""
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return status, error["code"], error["param"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("echo", True),
        ("best_of", 2),
        ("prompt", "x"),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "auto"),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"json": {}}),
        ("guided_json", {}),
        ("logits_processors", ["x"]),
        ("use_beam_search", True),
        ("documents", [{}]),
        ("chat_template", "{{ messages }}"),
        ("kv_transfer_params", {}),
        ("modalities", ["audio"]),
        ("no_such_field", 1),
    ],
)
async def test_an_unsupported_field_of_a_chat_is_refused_by_name(
    running: Running, field: str, value: Any
) -> None:
    """What is not done is never silently ignored."""
    status, body, _ = await running.post(CHAT, chat(**{field: value}))
    assert refused(status, body) == (400, "unsupported_parameter", field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "x"),
        ("messages", []),
        ("top_logprobs", 3),
        ("max_completion_tokens", 3),
        ("chat_template_kwargs", {}),
        ("response_format", {"type": "json_schema"}),
    ],
)
async def test_an_unsupported_field_of_a_completion_is_refused_by_name(
    running: Running, field: str, value: Any
) -> None:
    """What is not done is never silently ignored."""
    status, body, _ = await running.post(COMPLETIONS, completion(**{field: value}))
    assert refused(status, body) == (400, "unsupported_parameter", field)


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/pins"])
async def test_an_unknown_field_of_a_message_is_refused_by_name(
    running: Running, path: str
) -> None:
    """Wherever messages are taken."""
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": "", "foo": 1}]
    body = chat(messages=messages) if path == CHAT else {"messages": messages}
    status, answer, _ = await running.post(path, body)
    assert refused(status, answer) == (400, "unsupported_parameter", "messages[1].foo")


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u"},
        {"metadata": {"a": "b"}},
        {"store": True},
        {"prompt_cache_key": "k"},
        {"safety_identifier": "s"},
        {"service_tier": "auto"},
        {"stream": False},
        {"n": 1},
        {"seed": 7, "temperature": 0.0, "top_p": 0.5},
        {"stop": None, "stream_options": None},
        {"tools": [], "logprobs": False, "logit_bias": {}, "presence_penalty": 0},
        {"tool_choice": "none", "echo": False, "best_of": 1, "bad_words": [], "top_k": -1},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"response_format": {"type": "text"}},
        {"functions": [], "documents": [], "parallel_tool_calls": True, "modalities": ["text"]},
    ],
)
async def test_a_harmless_field_is_accepted(running: Running, fields: dict[str, Any]) -> None:
    """Fields that cannot change the answer, and values that ask for nothing."""
    status, body, _ = await running.post(CHAT, chat(**fields))
    assert status == 200, body


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b"[]", "invalid_request", None),
        (b'{"model":"tiny","messages":[{"role":"user","content":"\xff"}]}', "invalid_utf8", None),
        (chat(temperature=9), "invalid_request", "temperature"),
        (chat(max_tokens=0), "invalid_request", "max_tokens"),
        (chat(max_tokens="8"), "invalid_request", "max_tokens"),
        (chat(stop=[""]), "invalid_request", "stop"),
        (chat(stop_token_ids=[258]), "invalid_request", "stop_token_ids"),
        (chat(allowed_token_ids=[5, 258]), "invalid_request", "allowed_token_ids"),
        (chat(logit_bias={"258": 1}), "invalid_request", "logit_bias"),
        (chat(min_tokens=9), "invalid_request", "min_tokens"),
        (chat("x", min_tokens=60, max_tokens=None), "invalid_request", "min_tokens"),
        (chat(truncate_prompt_tokens=65), "invalid_request", "truncate_prompt_tokens"),
        (chat(chat_template_kwargs={"x": 1}), "invalid_request", "chat_template_kwargs"),
        (chat(chat_template_kwargs={"tools": "x"}), "invalid_request", "chat_template_kwargs"),
        (chat(request_id="a b"), "invalid_request", "request_id"),
        ({"model": "tiny"}, "invalid_request", "messages"),
        (chat(messages=[]), "invalid_request", "messages"),
        (chat(metadata={"a": 1}), "invalid_request", "metadata[...]"),
        (chat(store="yes"), "invalid_request", "store"),
        (chat(service_tier=1), "invalid_request", "service_tier"),
        (chat(cache_salt=""), "invalid_request", "cache_salt"),
        (chat(cache_salt=5), "invalid_request", "cache_salt"),
        (chat(cache_salt="x" * 257), "invalid_request", "cache_salt"),
        (chat(stream_options={"include_usage": True}), "invalid_request", "stream_options"),
        (
            chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            "invalid_request",
            "messages[0].content",
        ),
    ],
)
async def test_a_malformed_chat_is_refused(
    running: Running, body: Any, code: str, param: str | None
) -> None:
    """The code says what kind of fault, the param where."""
    status, answer, _ = await running.post(CHAT, body)
    assert refused(status, answer) == (400, code, param)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([1, "a"], "prompt"),
        ([["a"]], "prompt[0][0]"),
        ([300], "prompt"),
        ([[5], [258]], "prompt"),
        ([-1], "prompt"),
        (["a"] * 129, "prompt"),
        (None, "prompt"),
    ],
)
async def test_a_malformed_prompt_is_refused(running: Running, prompt: Any, param: str) -> None:
    """Empty, mixed, too many, or ids that the model does not have."""
    status, body, _ = await running.post(COMPLETIONS, completion(prompt))
    got_status, _, got_param = refused(status, body)
    assert (got_status, got_param is not None and got_param.startswith("prompt")) == (400, True), (
        got_param,
        param,
    )


async def test_a_text_with_a_token_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    """Tokenizers have such tokens: in a step they would fail everybody else's requests as well."""
    folder = write_byte_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|pad|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    text = "As long as a block, and a <|pad|>"
    async with serving(folder) as running:
        for path, body, param in (
            (CHAT, chat(text), "messages"),
            (COMPLETIONS, completion(text), "prompt"),
            (COMPLETIONS, completion([text, "fine"]), "prompt"),
            ("/pins", {"prompt": text}, "prompt"),
        ):
            status, got, _ = await running.post(path, body)
            assert refused(status, got) == (400, "invalid_request", param)
            assert "258; the model's ids end at 257" in got["error"]["message"]
        assert running.engine.load().num_steps == 0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
async def test_another_model_is_not_found(running: Running, path: str) -> None:
    """404 without an echo of the name."""
    bodies = {
        CHAT: chat(),
        COMPLETIONS: completion(),
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [1]},
    }
    status, body, _ = await running.post(path, {**bodies[path], "model": "no-such-model-xyz"})
    assert refused(status, body) == (404, "model_not_found", "model")
    assert "xyz" not in body["error"]["message"]


@pytest.mark.parametrize(
    ("request_body", "param", "numbers"),
    [
        (completion("x" * 64), "prompt", ["64"]),
        (completion("x" * 99, max_tokens=None), "prompt", ["99", "64"]),
        (completion("x" * 60, max_tokens=5), "max_tokens", ["60", "5", "65", "64"]),
        (completion(["ok", "x" * 80]), "prompt", ["80", "64"]),
    ],
)
async def test_what_does_not_fit_the_context_is_refused_with_the_numbers(
    running: Running, request_body: Any, param: str, numbers: list[str]
) -> None:
    """An explicit limit is never cut short in silence; a prompt that fits exactly has no room."""
    status, body, _ = await running.post(COMPLETIONS, request_body)
    assert refused(status, body) == (400, "context_length_exceeded", param)
    assert all(number in body["error"]["message"].replace(",", "") for number in numbers)


@pytest.mark.parametrize("path", [COMPLETIONS, "/pins"])
async def test_a_prompt_that_cannot_fit_is_refused_by_its_length(
    running: Running, path: str
) -> None:
    """Before it is tokenized: its exact number of tokens is not told."""
    body = completion("x" * 1000) if path == COMPLETIONS else {"prompt": "x" * 1000}
    status, answer, _ = await running.post(path, body)
    assert refused(status, answer) == (400, "context_length_exceeded", "prompt")
    assert "at least" in answer["error"]["message"]


async def test_a_chat_that_does_not_fit_names_its_field(running: Running) -> None:
    """Messages when the prompt alone is too long, else the limit that was given."""
    status, body, _ = await running.post(CHAT, chat("x" * 100))
    assert refused(status, body) == (400, "context_length_exceeded", "messages")
    status, body, _ = await running.post(CHAT, {**chat("x"), "max_completion_tokens": 60})
    assert refused(status, body) == (400, "context_length_exceeded", "max_completion_tokens")


@pytest.mark.parametrize(
    ("prompt", "n", "param"), [(["a", "b"], 2, "prompt"), (["a"] * 4, 1, "prompt"), ("a", 4, "n")]
)
async def test_more_answers_than_there_can_ever_be_are_refused_with_the_numbers(
    byte_model: Path, prompt: Any, n: int, param: str
) -> None:
    """Not with a 503 that would be the same later on."""
    async with serving(byte_model, max_num_seqs=2, max_waiting=1) as running:
        status, body, _ = await running.post(COMPLETIONS, completion(prompt, n=n))
        fits, _, _ = await running.post(COMPLETIONS, completion(["a", "b", "c"]))
    assert refused(status, body) == (400, "invalid_request", param)
    assert "4 answers" in body["error"]["message"]
    assert "3 at most" in body["error"]["message"]
    assert fits == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stream_is_refused_like_a_whole_answer(running: Running, *, stream: bool) -> None:
    """Errors before the first output have their own status, streamed or not."""
    status, body, headers = await running.post(COMPLETIONS, completion("x" * 99, stream=stream))
    assert refused(status, body) == (400, "context_length_exceeded", "prompt")
    assert headers["Content-Type"].startswith("application/json")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": []}, "prompt"),
        ({"prompt": "x", "return_token_strs": True}, "return_token_strs"),
        ({"messages": []}, "messages"),
    ],
)
async def test_a_malformed_tokenize_is_refused(running: Running, body: Any, param: str) -> None:
    """Exactly one of prompt and messages."""
    status, answer, _ = await running.post("/tokenize", body)
    assert refused(status, answer)[::2] == (400, param)


@pytest.mark.parametrize("tokens", [[258], [-1], ["a"], None])
async def test_a_malformed_detokenize_is_refused(running: Running, tokens: Any) -> None:
    """Ids that the model does not have, or no ids."""
    status, answer, _ = await running.post("/detokenize", {"tokens": tokens})
    assert refused(status, answer)[0] == 400


async def test_a_body_over_the_limit_is_refused(running: Running) -> None:
    """By the limit that was configured."""
    status, body, _ = await running.post(CHAT, b"x" * 3000)
    assert refused(status, body)[:2] == (413, "payload_too_large")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", CHAT, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/reset_prefix_cache", 405, "method_not_allowed"),
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
    ],
)
async def test_a_wrong_route_or_method_is_refused_in_json(
    running: Running, method: str, path: str, status: int, code: str
) -> None:
    """Never aiohttp's own text."""
    async with running.http.request(method, running.url + path) as response:
        assert refused(response.status, await response.json())[:2] == (status, code)


async def test_nothing_refused_reaches_the_engine(running: Running) -> None:
    """No step is computed for it and no block stays held."""
    await running.post(CHAT, chat(n=9))
    await running.post(COMPLETIONS, completion("x" * 99))
    assert running.engine.load().num_steps == 0
    assert await running.nothing_is_held()
