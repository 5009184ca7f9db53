"""The OpenAI API as both programs speak it: requests, answers, chunks, usage, load.

Router and worker parse with the same functions, so both refuse the same input with the same 400.
Unknown request fields are ignored here: the router forwards them, the worker refuses them by name.
"""

from __future__ import annotations

from typing import cast

import msgspec

from kvway_core.answers import (
    AssistantMessage,
    BlockCounts,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    Completion,
    CompletionChoice,
    DetokenizeResponse,
    FinishReason,
    KvEventsInfo,
    LoadReport,
    ModelCard,
    ModelList,
    PromptTokensDetails,
    TokenizeResponse,
    Usage,
    WorkerState,
)
from kvway_core.errors import InvalidRequest
from kvway_core.requests import (
    DEFAULT_COMPLETION_TOKENS,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    GenerationRequest,
    StreamOptions,
    TokenizeRequest,
)
from kvway_core.strict_json import BodyDecoder, plain_name, top_level_fields

__all__ = [
    "DEFAULT_COMPLETION_TOKENS",
    "MAX_CHOICES",
    "MAX_MESSAGES",
    "MAX_PROMPTS",
    "MAX_STOPS",
    "MAX_STOP_BYTES",
    "ROLES",
    "SSE_DONE",
    "AssistantMessage",
    "BlockCounts",
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatDelta",
    "ChatMessage",
    "ChatRequest",
    "Completion",
    "CompletionChoice",
    "CompletionRequest",
    "ContentPart",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "FinishReason",
    "GenerationRequest",
    "KvEventsInfo",
    "LoadReport",
    "ModelCard",
    "ModelList",
    "PromptTokensDetails",
    "StreamOptions",
    "TokenizeRequest",
    "TokenizeResponse",
    "Usage",
    "WorkerState",
    "encode",
    "parse_chat",
    "parse_completion",
    "parse_detokenize",
    "parse_tokenize",
    "sse",
    "unsupported_fields",
]

MAX_MESSAGES = 4096
MAX_PROMPTS = 128
MAX_CHOICES = 8
MAX_STOPS = 16
MAX_STOP_BYTES = 256
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

SSE_DONE = b"data: [DONE]\n\n"


def parse_chat(body: bytes) -> ChatRequest:
    """Reads and checks a chat request.

    Raises:
        InvalidRequest: Naming the field (`param`) and the kind of fault (`code`).
    """
    request = _CHAT.decode(body)
    _check_sampling(request)
    _check_range("max_completion_tokens", request.max_completion_tokens, 1, _MAX_INT)
    _check_range("top_logprobs", request.top_logprobs, 0, 20)
    _check_messages(request.messages)
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Reads and checks a completion request.

    Raises:
        InvalidRequest: Naming the field (`param`) and the kind of fault (`code`).
    """
    request = _COMPLETION.decode(body)
    _check_sampling(request)
    _check_range("logprobs", request.logprobs, 0, 20)
    _check_range("best_of", request.best_of, 1, MAX_CHOICES)
    _check_prompt(request.prompt)
    return request


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Reads and checks a tokenize request: exactly one of `prompt` and `messages`.

    Raises:
        InvalidRequest: Naming the field at fault.
    """
    request = _TOKENIZE.decode(body)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
    if request.messages is not None:
        _check_messages(request.messages)
    return request


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Reads and checks a detokenize request.

    Raises:
        InvalidRequest: Naming the field at fault.
    """
    request = _DETOKENIZE.decode(body)
    _check_token_ids("tokens", request.tokens)
    return request


def unsupported_fields(body: bytes, supported: frozenset[str]) -> InvalidRequest | None:
    """Returns the refusal of the first field that asks for something outside `supported`.

    A field that is null or asks for nothing (`presence_penalty: 0`) is no reason to refuse.

    Raises:
        InvalidRequest: If the body is not a JSON object.
    """
    for name, raw in top_level_fields(body).items():
        if name in supported or bytes(raw) in _NEUTRAL.get(name, (b"null",)):
            continue
        param = plain_name(name)
        problem = f"{param or 'A field of the body'} is not supported by this server."
        return InvalidRequest(problem, param=param, code="unsupported_parameter")
    return None


def encode(value: msgspec.Struct) -> bytes:
    """Returns an answer as JSON."""
    return _ENCODER.encode(value)


def sse(payload: bytes) -> bytes:
    """Returns one server-sent event. The payload is JSON, which never has a raw line break."""
    return b"data: " + payload + b"\n\n"


_MIN_INT64, _MAX_INT64 = -(2**63), 2**63 - 1
_MAX_INT = 2**31 - 1
_MAX_TOKEN_ID = 2**32 - 1

_CHAT = BodyDecoder(ChatRequest)
_COMPLETION = BodyDecoder(CompletionRequest)
_TOKENIZE = BodyDecoder(TokenizeRequest)
_DETOKENIZE = BodyDecoder(DetokenizeRequest)
_ENCODER = msgspec.json.Encoder()

_NEUTRAL: dict[str, tuple[bytes, ...]] = {
    "best_of": (b"null", b"1"),
    "echo": (b"null", b"false"),
    "frequency_penalty": (b"null", b"0", b"0.0"),
    "logit_bias": (b"null", b"{}"),
    "logprobs": (b"null", b"false"),
    "min_p": (b"null", b"0", b"0.0"),
    "min_tokens": (b"null", b"0"),
    "n": (b"null", b"1"),
    "presence_penalty": (b"null", b"0", b"0.0"),
    "repetition_penalty": (b"null", b"1", b"1.0"),
    "response_format": (b"null", b'{"type":"text"}', b'{"type": "text"}'),
    "store": (b"null", b"false"),
    "suffix": (b"null", b'""'),
    "tool_choice": (b"null", b'"none"'),
    "tools": (b"null", b"[]"),
    "top_k": (b"null", b"0", b"-1"),
    "top_logprobs": (b"null", b"0"),
}
"""Values that ask for nothing, as they stand in the body."""

_SAMPLING_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, 2),
    ("top_k", -1, _MAX_INT),
    ("min_p", 0, 1),
    ("n", 1, MAX_CHOICES),
    ("seed", _MIN_INT64, _MAX_INT64),
    ("max_tokens", 1, _MAX_INT),
    ("min_tokens", 0, _MAX_INT),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
)


def _check_sampling(request: GenerationRequest) -> None:
    """Raises InvalidRequest if a field that both requests have is out of range."""
    for name, low, high in _SAMPLING_RANGES:
        _check_range(name, getattr(request, name), low, high)
    for name in ("top_p", "repetition_penalty"):
        value = getattr(request, name)
        if value is not None and value <= 0:
            raise InvalidRequest(f"{name} must be above 0.", param=name)
    _check_range("top_p", request.top_p, 0, 1)
    _check_stop(request.stop_strings)
    if request.stop_token_ids is not None:
        _check_token_ids("stop_token_ids", request.stop_token_ids)


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    """Raises InvalidRequest if a value is given and not within [low, high]."""
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}.", param=name)


def _check_stop(stops: tuple[str, ...]) -> None:
    """Raises InvalidRequest if there are too many stop strings, or a long or empty one."""
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop may have {MAX_STOPS} strings, got {len(stops)}.", param="stop")
    for stop in stops:
        if not stop or len(stop.encode("utf-8")) > MAX_STOP_BYTES:
            raise InvalidRequest(
                f"Each string of stop must have 1 to {MAX_STOP_BYTES} bytes.", param="stop"
            )


def _check_messages(messages: list[ChatMessage]) -> None:
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
        _check_token_ids("prompt", cast("list[int]", prompt))
        return
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt may have {MAX_PROMPTS} prompts, got {len(prompt)}.", param="prompt"
        )
    for index, one in enumerate(prompt):
        if not one:
            raise InvalidRequest(f"prompt[{index}] must not be empty.", param=f"prompt[{index}]")
        if isinstance(one, list):
            _check_token_ids(f"prompt[{index}]", one)


def _check_token_ids(name: str, token_ids: list[int]) -> None:
    """Raises InvalidRequest if a token id does not fit 32 unsigned bits."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= _MAX_TOKEN_ID:
        raise InvalidRequest(
            f"{name} must hold token ids between 0 and {_MAX_TOKEN_ID}.", param=name
        )
