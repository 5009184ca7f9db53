"""The endpoints. Whatever is refused is raised, and written by the shared error middleware."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from importlib.metadata import version
from typing import Final, Protocol

import msgspec
import structlog
from aiohttp import web

from kvway_core.api import (
    REQUEST_ID,
    ModelCard,
    ModelList,
    encode,
    parse_abort,
    peek_request_id,
)
from kvway_core.errors import ClientDisconnected, InternalError, InvalidRequest, KvwayError
from kvway_core.metrics import CONTENT_TYPE, render
from kvway_core.openapi import openapi
from kvway_core.web import Handler, json_response, read_body
from kvway_worker.api import jobs, tokenizing
from kvway_worker.api.answering import answer_in_events, answer_whole
from kvway_worker.api.fields import ABORT_FIELDS, check_fields
from kvway_worker.api.generation import Generator
from kvway_worker.api.jobs import Job
from kvway_worker.api.openapi import OPERATIONS
from kvway_worker.api.running_requests import RUNNING, Held
from kvway_worker.api.served_model import ServedModel
from kvway_worker.api.shapes import ChatShape, CompletionShape, Head
from kvway_worker.api.state import WORKER

REQUEST_ID_HEADER: Final = "x-request-id"
_HEALTHY: Final = frozenset({"ready", "draining"})

_log = structlog.get_logger(__name__)


class _ReadJob(Protocol):
    """Makes a job of a body."""

    def __call__(
        self,
        body: bytes,
        model: ServedModel,
        *,
        answer_id: str,
        arrival_s: float,
        max_answers: int,
    ) -> Job: ...


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    return await _generate(request, jobs.chat_job, ChatShape, id_prefix="chatcmpl-")


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    return await _generate(request, jobs.completion_job, CompletionShape, id_prefix="cmpl-")


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize."""
    return await _convert(request, tokenizing.tokenize)


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize."""
    return await _convert(request, tokenizing.detokenize)


async def models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    model, _ = request.app[WORKER].loaded()
    card = ModelCard(id=model.name, created=model.created, max_model_len=model.max_model_len)
    return json_response(encode(ModelList(data=[card])))


async def load(request: web.Request) -> web.Response:
    """GET /load: always 200, so that a router sees the state."""
    return json_response(encode(request.app[WORKER].load_report()))


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """POST /reset_prefix_cache: false, and nothing is forgotten, while a request holds blocks.

    With `reset_running_requests=true` running requests give their blocks back and compute them
    again.
    """
    _, engine = request.app[WORKER].loaded()
    reset_running = _flag(request, "reset_running_requests")
    success = await engine.reset_prefix_cache(reset_running=reset_running)
    return web.json_response({"success": success})


async def abort_requests(request: web.Request) -> web.Response:
    """POST /abort_requests: tells which of the requests were running."""
    _, engine = request.app[WORKER].loaded()
    body = await read_body(request)
    request_ids = parse_abort(body).request_ids
    check_fields(body, ABORT_FIELDS)
    aborted = request.app[RUNNING].abort(request_ids, engine)
    others = [request_id for request_id in dict.fromkeys(request_ids) if request_id not in aborted]
    return web.json_response({"aborted": aborted, "not_running": others})


async def health(request: web.Request) -> web.Response:
    """GET /health: 200 while the process does its work, also while it drains."""
    state = request.app[WORKER].state
    return web.json_response({"status": state}, status=200 if state in _HEALTHY else 503)


async def ready(request: web.Request) -> web.Response:
    """GET /ready: 200 while new requests are taken."""
    state = request.app[WORKER].state
    return web.json_response({"status": state}, status=200 if state == "ready" else 503)


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, in Prometheus' text format."""
    body = render(request.app[WORKER].metrics.registry)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


def document(model: str) -> Handler:
    """Make the handler of GET /openapi.json."""
    body = openapi(
        title="kvway worker", version=version("kvway"), model=model, operations=OPERATIONS
    )

    async def answer(_request: web.Request) -> web.StreamResponse:
        return json_response(body)

    return answer


@web.middleware
async def count_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count each answer with an error status."""
    response = await handler(request)
    if response.status >= HTTPStatus.BAD_REQUEST:
        request.app[WORKER].metrics.http_error(response.status)
    return response


async def _generate(
    request: web.Request,
    read_job: _ReadJob,
    shape_type: type[ChatShape | CompletionShape],
    *,
    id_prefix: str,
) -> web.StreamResponse:
    """Answer a request, which has its id from the moment its body is there."""
    worker = request.app[WORKER]
    arrival_s = worker.clock.monotonic()
    with worker.request() as (model, generator):
        body = await read_body(request)
        answer_id = id_prefix + secrets.token_hex(16)
        request_id = _given_id(request, body) or answer_id
        with request.app[RUNNING].hold(request_id, answer_id) as held:
            read = partial(
                read_job,
                body,
                model,
                answer_id=answer_id,
                arrival_s=arrival_s,
                max_answers=generator.engine.max_requests,
            )
            job = await worker.executor.run(read)
            shape = shape_type(
                Head(job, int(worker.clock.time()), model.name, model.fingerprint, model.encoder)
            )
            return await _answer(request, job, shape, generator, held=held, request_id=request_id)


async def _answer(
    request: web.Request,
    job: Job,
    shape: ChatShape | CompletionShape,
    generator: Generator,
    *,
    held: Held,
    request_id: str,
) -> web.StreamResponse:
    """Answer a job and log how it ended: one line, whatever happened."""
    worker = request.app[WORKER]
    headers = {REQUEST_ID_HEADER: request_id}
    outcome = InternalError.code
    failure: KvwayError | None = None
    response: web.StreamResponse
    try:
        if job.stream:
            response, failure = await answer_in_events(
                job, shape, generator, held=held, request=request, headers=headers
            )
        else:
            response = await answer_whole(job, shape, generator, held=held, headers=headers)
    except KvwayError as exc:
        outcome = exc.code
        raise
    except (asyncio.CancelledError, ConnectionError):
        outcome = ClientDisconnected.code
        raise
    else:
        outcome = "ok"
        if failure is not None:
            outcome = failure.code
            worker.metrics.stream_broke(failure.code)
        return response
    finally:
        _log.info(
            "request_finished",
            request_id=request_id,
            id=job.answer_id,
            path=request.path,
            stream=job.stream,
            outcome=outcome,
            num_prompts=len(job.leaders),
            num_choices=job.num_choices,
            num_prompt_tokens=job.num_prompt_tokens,
            cached_tokens=sum(seq.cached_tokens or 0 for seq in job.leaders),
            num_output_tokens=sum(seq.num_output_tokens for seq in job.sequences),
            duration_s=round(worker.clock.monotonic() - job.sequences[0].arrival_s, 6),
        )


async def _convert(
    request: web.Request, convert: Callable[[bytes, ServedModel], msgspec.Struct]
) -> web.Response:
    worker = request.app[WORKER]
    with worker.request() as (model, _):
        body = await read_body(request)
        answer = await worker.executor.run(partial(convert, body, model))
        return json_response(encode(answer))


def _flag(request: web.Request, name: str) -> bool:
    """Return a switch of the query, off without it.

    Raises:
        InvalidRequest: It is neither true nor false, or the query has something else.
    """
    for key in request.query:
        if key != name:
            raise InvalidRequest(f"The query may have {name} and nothing else.", param=name)
    value = request.query.get(name, "false").lower()
    if value not in {"true", "1", "false", "0"}:
        raise InvalidRequest(f"{name} must be true or false.", param=name)
    return value in {"true", "1"}


def _given_id(request: web.Request, body: bytes) -> str | None:
    """Return what the client calls the request, in the body or the header; None if it does not."""
    names = (peek_request_id(body), request.headers.get(REQUEST_ID_HEADER))
    return next((name for name in names if name and REQUEST_ID.fullmatch(name)), None)
