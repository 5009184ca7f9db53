"""The worker's endpoints in OpenAPI's words."""

from __future__ import annotations

from typing import Final

from kvway_core.api import (
    AbortRequest,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    LoadReport,
    ModelList,
    Pin,
    PinList,
    PinRequest,
    TokenizeRequest,
    TokenizeResponse,
)
from kvway_core.openapi import OPENAPI_PATH, Operation
from kvway_worker.api.fields import (
    ABORT_FIELDS,
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    PIN_FIELDS,
    TOKENIZE_FIELDS,
)

_GENERATED: Final = ("application/json", "text/event-stream")

OPERATIONS: Final = (
    Operation(
        *("post", "/v1/chat/completions", "Answer a conversation"),
        request=ChatRequest,
        supported=CHAT_FIELDS,
        answer=ChatCompletion,
        content_types=_GENERATED,
    ),
    Operation(
        *("post", "/v1/completions", "Go on with a text"),
        request=CompletionRequest,
        supported=COMPLETION_FIELDS,
        answer=Completion,
        content_types=_GENERATED,
    ),
    Operation("get", "/v1/models", "The one model", answer=ModelList),
    Operation(
        *("post", "/tokenize", "Token ids of a text or a conversation"),
        request=TokenizeRequest,
        supported=TOKENIZE_FIELDS,
        answer=TokenizeResponse,
    ),
    Operation(
        *("post", "/detokenize", "Text of token ids"),
        request=DetokenizeRequest,
        supported=DETOKENIZE_FIELDS,
        answer=DetokenizeResponse,
    ),
    Operation("get", "/load", "State, capacity and rates", answer=LoadReport),
    Operation(
        *("post", "/abort_requests", "End requests"), request=AbortRequest, supported=ABORT_FIELDS
    ),
    Operation(
        *("post", "/pins", "Keep a prefix"), request=PinRequest, supported=PIN_FIELDS, answer=Pin
    ),
    Operation("get", "/pins", "Prefixes that are kept", answer=PinList),
    Operation("delete", "/pins/{id}", "Keep a prefix no longer"),
    Operation(
        *("post", "/reset_prefix_cache", "Forget what is cached"),
        flags=("reset_running_requests",),
    ),
    Operation("get", "/metrics", "Metrics for Prometheus", content_types=("text/plain",)),
    Operation("get", "/health", "Whether the process works"),
    Operation("get", "/ready", "Whether requests are taken"),
    Operation("get", OPENAPI_PATH, "This document"),
)
