"""The aiohttp glue that both programs share: every answer is JSON in OpenAI's form, even to junk.

Only this module and those behind it (`web_answers`, `web_bodies`, `web_server`) need aiohttp. A
program builds its application with `new_app`, its runner with `make_runner`, and listens with
`lifecycle.start_site`:

    app = new_app()
    app.router.add_post("/v1/completions", completions)
    runner = make_runner(app, HttpLimits(max_body_bytes=2**20))
    port = await start_site(runner, "127.0.0.1", 0)
    ...
    await runner.cleanup()

Nothing a client sent is ever repeated in an error, and a malformed request costs one debug line.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import structlog
from aiohttp import http_parser, web

from kvway_core.errors import ConfigError, InternalError, KvwayError
from kvway_core.web_answers import (
    answer_error,
    answer_http_exception,
    error_response,
    has_begun,
    json_response,
)
from kvway_core.web_bodies import BODY
from kvway_core.web_limits import HttpLimits
from kvway_core.web_server import LINGER_S, Runner

__all__ = [
    "Handler",
    "HttpLimits",
    "error_response",
    "json_response",
    "listen",
    "make_runner",
    "new_app",
    "read_body",
]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_LOG = structlog.get_logger(__name__)


def new_app() -> web.Application:
    """Returns an application that answers every error of its handlers in OpenAI's form."""
    return web.Application(middlewares=[error_middleware])


def make_runner(app: web.Application, limits: HttpLimits | None = None) -> web.AppRunner:
    """Returns the runner of an application; whoever calls this must await its `cleanup`.

    A handler is cancelled when its client leaves. Bodies are never decompressed.

    Args:
        app: From `new_app`.
        limits: What clients may take; None is the default of each.

    Raises:
        ConfigError: If aiohttp runs on its Python parser, which reads some requests differently
            from the C one: with a proxy in front that is how requests are smuggled.
    """
    if http_parser.HttpRequestParser is http_parser.HttpRequestParserPy:
        raise ConfigError(
            ["aiohttp has no C parser here: unset AIOHTTP_NO_EXTENSIONS or reinstall aiohttp"]
        )
    return Runner(
        app,
        limits or HttpLimits(),
        handler_cancellation=True,
        lingering_time=LINGER_S,
        auto_decompress=False,
        access_log=None,
    )


async def listen(runner: web.AppRunner, host: str, port: int, *, share_port: bool = False) -> int:
    """Starts to listen and returns the port, which the system chose if `port` is 0.

    With `share_port` other processes may listen there too.

    Raises:
        ConfigError: If the address cannot be listened on, naming it and the fix.
    """
    if runner.server is None:
        await runner.setup()
    site = web.TCPSite(runner, host, port, reuse_address=True, reuse_port=share_port)
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


async def read_body(request: web.Request) -> bytes:
    """Returns the whole body of a request, which must not have been read, within the limits.

    Raises:
        KvwayError: As `web_bodies.Body.read`.
    """
    return await request[BODY].read()


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
        return answer_http_exception(request, exc)
    except KvwayError as exc:
        return answer_error(request, exc)
    except Exception as exc:
        if isinstance(exc, ConnectionError) and has_begun(request):
            raise
        _LOG.exception("request_crashed", method=request.method, route=_route(request))
        return answer_error(request, InternalError())


def _route(request: web.Request) -> str:
    """Returns the route of a request as it was registered, never the path as it was sent."""
    resource = request.match_info.route.resource
    return "unknown" if resource is None else resource.canonical
