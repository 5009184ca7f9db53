"""Fields of a request, each by what it does to the engine's work or to the answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from kvway_core.prompts import PromptEncoder
from kvway_core.testing.byte_model import write_byte_model
from kvway_core.token_bytes import byte_alphabet
from kvway_worker.api.fields import CHAT_FIELDS, COMPLETION_FIELDS
from kvway_worker.api.sampling_fields import bad_word_runs
from kvway_worker.scheduling.sequence import Sequence
from kvway_worker.scheduling.step import StepPlan, StepResult
from tests.worker.http_worker import IM_END, ScriptedEngine, chat, completion, serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class Recorder(ScriptedEngine):
    """Keeps the requests that it saw, each once, in their order. Answer i of a prompt is "iii"."""

    def __init__(self) -> None:
        super().__init__(b"-", num_blocks=256)
        self.seen: dict[str, Sequence] = {}

    @override
    def execute(self, plan: StepPlan) -> StepResult:
        self.seen |= {seq.request_id: seq for row in plan.rows for seq in row.sampling}
        return super().execute(plan)

    @override
    def token(self, seq: Sequence) -> int:
        return ord("0") + int(seq.request_id.rsplit("-", 1)[1])

    @property
    def first(self) -> Sequence:
        """The first request."""
        return next(iter(self.seen.values()))


SAMPLING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_tokens": 0}),
    ({}, {"stop_token_ids": frozenset({IM_END}), "logprobs": None, "prompt_logprobs": None}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"top_p": 0.5, "top_k": 7, "min_p": 0.1}, {"top_p": 0.5, "top_k": 7, "min_p": 0.1}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"seed": -5}, {"seed": -5}),
    ({"min_tokens": 3}, {"min_tokens": 3}),
    ({"ignore_eos": True, "stop_token_ids": [7]}, {"stop_token_ids": frozenset({7})}),
    ({"stop_token_ids": [7]}, {"stop_token_ids": frozenset({7, IM_END})}),
    (
        {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.5},
        {"presence_penalty": 0.5, "frequency_penalty": -1.0, "repetition_penalty": 1.5},
    ),
    ({"logit_bias": {"5": 2, "7": -100}}, {"logit_bias": ((5, 2.0), (7, -100.0))}),
    ({"allowed_token_ids": [50, 48, 50]}, {"allowed_token_ids": frozenset({48, 50})}),
    ({"bad_words": ["ab", " c", "\n"]}, {"bad_words": ((97, 98), (32, 99), (10,))}),
]


@pytest.mark.parametrize(("fields", "params"), SAMPLING)
@pytest.mark.parametrize("make", [chat, completion])
async def test_how_tokens_are_chosen_reaches_the_engine(
    byte_model: Path, make: Any, fields: dict[str, Any], params: dict[str, Any]
) -> None:
    engine = Recorder()
    async with serving(byte_model, engine) as running:
        path = CHAT if make is chat else COMPLETIONS
        status, body, _ = await running.post(path, make(**fields))
    assert status == 200, body
    assert {name: getattr(engine.first.params, name) for name in params} == params


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        (["cat"], {"cat", " cat"}),
        ([" cat"], {" cat"}),
        (["\n"], {"\n"}),
        ([" "], {" "}),
        (["dog"], {"dog"}),
        (["cats", "cat"], {"cats", " cats", "cat", " cat"}),
        (["cats", " cats"], {"cats", " cats"}),
    ],
)
def test_a_bad_word_is_forbidden_inside_of_a_text_where_only_its_first_token_differs(
    spaced_words: PromptEncoder, words: list[str], runs: set[str]
) -> None:
    """And no other word is: the vocabulary has "cat" and " cat", " dog" is a space and "dog"."""
    encode = spaced_words.encode_text
    assert set(bad_word_runs(words, spaced_words)) == {tuple(encode(run)) for run in runs}
    assert [len(encode(text)) for text in ("cat", " cat", "\n", " \n")] == [1] * 4


@pytest.fixture(scope="module")
def spaced_words(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    """The byte model with one token for "cat", one for " cat", one for both white spaces."""
    folder = write_byte_model(tmp_path_factory.mktemp("spaced"))
    content = json.loads((folder / "tokenizer.json").read_text())
    space, line_break = (byte_alphabet()[ord(char)] for char in " \n")
    for left, right in (("c", "a"), ("ca", "t"), (space, "cat"), (space, line_break)):
        content["model"]["vocab"][left + right] = len(content["model"]["vocab"]) + 10
        content["model"]["merges"].append([left, right])
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return PromptEncoder.load(folder)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [IM_END], "min_tokens": 1}, "min_tokens"),
        (
            {"allowed_token_ids": [7, IM_END], "stop_token_ids": [7], "min_tokens": 1},
            "min_tokens",
        ),
        ({"allowed_token_ids": [97, IM_END], "bad_words": ["a"], "min_tokens": 1}, "min_tokens"),
        ({"stop_token_ids": list(range(258)), "min_tokens": 1}, "min_tokens"),
        ({"allowed_token_ids": [97, 98], "bad_words": ["a", "b"]}, "bad_words"),
        ({"allowed_token_ids": [IM_END]}, None),
        ({"allowed_token_ids": [IM_END], "min_tokens": 1, "ignore_eos": True}, None),
        ({"allowed_token_ids": [97, IM_END], "min_tokens": 1}, None),
        ({"allowed_token_ids": [97, 98], "bad_words": ["a"]}, None),
        ({"allowed_token_ids": [97, 98], "bad_words": ["aa", "ab"]}, None),
        ({"allowed_token_ids": [97, IM_END], "bad_words": ["a"]}, None),
        ({"stop_token_ids": list(range(257)), "ignore_eos": True, "min_tokens": 1}, None),
    ],
)
async def test_fields_that_leave_no_token_to_choose_are_refused(
    byte_model: Path, fields: dict[str, Any], param: str | None
) -> None:
    """Where it can be told before anything is computed."""
    async with serving(byte_model, ScriptedEngine(b"ab")) as running:
        status, body, _ = await running.post(COMPLETIONS, completion(**fields))
    assert status == (200 if param is None else 400)
    assert param is None or body["error"]["param"] == param


async def test_priority_and_cache_hint_reach_the_engine(byte_model: Path) -> None:
    for fields, expected in (
        ({}, (0, False)),
        ({"priority": -3, "kv_cache": "ephemeral"}, (-3, True)),
        ({"kv_cache": "normal"}, (0, False)),
    ):
        engine = Recorder()
        async with serving(byte_model, engine) as running:
            await running.post(CHAT, chat(**fields))
        assert (engine.first.priority, engine.first.ephemeral) == expected


async def test_nothing_of_an_ephemeral_request_stays_cached(byte_model: Path) -> None:
    cached = []
    async with serving(byte_model) as running:
        for hint in ("ephemeral", "normal", "normal"):
            _, body, _ = await running.post(COMPLETIONS, completion("x" * 40, kv_cache=hint))
            cached.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 39]


# --- several answers ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("stream", [False, True])
async def test_several_answers_have_their_index_and_the_prompt_counts_once(
    byte_model: Path, make: Any, *, stream: bool
) -> None:
    path = CHAT if make is chat else COMPLETIONS
    texts = ["", "", ""]
    async with serving(byte_model, Recorder()) as running:
        request = make(n=3, max_tokens=4)
        if stream:
            request["stream_options"] = {"include_usage": True}
            *events, last, done = await running.events(path, request)
            assert done == "[DONE]"
            for choice in (choice for event in events for choice in event["choices"]):
                delta = choice["text"] if make is completion else choice["delta"].get("content")
                texts[choice["index"]] += delta or ""
            usage = last["usage"]
        else:
            _, body, _ = await running.post(path, request)
            usage = body["usage"]
            for choice in body["choices"]:
                shown = choice["text"] if make is completion else choice["message"]["content"]
                texts[choice["index"]] = shown
        assert await running.nothing_is_held()
        counted = running.worker.metrics.registry.get_sample_value(
            "vllm:prompt_tokens_total", {"model_name": "tiny"}
        )
    assert texts == ["0000", "1111", "2222"]
    assert counted == usage["prompt_tokens"]
    assert usage["completion_tokens"] == 12
    num_prompt = len("Once upon a time") if make is completion else 39
    assert usage["prompt_tokens"] == num_prompt
    assert usage["total_tokens"] == num_prompt + 12
    assert usage["prompt_tokens_details"]["cached_tokens"] <= num_prompt


async def test_several_answers_to_several_prompts_come_prompt_by_prompt(byte_model: Path) -> None:
    async with serving(byte_model, Recorder()) as running:
        request = completion(["ab", "cde"], n=2, best_of=2, max_tokens=1, echo=True)
        _, body, _ = await running.post(COMPLETIONS, request)
    assert [choice["text"] for choice in body["choices"]] == ["ab0", "ab1", "cde0", "cde1"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 5


async def test_each_answer_has_a_seed_made_of_the_requests(byte_model: Path) -> None:
    """The first has the seed itself; all repeat, and differ from those of the next seed."""
    seeds: list[list[int]] = []
    for seed in (7, 7, 8):
        engine = Recorder()
        async with serving(byte_model, engine) as running:
            await running.post(COMPLETIONS, completion(n=3, seed=seed))
        seeds.append([seq.params.seed for seq in engine.seen.values()])
    assert seeds[0] == seeds[1]
    assert (seeds[0][0], seeds[2][0]) == (7, 8)
    assert len({*seeds[0], *seeds[2]}) == 6


# --- the prompt --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "max_tokens", "kept"), [(3, 8, "xyz"), (40, 8, "abcxyz"), (-1, 60, "wxyz")]
)
async def test_a_prompt_is_truncated_from_its_beginning(
    byte_model: Path, keep: int, max_tokens: int, kept: str
) -> None:
    """Before lengths are checked; -1 leaves room for the answer."""
    prompt = "abcxyz" if keep > 0 else "v" * 100 + "wxyz"
    request = completion(prompt, truncate_prompt_tokens=keep, max_tokens=max_tokens, echo=True)
    async with serving(byte_model, ScriptedEngine(b"!"), max_model_len=64) as running:
        _, body, _ = await running.post(COMPLETIONS, request)
    assert body["usage"]["prompt_tokens"] == len(kept)
    assert body["choices"][0]["text"].removesuffix("!" * max_tokens) == kept


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "<|im_start|>user\nhi<|im_end|>\n"),
        ({"continue_final_message": True}, "<|im_start|>user\nhi"),
    ],
)
async def test_where_a_chats_prompt_ends(
    byte_model: Path, fields: dict[str, Any], prompt: str
) -> None:
    """For chats as for /tokenize."""
    engine = Recorder()
    async with serving(byte_model, engine) as running:
        await running.post(CHAT, chat("hi", **fields))
        _, tokens, _ = await running.post(
            "/tokenize", {"messages": chat("hi")["messages"], **fields}
        )
    encoder = PromptEncoder.load(byte_model)
    assert encoder.decode(engine.first.prompt_token_ids, skip_special_tokens=False) == prompt
    assert tokens["tokens"] == engine.first.prompt_token_ids


# --- text --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text", "stop_reason"),
    [
        ({}, "ab", None),
        ({"stop_token_ids": [IM_END]}, "ab", None),
        ({"stop_token_ids": [IM_END], "ignore_eos": True}, "ab", IM_END),
        ({"skip_special_tokens": False}, "ab", None),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "ab<|im_end|>", None),
        ({"ignore_eos": True, "skip_special_tokens": False}, "ab<|im_end|>cab<|im_end|>c", None),
        ({"stop_token_ids": [98]}, "a", 98),
        ({"stop_token_ids": [98], "include_stop_str_in_output": True}, "ab", 98),
        ({"stop": "b"}, "a", "b"),
        ({"stop": ["zz", "b"], "include_stop_str_in_output": True}, "ab", "b"),
        ({"stop": "b", "min_tokens": 3, "ignore_eos": True}, "abca", "b"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_ends_an_answer_and_what_of_it_is_shown(
    byte_model: Path, fields: dict[str, Any], text: str, stop_reason: Any, *, stream: bool
) -> None:
    engine = ScriptedEngine([ord("a"), ord("b"), IM_END, ord("c")])
    async with serving(byte_model, engine) as running:
        if stream:
            *events, _ = await running.events(COMPLETIONS, completion(**fields))
            choice = events[-1]["choices"][0]
            shown = "".join(event["choices"][0]["text"] for event in events)
        else:
            _, body, _ = await running.post(COMPLETIONS, completion(**fields))
            choice = body["choices"][0]
            shown = choice["text"]
    assert (shown, choice["stop_reason"]) == (text, stop_reason)
    limited = text.count("c") == 2
    assert choice["finish_reason"] == ("length" if limited else "stop")


# --- usage and ids -----------------------------------------------------------------------------


async def test_continuous_usage_is_in_every_event(byte_model: Path) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, make in ((CHAT, chat), (COMPLETIONS, completion)):
        async with serving(byte_model, ScriptedEngine(b"ab")) as running:
            *events, _ = await running.events(path, make(max_tokens=3, stream_options=options))
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == ([1, 1, 2, 3, 3] if make is chat else [1, 2, 3, 3])
        for event in events:
            usage = event["usage"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_token_ids_come_with_the_answer(byte_model: Path) -> None:
    """As vLLM does: of a chat's prompt once, of a completion's in each choice."""
    script = [ord("a"), 0xC3, 0xA9, IM_END]
    async with serving(byte_model, ScriptedEngine(script)) as running:
        _, body, _ = await running.post(CHAT, chat("x", return_token_ids=True))
        *events, _ = await running.events(CHAT, chat("x", return_token_ids=True))
        _, done, _ = await running.post(COMPLETIONS, completion("hé", return_token_ids=True))
        *chunks, _ = await running.events(COMPLETIONS, completion("hé", return_token_ids=True))
        _, plain, _ = await running.post(COMPLETIONS, completion("hé"))
    prompt = PromptEncoder.load(byte_model).encode_text("<|im_start|>user\nx<|im_end|>\n")
    assert body["prompt_token_ids"][: len(prompt)] == prompt
    assert body["choices"][0]["token_ids"] == script
    assert events[0]["prompt_token_ids"] == body["prompt_token_ids"]
    assert all("prompt_token_ids" not in event for event in events[1:])
    told = [event["choices"][0].get("token_ids", []) for event in events]
    assert told == [[], [ord("a")], [0xC3, 0xA9], [IM_END]]
    assert done["choices"][0]["prompt_token_ids"] == list("hé".encode())
    assert done["choices"][0]["token_ids"] == script
    assert chunks[0]["choices"][0]["prompt_token_ids"] == list("hé".encode())
    assert "prompt_token_ids" not in chunks[1]["choices"][0]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == told[1:]
    assert "token_ids" not in plain["choices"][0]


# --- nothing is ignored ------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_no_value_of_a_field_is_a_server_error(byte_model: Path, path: str) -> None:
    """Every field with every kind of value: an answer or a 400."""
    values: list[Any] = [None, True, 0, -1, 1, 2**40, 0.5, -1e9, "", "x", "1"]
    values += [
        chat()["messages"],
        [],
        [0],
        [300],
        ["x"],
        [[1]],
        {},
        {"1": 1},
        {"x": "y"},
        {"include_usage": True},
    ]
    fields = sorted((CHAT_FIELDS if path == CHAT else COMPLETION_FIELDS) - {"model"})
    make = chat if path == CHAT else completion
    async with serving(byte_model, ScriptedEngine(b"ab"), num_blocks=64) as running:

        async def status(field: str, value: Any) -> tuple[str, Any, int]:
            body = {**make(max_tokens=2), field: value}
            async with running.http.post(running.url + path, json=body) as response:
                await response.read()
                return field, value, response.status

        for field in fields:
            tried = await asyncio.gather(*(status(field, value) for value in values))
            assert [one for one in tried if one[2] not in {200, 400}] == []
            assert any(one[2] == 200 for one in tried)
        assert await running.nothing_is_held()
