"""Answers of the server's own: JSON, and every error in OpenAI's form.

Nothing a client sent is ever repeated in an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

import structlog
from aiohttp import hdrs, web

from kvway_core.errors import (
    KvwayError,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    RequestError,
    error_body,
)

MALFORMED_HTTP: Final = "malformed_http"
"""Code of what breaks the rules of HTTP: nobody knows where the next request would begin."""
RETRY_AFTER_S: Final = "1"

_LOG = structlog.get_logger(__name__)
_JSON: Final = "application/json"
_CLOSING: Final = frozenset({408, 413, 415, 417, 431, 501, 505})


class HttpRefusal(RequestError):
    """A refusal by aiohttp, or of something that is not the HTTP we speak."""

    def __init__(self, status: HTTPStatus, message: str | None = None) -> None:
        super().__init__(message or f"{status.phrase}.")
        self.http_status = int(status)
        self.code = status.name.lower()


def json_response(
    body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Returns an answer of JSON bytes."""
    return web.Response(body=body, status=status, headers=headers, content_type=_JSON)


def error_response(error: KvwayError, *, headers: Mapping[str, str] | None = None) -> web.Response:
    """Returns an error as an answer; a 503 says when to come back.

    After a body that was refused or broken the connection is closed.
    """
    response = json_response(error_body(error), status=error.http_status, headers=headers)
    if error.http_status == HTTPStatus.SERVICE_UNAVAILABLE:
        response.headers.setdefault(hdrs.RETRY_AFTER, RETRY_AFTER_S)
    if error.http_status in _CLOSING or error.code == MALFORMED_HTTP:
        response.force_close()
    return response


def error_bytes(error: KvwayError) -> bytes:
    """Returns an error as the last bytes of a connection on which no request was read."""
    status, body = HTTPStatus(error.http_status), error_body(error)
    headers = {
        hdrs.CONTENT_TYPE: _JSON,
        hdrs.CONTENT_LENGTH: str(len(body)),
        hdrs.CONNECTION: "close",
    }
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers[hdrs.RETRY_AFTER] = RETRY_AFTER_S
    head = [f"HTTP/1.1 {int(status)} {status.phrase}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*head, "", ""]).encode("ascii") + body


def answer_error(request: web.BaseRequest, error: KvwayError) -> web.Response:
    """Returns the answer to an error, or gives the connection up when another answer has begun.

    Raises:
        ConnectionResetError: Another answer has begun.
    """
    if has_begun(request):
        _LOG.warning("answer_broken_off", code=error.code)
        raise ConnectionResetError("the answer had begun") from error
    return error_response(error)


def answer_http_exception(request: web.BaseRequest, exc: web.HTTPException) -> web.Response:
    """Returns aiohttp's own refusals in OpenAI's form."""
    if isinstance(exc, web.HTTPMethodNotAllowed):
        allow = ", ".join(sorted({*exc.allowed_methods, hdrs.METH_OPTIONS}))
        if request.method == hdrs.METH_OPTIONS:
            return web.Response(status=204, headers={hdrs.ALLOW: allow})
        error = MethodNotAllowed(f"This route takes {allow}.")
        return error_response(error, headers={hdrs.ALLOW: allow})
    if exc.status == HTTPStatus.NOT_FOUND:
        return error_response(NotFound("There is no such route."))
    if exc.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return error_response(PayloadTooLarge("The body is too large."))
    return error_response(HttpRefusal(HTTPStatus(exc.status)))


def has_begun(request: web.BaseRequest) -> bool:
    """Says whether bytes of an answer have been sent."""
    return bool(request.writer.output_size)
