"""The routes of the API listener in OpenAPI's words."""

from __future__ import annotations

from typing import Final

from kvway_core.api import ChatRequest, CompletionRequest, ModelList
from kvway_core.openapi import OPENAPI_PATH, Operation
from kvway_router.reading import Route

_GENERATED: Final = ("application/json", "text/event-stream")

# Fields that are not in the structs are the replica's business, and so are the answers.
OPERATIONS: Final = (
    Operation(
        *("post", Route.CHAT.value, "Answer a conversation"),
        request=ChatRequest,
        content_types=_GENERATED,
    ),
    Operation(
        *("post", Route.COMPLETIONS.value, "Go on with a text"),
        request=CompletionRequest,
        content_types=_GENERATED,
    ),
    Operation("get", "/v1/models", "The one model", answer=ModelList),
    Operation("get", "/health", "Whether the process runs"),
    Operation("get", "/ready", "Whether a request would find a replica"),
    Operation("get", "/metrics", "Metrics for Prometheus", content_types=("text/plain",)),
    Operation("get", OPENAPI_PATH, "This document"),
)
