"""Answers on their way from the step thread to their readers. The asyncio side only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Requests
from dataclasses import dataclass
from typing import Self, TypeAlias

from kvway_core.errors import InvalidRequest, KvwayError, Overloaded
from kvway_worker.scheduling.sampling_params import TokenLogprobs
from kvway_worker.scheduling.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class TokenOut:
    """A part of an answer.

    Attributes:
        token_id: The next token; also the one that ended the answer. None in the last part of an
            answer that was aborted.
        finish_reason: "stop" after an end or stop token, "length" at the limit, "abort" when
            somebody else ended it, None in between.
        cached_tokens: Prompt tokens whose KV was reused; the same in every part.
        logprobs: Of the token, when asked for.
        prompt_logprobs: Of the prompt's tokens from the second on, with the first token, when
            asked for.
    """

    token_id: int | None
    finish_reason: FinishReason | None
    cached_tokens: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


Output: TypeAlias = TokenOut | KvwayError


@dataclass(slots=True, eq=False)
class Stream:
    """One request and what its reader has not read yet.

    Attributes:
        seq: The request; only the step thread reads its progress.
        outputs: Its answer; the last one has a finish reason or is an error, or is None when its
            reader leaves.
        submitted_s: When it was handed over, seconds on the loop's clock.
        scheduled_s: When it first got a place. This and the next belong to the step thread.
        first_token_s: When its first token was known.
    """

    seq: Sequence
    outputs: asyncio.Queue[Output | None]
    submitted_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None


class TokenStream:
    """The answer to one request, for one reader: iterate it, and close it when you leave.

    The last part has a finish reason; an error is raised instead of it.

    Args:
        stream: What is read.
        leave: Told when the reader closes it.
    """

    def __init__(self, stream: Stream, leave: Callable[[Stream], None]) -> None:
        self._stream = stream
        self._leave = leave
        self._is_over = False

    @classmethod
    def aborted(cls, seq: Sequence) -> Self:
        """Returns the answer to a request that was ended before it was handed over."""
        outputs: asyncio.Queue[Output | None] = asyncio.Queue(maxsize=1)
        outputs.put_nowait(TokenOut(None, "abort", 0))
        return cls(Stream(seq, outputs, seq.arrival_s), lambda _: None)

    @property
    def seq(self) -> Sequence:
        """The request."""
        return self._stream.seq

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenOut:
        """Returns the next part.

        Raises:
            StopAsyncIteration: If the answer has ended or was closed.
            ShuttingDown: If the loop is closed.
            EngineFailed: If the request's step failed or the engine was given up.
        """
        if self._is_over:
            raise StopAsyncIteration
        out = await self._stream.outputs.get()
        if out is None:
            raise StopAsyncIteration
        if isinstance(out, KvwayError):
            self._is_over = True
            raise out
        self._is_over = out.finish_reason is not None
        return out

    async def aclose(self) -> None:
        """Ends the reading; a request that has not ended is aborted and its blocks are freed."""
        self._is_over = True
        self._leave(self._stream)


class Streams:
    """The requests that are accepted and have not ended.

    Args:
        max_requests: How many there may be.

    Invariants:
        1. There are at most `max_requests`, each with its own id.
        2. A stream buffers at most its `max_tokens` tokens, an end and None.
        3. Nothing follows the output that ends a request.
    """

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self._open: dict[str, Stream] = {}

    def open(self, seqs: Requests[Sequence], *, now_s: float) -> tuple[Stream, ...]:
        """Accepts requests that belong together, all or none.

        Raises:
            InvalidRequest: If one of the same id has not ended.
            Overloaded: If there are too many.
        """
        ids = [seq.request_id for seq in seqs]
        for index, request_id in enumerate(ids):
            if request_id in self._open or request_id in ids[:index]:
                raise InvalidRequest(
                    f"A request with the id {request_id!r} is running; use another id.",
                    param="request_id",
                )
        if len(self._open) + len(ids) > self.max_requests:
            raise Overloaded(
                f"{len(self._open)} requests are running or waiting, and at most "
                f"{self.max_requests} may be; try again later."
            )
        streams = tuple(
            Stream(seq, asyncio.Queue(maxsize=seq.params.max_tokens + 2), now_s) for seq in seqs
        )
        self._open.update(zip(ids, streams, strict=True))
        return streams

    def find(self, request_id: str) -> Stream | None:
        """Returns the request of an id, None if it has ended or never was."""
        return self._open.get(request_id)

    def leave(self, stream: Stream) -> bool:
        """Drops a request whose reader leaves; says whether it had not ended before."""
        if self._open.get(stream.seq.request_id) is not stream:
            return False
        del self._open[stream.seq.request_id]
        stream.outputs.put_nowait(None)  # for a task that still waits for a part
        return True

    def put(self, outputs: Iterable[tuple[Stream, Output]]) -> None:
        """Gives readers what a step made for them; what comes behind an end is dropped."""
        for stream, output in outputs:
            if self._open.get(stream.seq.request_id) is not stream:
                continue
            stream.outputs.put_nowait(output)
            if isinstance(output, KvwayError) or output.finish_reason is not None:
                del self._open[stream.seq.request_id]
