"""What a request of the OpenAI API may say: ranges, sizes and which fields go together.

Each check raises InvalidRequest with the field as `param` and a sentence with value, limit and
way out. What depends on the model (its vocabulary, its context) is checked where the model is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, cast

from kvway_core.errors import InvalidRequest
from kvway_core.requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    PinRequest,
)

MAX_MESSAGES: Final = 4096
MAX_PROMPTS: Final = 128
MAX_CHOICES: Final = 8
MAX_STOPS: Final = 16
MAX_STOP_BYTES: Final = 256
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_BAD_WORDS: Final = 128
MAX_BIASED_TOKENS: Final = 1024
MAX_LOGPROBS: Final = 20
MAX_SALT_CHARS: Final = 256
MAX_TEMPLATE_KWARGS: Final = 32
MAX_TEMPLATE_KWARG_BYTES: Final = 1024
MAX_ABORTED_REQUESTS: Final = 256
MAX_PIN_TTL_S: Final = 7 * 24 * 3600.0
ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
CACHE_HINTS: Final = ("normal", "ephemeral")

REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""What a client may call its request, in the header and in the body."""

_MIN_INT64, _MAX_INT64 = -(2**63), 2**63 - 1
_MAX_INT = 2**31 - 1
_MAX_TOKEN_ID = 2**32 - 1
_SHOWN_DIGITS = 24

_RANGES: Final[tuple[tuple[str, float, float], ...]] = (
    ("temperature", 0, 2),
    ("top_k", -1, _MAX_INT),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("n", 1, MAX_CHOICES),
    ("seed", _MIN_INT64, _MAX_INT64),
    ("max_tokens", 1, _MAX_INT),
    ("min_tokens", 0, _MAX_INT),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 0.01, 100),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("priority", -_MAX_INT, _MAX_INT),
)
_OF_ONE_KIND: Final[Mapping[str, tuple[float, float]]] = {
    "max_completion_tokens": (1, _MAX_INT),
    "top_logprobs": (0, MAX_LOGPROBS),
    "logprobs": (0, MAX_LOGPROBS),
    "best_of": (1, MAX_CHOICES),
    "ttl_s": (1, MAX_PIN_TTL_S),
}

BOUNDS: Final[Mapping[str, Mapping[str, object]]] = {
    **{name: {"minimum": low, "maximum": high} for name, low, high in _RANGES},
    **{name: {"minimum": low, "maximum": high} for name, (low, high) in _OF_ONE_KIND.items()},
    "truncate_prompt_tokens": {"minimum": -1, "maximum": _MAX_INT},
    "stop": {"maxItems": MAX_STOPS, "minLength": 1, "maxLength": MAX_STOP_BYTES},
    "bad_words": {"maxItems": MAX_BAD_WORDS},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS},
    "allowed_token_ids": {"minItems": 1},
    "logit_bias": {"maxProperties": MAX_BIASED_TOKENS},
    "cache_salt": {"minLength": 1, "maxLength": MAX_SALT_CHARS},
    "request_id": {"pattern": f"^{REQUEST_ID.pattern}$"},
    "request_ids": {"minItems": 1, "maxItems": MAX_ABORTED_REQUESTS},
    "kv_cache": {"enum": CACHE_HINTS},
    "messages": {"minItems": 1, "maxItems": MAX_MESSAGES},
    "role": {"enum": sorted(ROLES)},
    "chat_template_kwargs": {"maxProperties": MAX_TEMPLATE_KWARGS},
}
"""The bounds of fields in the words of JSON Schema; of those that differ by kind, the wider."""


def check_chat(request: ChatRequest) -> None:
    """Checks a chat request.

    Raises:
        InvalidRequest: If it says what it may not.
    """
    _check_generation(request)
    for name in ("max_completion_tokens", "top_logprobs"):
        check_range(name, getattr(request, name), *_OF_ONE_KIND[name])
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    check_messages(request.messages)
    check_template_fields(
        request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )
    check_template_kwargs(request.chat_template_kwargs)
    _check_min_tokens(request.min_tokens, request.max_output_tokens)


def check_completion(request: CompletionRequest) -> None:
    """Checks a completion request.

    Raises:
        InvalidRequest: If it says what it may not.
    """
    _check_generation(request)
    for name in ("logprobs", "best_of"):
        check_range(name, getattr(request, name), *_OF_ONE_KIND[name])
    if request.best_of is not None and request.best_of != request.num_choices:
        raise InvalidRequest(
            f"best_of is {request.best_of} and n is {request.num_choices}; all answers are "
            "returned, so give best_of the value of n or leave it out.",
            param="best_of",
        )
    _check_prompt(request.prompt)
    _check_min_tokens(request.min_tokens, request.max_output_tokens)


def check_pin(request: PinRequest) -> None:
    """Checks a request to pin a prefix.

    Raises:
        InvalidRequest: If it says what it may not.
    """
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
    if request.messages is not None:
        check_messages(request.messages)
    elif not request.prompt:
        raise InvalidRequest("prompt must not be empty.", param="prompt")
    if isinstance(request.prompt, list):
        check_token_ids("prompt", request.prompt)
    check_template_kwargs(request.chat_template_kwargs)
    _check_salt(request.cache_salt)
    check_range("ttl_s", request.ttl_s, *_OF_ONE_KIND["ttl_s"])


def check_request_ids(request_ids: list[str]) -> None:
    """Checks the ids of requests to abort.

    Raises:
        InvalidRequest: If there are none or too many, or one cannot be an id.
    """
    if not 1 <= len(request_ids) <= MAX_ABORTED_REQUESTS:
        raise InvalidRequest(
            f"request_ids has {len(request_ids)} ids; give 1 to {MAX_ABORTED_REQUESTS}.",
            param="request_ids",
        )
    for index, request_id in enumerate(request_ids):
        _check_request_id(f"request_ids[{index}]", request_id)


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    """Raises InvalidRequest if a value is given and not within [low, high]."""
    if value is not None and not low <= value <= high:
        shown = str(value)
        given = f"is {shown}; it " if len(shown) <= _SHOWN_DIGITS else ""
        raise InvalidRequest(f"{name} {given}must be between {low} and {high}.", param=name)


def check_token_ids(name: str, token_ids: list[int]) -> None:
    """Raises InvalidRequest if a token id does not fit 32 unsigned bits."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= _MAX_TOKEN_ID:
        raise InvalidRequest(
            f"{name} must hold token ids between 0 and {_MAX_TOKEN_ID}.", param=name
        )


def check_messages(messages: list[ChatMessage]) -> None:
    """Raises InvalidRequest if there is no message, too many, an unknown role, or no content."""
    if not messages:
        raise InvalidRequest("messages must have at least one message.", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(
            f"messages may have {MAX_MESSAGES} messages, got {len(messages)}.",
            param="messages",
            code="too_complex",
        )
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidRequest(
                f"messages[{index}].role must be one of {', '.join(sorted(ROLES))}.",
                param=f"messages[{index}].role",
            )
        if message.content is None and message.role != "assistant":
            raise InvalidRequest(
                f"messages[{index}].content is required.", param=f"messages[{index}].content"
            )


def check_template_fields(
    messages: list[ChatMessage],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
) -> None:
    """Raises InvalidRequest if an answer is to begin and to be continued, or nothing can be."""
    if not continue_final_message:
        return
    if add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message goes on with the last message and add_generation_prompt "
            "begins a new one; ask for one of them.",
            param="continue_final_message",
        )
    if not messages[-1].content:
        raise InvalidRequest(
            "continue_final_message needs a last message with content.",
            param="continue_final_message",
        )


def check_template_kwargs(kwargs: dict[str, object] | None) -> None:
    """Raises InvalidRequest if there are too many, or one is no short plain value."""
    name = "chat_template_kwargs"
    if kwargs is None:
        return
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise InvalidRequest(
            f"{name} has {len(kwargs)} values; it may have {MAX_TEMPLATE_KWARGS}.", param=name
        )
    for value in kwargs.values():
        if value is not None and not isinstance(value, bool | int | float | str):
            raise InvalidRequest(f"{name} may hold text, numbers, true and false.", param=name)
        if isinstance(value, str) and len(value.encode()) > MAX_TEMPLATE_KWARG_BYTES:
            raise InvalidRequest(
                f"A text of {name} may have {MAX_TEMPLATE_KWARG_BYTES} bytes.", param=name
            )


def _check_generation(request: GenerationRequest) -> None:
    """Checks what both kinds of request have."""
    for name, low, high in _RANGES:
        check_range(name, getattr(request, name), low, high)
    if request.top_p == 0:
        raise InvalidRequest(
            "top_p must be above 0; for the likeliest token use temperature 0.", param="top_p"
        )
    _check_strings("stop", request.stop_strings, most=MAX_STOPS)
    _check_strings("bad_words", tuple(request.bad_words or ()), most=MAX_BAD_WORDS)
    _check_token_fields(request)
    _check_salt(request.cache_salt)
    if request.request_id is not None:
        _check_request_id("request_id", request.request_id)
    if request.kv_cache is not None and request.kv_cache not in CACHE_HINTS:
        raise InvalidRequest(
            f"kv_cache must be one of {', '.join(CACHE_HINTS)}.", param="kv_cache"
        )
    _check_truncation(request.truncate_prompt_tokens)
    _check_stream_fields(request)


def _check_token_fields(request: GenerationRequest) -> None:
    """Checks the fields that hold token ids."""
    if request.stop_token_ids is not None:
        _check_count("stop_token_ids", len(request.stop_token_ids), MAX_STOP_TOKEN_IDS)
        check_token_ids("stop_token_ids", request.stop_token_ids)
    if request.allowed_token_ids is not None:
        if not request.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids is empty, so no token could follow; name some or leave it out.",
                param="allowed_token_ids",
            )
        check_token_ids("allowed_token_ids", request.allowed_token_ids)
    bias = request.logit_bias or {}
    _check_count("logit_bias", len(bias), MAX_BIASED_TOKENS)
    for token, value in bias.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= len(str(_MAX_TOKEN_ID))):
            raise InvalidRequest(
                'The keys of logit_bias must be token ids, like "42".', param="logit_bias"
            )
        check_range("logit_bias", value, -100, 100)
    if len({int(token) for token in bias}) < len(bias):
        raise InvalidRequest("logit_bias has a token id twice.", param="logit_bias")


def _check_stream_fields(request: GenerationRequest) -> None:
    """Checks what depends on whether the answer is streamed."""
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
    if request.continuous_usage and not request.include_usage:
        raise InvalidRequest(
            "continuous_usage_stats needs include_usage to be true.",
            param="stream_options.continuous_usage_stats",
        )
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs are not streamed; leave out stream.", param="prompt_logprobs"
        )


def _check_min_tokens(min_tokens: int | None, max_tokens: int | None) -> None:
    if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {min_tokens} and the answer may have {max_tokens} tokens; lower "
            "min_tokens or allow more.",
            param="min_tokens",
        )


def _check_strings(name: str, strings: tuple[str, ...], *, most: int) -> None:
    """Raises InvalidRequest if there are too many strings, or a long or empty one."""
    if len(strings) > most:
        raise InvalidRequest(f"{name} may have {most} strings, got {len(strings)}.", param=name)
    for string in strings:
        if not string or len(string.encode("utf-8")) > MAX_STOP_BYTES:
            raise InvalidRequest(
                f"Each string of {name} must have 1 to {MAX_STOP_BYTES} bytes.", param=name
            )


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"{name} has {count} entries; it may have {most}.", param=name)


def _check_salt(salt: str | None) -> None:
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt must be a string of 1 to {MAX_SALT_CHARS} characters.", param="cache_salt"
        )


def _check_request_id(name: str, request_id: str) -> None:
    if not REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(
            f"{name} must have 1 to 128 characters, each a letter, a digit or one of . _ : -",
            param=name,
        )


def _check_truncation(num_tokens: int | None) -> None:
    """Raises InvalidRequest if it is neither a number of tokens nor -1."""
    if num_tokens is not None and num_tokens != -1:
        check_range("truncate_prompt_tokens", num_tokens, 1, _MAX_INT)


def _check_prompt(prompt: str | list[str | int | list[int]]) -> None:
    """Raises InvalidRequest if a prompt is empty, mixes kinds, or is not of token ids."""
    if not prompt:
        raise InvalidRequest("prompt must not be empty.", param="prompt")
    if isinstance(prompt, str):
        return
    if len(set(map(type, prompt))) > 1:
        raise InvalidRequest(
            "prompt must be all strings, all token ids or all lists of token ids.", param="prompt"
        )
    if isinstance(prompt[0], int):
        check_token_ids("prompt", cast("list[int]", prompt))
        return
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt may have {MAX_PROMPTS} prompts, got {len(prompt)}.", param="prompt"
        )
    for index, one in enumerate(prompt):
        if not one:
            raise InvalidRequest(f"prompt[{index}] must not be empty.", param=f"prompt[{index}]")
        if isinstance(one, list):
            check_token_ids(f"prompt[{index}]", one)
