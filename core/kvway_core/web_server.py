"""aiohttp's server with bounds of our own: what is refused before any handler sees a request.

    connection ─> too many? 503 ─> head: 10 s, 8 KiB a line ─> refused by its headers alone?
        ─> handler, which reads the body within its bounds ─> answer, at the client's pace
           but never waiting long for a client that takes nothing

Everything of aiohttp that is not its public interface is used here and nowhere else.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final, cast

import structlog
from aiohttp import HttpVersion10, HttpVersion11, hdrs, web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler, _ErrInfo
from typing_extensions import override

from kvway_core.errors import (
    InternalError,
    InvalidRequest,
    KvwayError,
    Overloaded,
    PayloadTooLarge,
    RequestTimeout,
)
from kvway_core.web_answers import (
    MALFORMED_HTTP,
    HttpRefusal,
    answer_http_exception,
    error_bytes,
    error_response,
    has_begun,
)
from kvway_core.web_bodies import BODY, Body, BodyBudget
from kvway_core.web_limits import MAX_LINE_BYTES, HttpLimits

LINGER_S: Final = 2.0
"""How long what a client still sends is passed over, so that it sees why it was refused."""
_NO_METHOD: Final = "UNKNOWN"
"""aiohttp's name for the method of what its parser refused."""

_LOG = structlog.get_logger(__name__)


class _Protocol(RequestHandler):
    """aiohttp's connection, with our bounds, and errors of its parser answered like all others."""

    __slots__ = ("_head_timer", "_is_silent", "_server", "_stall_timer", "_waiting_bytes")

    def __init__(self, server: Server, **kwargs: Any) -> None:
        super().__init__(server, **kwargs)
        self._server = server
        self._is_silent = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._waiting_bytes = 0

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes a connection, unless there are too many."""
        is_one_too_many = self._server.is_full()
        super().connection_made(transport)
        if is_one_too_many:
            most = self._server.limits.max_connections
            error = Overloaded(f"{most} connections are open; come back in a second.")
            cast("asyncio.Transport", transport).write(error_bytes(error))
            self.force_close()
            return
        _give_up_on_dead_peers(transport, after_s=self._server.limits.stall_timeout_s)
        self._start_head_timer()

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        """Stops what waits for the client."""
        for timer in (self._head_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    # -- the time that headers take -------------------------------------------------------------

    @override
    def data_received(self, data: bytes) -> None:
        """Reads bytes of the client; while they are not yet a whole head, its time runs."""
        super().data_received(data)
        self._is_silent = False
        if self._messages and isinstance(self._messages[-1][0], _ErrInfo):
            self._break_open_bodies()
        if self._messages:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None and self._waiter is not None and not self._waiter.done():
            self._start_head_timer()

    def _break_open_bodies(self) -> None:
        """Tells who reads a body that the parser has given it up; aiohttp lets them wait."""
        payloads = [payload for _, payload in self._messages]
        if self._current_request is not None:
            payloads.append(self._current_request.content)
        for payload in payloads:
            if not payload.is_eof():
                payload.set_exception(web.RequestPayloadError("the rest is not valid HTTP"))
                payload.feed_eof()  # or aiohttp reads on to the end, and logs that it cannot

    def _start_head_timer(self) -> None:
        seconds = self._server.limits.headers_timeout_s
        self._head_timer = self._loop.call_later(seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_silent:
            self.force_close()
            return
        seconds = self._server.limits.headers_timeout_s
        if self.transport is not None:
            error = RequestTimeout(f"The headers did not arrive within {seconds:g} s.")
            self.transport.write(error_bytes(error))
            self._stop_listening()
            self._head_timer = self._loop.call_later(LINGER_S, self.force_close)

    # -- the time that a client takes nothing -----------------------------------------------------

    @override
    def pause_writing(self) -> None:
        """Begins to wait for a client that reads slower than it is written to."""
        super().pause_writing()
        self._watch_buffer()

    @override
    def resume_writing(self) -> None:
        """Goes on: the client has taken most of what waited for it."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        super().resume_writing()

    def _watch_buffer(self) -> None:
        """Looks again in a while whether the client takes anything at all."""
        if self.transport is None:
            return
        self._waiting_bytes = self.transport.get_write_buffer_size()
        seconds = self._server.limits.stall_timeout_s
        self._stall_timer = self._loop.call_later(seconds, self._check_progress)

    def _check_progress(self) -> None:
        self._stall_timer = None
        if self.transport is None:
            return
        if self.transport.get_write_buffer_size() < self._waiting_bytes:
            self._watch_buffer()
            return
        _LOG.info("stalled_client_cut", waiting_bytes=self._waiting_bytes)
        self.transport.abort()

    # -- errors -----------------------------------------------------------------------------------

    @override
    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers what no handler answered, without repeating a byte of the client's."""
        if has_begun(request) or isinstance(exc, ConnectionError):
            raise ConnectionResetError("the answer had begun") from exc
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            _LOG.error("request_crashed", exc_info=exc)
            response = error_response(InternalError())
        else:
            _LOG.debug("malformed_http_refused", reason=type(exc).__name__)
            response = error_response(_parser_refusal(exc))
        response.force_close()
        return response

    @override
    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Sends an answer; behind one to what is no HTTP, waits for the client to close."""
        finished = await super().finish_response(request, resp, start_time)
        if request.method == _NO_METHOD and self.transport is not None:
            self._stop_listening()
            await asyncio.sleep(LINGER_S)  # ends with the connection
        return finished

    def _stop_listening(self) -> None:
        """Says that nothing more is sent, and passes over what still comes.

        To close at once would reset the connection of who still sends, and lose the answer.
        """
        self._close = True
        if self.transport is not None and self.transport.can_write_eof():
            self.transport.write_eof()


def _parser_refusal(exc: BaseException | None) -> KvwayError:
    """Returns what an error of aiohttp's parser means, not its words: they are the client's."""
    if isinstance(exc, LineTooLong):
        return HttpRefusal(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"The request line and each header may have {MAX_LINE_BYTES} bytes.",
        )
    return InvalidRequest("The request is not valid HTTP/1.1.", code=MALFORMED_HTTP)


def _malformed(request: web.BaseRequest) -> InvalidRequest | None:
    """Returns why a request is no HTTP/1.1 although aiohttp took it, None if it is."""
    if not all(value.isascii() or _is_utf8(value) for _, value in request.raw_headers):
        return InvalidRequest("The values of headers must be UTF-8.", code=MALFORMED_HTTP)
    codings = request.headers.getall(hdrs.TRANSFER_ENCODING, [])
    old = request.version == HttpVersion10
    if codings and (old or [coding.strip().lower() for coding in codings] != ["chunked"]):
        return InvalidRequest("The body is not framed as HTTP/1.1 wants.", code=MALFORMED_HTTP)
    return None


def _is_utf8(value: bytes) -> bool:
    """Says whether a header's value is text: aiohttp's client drops what is not, silently."""
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _give_up_on_dead_peers(transport: asyncio.BaseTransport, *, after_s: float) -> None:
    """Has the system close a connection whose peer acknowledges nothing, or has no room, so long.

    That ends also what no handler waits for: an answer that is complete but was never taken.
    """
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in {socket.AF_INET, socket.AF_INET6}:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(after_s * 1000)))


class Server(web.Server):
    """aiohttp's server, with the connections above and checks that come before any handler."""

    def __init__(self, server: web.Server, limits: HttpLimits) -> None:
        super().__init__(
            self._check_and_handle,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            **server._kwargs,  # noqa: SLF001 (the only way to install a protocol of our own)
        )
        self._inner: Callable[[Any], Awaitable[web.StreamResponse]] = server.request_handler
        self.limits = limits
        self.bodies = BodyBudget(limits.max_bodies_bytes)
        self._was_full = False

    @override
    def __call__(self) -> RequestHandler:
        """Returns the protocol of a new connection."""
        return _Protocol(self, loop=self._loop, **self._kwargs)

    def is_full(self) -> bool:
        """Says whether there may be no more connections; logs when that begins."""
        is_full = len(self._connections) >= self.limits.max_connections
        if is_full and not self._was_full:
            _LOG.warning("connections_full", max_connections=self.limits.max_connections)
        self._was_full = is_full
        return is_full

    async def _check_and_handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Refuses what aiohttp accepts and should not, then hands the request on."""
        if (refusal := self._refusal(request)) is not None:
            response = error_response(refusal)
            response.force_close()
            return response
        body = Body(request, self.limits, self.bodies)
        request[BODY] = body
        try:
            return await self._inner(request)
        except web.HTTPException as exc:
            if exc.status < HTTPStatus.BAD_REQUEST:
                raise
            return answer_http_exception(request, exc)
        finally:
            body.close()

    def _refusal(self, request: web.BaseRequest) -> KvwayError | None:
        """Returns why a request is refused by its headers alone, None if it is not."""
        if request._version not in {HttpVersion10, HttpVersion11}:  # noqa: SLF001
            request._version = HttpVersion11  # noqa: SLF001 (else the answer claims that version)
            return HttpRefusal(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
        if request.method == hdrs.METH_CONNECT:  # its body would be read as the next request
            return HttpRefusal(HTTPStatus.NOT_IMPLEMENTED, "This server is no tunnel.")
        if (malformed := _malformed(request)) is not None:
            return malformed
        expected = request.headers.getall(hdrs.EXPECT, [])
        if any(value.lower() != "100-continue" for value in expected):
            return HttpRefusal(HTTPStatus.EXPECTATION_FAILED)
        length = request.content_length
        if length is not None and length > self.limits.max_body_bytes:
            return PayloadTooLarge(f"The body may have {self.limits.max_body_bytes} bytes.")
        return self.bodies.refusal(length or 0)


class Runner(web.AppRunner):
    """aiohttp's runner, with the server above."""

    __slots__ = ("_limits",)

    def __init__(self, app: web.Application, limits: HttpLimits, **kwargs: Any) -> None:
        super().__init__(app, keepalive_timeout=limits.idle_timeout_s, **kwargs)
        self._limits = limits

    @override
    async def _make_server(self) -> web.Server:
        """Returns the server, built from the one that aiohttp makes."""
        return Server(await super()._make_server(), self._limits)
