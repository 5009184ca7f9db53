"""From a request body to what the router must know about it: pure CPU work, kept off the loop.

`read_request` is a plain function of the body; `ReaderPool` runs it in a few threads with a
bounded line before them, so that one long prompt delays neither others' streams nor the probes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeVar

import msgspec
import xxhash

from kvway_core.api import ChatRequest, CompletionRequest, parse_chat, parse_completion
from kvway_core.blocks import Namespace, block_hashes, event_hash
from kvway_core.errors import ContextLengthExceeded, ModelNotFound, Overloaded
from kvway_core.prompting import encode_prompts
from kvway_core.prompts import PromptEncoder
from kvway_core.strict_json import top_level_fields

_Result = TypeVar("_Result")

STRIPPED_FIELDS: Final = frozenset({"cache_salt"})
"""Fields of a body that never reach a replica: who shares a cache is not the client's choice."""

STICKY_HEADER: Final = "x-kvway-sticky"
"""Requests with the same value go to the same of otherwise equal replicas."""

EXPECTED_OUTPUT_TOKENS: Final = 256
"""Longest answer that the choice reckons with: clients allow far more than most answers take."""


class Route(Enum):
    """The routes that generate; the value is the path, here and at every replica."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What routing needs of a request.

    Attributes:
        model: Served model name.
        stream: Whether the client asked for an event stream.
        num_prompts: Prompts in the request; all but the first count as work only.
        num_tokens: Prompt tokens of all prompts together.
        num_output_tokens: Output to reckon with: what the client allows, within reason.
        hashes: Event hash of each full block of the first prompt.
        sticky_key: Digest of what the client wants kept together; empty for nothing.
        body: The bytes for the replica: the client's own unless a field had to be stripped.
    """

    model: str
    stream: bool
    num_prompts: int
    num_tokens: int
    num_output_tokens: int
    hashes: tuple[int, ...]
    body: bytes
    sticky_key: bytes = b""

    @property
    def sticky(self) -> bool:
        """Whether the client gave a key to keep requests together."""
        return bool(self.sticky_key)

    @property
    def prefix_key(self) -> bytes:
        """Names the beginning of the first prompt; empty when it has no full block."""
        return self.hashes[0].to_bytes(8, "big") if self.hashes else b""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model behind this router.

    Attributes:
        name: What clients call it.
        encoder: Its tokenizer and chat template.
        namespace: What its block hashes start from.
    """

    name: str
    encoder: PromptEncoder
    namespace: Namespace


def read_request(
    body: bytes,
    *,
    route: Route,
    model: ServedModel,
    max_model_len: int | None,
    sticky: str | None = None,
) -> ReadRequest:
    """Decodes, checks, tokenizes and hashes one request.

    Args:
        body: As the client sent it.
        route: Where it was sent.
        model: What this router serves.
        max_model_len: Tokens of prompt and answer together, None when nobody said.
        sticky: Key of the header `STICKY_HEADER`; it counts more than ``prompt_cache_key``.

    Raises:
        InvalidRequest: Anything malformed, with the field's name.
        ModelNotFound: Another model is asked for.
        ContextLengthExceeded: A prompt leaves no room for a single token of an answer.
    """
    request = parse_chat(body) if route is Route.CHAT else parse_completion(body)
    if request.model != model.name:
        raise ModelNotFound(
            f"The model is not served here; this server has {model.name}.", param="model"
        )
    prompts = encode_prompts(request, model.encoder, max_model_len=max_model_len)
    longest = max(len(prompt) for prompt in prompts)
    if max_model_len is not None and longest >= max_model_len:
        raise ContextLengthExceeded(
            f"The prompt has {longest} tokens and the model's context has {max_model_len}, "
            "of which the answer needs at least one; shorten the prompt.",
            param="messages" if route is Route.CHAT else "prompt",
        )
    namespace = model.namespace
    chain = block_hashes(prompts[0], parent=namespace.root(), block_size=namespace.block_size)
    return ReadRequest(
        model=request.model,
        stream=bool(request.stream),
        num_prompts=len(prompts),
        num_tokens=sum(len(prompt) for prompt in prompts),
        num_output_tokens=_expected_output(request) * len(prompts),
        hashes=tuple(event_hash(block) for block in chain),
        body=strip_fields(body),
        sticky_key=sticky_key(sticky or request.prompt_cache_key),
    )


def sticky_key(text: str | None) -> bytes:
    """Returns what stands for a client's key: 8 bytes however long it is, none for no key."""
    return xxhash.xxh3_64_digest(text.encode("utf-8", "surrogatepass")) if text else b""


def _expected_output(request: ChatRequest | CompletionRequest) -> int:
    allowed = request.max_output_tokens
    length = EXPECTED_OUTPUT_TOKENS if allowed is None else min(allowed, EXPECTED_OUTPUT_TOKENS)
    return length * request.num_choices


def strip_fields(body: bytes) -> bytes:
    """Returns `body` without `STRIPPED_FIELDS`; the very same bytes when it has none of them.

    The fields that stay keep their order and their spelling.
    """
    if not any(field.encode() in body for field in STRIPPED_FIELDS) and b"\\u" not in body:
        return body
    fields = top_level_fields(body)
    if STRIPPED_FIELDS.isdisjoint(fields):
        return body
    return msgspec.json.encode({k: v for k, v in fields.items() if k not in STRIPPED_FIELDS})


class ReaderPool:
    """A few threads for CPU work, and a bounded line in front of them.

    The loop keeps the line, not the executor: who gives up waiting leaves nothing behind.
    """

    def __init__(self, *, num_threads: int, max_waiting: int) -> None:
        """Makes a pool; its threads start with the first work."""
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="kvway-reader")
        self._free = asyncio.Semaphore(num_threads)
        self._max_waiting = max_waiting
        self._num_waiting = 0

    @property
    def num_waiting(self) -> int:
        """Pieces of work in line."""
        return self._num_waiting

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Runs `work` in a thread and returns its result, or raises what it raised.

        Raises:
            Overloaded: The line is full.
        """
        if self._free.locked() and self._num_waiting >= self._max_waiting:
            raise Overloaded("Too many prompts are waiting to be read; come back in a second.")
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        future.add_done_callback(lambda _: self._free.release())
        return await asyncio.shield(future)

    def close(self) -> None:
        """Lets the threads end after the work they have."""
        self._executor.shutdown(wait=False, cancel_futures=True)
