"""A prompt as the finder remembers it: its text, where its messages are, and its anchors.

An anchor is a place that the text itself chooses: where eight bytes hash to a number that ends in
zero bits. Its key is a hash of the 32 bytes from there. So a passage has the same anchors wherever
it stands, and a few hundred of them tell which earlier prompt has the same passages (winnowing, as
for finding copied documents: Schleimer, Wilkerson, Aiken 2003; here the choice is by value alone,
so that it is a few operations on whole arrays).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Places = NDArray[np.int64]

ANCHOR_BYTES: Final = 32
MAX_ANCHORS: Final = 1024
ANCHORED_BYTES: Final = 256 * 1024
"""Anchors are taken from so much of a text; what agrees there is followed to its end."""

_WORD_BYTES: Final = 8
_FEWEST_ZERO_BITS: Final = 4
_MOST_ZERO_BITS: Final = 16
_C1: Final = np.uint64(0x9E3779B97F4A7C15)
_C2: Final = np.uint64(0xBF58476D1CE4E5B9)
_NO_ANCHORS: Final = (np.empty(0, np.uint64), np.empty(0, np.int64))

TOOLS: Final = "tools"
TEMPLATE: Final = "template"
PROMPT: Final = "prompt"


class Part(NamedTuple):
    """A message's content in the text of the prompt: bytes from `begin` to `end`."""

    begin: int
    end: int
    message: int
    role: str


class Place(NamedTuple):
    """Where something is: which message, and how many characters into its content.

    Between messages the role is "tools" if the request has tools, else "template", and of a prompt
    without messages "prompt"; the message is None, and the characters count from the front of the
    prompt.
    """

    message: int | None
    role: str
    char: int


@dataclass(frozen=True, eq=False)
class SeenPrompt:
    """One prompt.

    Attributes:
        ref: Names its request: an id, or a line of a file.
        namespace: Only prompts of one namespace can share anything.
        data: Its text, UTF-8.
        parts: Where its messages are, in order.
        num_tokens: How many tokens it has.
        hit_tokens: How many leading ones could be reused.
        has_tools: Whether the request lists tools.
        ttft_s: Its time to first token, None if nobody knows.
        token_s: Seconds of prefill that one more token takes there; None likewise.
    """

    ref: str
    namespace: str
    data: bytes
    parts: Sequence[Part]
    num_tokens: int
    hit_tokens: int
    has_tools: bool = False
    ttft_s: float | None = None
    token_s: float | None = None

    @property
    def tokens_per_byte(self) -> float:
        """How many tokens a byte is, on average."""
        return self.num_tokens / max(1, len(self.data))

    @property
    def hit_bytes(self) -> int:
        """About how many leading bytes could be reused."""
        return round(self.hit_tokens / self.tokens_per_byte) if self.num_tokens else 0

    @cached_property
    def array(self) -> NDArray[np.uint8]:
        """The text as numbers."""
        return np.frombuffer(self.data, np.uint8)

    @cached_property
    def anchors(self) -> tuple[Keys, Places]:
        """Keys in order of size, and where each is first."""
        return find_anchors(self.data[:ANCHORED_BYTES])

    @cached_property
    def message_keys(self) -> tuple[int, ...]:
        """What each message says, as a number."""
        return tuple(hash((p.role, self.data[p.begin : p.end])) for p in self.parts)

    def place(self, at: int) -> Place:
        """Returns where a byte of the text is."""
        for part in self.parts:
            if part.begin <= at <= part.end:
                chars = len(self.data[part.begin : at].decode("utf-8", "ignore"))
                return Place(part.message, part.role, chars)
        role = TOOLS if self.has_tools else TEMPLATE if self.parts else PROMPT
        return Place(None, role, len(self.data[:at].decode("utf-8", "ignore")))


def find_anchors(data: bytes) -> tuple[Keys, Places]:
    """Returns the anchors of a text: keys in order of size, and where each is first.

    Long texts keep fewer: those whose hash ends in more zero bits, which any text would keep.
    """
    num_words = len(data) - _WORD_BYTES + 1
    if num_words < ANCHOR_BYTES:
        return _NO_ANCHORS
    words = np.empty(num_words, np.uint64)
    for shift in range(_WORD_BYTES):
        num = (len(data) - shift) // _WORD_BYTES
        words[shift::_WORD_BYTES] = np.frombuffer(data, "<u8", count=num, offset=shift)
    rank = (words * _C1) >> np.uint64(64 - _MOST_ZERO_BITS)
    last = num_words - (ANCHOR_BYTES - _WORD_BYTES)
    zero_bits = _FEWEST_ZERO_BITS
    at = np.flatnonzero((rank[:last] & np.uint64((1 << zero_bits) - 1)) == 0)
    while len(at) > MAX_ANCHORS and zero_bits < _MOST_ZERO_BITS:
        zero_bits += 1
        at = at[(rank[at] & np.uint64((1 << zero_bits) - 1)) == 0]
    keys = words[at]
    for offset in range(_WORD_BYTES, ANCHOR_BYTES, _WORD_BYTES):
        keys = (keys ^ (keys >> np.uint64(29))) * _C2 + words[at + offset]
    keys, first = np.unique((keys ^ (keys >> np.uint64(32))) * _C1, return_index=True)
    return keys, at[first].astype(np.int64)


def locate_parts(data: bytes, messages: Iterable[tuple[str, Sequence[str]]]) -> list[Part]:
    """Returns where the contents of messages are in the text that a template made of them.

    Args:
        data: The text, UTF-8.
        messages: Role and texts of each message. One that the template changed is left out.
    """
    parts, at = [], 0
    for number, (role, texts) in enumerate(messages):
        begin, end = None, at
        for text in texts:
            content = text.encode("utf-8", "surrogatepass")
            found = data.find(content, end) if content else -1
            if found < 0:  # many templates strip
                content = content.strip()
                found = data.find(content, end) if content else -1
            if found < 0:
                continue
            begin = found if begin is None else begin
            end = found + len(content)
        if begin is not None:
            parts.append(Part(begin, end, number, role))
            at = end
    return parts


def message_texts(messages: Iterable[Mapping[str, object]]) -> list[tuple[str, list[str]]]:
    """Returns role and texts of messages as the API has them."""
    found = []
    for message in messages:
        content = message.get("content")
        texts = [content] if isinstance(content, str) else []
        if isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, dict)]
            texts = [text for text in parts if isinstance(text, str)]
        found.append((str(message.get("role", "")), texts))
    return found
