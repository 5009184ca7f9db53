"""The aiohttp glue that both programs share: every answer is JSON in OpenAI's form, even to junk.

The only module of this package that needs aiohttp. A program builds its application with
`new_app`, its runner with `make_runner`, and listens with `lifecycle.start_site`:

    app = new_app()
    app.router.add_post("/v1/completions", completions)
    runner = make_runner(app, max_body_bytes=2**20)
    port = await start_site(runner, "127.0.0.1", 0)
    ...
    await runner.cleanup()

Nothing a client sent is ever repeated in an error, and a malformed request costs one debug line.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

import aiohttp
import structlog
from aiohttp import hdrs, http_parser, web
from aiohttp.web_protocol import RequestHandler
from typing_extensions import override

from kvway_core.errors import (
    ClientDisconnected,
    ConfigError,
    InternalError,
    InvalidRequest,
    KvwayError,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    RequestError,
    RequestTimeout,
    UnsupportedMediaType,
    error_body,
)

DEFAULT_MAX_BODY_BYTES = 16 * 2**20
DEFAULT_BODY_TIMEOUT_S = 30.0
KEEPALIVE_TIMEOUT_S = 75.0
"""How long a connection may idle, and how long the headers of a request may take."""
LINGER_S = 2.0
"""How long the rest of a refused body is read, so that the client sees the refusal."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_LOG = structlog.get_logger(__name__)
_JSON = "application/json"


def new_app() -> web.Application:
    """Returns an application that answers every error of its handlers in OpenAI's form."""
    return web.Application(middlewares=[error_middleware])


def make_runner(
    app: web.Application,
    *,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    keepalive_timeout_s: float = KEEPALIVE_TIMEOUT_S,
) -> web.AppRunner:
    """Returns the runner of an application; whoever calls this must await its `cleanup`.

    A handler is cancelled when its client leaves. Bodies are never decompressed.

    Args:
        app: From `new_app`.
        max_body_bytes: A request that announces more is refused before `100 Continue`.
        keepalive_timeout_s: How long a connection may idle and headers may take, seconds.

    Raises:
        ConfigError: If aiohttp runs on its Python parser, which reads some requests differently
            from the C one: with a proxy in front that is how requests are smuggled.
    """
    if http_parser.HttpRequestParser is http_parser.HttpRequestParserPy:
        raise ConfigError(
            ["aiohttp has no C parser here: unset AIOHTTP_NO_EXTENSIONS or reinstall aiohttp"]
        )
    return _Runner(
        app,
        max_body_bytes=max_body_bytes,
        handler_cancellation=True,
        keepalive_timeout=keepalive_timeout_s,
        lingering_time=LINGER_S,
        auto_decompress=False,
        access_log=None,
    )


async def listen(runner: web.AppRunner, host: str, port: int) -> int:
    """Starts to listen and returns the port, which the system chose if `port` is 0.

    Raises:
        ConfigError: If the address cannot be listened on, naming it and the fix.
    """
    if runner.server is None:
        await runner.setup()
    site = web.TCPSite(runner, host, port, reuse_address=True)
    try:
        await site.start()
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            problem = "the port is taken; choose another one, or 0 for any free one"
        elif exc.errno == errno.EACCES:
            problem = "not allowed; choose a port above 1023"
        else:
            problem = f"{exc.strerror or exc}; check the host"
        raise ConfigError([f"cannot listen on {host}:{port}: {problem}"]) from exc
    except (OverflowError, UnicodeError) as exc:
        raise ConfigError([f"cannot listen on {host}:{port}: {exc}"]) from exc
    return int(runner.addresses[-1][1])


async def read_body(
    request: web.Request,
    *,
    limit_bytes: int = DEFAULT_MAX_BODY_BYTES,
    timeout_s: float = DEFAULT_BODY_TIMEOUT_S,
) -> bytes:
    """Returns the whole body of a request.

    Args:
        request: The request; its body must not have been read.
        limit_bytes: A body of exactly this many bytes is accepted.
        timeout_s: Time for all of it to arrive, seconds.

    Raises:
        UnsupportedMediaType: If the body is compressed.
        PayloadTooLarge: If it is over the limit, if possible before reading any of it.
        RequestTimeout: If it does not arrive in time.
        InvalidRequest: If it breaks the rules of HTTP.
        ClientDisconnected: If the client leaves.
    """
    encodings = request.headers.getall(hdrs.CONTENT_ENCODING, ["identity"])
    if any(encoding.strip().lower() not in {"", "identity"} for encoding in encodings):
        raise UnsupportedMediaType("Compressed bodies are not accepted; send them as they are.")
    too_large = PayloadTooLarge(f"The body may have {limit_bytes} bytes.")
    if request.content_length is not None and request.content_length > limit_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > limit_bytes:
                    raise too_large
    except TimeoutError:
        raise RequestTimeout(f"The body did not arrive within {timeout_s:g} s.") from None
    except (aiohttp.ClientPayloadError, web.RequestPayloadError, aiohttp.http.HttpProcessingError):
        raise InvalidRequest("The body breaks off or is not valid HTTP.") from None
    except ConnectionError:
        raise ClientDisconnected("The client left while sending its body.") from None
    return bytes(body)


def json_response(
    body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Returns an answer of JSON bytes."""
    return web.Response(body=body, status=status, headers=headers, content_type=_JSON)


def error_response(error: KvwayError, *, headers: Mapping[str, str] | None = None) -> web.Response:
    """Returns an error as an answer; after a refused or broken body the connection is closed."""
    response = json_response(error_body(error), status=error.http_status, headers=headers)
    if error.http_status in _CLOSING:
        response.force_close()
    return response


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers errors of handlers in OpenAI's form: one of the two places that catch everything.

    An error after the answer has begun cannot be answered: the connection is closed, so that the
    client sees an answer without its end.
    """
    try:
        return await handler(request)
    except web.HTTPException as exc:
        if exc.status < HTTPStatus.BAD_REQUEST:
            raise
        return _answer_http_exception(request, exc)
    except KvwayError as exc:
        return _answer(request, exc)
    except Exception as exc:
        if isinstance(exc, ConnectionError) and _has_begun(request):
            raise
        _LOG.exception("request_crashed", method=request.method, route=_route(request))
        return _answer(request, InternalError())


_CLOSING = frozenset({408, 413, 415, 417, 431, 505})


class _HttpError(RequestError):
    """A refusal by aiohttp, or of something that is not the HTTP we speak."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(f"{status.phrase}.")
        self.http_status = int(status)
        self.code = status.name.lower()


def _answer(request: web.BaseRequest, error: KvwayError) -> web.Response:
    """Returns the answer to an error, or gives the connection up when another answer has begun."""
    if _has_begun(request):
        _LOG.warning("answer_broken_off", code=error.code)
        raise ConnectionResetError("the answer had begun") from error
    return error_response(error)


def _answer_http_exception(request: web.BaseRequest, exc: web.HTTPException) -> web.Response:
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
    return error_response(_HttpError(HTTPStatus(exc.status)))


def _has_begun(request: web.BaseRequest) -> bool:
    """Says whether bytes of an answer have been sent."""
    return bool(request.writer.output_size)


def _route(request: web.Request) -> str:
    """Returns the route of a request as it was registered, never the path as it was sent."""
    resource = request.match_info.route.resource
    return "unknown" if resource is None else resource.canonical


class _Protocol(RequestHandler):
    """aiohttp's connection, with errors of its parser answered like all others."""

    __slots__ = ()

    @override
    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers what no handler answered, without repeating a byte of the client's."""
        if _has_begun(request) or isinstance(exc, ConnectionError):
            raise ConnectionResetError("the answer had begun") from exc
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            _LOG.error("request_crashed", exc_info=exc)
            response = error_response(InternalError())
        else:
            _LOG.debug("malformed_http_refused", reason=type(exc).__name__)
            error = InvalidRequest("The request is not valid HTTP/1.1.", code="malformed_http")
            response = error_response(error)
        response.force_close()
        return response


class _Server(web.Server):
    """aiohttp's server, with the connections above and checks that come before any handler."""

    def __init__(self, server: web.Server, *, max_body_bytes: int) -> None:
        super().__init__(
            self._check_and_handle,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            **server._kwargs,  # noqa: SLF001 (the only way to install a protocol of our own)
        )
        self._inner: Callable[[Any], Awaitable[web.StreamResponse]] = server.request_handler
        self._max_body_bytes = max_body_bytes

    @override
    def __call__(self) -> RequestHandler:
        """Returns the protocol of a new connection."""
        return _Protocol(self, loop=self._loop, **self._kwargs)

    async def _check_and_handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Refuses what aiohttp accepts and should not, then hands the request on."""
        if (refusal := self._refusal(request)) is not None:
            response = error_response(refusal)
            response.force_close()
            return response
        try:
            return await self._inner(request)
        except web.HTTPException as exc:
            if exc.status < HTTPStatus.BAD_REQUEST:
                raise
            return _answer_http_exception(request, exc)

    def _refusal(self, request: web.BaseRequest) -> KvwayError | None:
        """Returns why a request is refused by its headers alone, None if it is not."""
        if request.version not in {aiohttp.HttpVersion10, aiohttp.HttpVersion11}:
            return _HttpError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
        codings = request.headers.getall(hdrs.TRANSFER_ENCODING, [])
        old = request.version == aiohttp.HttpVersion10
        if codings and (old or [coding.strip().lower() for coding in codings] != ["chunked"]):
            return InvalidRequest(
                "The body is not framed as HTTP/1.1 wants.", code="malformed_http"
            )
        length = request.content_length
        if length is not None and length > self._max_body_bytes:
            return PayloadTooLarge(f"The body may have {self._max_body_bytes} bytes.")
        if request.headers.get(hdrs.EXPECT, "100-continue").lower() != "100-continue":
            return _HttpError(HTTPStatus.EXPECTATION_FAILED)
        return None


class _Runner(web.AppRunner):
    """aiohttp's runner, with the server above."""

    __slots__ = ("_max_body_bytes",)

    def __init__(self, app: web.Application, *, max_body_bytes: int, **kwargs: Any) -> None:
        super().__init__(app, **kwargs)
        self._max_body_bytes = max_body_bytes

    @override
    async def _make_server(self) -> web.Server:
        """Returns the server, built from the one that aiohttp makes."""
        return _Server(await super()._make_server(), max_body_bytes=self._max_body_bytes)
