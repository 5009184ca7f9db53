"""HTTP on the client's side: the routes of the API listener."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from typing import Final

from aiohttp import web
from multidict import CIMultiDict
from typing_extensions import override

from kvway_core.api import ModelCard, ModelList, encode, sse
from kvway_core.errors import ClientDisconnected, KvwayError, error_body
from kvway_core.metrics import CONTENT_TYPE
from kvway_core.web import error_response, json_response, read_body
from kvway_router.dispatch import Call, Dispatcher, Downstream
from kvway_router.metrics import RouterMetrics
from kvway_router.reading import Route
from kvway_router.replicas import ReplicaSet

REQUEST_ID: Final = web.RequestKey("request_id", str)
_BREAK_OFF_S: Final = 1.0
_GONE: Final = "The client closed the connection."


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
    async def break_off(self, error: KvwayError, *, event_stream: bool) -> None:
        if event_stream:
            with suppress(ConnectionError, TimeoutError):  # it left, or it does not read
                async with asyncio.timeout(_BREAK_OFF_S):
                    await self.response.write(sse(error_body(error)))
        transport = self._request.transport
        if transport is not None:
            transport.close()  # before the last chunk, which would say that all is well


class ApiHandlers:
    """The routes that clients use.

    Args:
        dispatcher: Answers requests.
        replicas: Tell whether there is anyone to answer.
        metrics: What ``/metrics`` shows.
        model: Served model name.
        created_s: When the router started, Unix seconds.
    """

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        replicas: ReplicaSet,
        metrics: RouterMetrics,
        model: str,
        created_s: int,
    ) -> None:
        """Takes what the routes need."""
        self._dispatcher = dispatcher
        self._replicas = replicas
        self._metrics = metrics
        self._model = model
        self._created_s = created_s

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
            web.get("/v1/models", self.models),
            *self.probes(),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/chat/completions``."""
        return await self._generate(Route.CHAT, request)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/completions``."""
        return await self._generate(Route.COMPLETIONS, request)

    async def _generate(self, route: Route, request: web.Request) -> web.StreamResponse:
        request_id = secrets.token_hex(16)
        request[REQUEST_ID] = request_id
        downstream = HttpDownstream(request)
        call = Call(request_id=request_id, route=route, headers=CIMultiDict(request.headers))
        try:
            await self._dispatcher.dispatch(call, downstream)
        except KvwayError as exc:  # raised only before the client was sent anything
            return error_response(exc)
        return downstream.response

    async def models(self, _request: web.Request) -> web.Response:
        """``GET /v1/models``: the one model that is served."""
        card = ModelCard(
            id=self._model,
            created=self._created_s,
            max_model_len=self._dispatcher.max_model_len(),
        )
        return json_response(encode(ModelList(data=[card])))

    async def health(self, _request: web.Request) -> web.Response:
        """``GET /health``: the process runs and its loop turns."""
        return json_response(b'{"status":"ok"}')

    async def ready(self, _request: web.Request) -> web.Response:
        """``GET /ready``: 200 while a request sent now would find a replica."""
        if self._dispatcher.running.draining:
            return json_response(b'{"status":"draining"}', status=503)
        if not self._replicas.usable():
            return json_response(b'{"status":"no replica is ready"}', status=503)
        return json_response(b'{"status":"ready"}')

    async def metrics(self, _request: web.Request) -> web.Response:
        """``GET /metrics``, in the text format of Prometheus."""
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def add_request_id(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Puts the request's id on its answer, an error's too; a signal handler of aiohttp."""
    if isinstance(request, web.Request) and REQUEST_ID in request:
        response.headers.setdefault("x-kvway-request-id", request[REQUEST_ID])
