"""Messages of the API as chat templates expect them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from kvway_core.api import ChatMessage, ContentPart
from kvway_core.errors import InvalidRequest
from kvway_core.strict_json import plain_name

IMAGE_PART: Final = "image_url"
"""What the API calls an image among the parts of a content."""


def plain_message(
    index: int, message: ChatMessage, *, parts_allowed: bool, images_allowed: bool = False
) -> dict[str, object]:
    """Returns a message as the template sees it: what is null is left out.

    Args:
        index: Its place in the conversation.
        message: The message.
        parts_allowed: Whether the template takes a list of parts.
        images_allowed: Whether it has a place for images among them.

    Raises:
        InvalidRequest: A part is neither text nor, where it may be, an image.
    """
    plain: dict[str, object] = {"role": message.role}
    if isinstance(message.content, str):
        plain["content"] = message.content
    elif message.content is not None:
        if parts_allowed:
            plain["content"] = [
                {"type": "image"}
                if images_allowed and part.type == IMAGE_PART
                else {"type": "text", "text": _text_of(index, part)}
                for part in message.content
            ]
        else:
            plain["content"] = "\n".join(_text_of(index, part) for part in message.content)
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls is not None:
        plain["tool_calls"] = [_plain_tool_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _text_of(index: int, part: ContentPart) -> str:
    """Returns the text of a part.

    Raises:
        InvalidRequest: If it is not a text part.
    """
    param = f"messages[{index}].content"
    if part.type != "text":
        kind = plain_name(part.type) or "this"
        raise InvalidRequest(
            f"{param}: parts of type {kind} are not supported, only text.", param=param
        )
    if part.text is None:
        raise InvalidRequest(f"{param}: a text part needs text.", param=param)
    return part.text


def _plain_tool_call(call: Mapping[str, object]) -> dict[str, object]:
    """Returns a tool call with its arguments as an object, which is what templates expect.

    The API has them as JSON text; text that is no JSON object stays as it is.
    """
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = msgspec.json.decode(function["arguments"], type=dict[str, object])
    except (ValueError, RecursionError):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}
