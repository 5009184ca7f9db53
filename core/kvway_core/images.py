r"""Images in a conversation: what names their content, and where each is in the rendered text.

The template writes a placeholder for an image, as it does in transformers, and an engine puts as
many tokens in its place as its vision model makes of the image. Nothing is fetched here: an image
is named by what the client sent, so a link stands for whatever is behind it.

    text     ...<|im_start|>user\n<image>What is this?...
    without  ...<|im_start|>user\n\0What is this?...
                                  ^ there the image begins
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec
import xxhash

from kvway_core.chat_messages import IMAGE_PART
from kvway_core.errors import InvalidRequest
from kvway_core.requests import ChatMessage, ContentPart

MAX_IMAGES: Final = 64
"""Images of one request: each costs a rendering of its conversation."""

_NO_IMAGE: Final = ContentPart("text", text="\0")


class PlacedImage(NamedTuple):
    """An image in a rendered text.

    Attributes:
        place: Characters before it, or fewer: never more.
        content: Names what is in it: 16 bytes.
    """

    place: int
    content: bytes


class _ImageURL(msgspec.Struct):
    url: str
    detail: str | None = None


def images_of(
    messages: Sequence[ChatMessage], text: str, render: Callable[[Sequence[ChatMessage]], str]
) -> list[PlacedImage]:
    """Returns the images of a conversation, in order.

    An image begins where the text would differ without it. What else a template writes because
    there is an image comes before that then, and moves its place to there.

    Args:
        messages: The conversation.
        text: As the template renders it.
        render: Renders another one in the same way.

    Raises:
        InvalidRequest: An image has no URL, or there are too many.
    """
    found: list[PlacedImage] = []
    for index, message in enumerate(messages):
        parts = message.content if isinstance(message.content, list) else ()
        for number, part in enumerate(parts):
            if part.type != IMAGE_PART:
                continue
            if len(found) == MAX_IMAGES:
                raise InvalidRequest(
                    f"messages may have {MAX_IMAGES} images together.", param="messages"
                )
            others = [*parts[:number], _NO_IMAGE, *parts[number + 1 :]]
            without = [*messages]
            without[index] = msgspec.structs.replace(message, content=others)
            content = _content_of(part, f"messages[{index}].content[{number}]")
            found.append(PlacedImage(_num_common(text, render(without)), content))
    return found


def _content_of(part: ContentPart, name: str) -> bytes:
    """Returns what names the content of an image.

    Raises:
        InvalidRequest: It has no URL.
    """
    try:
        image = msgspec.convert(part.image_url, _ImageURL)
    except msgspec.ValidationError:
        param = f"{name}.image_url"
        raise InvalidRequest(f"{param}: an image needs a url.", param=param) from None
    named = "\0".join((image.detail or "auto", image.url))
    return xxhash.xxh3_128_digest(named.encode("utf-8", "surrogatepass"))


def _num_common(one: str, other: str) -> int:
    """Counts the leading characters that two texts agree on."""
    agree, differ = 0, min(len(one), len(other))
    while agree < differ:
        middle = (agree + differ + 1) // 2
        if one.startswith(other[agree:middle], agree):
            agree = middle
        else:
            differ = middle - 1
    return agree
