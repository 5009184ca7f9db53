"""Requests of a file as prompts, with what an endless cache would have held of each.

With a model the prompt is what its template and tokenizer make of it. Without one, messages are
put one behind the other under plain headings, and a token is reckoned to be four characters: where
two prompts part is exact, the tokens are about right.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from kvway_core.api import parse_chat, parse_completion
from kvway_core.blocks import Namespace, block_hashes
from kvway_core.errors import RequestError
from kvway_core.prompting import read_prompts
from kvway_core.prompts import PromptEncoder
from kvway_router.prefixes.seen import SeenPrompt, locate_parts, message_texts

CHARS_PER_TOKEN: Final = 4
_MIX: Final = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F], np.uint32)


@dataclass(frozen=True, eq=False)
class CheckedPrompt:
    """One prompt of the file.

    Attributes:
        seen: As the finder takes it.
        tokens: Its tokens.
        hashes: Its block hashes.
    """

    seen: SeenPrompt
    tokens: Sequence[int]
    hashes: Sequence[bytes]


class Prompter(Protocol):
    """Makes text and tokens of requests."""

    def render(self, body: dict[str, Any]) -> str:
        """Returns the text of a request.

        Raises:
            ValueError: It cannot be rendered; says why.
        """
        ...

    def encode(self, text: str) -> Sequence[int]:
        """Returns the tokens of a text."""
        ...


class PlainPrompter:
    """Without a model: plain headings, four characters a token."""

    def render(self, body: dict[str, Any]) -> str:
        """Returns tools, then messages; or the prompt as it is."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return prompt
        messages = body.get("messages")
        if not isinstance(messages, list):
            raise ValueError("neither messages nor a prompt of text")  # noqa: TRY004  of the file
        pieces = []
        if body.get("tools"):
            pieces.append(f"<tools>\n{json.dumps(body['tools'], ensure_ascii=False)}\n")
        for message in messages:
            if not isinstance(message, dict):
                raise ValueError("a message is not an object")  # noqa: TRY004  of the file
            ((role, texts),) = message_texts([message])
            calls = message.get("tool_calls")
            said = "".join(texts) + (json.dumps(calls, ensure_ascii=False) if calls else "")
            pieces.append(f"<{role}>\n{said}\n")
        return "".join(pieces) + "<assistant>\n"

    def encode(self, text: str) -> Sequence[int]:
        """Returns a number for each four characters: alike where the text is."""
        units = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        whole = units[: len(units) // CHARS_PER_TOKEN * CHARS_PER_TOKEN]
        tokens = (whole.reshape(-1, CHARS_PER_TOKEN) * _MIX).sum(axis=1, dtype=np.uint32)
        rest = units[len(whole) :]
        last = [int((rest * _MIX[: len(rest)]).sum(dtype=np.uint32))] if len(rest) else []
        return [*tokens.tolist(), *last]


class ModelPrompter:
    """With a model's template and tokenizer."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder

    def render(self, body: dict[str, Any]) -> str:
        """Returns what the model sees."""
        data = msgspec.json.encode(body)
        try:
            request = parse_chat(data) if "messages" in body else parse_completion(data)
            reader = read_prompts(request, self._encoder, max_model_len=None)[0]
        except RequestError as exc:
            raise ValueError(str(exc)) from exc
        text = reader.text
        if text is None:  # nothing to look into
            raise ValueError("the prompt is given as tokens, or truncated")
        return text

    def encode(self, text: str) -> Sequence[int]:
        """Returns the tokens of a text."""
        return self._encoder.encode_text(text, add_special_tokens=False)


class EndlessCache:
    """What would be cached if nothing were ever evicted."""

    def __init__(self, prompter: Prompter, *, block_size: int) -> None:
        self.block_size = block_size
        self._prompter = prompter
        self._held: set[bytes] = set()

    def take(self, ref: str, body: dict[str, Any]) -> CheckedPrompt:
        """Returns a request's prompt and what was held of it; holds it from now on.

        Raises:
            ValueError: It cannot be rendered.
        """
        text = self._prompter.render(body)
        tokens = self._prompter.encode(text)
        name = str(body.get("model") or "")
        root = Namespace(name, self.block_size).root()
        hashes = block_hashes(tokens, parent=root, block_size=self.block_size)
        num_held = next((n for n, h in enumerate(hashes) if h not in self._held), len(hashes))
        self._held.update(hashes)
        data = text.encode("utf-8", "surrogatepass")
        messages = body.get("messages")
        parts = locate_parts(data, message_texts(messages)) if isinstance(messages, list) else []
        seen = SeenPrompt(
            ref=ref,
            namespace=name,
            data=data,
            parts=tuple(parts),
            num_tokens=len(tokens),
            hit_tokens=num_held * self.block_size,
            has_tools=bool(body.get("tools")),
        )
        return CheckedPrompt(seen, tokens, hashes)

    def count_tokens(self, text: str) -> int:
        """Returns how many tokens a text has."""
        return len(self._prompter.encode(text))
