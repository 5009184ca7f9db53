"""The OpenAI API as both programs speak it: requests, answers, chunks, usage, load.

Router and worker parse with the same functions, so both refuse the same input with the same 400.
Unknown request fields are ignored here: the router forwards them, the worker refuses them by name.
"""

from __future__ import annotations

import msgspec

from kvway_core.answers import (
    AssistantMessage,
    AttentionInfo,
    BlockCounts,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    DetokenizeResponse,
    FinishReason,
    KvEventsInfo,
    LoadReport,
    ModelCard,
    ModelList,
    Pin,
    PinList,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    TokenizeResponse,
    TokenLogprob,
    TopLogprob,
    Usage,
    WorkerState,
)
from kvway_core.errors import InvalidRequest
from kvway_core.request_checks import (
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_SALT_CHARS,
    MAX_STOP_BYTES,
    MAX_STOPS,
    REQUEST_ID,
    ROLES,
    check_chat,
    check_completion,
    check_messages,
    check_pin,
    check_request_ids,
    check_template_fields,
    check_template_kwargs,
    check_token_ids,
)
from kvway_core.requests import (
    DEFAULT_COMPLETION_TOKENS,
    AbortRequest,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    GenerationRequest,
    PinRequest,
    StreamOptions,
    TokenizeRequest,
)
from kvway_core.strict_json import BodyDecoder
from kvway_core.unsupported import unsupported_fields, unsupported_in_messages

__all__ = [
    "DEFAULT_COMPLETION_TOKENS",
    "MAX_CHOICES",
    "MAX_MESSAGES",
    "MAX_PROMPTS",
    "MAX_SALT_CHARS",
    "MAX_STOPS",
    "MAX_STOP_BYTES",
    "REQUEST_ID",
    "ROLES",
    "SSE_DONE",
    "AbortRequest",
    "AssistantMessage",
    "AttentionInfo",
    "BlockCounts",
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatDelta",
    "ChatLogprobs",
    "ChatMessage",
    "ChatRequest",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
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
    "Pin",
    "PinList",
    "PinRequest",
    "PromptLogprob",
    "PromptLogprobs",
    "PromptTokensDetails",
    "StreamOptions",
    "TokenLogprob",
    "TokenizeRequest",
    "TokenizeResponse",
    "TopLogprob",
    "Usage",
    "WorkerState",
    "encode",
    "parse_abort",
    "parse_chat",
    "parse_completion",
    "parse_detokenize",
    "parse_pin",
    "parse_tokenize",
    "peek_request_id",
    "sse",
    "unsupported_fields",
    "unsupported_in_messages",
]

SSE_DONE = b"data: [DONE]\n\n"


class _Named(msgspec.Struct, frozen=True):
    request_id: str | None = None


def parse_chat(body: bytes) -> ChatRequest:
    """Reads and checks a chat request.

    Raises:
        InvalidRequest: Naming the field (`param`) and the kind of fault (`code`).
    """
    request = _CHAT.decode(body)
    check_chat(request)
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Reads and checks a completion request.

    Raises:
        InvalidRequest: Naming the field (`param`) and the kind of fault (`code`).
    """
    request = _COMPLETION.decode(body)
    check_completion(request)
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
        check_messages(request.messages)
        check_template_fields(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
    check_template_kwargs(request.chat_template_kwargs)
    return request


def parse_pin(body: bytes) -> PinRequest:
    """Reads and checks a request to pin a prefix: exactly one of `prompt` and `messages`.

    Raises:
        InvalidRequest: Naming the field at fault.
    """
    request = _PIN.decode(body)
    check_pin(request)
    return request


def parse_abort(body: bytes) -> AbortRequest:
    """Reads and checks a request to abort requests.

    Raises:
        InvalidRequest: Naming the field at fault.
    """
    request = _ABORT.decode(body)
    check_request_ids(request.request_ids)
    return request


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Reads and checks a detokenize request.

    Raises:
        InvalidRequest: Naming the field at fault.
    """
    request = _DETOKENIZE.decode(body)
    check_token_ids("tokens", request.tokens)
    return request


def peek_request_id(body: bytes) -> str | None:
    """Returns the `request_id` of a body that nobody has checked yet; None if there is none.

    Complexity:
        One search for the name; only if that may be there, a scan of the body that keeps nothing.
    """
    if b"request_id" not in body and b"\\u" not in body:
        return None
    try:
        return _PEEK.decode(body).request_id
    except (ValueError, RecursionError):  # whoever parses it says what is wrong
        return None


def encode(value: msgspec.Struct) -> bytes:
    """Returns an answer as JSON."""
    return _ENCODER.encode(value)


def sse(payload: bytes) -> bytes:
    """Returns one server-sent event. The payload is JSON, which never has a raw line break."""
    return b"data: " + payload + b"\n\n"


_CHAT = BodyDecoder(ChatRequest)
_COMPLETION = BodyDecoder(CompletionRequest)
_TOKENIZE = BodyDecoder(TokenizeRequest)
_DETOKENIZE = BodyDecoder(DetokenizeRequest)
_PIN = BodyDecoder(PinRequest)
_ABORT = BodyDecoder(AbortRequest)
_PEEK = msgspec.json.Decoder(_Named)
_ENCODER = msgspec.json.Encoder()
