"""Answers a job, at once or in events.

The headers of a stream go out with its first output, so that whatever fails before it is answered
with its own status. What fails later ends the stream with an error event, without `[DONE]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from kvway_core.api import SSE_DONE, PromptTokensDetails, Usage, encode, sse
from kvway_core.errors import KvwayError, error_body
from kvway_worker.api.generation import Delta, Generator
from kvway_worker.api.jobs import Job
from kvway_worker.api.running_requests import Held
from kvway_worker.api.shapes import Part, Shape
from kvway_worker.scheduling.sampling_params import TokenLogprobs
from kvway_worker.streams import TokenStream

CACHED_TOKENS_HEADER: Final = "x-kvway-cached-tokens"
_STREAM_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

MAX_WRITTEN_AT_ONCE: Final = 32
"""Tokens whose log probabilities are written on the event loop, about 50 microseconds each."""

T = TypeVar("T")


class _Tally:
    """Counts the tokens of a request's answers as they grow."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._num_tokens = [0] * len(job.sequences)
        self._cached_tokens = [0] * len(job.leaders)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were reused, those of each prompt counted once."""
        return sum(self._cached_tokens)

    def count(self, index: int, delta: Delta) -> None:
        """Count what an answer has by now."""
        prompt = index // self._job.num_choices
        self._num_tokens[index] = delta.num_tokens
        self._cached_tokens[prompt] = max(self._cached_tokens[prompt], delta.cached_tokens)

    def usage(self) -> Usage:
        """Return what the request cost so far."""
        num_prompt_tokens, num_tokens = self._job.num_prompt_tokens, sum(self._num_tokens)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_tokens,
            total_tokens=num_prompt_tokens + num_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
        )


@dataclass(slots=True)
class _Gathering:
    """Collects deltas of one answer until they are written together."""

    index: int
    is_first: bool = True
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        if delta.token_id is not None:
            self.token_ids.append(delta.token_id)
        if delta.logprobs is not None:
            self.logprobs.append(delta.logprobs)
        self.prompt_logprobs += delta.prompt_logprobs

    def take(self, last: Delta) -> Part:
        """Return what was collected up to `last`, and begin again behind it."""
        part = Part(
            self.index,
            "".join(self.texts),
            tuple(self.token_ids),
            tuple(self.logprobs),
            last.finish_reason,
            last.stop_reason,
            self.prompt_logprobs,
            self.is_first,
        )
        self.is_first = False
        self.prompt_logprobs = ()
        for collected in (self.texts, self.token_ids, self.logprobs):
            collected.clear()
        return part


async def answer_whole(
    job: Job, shape: Shape, generator: Generator, *, held: Held, headers: Mapping[str, str]
) -> web.Response:
    """Generate all answers of a job and return them in one JSON body.

    Raises:
        KvwayError: One of them failed; the others are aborted.
    """
    tally = _Tally(job)

    async def generate(index: int, stream: TokenStream) -> Part:
        gathering = _Gathering(index)
        last: Delta | None = None
        async with aclosing(_deltas(job, index, stream, generator)) as deltas:
            async for last in deltas:
                gathering.add(last)
                tally.count(index, last)
        if last is None:
            raise AssertionError("an answer has no end")
        return gathering.take(last)

    async with _submitted(job, generator, held) as streams:
        parts = await _together([generate(*numbered) for numbered in enumerate(streams)])
    return web.Response(
        body=await _encoded(parts, lambda: shape.whole(parts, tally.usage())),
        content_type="application/json",
        headers={**headers, CACHED_TOKENS_HEADER: str(tally.cached_tokens)},
    )


async def answer_in_events(
    job: Job,
    shape: Shape,
    generator: Generator,
    *,
    held: Held,
    request: web.Request,
    headers: Mapping[str, str],
) -> tuple[web.StreamResponse, KvwayError | None]:
    """Generate the answers of a job and send each piece of text as it becomes certain.

    The header with the cached tokens is there for a job of one prompt only: of several, some
    begin after the headers went out.

    Returns:
        The response, complete, and the error it ended with, if it ended with one.

    Raises:
        KvwayError: It failed before anything was sent.
    """
    events = _EventStream(request, headers={**_STREAM_HEADERS, **headers})
    tally = _Tally(job)

    async def send(index: int, stream: TokenStream) -> None:
        gathering = _Gathering(index)
        has_begun = False
        async with aclosing(_deltas(job, index, stream, generator)) as deltas:
            async for delta in deltas:
                tally.count(index, delta)
                if not has_begun:
                    has_begun = True
                    await events.begin(_cached_header(job, delta))
                    if (opening := shape.opening(index, tally.usage())) is not None:
                        await events.send(encode(opening))
                gathering.add(delta)
                if delta.text or delta.finish_reason is not None:
                    part = gathering.take(delta)
                    write = partial(shape.chunk, part, tally.usage())
                    await events.send(await _encoded((part,), write))

    try:
        async with _submitted(job, generator, held) as streams:
            await _together([send(*numbered) for numbered in enumerate(streams)])
    except KvwayError as exc:
        if not events.has_begun:
            raise
        return await events.end(sse(error_body(exc))), exc
    if job.include_usage:
        await events.send(encode(shape.closing(tally.usage())))
    return await events.end(SSE_DONE), None


async def _encoded(parts: Sequence[Part], write: Callable[[], msgspec.Struct]) -> bytes:
    """Return what is written of parts, as JSON.

    The log probabilities of a long prompt take seconds to write, for which no other answer is to
    wait: they are written on a thread.
    """
    num_told = sum(len(part.logprobs) + len(part.prompt_logprobs) for part in parts)
    if num_told <= MAX_WRITTEN_AT_ONCE:
        return encode(write())
    return await asyncio.to_thread(lambda: encode(write()))


def _cached_header(job: Job, delta: Delta) -> dict[str, str]:
    if len(job.leaders) > 1:
        return {}
    return {CACHED_TOKENS_HEADER: str(delta.cached_tokens)}


@asynccontextmanager
async def _submitted(
    job: Job, generator: Generator, held: Held
) -> AsyncGenerator[Sequence[TokenStream], None]:
    """Hand a job to the engine; what of it has not ended when the block is left, is aborted.

    Raises:
        KvwayError: What `EngineLoop.submit` raises; nothing runs then.
    """
    streams = held.submit(job, generator.engine)
    try:
        yield streams
    finally:
        for stream in streams:
            await stream.aclose()


def _deltas(
    job: Job, index: int, stream: TokenStream, generator: Generator
) -> AsyncGenerator[Delta, None]:
    is_leader = index % job.num_choices == 0
    return generator.deltas(stream, job.rules, counts_prompt=is_leader)


class _EventStream:
    """A response of server-sent events that several answers write to."""

    def __init__(self, request: web.Request, *, headers: Mapping[str, str]) -> None:
        self._request = request
        self._response = web.StreamResponse(headers=headers)
        self._beginning = asyncio.Lock()

    @property
    def has_begun(self) -> bool:
        """Whether the headers went out."""
        return self._response.prepared

    async def begin(self, headers: Mapping[str, str]) -> None:
        """Send the headers, once."""
        async with self._beginning:
            if not self.has_begun:
                self._response.headers.update(headers)
                await self._response.prepare(self._request)

    async def send(self, event: bytes) -> None:
        """Send one event; waits while the client reads slower than the answer grows."""
        await self._response.write(sse(event))

    async def end(self, last: bytes) -> web.StreamResponse:
        """Send the last bytes and return the response."""
        await self._response.write(last)
        await self._response.write_eof()
        return self._response


async def _together(answers: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run answers side by side; the first that fails cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer) for answer in answers]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
