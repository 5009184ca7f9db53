"""What clients may send: every refusal names its kind and its field, and repeats nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvway_core import api
from kvway_core.api import ChatMessage, ChatRequest, CompletionRequest
from kvway_core.errors import InvalidRequest, error_body

MESSAGE: dict[str, object] = {"role": "user", "content": "hi"}
CHAT = {"model": "m", "messages": [MESSAGE]}
COMPLETION = {"model": "m", "prompt": "hi"}
HEAD = b'{"model":"m","messages":[{"role":"user","content":"hi"}]'
ECHO = "words of the client"


def chat(**fields: object) -> ChatRequest:
    return api.parse_chat(json.dumps({**CHAT, **fields}).encode())


def completion(**fields: object) -> CompletionRequest:
    return api.parse_completion(json.dumps({**COMPLETION, **fields}).encode())


def refusal(body: bytes, parse: Callable[[bytes], object] = api.parse_chat) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(body)
    return caught.value


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


BAD_BODIES: dict[str, tuple[str, bytes]] = {
    "empty": ("invalid_json", b""),
    "white space": ("invalid_json", b" \r\n\t"),
    "not JSON": ("invalid_json", b"hello"),
    "truncated": ("invalid_json", HEAD),
    "trailing data": ("invalid_json", HEAD + b"} x"),
    "two objects": ("invalid_json", HEAD + b"}" + HEAD + b"}"),
    "single quotes": ("invalid_json", b"{'model':'m'}"),
    "comment": ("invalid_json", HEAD + b"/* */}"),
    "trailing comma": ("invalid_json", HEAD + b",}"),
    "UTF-8 BOM": ("invalid_json", b"\xef\xbb\xbf" + HEAD + b"}"),
    "UTF-16": ("invalid_json", (HEAD + b"}").decode().encode("utf-16")),
    "UTF-16 without BOM": ("invalid_json", (HEAD + b"}").decode().encode("utf-16-le")),
    "raw control character": ("invalid_json", HEAD + b',"user":"a\nb"}'),
    "array": ("invalid_request", b"[1]"),
    "null": ("invalid_request", b"null"),
    "string": ("invalid_request", b'"x"'),
    "number": ("invalid_request", b"7"),
    "invalid UTF-8": ("invalid_utf8", HEAD + b',"user":"\xff"}'),
    "invalid UTF-8 passed on": ("invalid_utf8", HEAD + b',"x":"\xff"}'),
    "overlong UTF-8": ("invalid_utf8", HEAD + b',"x":"\xc0\xaf"}'),
    "encoded surrogate": ("invalid_utf8", HEAD + b',"x":"\xed\xa0\x80"}'),
    "lone high surrogate": ("invalid_utf8", HEAD + b',"user":"\\ud800"}'),
    "lone low surrogate": ("invalid_utf8", HEAD + b',"user":"\\udc00"}'),
    "surrogates reversed": ("invalid_utf8", HEAD + b',"x":"\\udc00\\ud800"}'),
    "high surrogate and text": ("invalid_utf8", HEAD + b',"x":"\\ud800abcdefgh"}'),
    "NaN": ("invalid_number", HEAD + b',"temperature":NaN}'),
    "Infinity": ("invalid_number", HEAD + b',"temperature":Infinity}'),
    "-Infinity passed on": ("invalid_number", HEAD + b',"x":-Infinity}'),
    "1e400": ("invalid_number", HEAD + b',"temperature":1e400}'),
    "1e400 passed on": ("invalid_number", HEAD + b',"x":[{"y":1e400}]}'),
    "-1e400 in a message": ("invalid_number", HEAD + b',"tools":[{"x":-1e400}]}'),
    "1e400 in a message": (
        "invalid_number",
        b'{"model":"m","messages":[{"role":"user","content":"hi","x":-1e400}]}',
    ),
    "5,000 digits in a message": (
        "invalid_number",
        b'{"model":"m","messages":[{"role":"user","content":"hi","x":%b}]}' % (b"9" * 5000),
    ),
    "5,000 digits": ("invalid_number", HEAD + b',"seed":' + b"9" * 5000 + b"}"),
    "5,000 digits passed on": ("invalid_number", HEAD + b',"x":' + b"9" * 5000 + b"}"),
    "duplicate key": ("duplicate_key", HEAD + b',"model":"n"}'),
    "duplicate key, spaced": ("duplicate_key", b'{"n": 1, "n": 1, ' + HEAD[1:] + b"}"),
    "duplicate key, escaped": ("duplicate_key", HEAD + b',"mod\\u0065l":"n"}'),
    "duplicate unknown key": ("duplicate_key", HEAD + b',"x":1,"x":2}'),
    "duplicate key in a message": (
        "duplicate_key",
        b'{"model":"m","messages":[{"role":"user","content":"hi","role":"system"}]}',
    ),
    "duplicate key in a message, escaped": (
        "duplicate_key",
        b'{"model":"m","messages":[{"role":"user","content":"hi","r\\u006fle":"system"}]}',
    ),
    "duplicate key in what is passed on": (
        "duplicate_key",
        HEAD + b',"x":[[{"y":{"\\u001b[31m":1,"\\u001b[31m":2}}]]}',
    ),
    "duplicate key in options": (
        "duplicate_key",
        HEAD + b',"stream":true,"stream_options":{"include_usage":true,"include_usage":false}}',
    ),
    "too deep": ("too_complex", HEAD + b',"x":' + nested(64) + b"}"),
    "too deep in a message": (
        "too_complex",
        b'{"model":"m","messages":[{"role":"user","content":"a","x":' + nested(62) + b"}]}",
    ),
    "deeper than the stack": ("too_complex", HEAD + b',"x":' + nested(100_000) + b"}"),
    "arrays without end": ("invalid_request", b"[" * 100_000),
    "objects deeper than the stack": ("too_complex", HEAD + b',"x":' + b'{"a":' * 5_000),
    "long key": ("too_complex", HEAD + b',"' + b"k" * 257 + b'":1}'),
    "many keys": (
        "too_complex",
        HEAD + b"".join(b',"k%d":1' % index for index in range(10_000)) + b"}",
    ),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_bad_body_is_named(name: str) -> None:
    code, body = BAD_BODIES[name]
    error = refusal(body)
    assert error.code == code
    assert error.http_status == 400


def test_golden_bodies_of_refusals(golden: Callable[[str, str], None]) -> None:
    lines = [
        f"{name}: {error_body(refusal(body)).decode()}" for name, (_, body) in BAD_BODIES.items()
    ]
    golden("refused_bodies.txt", "\n".join(lines) + "\n")


WRONG_VALUES = {
    "bool": True,
    "string": ECHO,
    "number": 1,
    "fraction": 1.5,
    "array": [ECHO],
    "object": {ECHO: ECHO},
}
ACCEPTED_KINDS = {
    "add_generation_prompt": {"bool"},
    "add_special_tokens": {"bool"},
    "allowed_token_ids": set(),
    "bad_words": {"array"},
    "cache_salt": {"string"},
    "chat_template_kwargs": {"object"},
    "continue_final_message": {"bool"},
    "frequency_penalty": {"number", "fraction"},
    "ignore_eos": {"bool"},
    "include_stop_str_in_output": {"bool"},
    "kv_cache": set(),
    "logit_bias": set(),
    "logprobs": {"bool"},
    "max_completion_tokens": {"number"},
    "max_tokens": {"number"},
    "messages": set(),
    "metadata": {"object"},
    "min_p": {"number"},
    "min_tokens": {"number"},
    "model": {"string"},
    "n": {"number"},
    "presence_penalty": {"number", "fraction"},
    "priority": {"number"},
    "prompt_cache_key": {"string"},
    "prompt_logprobs": {"number"},
    "repetition_penalty": {"number", "fraction"},
    "request_id": set(),
    "response_format": {"object"},
    "return_token_ids": {"bool"},
    "return_tokens_as_token_ids": {"bool"},
    "safety_identifier": {"string"},
    "seed": {"number"},
    "service_tier": {"string"},
    "skip_special_tokens": {"bool"},
    "stop": {"string", "array"},
    "stop_token_ids": set(),
    "store": {"bool"},
    "stream": {"bool"},
    "stream_options": set(),
    "temperature": {"number", "fraction"},
    "tool_choice": {"string", "object"},
    "tools": set(),
    "top_k": {"number"},
    "top_logprobs": {"number"},
    "top_p": {"number"},
    "truncate_prompt_tokens": {"number"},
    "user": {"string"},
}


COMPANIONS: dict[str, dict[str, object]] = {"top_logprobs": {"logprobs": True}}
"""What a field makes no sense without."""


def test_the_table_of_types_has_every_field() -> None:
    assert set(ACCEPTED_KINDS) == set(ChatRequest.__struct_fields__)


@pytest.mark.parametrize("kind", WRONG_VALUES)
@pytest.mark.parametrize("field", ACCEPTED_KINDS)
def test_a_wrong_type_names_its_field(field: str, kind: str) -> None:
    body = json.dumps({**CHAT, **COMPANIONS.get(field, {}), field: WRONG_VALUES[kind]}).encode()
    if kind in ACCEPTED_KINDS[field]:
        api.parse_chat(body)
        return
    error = refusal(body)
    assert error.code == "invalid_request"
    assert (error.param or "").startswith(field)
    assert field in error.message
    assert ECHO not in error_body(error).decode()


@pytest.mark.parametrize("field", sorted(set(ACCEPTED_KINDS) - {"model", "messages"}))
def test_null_is_not_given(field: str) -> None:
    assert getattr(chat(**{field: None}), field) is None


@pytest.mark.parametrize("field", ["model", "messages"])
def test_what_is_required(field: str) -> None:
    without = {name: value for name, value in CHAT.items() if name != field}
    assert refusal(json.dumps(without).encode()).param == field
    assert refusal(json.dumps({**CHAT, field: None}).encode()).param == field


RANGES: dict[str, tuple[list[float], list[float]]] = {
    "temperature": ([0, 2, 0.5], [-0.1, 2.1, 1e308, -1]),
    "top_p": ([1, 1e-9], [0, -1, 1.01]),
    "min_p": ([0, 1], [-0.1, 1.1]),
    "top_k": ([-1, 0, 50], [-2, 2**31]),
    "n": ([1, 8], [0, -1, 9, 2**63]),
    "seed": ([0, -1, 2**63 - 1, -(2**63)], [2**63, -(2**63) - 1]),
    "max_tokens": ([1, 2**31 - 1], [0, -1, 2**31, 2**63]),
    "max_completion_tokens": ([1], [0, -1]),
    "min_tokens": ([0], [-1]),
    "presence_penalty": ([-2, 2], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 2], [-2.1, 2.1]),
    "repetition_penalty": ([0.01, 0.1, 2, 100], [0, -1, 0.009, 1e308]),
    "top_logprobs": ([0, 20], [-1, 21]),
    "prompt_logprobs": ([0, 20], [-1, 21]),
    "priority": ([0, -5, 2**31 - 1], [2**31, -(2**31), 2**63]),
    "truncate_prompt_tokens": ([-1, 1, 500], [0, -2, 2**31]),
}


@pytest.mark.parametrize("field", RANGES)
def test_ranges(field: str) -> None:
    inside, outside = RANGES[field]
    with_it = COMPANIONS.get(field, {})
    for value in inside:
        assert getattr(chat(**with_it, **{field: value}), field) == value
    for value in outside:
        error = refusal(json.dumps({**CHAT, **with_it, field: value}).encode())
        assert error.param == field
        assert len(error.message) < 150


REFUSED_CHATS: list[tuple[str, dict[str, object]]] = [
    ("top_logprobs", {"top_logprobs": 2}),
    ("top_logprobs", {"top_logprobs": 2, "logprobs": False}),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 10, "max_completion_tokens": 8}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options", {"stream": True, "stream_options": {ECHO: True}}),
    (
        "stream_options.continuous_usage_stats",
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    ),
    ("prompt_logprobs", {"stream": True, "prompt_logprobs": 0}),
    ("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
    (
        "continue_final_message",
        {"continue_final_message": True, "messages": [MESSAGE, {"role": "assistant"}]},
    ),
    ("chat_template_kwargs", {"chat_template_kwargs": {"documents": [ECHO]}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"a": "x" * 1025}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {str(n): n for n in range(33)}}),
    ("kv_cache", {"kv_cache": ECHO}),
    ("cache_salt", {"cache_salt": ""}),
    ("cache_salt", {"cache_salt": "x" * 257}),
    ("request_id", {"request_id": ""}),
    ("request_id", {"request_id": "a b"}),
    ("request_id", {"request_id": "x" * 129}),
    ("allowed_token_ids", {"allowed_token_ids": []}),
    ("allowed_token_ids", {"allowed_token_ids": [-1]}),
    ("stop_token_ids", {"stop_token_ids": [1] * 1025}),
    ("bad_words", {"bad_words": [""]}),
    ("bad_words", {"bad_words": ["x"] * 129}),
    ("logit_bias", {"logit_bias": {ECHO: 1}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": {"1": 101}}),
    ("logit_bias", {"logit_bias": {"1": 1, "01": 1}}),
    ("logit_bias", {"logit_bias": {"9" * 11: 1}}),
    ("logit_bias", {"logit_bias": {str(n): 1 for n in range(1025)}}),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED_CHATS)
def test_what_makes_no_sense_is_refused_by_name(param: str, fields: dict[str, object]) -> None:
    error = refusal(json.dumps({**CHAT, **fields}).encode())
    assert error.param == param
    assert ECHO not in error.message


@pytest.mark.parametrize(
    "fields", [{"best_of": 2}, {"n": 2, "best_of": 1}, {"n": 3, "best_of": 2}]
)
def test_best_of_other_than_n_is_refused(fields: dict[str, object]) -> None:
    body = json.dumps({**COMPLETION, **fields}).encode()
    assert refusal(body, api.parse_completion).param == "best_of"
    assert completion(n=3, best_of=3).num_choices == 3


def test_log_probabilities_of_either_kind() -> None:
    assert chat().num_logprobs is None
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).num_logprobs == 5
    assert completion().num_logprobs is None
    assert completion(logprobs=0).num_logprobs == 0
    assert completion(logprobs=20).num_logprobs == 20


def test_pins_take_exactly_one_kind_of_prefix() -> None:
    assert api.parse_pin(b'{"prompt":"a"}').prompt == "a"
    assert api.parse_pin(b'{"prompt":[1]}').prompt == [1]
    assert api.parse_pin(json.dumps({"messages": [MESSAGE]}).encode()).messages
    for fields, param in (
        ({}, "prompt"),
        ({"prompt": "a", "messages": [MESSAGE]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "a", "ttl_s": 0.5}, "ttl_s"),
        ({"prompt": "a", "ttl_s": 7 * 86400 + 1}, "ttl_s"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"messages": []}, "messages"),
    ):
        assert refusal(json.dumps(fields).encode(), api.parse_pin).param == param


def test_requests_to_abort_are_named() -> None:
    assert api.parse_abort(b'{"request_ids":["a"]}').request_ids == ["a"]
    for request_ids, param in (
        ([], "request_ids"),
        (["a"] * 257, "request_ids"),
        (["a", ECHO], "request_ids[1]"),
        ("a", "request_ids"),
        ([1], "request_ids[0]"),
    ):
        body = json.dumps({"request_ids": request_ids}).encode()
        assert refusal(body, api.parse_abort).param == param


FUZZED = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("0a", max_size=2), inner),
    max_leaves=4,
)


@given(
    fields=st.dictionaries(
        st.sampled_from(
            sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__})
        ),
        FUZZED,
        max_size=4,
    )
)
def test_any_value_of_any_field_is_read_or_refused(fields: dict[str, object]) -> None:
    for parse, base in ((api.parse_chat, CHAT), (api.parse_completion, COMPLETION)):
        with contextlib.suppress(InvalidRequest):
            parse(json.dumps({**base, **fields}).encode())


@pytest.mark.parametrize(
    ("param", "messages"),
    [
        ("messages", []),
        ("messages", [MESSAGE] * 4097),
        ("messages[1].role", [MESSAGE, {"role": ECHO, "content": "x"}]),
        ("messages[0].role", [{"content": "x"}]),
        ("messages[0].content", [{"role": "user"}]),
        ("messages[0].content", [{"role": "user", "content": None}]),
        ("messages[0].content", [{"role": "user", "content": 7}]),
        (
            "messages[0].content[1].text",
            [{**MESSAGE, "content": [{"type": "text"}, {"type": "t", "text": 1}]}],
        ),
        ("messages[0].content[0].type", [{**MESSAGE, "content": [{"text": "x"}]}]),
        ("messages[0].content[0]", [{**MESSAGE, "content": ["x"]}]),
        ("messages[0]", ["x"]),
    ],
)
def test_bad_messages_are_named(param: str, messages: list[object]) -> None:
    error = refusal(json.dumps({**CHAT, "messages": messages}).encode())
    assert error.param == param
    assert ECHO not in error.message


def test_an_assistant_may_have_called_a_tool_and_said_nothing() -> None:
    call: dict[str, object] = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": "{}"},
    }
    messages = [MESSAGE, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert chat(messages=messages).messages[1] == ChatMessage("assistant", tool_calls=[call])


@pytest.mark.parametrize("stop", ["", ["a", ""], ["x"] * 17, "x" * 257, ["\u00e9" * 129]])
def test_bad_stops(stop: object) -> None:
    assert refusal(json.dumps({**CHAT, "stop": stop}).encode()).param == "stop"


def test_stops_in_either_form() -> None:
    assert chat().stop_strings == ()
    assert chat(stop="a").stop_strings == ("a",)
    assert chat(stop=["a", "b"]).stop_strings == ("a", "b")
    assert chat(stop=["\u00e9" * 128] * 16).stop_strings == ("\u00e9" * 128,) * 16


def test_defaults() -> None:
    plain = chat()
    assert (plain.num_choices, plain.max_output_tokens, plain.include_usage) == (1, None, False)
    assert chat(max_tokens=5).max_output_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=6).max_output_tokens == 6
    usage: dict[str, object] = {"include_usage": True, "continuous_usage_stats": True}
    assert chat(stream=True, stream_options=usage).include_usage
    assert chat(stream=True, stream_options=usage).continuous_usage
    assert (plain.is_ephemeral, chat(kv_cache="ephemeral").is_ephemeral) == (False, True)
    assert completion().max_output_tokens == 16
    assert completion(max_tokens=3).max_output_tokens == 3


@pytest.mark.parametrize(
    ("expected", "prompt"),
    [
        (["hi"], "hi"),
        (["a", "b"], ["a", "b"]),
        ([[1, 2**32 - 1]], [1, 2**32 - 1]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_in_every_form(expected: list[object], prompt: object) -> None:
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    ("param", "prompt"),
    [
        ("prompt", ""),
        ("prompt", []),
        ("prompt", None),
        ("prompt", 7),
        ("prompt", ["a", 1]),
        ("prompt", ["a", [1]]),
        ("prompt", [-1]),
        ("prompt", [2**32]),
        ("prompt[0]", [True]),
        ("prompt[0]", [1.0]),
        ("prompt[1]", ["a", ""]),
        ("prompt[0]", [[]]),
        ("prompt[1]", [[1], [-1]]),
        ("prompt[0][0]", [["a"]]),
        ("prompt", ["a"] * 129),
    ],
)
def test_bad_prompts_are_named(param: str, prompt: object) -> None:
    body = json.dumps({**COMPLETION, "prompt": prompt}).encode()
    assert refusal(body, api.parse_completion).param == param


def test_unknown_fields_are_ignored_and_nul_is_text() -> None:
    assert chat(future={"deep": [1, None, "x"]}) == chat()
    assert chat(messages=[{**MESSAGE, "content": "\0"}]).messages[0].content == "\0"


def test_as_deep_as_allowed() -> None:
    api.parse_chat(HEAD + b',"x":' + nested(63) + b"}")


@pytest.mark.parametrize("space", [b"", b" "], ids=["compact", "spaced"])
@pytest.mark.parametrize("known", [True, False], ids=["read", "not read"])
def test_numbers_and_nesting_beyond_what_python_reads_are_refused(
    *, space: bytes, known: bool
) -> None:
    field = b'"seed":' if known else b'"zz":'
    digits = HEAD + b"," + space + field + b"1" * 4301 + b"}"
    assert refusal(digits).code == "invalid_number"
    nested = HEAD + b"," + space + b'"zz":{"a":' + b"1" * 4301 + b"}}"
    assert refusal(nested).code == "invalid_number"
    for depth in range(900, 1100):
        deep = HEAD + b"," + space + field + b"[" * depth + b"1" + b"]" * depth + b"}"
        # In a field that is read, its type is refused first, unless msgspec runs out of stack.
        assert refusal(deep).code in {"too_complex", *(["invalid_request"] if known else [])}


def test_many_brackets_are_not_depth() -> None:
    assert chat(messages=[{**MESSAGE, "content": "[{" * 1000}] * 200).messages[0].content
    assert completion(prompt=[[1]] * 100).prompts == [[1]] * 100


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)
spaces = st.text(" \n\r\t", max_size=2)


def written(
    pairs: list[tuple[str, object]], draw: Callable[[], str], *, ascii_only: bool
) -> bytes:
    """Returns an object as JSON with white space wherever it may be."""
    fields = (
        f"{draw()}{json.dumps(name, ensure_ascii=ascii_only)}{draw()}:{draw()}"
        f"{json.dumps(value, ensure_ascii=ascii_only)}{draw()}"
        for name, value in pairs
    )
    return f"{draw()}{{{','.join(fields)}}}{draw()}".encode()


@given(st.data(), st.dictionaries(st.text(max_size=6), json_values, max_size=4), st.booleans())
def test_a_field_given_twice_is_refused_and_once_is_not(
    data: st.DataObject,
    extra: dict[str, object],
    ascii_only: bool,  # noqa: FBT001
) -> None:
    """However the object is written: spaces, escapes, order."""
    unknown = {name: v for name, v in extra.items() if name not in ACCEPTED_KINDS}
    pairs = data.draw(st.permutations([*CHAT.items(), *unknown.items()]))
    spaced = data.draw(st.booleans())
    once = written(pairs, lambda: data.draw(spaces) if spaced else "", ascii_only=ascii_only)
    assert api.parse_chat(once) == chat()
    again = [*pairs, (data.draw(st.sampled_from(pairs))[0], data.draw(json_values))]
    again = data.draw(st.permutations(again))
    twice = written(again, lambda: data.draw(spaces) if spaced else "", ascii_only=ascii_only)
    # The type of the field may be refused as well; what must not happen is that it passes.
    assert refusal(twice).code in {"duplicate_key", "invalid_request"}


@given(st.data(), st.lists(st.sampled_from(["list", "object"]), max_size=8), st.booleans())
def test_a_key_given_twice_is_refused_at_any_depth(
    data: st.DataObject,
    path: list[str],
    ascii_only: bool,  # noqa: FBT001
) -> None:
    """However deep the object is, and whatever stands around it."""
    name, other = data.draw(st.lists(st.text(max_size=6), min_size=2, max_size=2, unique=True))

    def body(*names: str) -> bytes:
        pairs: list[tuple[str, object]] = [(key, data.draw(json_values)) for key in names]
        text = written(pairs, lambda: data.draw(spaces), ascii_only=ascii_only)
        for kind in path:
            text = b'[1, "a", %b, {}]' % text if kind == "list" else b'{"b":{}, "c" :%b}' % text
        return HEAD + b',"zz":' + text + b"}"

    assert api.parse_chat(body(name, other)) == chat()
    assert refusal(body(name, other, name)).code == "duplicate_key"


@given(st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
def test_junk_is_refused(body: bytes) -> None:
    assert refusal(body).http_status == 400
    assert refusal(body, api.parse_completion).http_status == 400


@given(st.data())
def test_a_damaged_body_is_refused_or_read_as_the_standard_library_reads_it(
    data: st.DataObject,
) -> None:
    body = bytearray(json.dumps({**CHAT, "n": 1, "stop": ["\u00e9"], "x": [1.5, {}]}).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        request = api.parse_chat(bytes(body))
    except InvalidRequest:
        return
    as_read = json.loads(bytes(body))
    assert request.model == as_read["model"]
    assert [m.content for m in request.messages] == [m["content"] for m in as_read["messages"]]


def test_tokenize_takes_exactly_one_kind_of_input() -> None:
    assert api.parse_tokenize(b'{"prompt":""}').prompt == ""
    assert api.parse_tokenize(json.dumps({"messages": [MESSAGE]}).encode()).messages
    for body in (b"{}", json.dumps({"prompt": "a", "messages": [MESSAGE]}).encode()):
        assert refusal(body, api.parse_tokenize).param == "prompt"
    assert refusal(b'{"messages":[]}', api.parse_tokenize).param == "messages"


def test_detokenize_takes_token_ids() -> None:
    assert api.parse_detokenize(b'{"tokens":[1,2]}').tokens == [1, 2]
    assert refusal(b'{"tokens":[-1]}', api.parse_detokenize).param == "tokens"
    assert refusal(b'{"tokens":"a"}', api.parse_detokenize).param == "tokens"


def test_golden_answers(golden: Callable[[str, str], None]) -> None:
    usage = api.Usage(10, 2, 12, api.PromptTokensDetails(8))
    at = 1_700_000_000
    values: list[msgspec.Struct] = [
        api.ChatCompletion(
            id="chatcmpl-1",
            created=at,
            model="m",
            choices=[
                api.ChatChoice(
                    index=0, message=api.AssistantMessage(content="hi"), finish_reason="stop"
                )
            ],
            usage=usage,
        ),
        api.ChatChunk(
            id="chatcmpl-1",
            created=at,
            model="m",
            choices=[
                api.ChatChunkChoice(index=0, delta=api.ChatDelta(role="assistant", content=""))
            ],
        ),
        api.ChatChunk(
            id="chatcmpl-1",
            created=at,
            model="m",
            choices=[api.ChatChunkChoice(index=0, delta=api.ChatDelta(), finish_reason="length")],
            usage=None,
        ),
        api.ChatChunk(id="chatcmpl-1", created=at, model="m", choices=[], usage=usage),
        api.Completion(
            id="chatcmpl-1",
            created=at,
            model="m",
            choices=[api.CompletionChoice(index=0, text="hi")],
            usage=usage,
        ),
        api.ModelList(data=[api.ModelCard(id="m", created=1, max_model_len=8192)]),
    ]
    golden("answers.txt", "".join(api.sse(api.encode(value)).decode() for value in values))


def load_report() -> api.LoadReport:
    return api.LoadReport(
        boot_id="b",
        model="m",
        block_size=16,
        hash_scheme="kvway-1",
        state="ready",
        num_running=1,
        num_waiting=2,
        waiting_uncached_tokens=3,
        blocks=api.BlockCounts(1, 2, 3),
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.01,
        max_model_len=8192,
        max_num_seqs=32,
        kv_events=api.KvEventsInfo(1, 2, "t"),
        kv_dtype="int8",
        attention=api.AttentionInfo("compiled", "there is a compiler", "on"),
    )


def test_a_load_report_survives_the_wire() -> None:
    report = load_report()
    assert msgspec.json.decode(api.encode(report), type=api.LoadReport) == report


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_waiting", -1),
        ("waiting_uncached_tokens", 10**400),
        ("block_size", 2**49),
        ("decode_step_s", -0.1),
        ("prefill_tokens_per_s", 1e300),
        ("blocks", {"free": 0, "cached": 0, "total": 10**400}),
        ("blocks", {"free": -1, "cached": 0, "total": 1}),
        ("kv_events", {"pub_port": -1, "replay_port": 2, "topic": ""}),
        ("kv_events", {"pub_port": 1, "replay_port": 65_536, "topic": ""}),
        ("boot_id", "b" * 1025),
    ],
)
def test_a_load_report_out_of_all_bounds_is_refused(field: str, value: object) -> None:
    fields = msgspec.to_builtins(load_report()) | {field: value}
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.json.decode(json.dumps(fields), type=api.LoadReport)
