"""What a request asks for that a server does not do: found by name, so that nothing is ignored.

A value that asks for nothing is no reason to refuse its field: null, and what `NEUTRAL` lists.
Values count as what they say, not as they are spelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from kvway_core.errors import InvalidRequest
from kvway_core.strict_json import plain_name, top_level_fields

NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "best_of": (1,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (False, True),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}
"""Values that ask for nothing. `parallel_tool_calls` is about `tools`, which has none then."""

_NEUTRAL_IN_MESSAGE: Final[Mapping[str, tuple[object, ...]]] = {"annotations": ([],)}
"""What OpenAI's answers have besides, when clients send them back."""

_MESSAGE: Final = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
_PART: Final = frozenset({"type", "text"})
_TOOL_CALL: Final = frozenset({"id", "type", "function"})
_FUNCTION: Final = frozenset({"name", "arguments"})

_MESSAGES: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


def unsupported_fields(body: bytes, supported: frozenset[str]) -> InvalidRequest | None:
    """Returns the refusal of the first field that asks for something outside `supported`.

    Raises:
        InvalidRequest: If the body is not a JSON object.
    """
    return _refusal(top_level_fields(body), supported, NEUTRAL, within="")


def unsupported_in_messages(body: bytes) -> InvalidRequest | None:
    """Returns the refusal of the first field inside `messages` that is none of OpenAI's form.

    That is role, content, name, tool_calls and tool_call_id; of text parts, type and text; of tool
    calls, id, type and function with name and arguments. Parts of other types are refused whole,
    for their type, by whoever reads them.

    Raises:
        InvalidRequest: If the body is not a JSON object.

    Complexity:
        O(body); texts are not decoded.
    """
    raw = top_level_fields(body).get("messages")
    if raw is None or bytes(raw) == b"null":
        return None
    refusals = (
        refusal
        for index, message in enumerate(_MESSAGES.decode(raw))
        for refusal in _in_message(message, f"messages[{index}]")
    )
    return next((refusal for refusal in refusals if refusal is not None), None)


def _in_message(message: Mapping[str, msgspec.Raw], where: str) -> Iterator[InvalidRequest | None]:
    """Yields what there is to refuse in a message, None where there is nothing."""
    yield _refusal(message, _MESSAGE, _NEUTRAL_IN_MESSAGE, within=where)
    for at, part in _objects(message.get("content"), f"{where}.content"):
        if part.get("type") == "text":
            yield _refusal(part, _PART, {}, within=at)
    for at, call in _objects(message.get("tool_calls"), f"{where}.tool_calls"):
        yield _refusal(call, _TOOL_CALL, {}, within=at)
        function = call.get("function")
        if isinstance(function, dict):
            yield _refusal(function, _FUNCTION, {}, within=f"{at}.function")


def _objects(raw: msgspec.Raw | None, where: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields the objects of a list, each with its name; nothing for a value that is no list."""
    if raw is None or bytes(memoryview(raw)[:1]) != b"[":
        return
    for index, value in enumerate(msgspec.json.decode(raw)):
        if isinstance(value, dict):
            yield f"{where}[{index}]", value


def _refusal(
    fields: Mapping[str, object],
    supported: frozenset[str],
    neutral: Mapping[str, tuple[object, ...]],
    *,
    within: str,
) -> InvalidRequest | None:
    """Returns the refusal of the first field that asks for something outside `supported`.

    Args:
        fields: An object of the body, values decoded or not.
        supported: Names that may have any value.
        neutral: Values that ask for nothing, by name.
        within: What the object is called, "" for the body.
    """
    for name, value in fields.items():
        if name in supported or _asks_for_nothing(value, neutral.get(name, ())):
            continue
        plain = plain_name(name)
        param = f"{within}.{plain}" if within and plain else plain or within or None
        what = f"A field of {within or 'the body'}" if plain is None else param
        return InvalidRequest(
            f"{what} is not supported by this server.", param=param, code="unsupported_parameter"
        )
    return None


def _asks_for_nothing(value: object, neutral: tuple[object, ...]) -> bool:
    """Says whether a value is null or one of `neutral`."""
    decoded = msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value
    return decoded is None or any(_is_same(decoded, other) for other in neutral)


def _is_same(value: object, other: object) -> bool:
    """Compares JSON values: 0 is 0.0, and no number is true or false."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
