"""What is not supported is found by name, and what asks for nothing is no reason to refuse."""

from __future__ import annotations

import json

import pytest

from kvway_core import api

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SUPPORTED = frozenset({"model", "messages", "n"})


def unsupported(text: str) -> str | None:
    """The field that a body with this text in it is refused for."""
    body = json.dumps(CHAT)[:-1] + f",{text}}}"
    error = api.unsupported_fields(body.encode(), SUPPORTED)
    return None if error is None else error.param


@pytest.mark.parametrize(
    "text",
    [
        '"n":3',
        '"seed":null',
        '"tools":[ ]',
        '"tools": \n[]',
        '"functions":[],"function_call":"none"',
        '"documents":[]',
        '"logits_processors":[]',
        '"tool_choice":"n\\u006fne"',
        '"best_of":1.0',
        '"echo":false',
        '"top_logprobs":-0.0',
        '"use_beam_search":false',
        '"length_penalty":1',
        '"length_penalty":1e0',
        '"parallel_tool_calls":true',
        '"parallel_tool_calls":false',
        '"modalities":["text"]',
        '"structured_outputs":{ }',
        '"suffix":""',
        '"response_format":{ "type" : "te\\u0078t" }',
    ],
)
def test_what_asks_for_nothing_is_no_reason_to_refuse(text: str) -> None:
    """However it is spelled."""
    assert unsupported(text) is None


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('"future":1', "future"),
        ('"presence_penalty":0.5', "presence_penalty"),
        ('"response_format":{"type":"json_object"}', "response_format"),
        ('"response_format":{"type":"text","x":1}', "response_format"),
        ('"best_of":true', "best_of"),
        ('"echo":0', "echo"),
        ('"use_beam_search":true', "use_beam_search"),
        ('"length_penalty":1.1', "length_penalty"),
        ('"parallel_tool_calls":1', "parallel_tool_calls"),
        ('"modalities":["text","audio"]', "modalities"),
        ('"modalities":[]', "modalities"),
        ('"structured_outputs":{"json":{}}', "structured_outputs"),
        ('"tools":[{}]', "tools"),
        ('"documents":{}', "documents"),
        ('"seed":[]', "seed"),
    ],
)
def test_what_asks_for_something_is_named(text: str, param: str) -> None:
    """A value of another type asks for something."""
    assert unsupported(text) == param


def test_a_strange_name_is_not_repeated() -> None:
    for body in (
        b'{"\\u001b[31m":1}',
        b'{"messages":[{"role":"user","content":"","\\u001b[31m":1}]}',
    ):
        error = api.unsupported_fields(body, SUPPORTED) or api.unsupported_in_messages(body)
        assert error is not None
        assert "\x1b" not in error.message + str(error.param)


def in_messages(*messages: object) -> str | None:
    """What the messages are refused for."""
    error = api.unsupported_in_messages(json.dumps({"messages": messages}).encode())
    assert error is None or error.code == "unsupported_parameter"
    return None if error is None else error.param


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PART = {"type": "text", "text": "hi"}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "hi", "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "x", "tool_call_id": "c"},
        {"role": "user", "content": [PART, PART]},
        {"role": "assistant", "content": "x", "refusal": None, "audio": None, "annotations": []},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        {"role": "user", "content": "[not a list"},
    ],
)
def test_messages_of_openais_form_are_taken(message: object) -> None:
    """Also what its clients send back of an answer; other kinds of parts are refused elsewhere."""
    assert in_messages(message) is None


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "hi", "foo": 1}, "messages[1].foo"),
        ({"role": "assistant", "content": "", "annotations": [1]}, "messages[1].annotations"),
        (
            {"role": "user", "content": [PART, {**PART, "cache_control": {}}]},
            "messages[1].content[1].cache_control",
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "index": 0}]},
            "messages[1].tool_calls[0].index",
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "x": 1}}]},
            "messages[1].tool_calls[0].function.x",
        ),
    ],
)
def test_an_unknown_field_inside_of_messages_is_named(message: object, param: str) -> None:
    """With the place where it stands."""
    assert in_messages({"role": "user", "content": "ok"}, message) == param


def test_without_messages_there_is_nothing_to_refuse() -> None:
    assert api.unsupported_in_messages(b'{"messages":null}') is None
    assert api.unsupported_in_messages(b"{}") is None
