"""The endpoints of pins: prefixes that stay in the cache while others come and go."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as TokenIds
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final

from aiohttp import web

from kvway_core.api import Pin, PinList, PinRequest, encode, parse_pin
from kvway_core.errors import ContextLengthExceeded, InvalidRequest, NotFound, RequestError
from kvway_core.prompting import check_text_fits
from kvway_core.web import json_response, read_body
from kvway_worker.api.fields import PIN_FIELDS, check_fields
from kvway_worker.api.served_model import ServedModel
from kvway_worker.api.state import WORKER, Worker
from kvway_worker.cache.pins import PinInfo
from kvway_worker.engine import EngineLoop
from kvway_worker.scheduling.sampling_params import SamplingParams
from kvway_worker.scheduling.sequence import Sequence

DEFAULT_TTL_S: Final = 3600.0


class PinEnded(RequestError):
    """A pin was deleted, or its time ran out, while its prefix was computed."""

    code = "pin_ended"
    http_status = 409


@dataclass(frozen=True, slots=True)
class PinJob:
    """A pin that was accepted.

    Attributes:
        pin_id: Its name.
        sequence: Computes the prefix, and one token that nobody reads.
        ttl_s: How long the pin lasts, seconds.
    """

    pin_id: str
    sequence: Sequence
    ttl_s: float


async def create_pin(request: web.Request) -> web.Response:
    """POST /pins: answers when the prefix is computed and pinned.

    Raises:
        InvalidRequest: The worker keeps no cache, or as `read_pin`.
        PinEnded: The pin ended meanwhile.
    """
    worker = request.app[WORKER]
    arrival_s = worker.clock.monotonic()
    if not worker.settings.prefix_caching:
        raise InvalidRequest(
            "This worker runs with --no-prefix-caching, so nothing can be pinned.",
            code="prefix_caching_off",
        )
    with worker.request() as (model, generator):
        body = await read_body(request)
        job = await worker.executor.run(partial(read_pin, body, model, arrival_s=arrival_s))
        info = await _compute_and_pin(job, generator.engine)
        return json_response(encode(_pin(info, worker, model)))


async def list_pins(request: web.Request) -> web.Response:
    """GET /pins: those that have not expired, the oldest first."""
    worker = request.app[WORKER]
    model, engine = worker.loaded()
    infos = await engine.pins()
    return json_response(encode(PinList(pins=[_pin(info, worker, model) for info in infos])))


async def delete_pin(request: web.Request) -> web.Response:
    """DELETE /pins/{id}: its blocks stay cached for as long as any other's."""
    _, engine = request.app[WORKER].loaded()
    pin_id = request.match_info["id"]
    if not await engine.unpin(pin_id):
        raise NotFound("There is no such pin; it may have expired.", param="id")
    return web.json_response({"id": pin_id, "deleted": True})


def read_pin(body: bytes, model: ServedModel, *, arrival_s: float) -> PinJob:
    """Read a request to pin a prefix. Pure and slow, as jobs.

    Raises:
        InvalidRequest: It is malformed, or the prefix fills no block.
        ModelNotFound: It asks for another model.
        ContextLengthExceeded: The prefix does not fit the context.
    """
    request = parse_pin(body)
    check_fields(body, PIN_FIELDS)
    model.check_name(request.model)
    param = "prompt" if request.messages is None else "messages"
    tokens = _prefix(request, model, param=param)
    if len(tokens) < model.block_size:
        raise InvalidRequest(
            f"The prefix has {len(tokens)} tokens and only full blocks of {model.block_size} can "
            "be pinned; pin a longer one.",
            param=param,
        )
    if len(tokens) >= model.max_model_len:
        raise ContextLengthExceeded(
            f"The prefix has {len(tokens)} tokens; the model's context has "
            f"{model.max_model_len}, and an answer needs some of it. Shorten the prefix.",
            param=param,
        )
    pin_id = "pin-" + secrets.token_hex(12)
    sequence = Sequence(
        pin_id,
        tokens,
        params=SamplingParams(max_tokens=1),
        namespace=model.namespace(request.cache_salt),
        arrival_s=arrival_s,
    )
    return PinJob(pin_id, sequence, DEFAULT_TTL_S if request.ttl_s is None else request.ttl_s)


def _prefix(request: PinRequest, model: ServedModel, *, param: str) -> TokenIds[int]:
    """Return the tokens to pin; of messages, those before the beginning of an answer."""
    special = request.add_special_tokens
    if request.messages is not None:
        special = bool(special)
        prompt: str | TokenIds[int] = model.encoder.render_chat(
            request.messages, add_generation_prompt=False, kwargs=request.chat_template_kwargs
        )
    else:
        prompt = request.prompt or ()
    if isinstance(prompt, str):
        check_text_fits(prompt, model.encoder, max_model_len=model.max_model_len, param=param)
        prompt = model.encoder.encode_text(prompt, add_special_tokens=special is not False)
    model.check_vocabulary(prompt, param=param)
    return prompt


async def _compute_and_pin(job: PinJob, engine: EngineLoop) -> PinInfo:
    """Pin a prefix and compute what of it is not cached.

    The pin comes first: a quota that is used up is told before anything is computed, and blocks
    are pinned the moment they are there. Its time begins anew when they are. A prefix that cannot
    be computed is not pinned, and a pin that ended meanwhile does not come back.

    Raises:
        PinEnded: It ended meanwhile.
        KvwayError: What `EngineLoop.pin` and `EngineLoop.submit` raise.
    """
    hashes = tuple(job.sequence.chain.hashes)
    try:
        await engine.pin(job.pin_id, hashes, ttl_s=job.ttl_s)
        (stream,) = engine.submit(job.sequence)
        async with aclosing(stream):
            async for _ in stream:
                pass
        info = await engine.renew_pin(job.pin_id, hashes, ttl_s=job.ttl_s)
    except BaseException:
        await engine.unpin(job.pin_id)
        raise
    if info is None:
        raise PinEnded(
            "The pin was deleted, or its ttl_s ran out, while its prefix was computed. What was "
            "computed is cached for as long as any other's; pin it again, with a longer ttl_s."
        )
    return info


def _pin(info: PinInfo, worker: Worker, model: ServedModel) -> Pin:
    left_s = info.expires_s - worker.clock.monotonic()
    return Pin(
        id=info.pin_id,
        num_tokens=info.num_blocks * model.block_size,
        num_blocks=info.num_blocks,
        num_cached_blocks=info.num_cached_blocks,
        expires_at=round(worker.clock.time() + left_s, 3),
    )
