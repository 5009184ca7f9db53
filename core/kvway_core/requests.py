"""What clients ask for in the OpenAI API. None means not given.

Import these from `kvway_core.api`, which reads and checks them.
"""

from __future__ import annotations

from typing import cast

import msgspec

DEFAULT_COMPLETION_TOKENS = 16


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content. `text` is there when `type` is "text".

    `image_url` is as the client sent it: who takes images reads it (`images.py`).
    """

    type: str
    text: str | None = None
    image_url: object = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, object]] | None = None
    tool_call_id: str | None = None


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream carries besides text. A field that is not here is refused."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and completion requests have in common. None means not given."""

    model: str
    request_id: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    kv_cache: str | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None

    @property
    def num_choices(self) -> int:
        """How many answers are asked for per prompt."""
        return 1 if self.n is None else self.n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end the answer."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream tells the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def is_ephemeral(self) -> bool:
        """Whether nothing of the request is to stay in the cache when it has ended."""
        return self.kv_cache == "ephemeral"


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, object]] | None = None
    tool_choice: str | dict[str, object] | None = None
    response_format: dict[str, object] | None = None

    @property
    def max_output_tokens(self) -> int | None:
        """The most tokens to generate; None is all the context has room for."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens to report for each one; None without log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def max_output_tokens(self) -> int:
        """The most tokens to generate."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens to report for each one; None without log probabilities."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one at least, each as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [cast("list[int]", self.prompt)]
        return cast("list[str | list[int]]", self.prompt)


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /tokenize: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, object]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None


class PinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /pins: either a prompt (text or token ids) or messages."""

    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[ChatMessage] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    ttl_s: float | None = None


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /abort_requests."""

    request_ids: list[str]


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None
