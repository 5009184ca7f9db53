"""HTTP on the client's side: the routes of the API listener."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from typing import Final

from aiohttp import web
from multidict import CIMultiDict
from typing_extensions import override

from kvway_core.api import ModelCard, ModelList, encode, sse
from kvway_core.errors import (
    ClientDisconnected,
    KvwayError,
    NotFound,
    error_body,
)
from kvway_core.metrics import CONTENT_TYPE
from kvway_core.openapi import OPENAPI_PATH, openapi
from kvway_core.web import error_response, json_response, read_body
from kvway_router.call import Call, Downstream
from kvway_router.dispatch import Dispatcher
from kvway_router.metrics import RouterMetrics
from kvway_router.openapi import OPERATIONS
from kvway_router.reading import GENERATING, Route
from kvway_router.replicas import ReplicaSet
from kvway_router.tracing import Tracer

REQUEST_ID: Final = web.RequestKey("request_id", str)
_BREAK_OFF_S: Final = 1.0
_MAX_RETRY_AFTER_S: Final = 5
_GONE: Final = "The client closed the connection."

_PASSED_ON: Final = re.compile(r"/v1(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~:@+,=-]+)+")
"""Paths that are passed on: only such as every server reads alike, or one that is refused here
could be meant there."""
_QUERY: Final = re.compile(r"(?:\?[!-~]*)?")
_PASSED_ON_METHODS: Final = ("DELETE", "GET", "PATCH", "POST", "PUT")
_MODELS: Final = "/v1/models"
_OWN_PATHS: Final = {route.value: ("POST",) for route in GENERATING} | {_MODELS: ("GET", "HEAD")}
_CHANGES_REPLICAS: Final = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""What is not a client's to do: it changes one replica of many."""


class HttpDownstream(Downstream):
    """The client's side of a request, over HTTP/1.1."""

    def __init__(self, request: web.Request) -> None:
        """Takes the request; nothing is read or sent yet."""
        self._request = request
        self._response: web.StreamResponse | None = None

    @property
    @override
    def started(self) -> bool:
        return self._response is not None

    @property
    def response(self) -> web.StreamResponse:
        """What was sent; there is something once `started`."""
        if self._response is None:
            raise RuntimeError("nothing was sent to the client")
        return self._response

    @override
    async def body(self) -> bytes:
        return await read_body(self._request)

    @override
    async def start(self, status: int, headers: CIMultiDict[str]) -> None:
        self._response = web.StreamResponse(status=status, headers=headers)
        try:
            await self._response.prepare(self._request)
        except ConnectionError as exc:
            raise ClientDisconnected(_GONE) from exc

    @override
    async def write(self, chunk: bytes) -> None:
        try:
            await self.response.write(chunk)
        except ConnectionError as exc:
            raise ClientDisconnected(_GONE) from exc

    @override
    async def end(self) -> None:
        try:
            await self.response.write_eof()
        except ConnectionError as exc:
            raise ClientDisconnected(_GONE) from exc

    @override
    async def break_off(self, error: KvwayError, *, as_event: bool) -> None:
        transport = self._request.transport
        if transport is None:
            return
        try:
            async with asyncio.timeout(_BREAK_OFF_S):
                if as_event:
                    await self.response.write(sse(error_body(error)))
        except (ConnectionError, TimeoutError):
            transport.abort()  # it left, or it does not read: what is buffered is for nobody
        else:
            transport.close()  # before the last chunk, which would say that all is well


class ApiHandlers:
    """The routes that clients use.

    Args:
        dispatcher: Answers requests.
        replicas: Tell whether there is anyone to answer.
        metrics: What ``/metrics`` shows.
        max_model_len: Returns the longest context there is; None if nobody says.
        model: Served model name.
        created_s: When the router started, Unix seconds.
        tracer: Traces requests; None for no traces.
    """

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        replicas: ReplicaSet,
        metrics: RouterMetrics,
        max_model_len: Callable[[], int | None],
        model: str,
        created_s: int,
        tracer: Tracer | None,
    ) -> None:
        """Takes what the routes need."""
        self._dispatcher = dispatcher
        self._replicas = replicas
        self._metrics = metrics
        self._max_model_len = max_model_len
        self._model = model
        self._created_s = created_s
        self._tracer = tracer
        self._openapi = openapi(
            title="kvway router", version=version("kvway"), model=model, operations=OPERATIONS
        )

    def probes(self) -> list[web.RouteDef]:
        """Returns the routes that both listeners have."""
        return [
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/metrics", self.metrics),
        ]

    def routes(self) -> list[web.RouteDef]:
        """Returns the routes of the API listener."""
        return [
            web.post(Route.CHAT.value, self.chat),
            web.post(Route.COMPLETIONS.value, self.completions),
            web.get(_MODELS, self.models),
            web.get(OPENAPI_PATH, self.openapi),
            *self.probes(),
            web.route("*", "/v1/{path:.*}", self.pass_on),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/chat/completions``."""
        return await self._generate(Route.CHAT, request)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/completions``."""
        return await self._generate(Route.COMPLETIONS, request)

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Every other path below ``/v1``: embeddings, sounds, whatever a replica may have."""
        path, mark, query = request.raw_path.partition("?")
        if path in _OWN_PATHS:
            raise web.HTTPMethodNotAllowed(request.method, _OWN_PATHS[path])
        is_known = path.lower() in _CHANGES_REPLICAS or path.lower() in _OWN_PATHS
        if is_known or not (_PASSED_ON.fullmatch(path) and _QUERY.fullmatch(mark + query)):
            raise NotFound("There is no such route.")
        if request.method not in _PASSED_ON_METHODS:
            raise web.HTTPMethodNotAllowed(request.method, _PASSED_ON_METHODS)
        return await self._generate(Route.OPAQUE, request)

    async def _generate(self, route: Route, request: web.Request) -> web.StreamResponse:
        request_id = secrets.token_hex(16)
        request[REQUEST_ID] = request_id
        downstream = HttpDownstream(request)
        call = Call(
            request_id=request_id,
            route=route,
            headers=CIMultiDict(request.headers),
            target=_target(route, request),
            method=request.method,
        )
        try:
            with self._tracer.request(call) if self._tracer else nullcontext():
                await self._dispatcher.dispatch(call, downstream)
        except KvwayError as exc:  # raised only before the client was sent anything
            return error_response(exc, headers=_retry_after() if exc.http_status == 503 else None)
        return downstream.response

    async def models(self, _request: web.Request) -> web.Response:
        """``GET /v1/models``: the one model that is served."""
        card = ModelCard(
            id=self._model,
            created=self._created_s,
            max_model_len=self._max_model_len(),
        )
        return json_response(encode(ModelList(data=[card])))

    async def openapi(self, _request: web.Request) -> web.Response:
        """``GET /openapi.json``."""
        return json_response(self._openapi)

    async def health(self, _request: web.Request) -> web.Response:
        """``GET /health``: the process runs and its loop turns."""
        return json_response(b'{"status":"ok"}')

    async def ready(self, _request: web.Request) -> web.Response:
        """``GET /ready``: 200 while a request sent now would find a replica."""
        if self._dispatcher.running.leaving:
            return json_response(b'{"status":"draining"}', status=503)
        if not self._replicas.usable():
            return json_response(b'{"status":"no replica is ready"}', status=503)
        return json_response(b'{"status":"ready"}')

    async def close_if_leaving(
        self, _request: web.BaseRequest, response: web.StreamResponse
    ) -> None:
        """Ends connections with their next answer once the router is about to stop."""
        if self._dispatcher.running.leaving:
            response.headers["Connection"] = "close"
            response.force_close()

    async def metrics(self, _request: web.Request) -> web.Response:
        """``GET /metrics``, in the text format of Prometheus."""
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})


def _target(route: Route, request: web.Request) -> str:
    """Returns path and query for the replica, spelled as they came.

    The playground sends to a route under another path, which is why that of a route counts.
    """
    path, mark, query = request.raw_path.partition("?")
    if route is not Route.OPAQUE:
        path = route.value
    return path + mark + query if _QUERY.fullmatch(mark + query) else path


def _retry_after() -> dict[str, str]:
    """Returns when a refused client may come again, left to chance so that not all do at once."""
    return {"Retry-After": str(1 + secrets.randbelow(_MAX_RETRY_AFTER_S))}


async def add_request_id(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Puts the request's id on its answer, an error's too; a signal handler of aiohttp."""
    if isinstance(request, web.Request) and REQUEST_ID in request:
        response.headers.setdefault("x-kvway-request-id", request[REQUEST_ID])
