"""How an answer is written: chat or completion, whole or in events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from kvway_core.api import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    Completion,
    CompletionChoice,
    FinishReason,
    Usage,
)


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer, complete."""

    text: str
    finish_reason: FinishReason


class Shape(Protocol):
    """Writes the answers to one request."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> msgspec.Struct:
        """Return the answer that is sent at once."""
        ...

    def opening(self, index: int) -> msgspec.Struct | None:
        """Return the event before the first text of an answer; None if there is none."""
        ...

    def chunk(self, index: int, text: str, finish_reason: FinishReason | None) -> msgspec.Struct:
        """Return the event that adds text to an answer, or ends it."""
        ...

    def closing(self, usage: Usage) -> msgspec.Struct:
        """Return the event without choices that tells the usage."""
        ...


class _ChatCompletion(ChatCompletion, frozen=True, kw_only=True):
    system_fingerprint: str


class _ChatChunk(ChatChunk, frozen=True, kw_only=True):
    system_fingerprint: str


class _Completion(Completion, frozen=True, kw_only=True):
    system_fingerprint: str


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Writes chat completions; with `include_usage` events have a usage, null until the last."""

    request_id: str
    created: int
    model: str
    fingerprint: str
    include_usage: bool

    def whole(self, choices: Sequence[Choice], usage: Usage) -> msgspec.Struct:
        """Return a chat.completion."""
        return _ChatCompletion(
            id=self.request_id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=[
                ChatChoice(
                    index=index,
                    message=AssistantMessage(content=choice.text),
                    finish_reason=choice.finish_reason,
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage,
        )

    def opening(self, index: int) -> msgspec.Struct | None:
        """Return the chunk that names the role."""
        return self._chunk([_delta(index, ChatDelta(role="assistant", content=""), None)])

    def chunk(self, index: int, text: str, finish_reason: FinishReason | None) -> msgspec.Struct:
        """Return a chunk with text, or the last one of its choice."""
        delta = ChatDelta(content=text) if text else ChatDelta()
        return self._chunk([_delta(index, delta, finish_reason)])

    def closing(self, usage: Usage) -> msgspec.Struct:
        """Return the chunk with the usage."""
        return self._chunk([], usage=usage)

    def _chunk(self, choices: list[ChatChunkChoice], *, usage: Usage | None = None) -> _ChatChunk:
        return _ChatChunk(
            id=self.request_id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=choices,
            usage=_usage_field(usage, include=self.include_usage),
        )


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """Writes text completions; with `include_usage` events have a usage, null until the last."""

    request_id: str
    created: int
    model: str
    fingerprint: str
    include_usage: bool

    def whole(self, choices: Sequence[Choice], usage: Usage) -> msgspec.Struct:
        """Return a text_completion."""
        return self._completion(
            [
                CompletionChoice(index=index, text=choice.text, finish_reason=choice.finish_reason)
                for index, choice in enumerate(choices)
            ],
            usage=usage,
        )

    def opening(self, index: int) -> msgspec.Struct | None:
        """Return None: a completion begins with its text."""
        del index
        return None

    def chunk(self, index: int, text: str, finish_reason: FinishReason | None) -> msgspec.Struct:
        """Return an event with text, or the last one of its choice."""
        choice = CompletionChoice(index=index, text=text, finish_reason=finish_reason)
        return self._completion([choice], usage=_usage_field(None, include=self.include_usage))

    def closing(self, usage: Usage) -> msgspec.Struct:
        """Return the event with the usage."""
        return self._completion([], usage=usage)

    def _completion(
        self, choices: list[CompletionChoice], *, usage: Usage | UnsetType | None
    ) -> _Completion:
        return _Completion(
            id=self.request_id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=choices,
            usage=usage,
        )


def _delta(index: int, delta: ChatDelta, finish_reason: FinishReason | None) -> ChatChunkChoice:
    return ChatChunkChoice(index=index, delta=delta, finish_reason=finish_reason)


def _usage_field(usage: Usage | None, *, include: bool) -> Usage | UnsetType | None:
    return usage if include else UNSET
