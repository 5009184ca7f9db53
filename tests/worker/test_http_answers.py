"""What the worker answers: text, usage, ids, events, over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvway_core.errors import EngineFailed, Overloaded
from kvway_worker.api.answering import _together
from tests.worker.http_worker import IM_END, ScriptedEngine, chat, completion, serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BLOCK = 16


def text_of(events: list[Any]) -> str:
    """The text of a stream of one choice."""
    assert events[-1] == "[DONE]"
    choices = [event["choices"][0] for event in events[:-1] if event["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


async def test_a_chat_is_answered_in_openais_form(byte_model: Path) -> None:
    """Id, object, usage with cached tokens (0 included), fingerprint, headers."""
    async with serving(byte_model, ScriptedEngine(b"Hi!")) as running:
        status, body, headers = await running.post(CHAT, chat(max_tokens=3))
    assert status == 200
    assert headers["x-kvway-cached-tokens"] == "0"
    assert headers["x-request-id"] == body["id"]
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 0
    assert body.pop("system_fingerprint").startswith("kvway-")
    num_prompt = len("<user\nHello there, worker.>\n<assistant\n")
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi!"},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": 3,
            "total_tokens": num_prompt + 3,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_a_completion_is_answered_in_openais_form(byte_model: Path) -> None:
    """A text completion has its own id, object and choices."""
    async with serving(byte_model, ScriptedEngine(b"Hi!")) as running:
        status, body, _ = await running.post(COMPLETIONS, completion("abc", max_tokens=3))
    assert status == 200
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "Hi!",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("make", [chat, completion])
async def test_a_stream_has_the_text_of_the_whole_answer(byte_model: Path, make: Any) -> None:
    """Streamed or not, cold or warm: the same text, one id, one reason, then [DONE]."""
    path = CHAT if make is chat else COMPLETIONS
    async with serving(byte_model) as running:
        _, whole, _ = await running.post(path, make(max_tokens=40))
        events = await running.events(path, make(max_tokens=40))
    choice = whole["choices"][0]
    assert text_of(events) == (
        choice["text"] if make is completion else choice["message"]["content"]
    )
    chunks = events[:-1]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert len({chunk["created"] for chunk in chunks}) == 1
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert not any("usage" in chunk for chunk in chunks)


async def test_a_chat_stream_opens_with_the_role_and_nothing_else(byte_model: Path) -> None:
    """The first chunk names the assistant; no later one does."""
    async with serving(byte_model, ScriptedEngine(b"ab")) as running:
        first, *others = await running.events(CHAT, chat(max_tokens=2))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [other["choices"][0]["delta"] for other in others[:-1]] == [
        {"content": "a"},
        {"content": "b"},
    ]


@pytest.mark.parametrize("make", [chat, completion])
async def test_include_usage_adds_one_event_without_choices(byte_model: Path, make: Any) -> None:
    """Usage is null until the event before [DONE], and the same as in a whole answer."""
    path = CHAT if make is chat else COMPLETIONS
    async with serving(byte_model) as running:
        _, whole, _ = await running.post(path, make("cold prompt of its own, long enough"))
        request = make(
            "another cold prompt, long enough too",
            stream_options={"include_usage": True},
            cache_salt="its own",
        )
        *chunks, last, done = await running.events(path, request)
    assert done == "[DONE]"
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


TEXT = "naïve café · 日本語 🙂👩‍👩‍👧 end"


async def test_no_event_splits_a_character(byte_model: Path) -> None:
    """Tokens are bytes here, so most of them end inside a character; no event does."""
    script = TEXT.encode()
    async with serving(byte_model, ScriptedEngine(script)) as running:
        events = await running.events(COMPLETIONS, completion(max_tokens=len(script)))
    pieces = [event["choices"][0]["text"] for event in events[:-1]]
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


async def test_an_answer_cut_inside_a_character_ends_with_a_replacement(byte_model: Path) -> None:
    """max_tokens may cut a character; the text says so once, streamed or not."""
    async with serving(byte_model, ScriptedEngine("a日".encode())) as running:
        _, whole, _ = await running.post(COMPLETIONS, completion(max_tokens=3))
        events = await running.events(COMPLETIONS, completion(max_tokens=3))
    assert whole["choices"][0]["text"] == "a\ufffd"
    assert text_of(events) == "a\ufffd"


@pytest.mark.parametrize(
    ("script", "stop", "expected", "num_tokens"),
    [
        (b"one two three", "two", "one ", 7),
        (b"one two three", ["three", " two"], "one", 7),
        (b"one two three", ["x", "e t"], "on", 5),
        ("日本語のテスト".encode(), "本語", "日", 9),
        (b"aaab", "aab", "a", 4),
        (b"<<END>>", "<END>", "<", 6),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_is_not_in_it(
    byte_model: Path,
    script: bytes,
    stop: str | list[str],
    expected: str,
    num_tokens: int,
    *,
    stream: bool,
) -> None:
    """Wherever token borders lie; the engine stops at once and frees its blocks."""
    request = completion(max_tokens=60, stop=stop)
    async with serving(byte_model, ScriptedEngine(script)) as running:
        if stream:
            request["stream_options"] = {"include_usage": True}
            *chunks, last, _ = await running.events(COMPLETIONS, request)
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            reason, usage = chunks[-1]["choices"][0]["finish_reason"], last["usage"]
        else:
            _, body, _ = await running.post(COMPLETIONS, request)
            choice, usage = body["choices"][0], body["usage"]
            text, reason = choice["text"], choice["finish_reason"]
        assert await running.nothing_is_held()
    assert (text, reason, usage["completion_tokens"]) == (expected, "stop", num_tokens)


async def test_text_held_for_a_stop_string_that_never_came_is_sent(byte_model: Path) -> None:
    """The beginning of a stop string at the end of an answer belongs to the answer."""
    async with serving(byte_model, ScriptedEngine(b"abSTO")) as running:
        events = await running.events(COMPLETIONS, completion(max_tokens=5, stop="STOP"))
    assert text_of(events) == "abSTO"
    assert events[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "expected", "reason"),
    [
        ({}, "ab", "stop"),
        ({"ignore_eos": True}, "abcab", "length"),
        ({"stop_token_ids": [ord("b")]}, "a", "stop"),
        ({"stop_token_ids": [ord("c")], "ignore_eos": True}, "ab", "stop"),
    ],
)
async def test_an_end_token_ends_the_answer_and_shows_no_text(
    byte_model: Path, fields: dict[str, Any], expected: str, reason: str
) -> None:
    """The model's end token, unless ignored, and the request's stop tokens always."""
    script = [ord("a"), ord("b"), IM_END, ord("c")]
    async with serving(byte_model, ScriptedEngine(script)) as running:
        _, body, _ = await running.post(COMPLETIONS, completion(max_tokens=6, **fields))
    assert body["choices"][0]["text"] == expected
    assert body["choices"][0]["finish_reason"] == reason


async def test_the_last_chunk_of_a_stopped_chat_adds_nothing(byte_model: Path) -> None:
    """An empty delta with the reason, as OpenAI's own."""
    async with serving(byte_model, ScriptedEngine([ord("a"), IM_END])) as running:
        *_, last, done = await running.events(CHAT, chat())
    assert done == "[DONE]"
    assert last["choices"] == [
        {
            "index": 0,
            "delta": {},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]


async def test_the_second_request_reports_what_it_reused(byte_model: Path) -> None:
    """Every full block of the shared part, in usage and in the header, before the first byte."""
    shared = "s" * 5 * BLOCK
    async with serving(byte_model) as running:
        await running.post(COMPLETIONS, completion(shared + "first"))
        _, body, headers = await running.post(COMPLETIONS, completion(shared + "second"))
        request = completion(shared + "third", stream=True)
        url = running.url + COMPLETIONS
        async with running.http.post(url, json=request) as response:
            streamed = response.headers["x-kvway-cached-tokens"]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 5 * BLOCK}
    assert headers["x-kvway-cached-tokens"] == streamed == str(5 * BLOCK)


async def test_a_cache_salt_keeps_caches_apart(byte_model: Path) -> None:
    """Same prompt: another salt or none never hits, the same salt does."""
    cached: list[int] = []
    async with serving(byte_model) as running:
        for salt in ({"cache_salt": "a"}, {"cache_salt": "b"}, {}, {"cache_salt": "a"}):
            _, body, _ = await running.post(COMPLETIONS, completion("p" * 40, **salt))
            cached.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 0, 39]


async def test_text_and_its_token_ids_are_the_same_prompt(byte_model: Path) -> None:
    """Text, ids, and lists of either; answers in the order of the prompts, usage of all."""
    prompts = ["first prompt", "second, longer prompt"]
    ids = [list(prompt.encode()) for prompt in prompts]
    async with serving(byte_model) as running:
        alone = [
            (await running.post(COMPLETIONS, completion(prompt)))[1]["choices"][0]["text"]
            for prompt in (*prompts, *ids)
        ]
        _, texts, headers = await running.post(COMPLETIONS, completion(prompts))
        _, lists, _ = await running.post(COMPLETIONS, completion(ids))
        events = await running.events(COMPLETIONS, completion(ids))
    assert alone[:2] == alone[2:]
    for body in (texts, lists):
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        assert [choice["text"] for choice in body["choices"]] == alone[:2]
        assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
    cached = texts["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert headers["x-kvway-cached-tokens"] == str(cached)
    streamed = ["", ""]
    for event in events[:-1]:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == alone[:2]


async def test_without_a_limit_a_chat_uses_the_rest_of_the_context(byte_model: Path) -> None:
    """Chat: all the room there is. Completion: 16 tokens, or the room if that is less."""
    async with serving(byte_model, max_model_len=64) as running:
        _, body, _ = await running.post(
            CHAT, {**chat("x"), "max_tokens": None, "ignore_eos": True}
        )
        _, short, _ = await running.post(
            COMPLETIONS, {**completion("y" * 60), "max_tokens": None, "ignore_eos": True}
        )
        _, usual, _ = await running.post(
            COMPLETIONS, {**completion("y"), "max_tokens": None, "ignore_eos": True}
        )
    assert body["usage"]["total_tokens"] == 64
    assert short["usage"]["completion_tokens"] == 4
    assert usual["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("given", "echoed"), [("req-1:a.b_c", True), ("", False), ("a b", False), ("x" * 200, False)]
)
async def test_a_clients_request_id_comes_back(
    byte_model: Path, given: str, *, echoed: bool
) -> None:
    """A plain one is echoed; anything else is replaced by the answer's id."""
    async with serving(byte_model) as running:
        _, body, headers = await running.post(CHAT, chat(), headers={"x-request-id": given})
    assert headers["x-request-id"] == (given if echoed else body["id"])


async def test_tokenize_is_what_a_request_is_made_of(byte_model: Path) -> None:
    """Ids of messages include the template; detokenize gives their text back."""
    async with serving(byte_model) as running:
        messages = chat("hé")["messages"]
        _, tokens, _ = await running.post("/tokenize", {"model": "tiny", "messages": messages})
        _, body, _ = await running.post(CHAT, chat("hé"))
        _, plain, _ = await running.post("/tokenize", {"prompt": "hé"})
        _, text, _ = await running.post("/detokenize", {"tokens": tokens["tokens"]})
        _, nothing, _ = await running.post("/detokenize", {"tokens": []})
    assert tokens["count"] == len(tokens["tokens"]) == body["usage"]["prompt_tokens"]
    assert tokens["max_model_len"] == 256 * BLOCK
    assert plain["tokens"] == list("hé".encode())
    assert text == {"prompt": "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"}
    assert nothing == {"prompt": ""}


async def test_models_names_the_one_model(byte_model: Path) -> None:
    """With the context that requests have."""
    async with serving(byte_model, max_model_len=128) as running:
        status, body = await running.get("/v1/models")
    assert status == 200
    [card] = body["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 128)


async def test_of_answers_that_fail_the_first_failure_is_told() -> None:
    """Not what its failure does to the others, whatever their order."""

    async def fails_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise EngineFailed("second")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise Overloaded("first")

    with pytest.raises(Overloaded, match="first"):
        await _together([fails_when_cancelled(), fails(), fails_when_cancelled()])
