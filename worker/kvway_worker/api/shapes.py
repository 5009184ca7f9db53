"""How an answer is written: chat or completion, whole or in events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishReason,
    PromptLogprobs,
    Usage,
)
from kvway_core.prompts import PromptEncoder
from kvway_worker.api.jobs import Extras, Job
from kvway_worker.api.logprobs import ChatWriter, CompletionWriter, TokenNames, prompt_logprobs
from kvway_worker.scheduling.sampling_params import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Part:
    """An answer, or what follows of it.

    Attributes:
        index: Which of the request's answers.
        text: Its text.
        token_ids: Its tokens; they may be ahead of the text.
        logprobs: Of these tokens, if asked for.
        finish_reason: Why it ended; None while it goes on.
        stop_reason: The stop string or token that ended it.
        prompt_logprobs: Of the prompt's tokens from the second on, if asked for.
        is_first: Whether it is the beginning of the answer.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: tuple[TokenLogprobs, ...]
    is_first: bool


@dataclass(frozen=True, slots=True)
class Head:
    """What every part of an answer says, and what the request wants to be told.

    Attributes:
        job: The request.
        created: Unix seconds.
        model: Served model name.
        fingerprint: The `system_fingerprint`.
        encoder: The model's, for the names of tokens.
    """

    job: Job
    created: int
    model: str
    fingerprint: str
    encoder: PromptEncoder

    @property
    def extras(self) -> Extras:
        """What is told besides the text."""
        return self.job.extras

    @property
    def names(self) -> TokenNames:
        """How tokens are called."""
        return TokenNames(self.encoder, as_ids=self.extras.tokens_as_ids)

    def prompt_ids(self, index: int) -> list[int] | UnsetType:
        """Return the tokens of an answer's prompt, if asked for."""
        if not self.extras.token_ids:
            return UNSET
        return self.job.sequences[index].prompt_token_ids

    def token_ids(self, part: Part) -> list[int] | UnsetType:
        """Return the tokens of an answer, if asked for."""
        return list(part.token_ids) if self.extras.token_ids else UNSET

    def prompt_logprobs(self, part: Part) -> PromptLogprobs | UnsetType:
        """Return the log probabilities of an answer's prompt, if asked for."""
        num_top = self.extras.prompt_logprobs
        if num_top is None:
            return UNSET
        return prompt_logprobs(part.prompt_logprobs, self.names, num_top=num_top)

    def usage(self, usage: Usage) -> Usage | UnsetType | None:
        """Return the usage of an event that has an answer's part."""
        if not self.job.include_usage:
            return UNSET
        return usage if self.job.continuous_usage else None


class Shape(Protocol):
    """Writes the answers to one request."""

    def whole(self, parts: Sequence[Part], usage: Usage) -> msgspec.Struct:
        """Return the answer that is sent at once."""
        ...

    def opening(self, index: int, usage: Usage) -> msgspec.Struct | None:
        """Return the event before the first text of an answer; None if there is none."""
        ...

    def chunk(self, part: Part, usage: Usage) -> msgspec.Struct:
        """Return the event that adds a part to an answer, or ends it."""
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

    head: Head

    def whole(self, parts: Sequence[Part], usage: Usage) -> msgspec.Struct:
        """Return a chat.completion."""
        return _ChatCompletion(
            id=self.head.job.answer_id,
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.fingerprint,
            choices=[
                ChatChoice(
                    index=part.index,
                    message=AssistantMessage(content=part.text),
                    logprobs=self._logprobs(part),
                    finish_reason=_ended(part.finish_reason),
                    stop_reason=part.stop_reason,
                    token_ids=self.head.token_ids(part),
                )
                for part in parts
            ],
            usage=usage,
            prompt_logprobs=self.head.prompt_logprobs(parts[0]),
            prompt_token_ids=self.head.prompt_ids(0),
        )

    def opening(self, index: int, usage: Usage) -> msgspec.Struct | None:
        """Return the chunk that names the role."""
        choice = ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
        ids = self.head.prompt_ids(0) if index == 0 else UNSET
        return self._chunk([choice], usage=self.head.usage(usage), prompt_token_ids=ids)

    def chunk(self, part: Part, usage: Usage) -> msgspec.Struct:
        """Return a chunk with a part, or the last one of its choice."""
        choice = ChatChunkChoice(
            index=part.index,
            delta=ChatDelta(content=part.text) if part.text else ChatDelta(),
            logprobs=self._logprobs(part),
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
            token_ids=self.head.token_ids(part),
        )
        return self._chunk([choice], usage=self.head.usage(usage))

    def closing(self, usage: Usage) -> msgspec.Struct:
        """Return the chunk with the usage."""
        return self._chunk([], usage=usage)

    def _logprobs(self, part: Part) -> ChatLogprobs | None:
        if self.head.extras.logprobs is None:
            return None
        return ChatWriter(self.head.names).write(part.logprobs)

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        *,
        usage: Usage | UnsetType | None,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> _ChatChunk:
        return _ChatChunk(
            id=self.head.job.answer_id,
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.fingerprint,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """Writes text completions; with `include_usage` events have a usage, null until the last."""

    head: Head
    _writers: dict[int, CompletionWriter] = field(default_factory=dict)

    def whole(self, parts: Sequence[Part], usage: Usage) -> msgspec.Struct:
        """Return a text_completion."""
        return self._completion([self._choice(part) for part in parts], usage=usage)

    def opening(self, index: int, usage: Usage) -> msgspec.Struct | None:
        """Return None: a completion begins with its text."""
        del index, usage
        return None

    def chunk(self, part: Part, usage: Usage) -> msgspec.Struct:
        """Return an event with a part, or the last one of its choice."""
        return self._completion([self._choice(part)], usage=self.head.usage(usage))

    def closing(self, usage: Usage) -> msgspec.Struct:
        """Return the event with the usage."""
        return self._completion([], usage=usage)

    def _choice(self, part: Part) -> CompletionChoice:
        prompt = part.index // self.head.job.num_choices
        return CompletionChoice(
            index=part.index,
            text=(self.head.job.echoes[prompt] if part.is_first else "") + part.text,
            logprobs=self._logprobs(part),
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
            prompt_logprobs=self.head.prompt_logprobs(part),
            prompt_token_ids=self.head.prompt_ids(part.index) if part.is_first else UNSET,
            token_ids=self.head.token_ids(part),
        )

    def _logprobs(self, part: Part) -> CompletionLogprobs | None:
        num_top = self.head.extras.logprobs
        if num_top is None:
            return None
        writer = self._writers.get(part.index)
        if writer is None:
            skip = self.head.job.rules.skip_special_tokens
            writer = CompletionWriter(self.head.names, skip_special_tokens=skip, num_top=num_top)
            self._writers[part.index] = writer
        if not (self.head.extras.echo and part.is_first):
            return writer.write(part.logprobs)
        first_token_id = self.head.job.sequences[part.index].token_ids[0]
        return writer.write_echo(first_token_id, part.prompt_logprobs, part.logprobs)

    def _completion(
        self, choices: list[CompletionChoice], *, usage: Usage | UnsetType | None
    ) -> _Completion:
        return _Completion(
            id=self.head.job.answer_id,
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.fingerprint,
            choices=choices,
            usage=usage,
        )


def _ended(reason: FinishReason | None) -> FinishReason:
    if reason is None:
        raise AssertionError("an answer ended without a reason")
    return reason
