"""Log probabilities in each form, whole and streamed, and the bytes of pieces of characters."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest

from kvway_core.prompts import PromptEncoder
from kvway_worker.api.logprobs import ChatWriter, CompletionWriter, TokenNames, prompt_logprobs
from kvway_worker.scheduling.sampling_params import TokenLogprobs
from tests.worker.http_worker import IM_END, ScriptedEngine, chat, completion, serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SCRIPT = [*"aé".encode(), IM_END]


@pytest.fixture
def encoder(byte_model: Path) -> PromptEncoder:
    return PromptEncoder.load(byte_model)


def top(token: str, index: int) -> dict[str, Any]:
    return {"token": token, "logprob": -index / 8, "bytes": [ord(token)]}


def entry(token: str, data: list[int], token_id: int, num_top: int) -> dict[str, Any]:
    """What a chat says of a token of ScriptedEngine."""
    likeliest = [top("AB"[index], index) for index in range(num_top)]
    return {
        "token": token,
        "logprob": -token_id / 1000,
        "bytes": data,
        "top_logprobs": likeliest,
    }


def chat_entries(num_top: int) -> list[dict[str, Any]]:
    return [
        entry("a", [97], 97, num_top),
        entry("bytes:\\xc3", [0xC3], 0xC3, num_top),
        entry("bytes:\\xa9", [0xA9], 0xA9, num_top),
        entry("<|im_end|>", list(b"<|im_end|>"), IM_END, num_top),
    ]


@pytest.mark.parametrize("num_top", [None, 0, 2])
async def test_a_chat_tells_every_token_with_its_bytes(
    byte_model: Path, num_top: int | None
) -> None:
    """OpenAI's form, an entry per completion token; pieces of a character by their bytes."""
    request = chat(logprobs=True, top_logprobs=num_top)
    async with serving(byte_model, ScriptedEngine(SCRIPT)) as running:
        _, body, _ = await running.post(CHAT, request)
        *events, _ = await running.events(CHAT, request)
    choice = body["choices"][0]
    assert choice["logprobs"] == {"content": chat_entries(num_top or 0), "refusal": None}
    assert body["usage"]["completion_tokens"] == len(choice["logprobs"]["content"])
    chunks = [event["choices"][0] for event in events[1:]]
    assert [len(chunk["logprobs"]["content"]) for chunk in chunks] == [1, 2, 1]
    streamed = [token for chunk in chunks for token in chunk["logprobs"]["content"]]
    assert streamed == chat_entries(num_top or 0)


@pytest.mark.parametrize("num_top", [0, 2])
async def test_a_completion_tells_four_lists(byte_model: Path, num_top: int) -> None:
    """OpenAI's older form: the token itself is told beside the likeliest; whole and streamed."""
    request = completion(logprobs=num_top)
    async with serving(byte_model, ScriptedEngine(SCRIPT)) as running:
        _, body, _ = await running.post(COMPLETIONS, request)
        *events, _ = await running.events(COMPLETIONS, request)
    names = ["a", "bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
    ids = [97, 0xC3, 0xA9, IM_END]
    likeliest = {"AB"[index]: -index / 8 for index in range(num_top)}
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs == {
        "text_offset": [0, 1, 1, 2],
        "token_logprobs": [-token / 1000 for token in ids],
        "tokens": names,
        "top_logprobs": [
            likeliest | {name: -token / 1000} for name, token in zip(names, ids, strict=True)
        ],
    }
    for field, told in logprobs.items():
        assert [one for e in events for one in e["choices"][0]["logprobs"][field]] == told


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_tells_the_prompt_as_well(byte_model: Path, *, stream: bool) -> None:
    """Nothing can be told of its first token; offsets go on through the answer."""
    request = completion("hé", echo=True, logprobs=1, max_tokens=2)
    async with serving(byte_model, ScriptedEngine(b"ab")) as running:
        if stream:
            *events, _ = await running.events(COMPLETIONS, request)
            choices = [event["choices"][0] for event in events]
        else:
            _, body, _ = await running.post(COMPLETIONS, request)
            choices = body["choices"]
    assert "".join(choice["text"] for choice in choices) == "héab"
    told = {
        field: [one for choice in choices for one in choice["logprobs"][field]]
        for field in ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    }
    assert told["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "a", "b"]
    assert told["text_offset"] == [0, 1, 1, 2, 3]
    assert told["token_logprobs"] == [None, -0.195, -0.169, -0.097, -0.098]
    assert told["top_logprobs"][:2] == [None, {"A": 0.0, "bytes:\\xc3": -0.195}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "skip", "text", "offsets"),
    [
        ("a<|im_end|>b", True, "abé", [0, 1, 1, 2, 2]),
        ("a<|im_end|>b", False, "a<|im_end|>bé", [0, 1, 11, 12, 12]),
        ([97, 0xC3], True, "a\ufffdé", [0, 1, 2, 2]),
    ],
)
async def test_the_offsets_of_an_echo_are_those_of_its_text(
    byte_model: Path, prompt: Any, text: str, offsets: list[int], *, skip: bool, stream: bool
) -> None:
    """Special tokens are in both or in neither; prompt and answer share no character."""
    request = completion(
        prompt, echo=True, logprobs=0, max_tokens=2, skip_special_tokens=skip, ignore_eos=True
    )
    async with serving(byte_model, ScriptedEngine("é".encode())) as running:
        if stream:
            *events, _ = await running.events(COMPLETIONS, request)
            choices = [event["choices"][0] for event in events]
        else:
            _, body, _ = await running.post(COMPLETIONS, request)
            choices = body["choices"]
    assert "".join(choice["text"] for choice in choices) == text
    told = [at for choice in choices for at in choice["logprobs"]["text_offset"]]
    assert told == offsets


async def test_an_echo_tells_each_prompt_with_its_own_first_token(byte_model: Path) -> None:
    request = completion(["ab", "cd"], n=2, echo=True, logprobs=0, max_tokens=1)
    async with serving(byte_model, ScriptedEngine(b"x")) as running:
        _, body, _ = await running.post(COMPLETIONS, request)
    told = ["".join(choice["logprobs"]["tokens"]) for choice in body["choices"]]
    assert told == [choice["text"] for choice in body["choices"]] == ["abx", "abx", "cdx", "cdx"]


async def test_the_logprobs_of_a_prompt_are_in_vllms_form(byte_model: Path) -> None:
    """For a completion in each choice, for a chat once; the token itself first, with its rank."""
    request = completion("hi", prompt_logprobs=1, n=2)
    async with serving(byte_model, ScriptedEngine(b"ab")) as running:
        _, body, _ = await running.post(COMPLETIONS, request)
        _, answer, _ = await running.post(CHAT, chat("x", prompt_logprobs=0))
        _, plain, _ = await running.post(COMPLETIONS, completion("hi"))
    told = [
        None,
        {
            "105": {"logprob": -0.105, "rank": 3, "decoded_token": "i"},
            "65": {"logprob": 0.0, "rank": 1, "decoded_token": "A"},
        },
    ]
    assert [choice["prompt_logprobs"] for choice in body["choices"]] == [told, told]
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert [len(token) for token in answer["prompt_logprobs"][1:]] == [1] * (
        answer["usage"]["prompt_tokens"] - 1
    )
    assert "prompt_logprobs" not in plain["choices"][0]


async def test_prompt_logprobs_of_a_warm_prompt_are_those_of_a_cold_one(byte_model: Path) -> None:
    """P28: the cache is not read for them, and cached_tokens says so."""
    answers = []
    async with serving(byte_model) as running:
        for fields in ({"prompt_logprobs": 1}, {}, {"prompt_logprobs": 1}):
            _, body, _ = await running.post(COMPLETIONS, completion("x" * 50, **fields))
            answers.append(body)
    first, _, again = answers
    assert first["choices"] == again["choices"]
    assert len(again["choices"][0]["prompt_logprobs"]) == 50
    assert [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in answers] == [
        *(0, 49, 0)
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt_logprobs": 4, "n": 8}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 20}, "logprobs"),
        ({"echo": True, "logprobs": 20, "stream": True}, "logprobs"),
    ],
)
async def test_more_log_probabilities_than_an_answer_tells_are_refused(
    byte_model: Path, fields: dict[str, Any], param: str
) -> None:
    """They would all be in memory at a time; below the limit the same prompts are answered."""
    prompts = [[7] * 7200] * 7  # 50,400 tokens: 2^20 log probabilities at 20 of each
    async with serving(byte_model, ScriptedEngine(b"x", num_blocks=512)) as running:
        status, body, _ = await running.post(COMPLETIONS, completion(prompts, **fields))
        assert (status, body["error"]["param"]) == (400, param)
        assert "tells 1048576 at most" in body["error"]["message"]
        assert running.engine.load().num_steps == 0
        one = completion([[7] * 7200], prompt_logprobs=20, max_tokens=1)
        status, body, _ = await running.post(COMPLETIONS, one)
        assert (status, len(body["choices"][0]["prompt_logprobs"])) == (200, 7200)


@pytest.mark.parametrize("stream", [False, True])
async def test_long_lists_are_written_beside_the_event_loop(
    byte_model: Path, monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    """Short ones, as of nearly every event, are written at once."""
    writers: dict[int, set[bool]] = {}
    write = CompletionWriter.write_echo

    def watched(self: CompletionWriter, first: int, prompt: Any, told: Any) -> Any:
        on_loop = threading.current_thread() is threading.main_thread()
        writers.setdefault(len(prompt) + 1, set()).add(on_loop)
        return write(self, first, prompt, told)

    monkeypatch.setattr(CompletionWriter, "write_echo", watched)
    async with serving(byte_model, ScriptedEngine(b"x")) as running:
        for text in ("short", "long " * 20):
            request = completion(text, echo=True, logprobs=1, max_tokens=2)
            if stream:
                events = await running.events(COMPLETIONS, request)
                told = [event["choices"][0]["logprobs"]["tokens"] for event in events[:-1]]
                tokens = [token for tokens in told for token in tokens]
            else:
                _, body, _ = await running.post(COMPLETIONS, request)
                tokens = body["choices"][0]["logprobs"]["tokens"]
            assert "".join(tokens) == text + "xx"
    assert writers == {5: {True}, 100: {False}}


async def test_tokens_may_be_called_by_their_ids(byte_model: Path) -> None:
    """In every form."""
    fields: dict[str, Any] = {"return_tokens_as_token_ids": True, "logprobs": 1}
    async with serving(byte_model, ScriptedEngine(b"ab")) as running:
        _, done, _ = await running.post(COMPLETIONS, completion(**fields, max_tokens=1))
        request = chat(**fields | {"logprobs": True}, max_tokens=1)
        _, body, _ = await running.post(CHAT, request)
    assert done["choices"][0]["logprobs"]["tokens"] == ["token_id:97"]
    assert list(done["choices"][0]["logprobs"]["top_logprobs"][0]) == [
        "token_id:65",
        "token_id:97",
    ]
    assert [one["token"] for one in body["choices"][0]["logprobs"]["content"]] == ["token_id:97"]


def test_the_bytes_of_an_answers_tokens_are_its_text(encoder: PromptEncoder) -> None:
    """Whatever characters its tokens split."""
    text = "naïve 日本語 🙂"
    tokens = [TokenLogprobs(token, -1.0, 1) for token in encoder.encode_text(text)]
    names = TokenNames(encoder, as_ids=False)
    content = ChatWriter(names).write(tokens).content
    assert b"".join(bytes(token.bytes) for token in content).decode() == text
    written = CompletionWriter(names, skip_special_tokens=True, num_top=0).write(tokens)
    begins = [i for i, byte in enumerate(text.encode()) if byte & 0xC0 != 0x80]
    assert [written.text_offset[at] for at in begins] == list(range(len(text)))


def test_special_tokens_that_are_not_shown_take_no_room(encoder: PromptEncoder) -> None:
    """Offsets are those of the text."""
    tokens = [TokenLogprobs(token, -1.0, 1) for token in (97, IM_END, 98)]
    names = TokenNames(encoder, as_ids=False)
    for skip, offsets in ((True, [0, 1, 1]), (False, [0, 1, 11])):
        writer = CompletionWriter(names, skip_special_tokens=skip, num_top=0)
        assert writer.write(tokens).text_offset == offsets


def test_minus_infinity_is_a_number(encoder: PromptEncoder) -> None:
    """JSON has no other way."""
    names = TokenNames(encoder, as_ids=False)
    token = TokenLogprobs(97, -math.inf, 2, ((98, -math.inf),))
    content = ChatWriter(names).write([token]).content[0]
    assert (content.logprob, content.top_logprobs[0].logprob) == (-9999.0, -9999.0)
    told = prompt_logprobs([token], names, num_top=1)[1]
    assert told is not None
    assert {key: one.logprob for key, one in told.items()} == {"97": -9999.0, "98": -9999.0}
