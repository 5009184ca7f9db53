"""Answers a job, at once or in events.

The headers of a stream go out with its first output, so that whatever fails before it is answered
with its own status. What fails later ends the stream with an error event, without `[DONE]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from kvway_core.api import SSE_DONE, FinishReason, PromptTokensDetails, Usage, encode, sse
from kvway_core.errors import KvwayError, error_body
from kvway_worker.generation import Delta, Generator
from kvway_worker.jobs import Job
from kvway_worker.sequence import Sequence as EngineSequence
from kvway_worker.shapes import Choice, Shape

CACHED_TOKENS_HEADER: Final = "x-kvway-cached-tokens"
_STREAM_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Answer:
    """One answer that came to its end."""

    text: str
    num_tokens: int
    cached_tokens: int
    finish_reason: FinishReason


async def answer_whole(
    job: Job, shape: Shape, generator: Generator, *, headers: Mapping[str, str]
) -> web.Response:
    """Generate all answers of a job and return them in one JSON body.

    Raises:
        KvwayError: One of them failed; the others are aborted.
    """
    answers = await _together([_answer(job, seq, generator) for seq in job.sequences])
    choices = [Choice(answer.text, answer.finish_reason) for answer in answers]
    usage = _usage(job, answers)
    cached = sum(answer.cached_tokens for answer in answers)
    return web.Response(
        body=encode(shape.whole(choices, usage)),
        content_type="application/json",
        headers={**headers, CACHED_TOKENS_HEADER: str(cached)},
    )


async def answer_in_events(
    job: Job,
    shape: Shape,
    generator: Generator,
    *,
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

    async def stream_one(index: int, seq: EngineSequence) -> _Answer:
        async def send(delta: Delta) -> None:
            if len(job.sequences) == 1:
                await events.begin({CACHED_TOKENS_HEADER: str(delta.cached_tokens)})
            else:
                await events.begin()
            if delta.num_tokens == 1 and (opening := shape.opening(index)) is not None:
                await events.send(opening)
            if delta.text or delta.finish_reason is not None:
                await events.send(shape.chunk(index, delta.text, delta.finish_reason))

        return await _answer(job, seq, generator, on_delta=send)

    try:
        answers = await _together(
            [stream_one(index, seq) for index, seq in enumerate(job.sequences)]
        )
    except KvwayError as exc:
        if not events.has_begun:
            raise
        return await events.end(sse(error_body(exc))), exc
    if job.include_usage:
        await events.send(shape.closing(_usage(job, answers)))
    return await events.end(SSE_DONE), None


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

    async def begin(self, headers: Mapping[str, str] | None = None) -> None:
        """Send the headers, once."""
        async with self._beginning:
            if not self.has_begun:
                self._response.headers.update(headers or {})
                await self._response.prepare(self._request)

    async def send(self, event: msgspec.Struct) -> None:
        """Send one event; waits while the client reads slower than the answer grows."""
        await self._response.write(sse(encode(event)))

    async def end(self, last: bytes) -> web.StreamResponse:
        """Send the last bytes and return the response."""
        await self._response.write(last)
        await self._response.write_eof()
        return self._response


async def _answer(
    job: Job,
    seq: EngineSequence,
    generator: Generator,
    *,
    on_delta: Callable[[Delta], Awaitable[None]] | None = None,
) -> _Answer:
    """Generate one answer and return it; hand out each delta on the way."""
    pieces: list[str] = []
    async with aclosing(generator.deltas(seq, stops=job.stops)) as deltas:
        async for delta in deltas:
            pieces.append(delta.text)
            if on_delta is not None:
                await on_delta(delta)
            if delta.finish_reason is not None:
                text = "".join(pieces)
                return _Answer(text, delta.num_tokens, delta.cached_tokens, delta.finish_reason)
    raise AssertionError("an answer ended without a reason")


async def _together(answers: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run answers side by side; the first that fails cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer) for answer in answers]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def _usage(job: Job, answers: Sequence[_Answer]) -> Usage:
    completion_tokens = sum(answer.num_tokens for answer in answers)
    return Usage(
        prompt_tokens=job.num_prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=job.num_prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(answer.cached_tokens for answer in answers)
        ),
    )
