"""Answers on their way from the step thread to their readers. The asyncio side only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from kvway_core.errors import InvalidRequest, KvwayError, Overloaded
from kvway_worker.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class TokenOut:
    """A part of an answer.

    Attributes:
        token_id: The next token; also the one that ended the answer.
        finish_reason: "stop" after an end or stop token, "length" at the limit, None in between.
        cached_tokens: Prompt tokens whose KV was reused; the same in every part.
    """

    token_id: int
    finish_reason: FinishReason | None
    cached_tokens: int


Output: TypeAlias = TokenOut | KvwayError


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """One request and what its reader has not read yet.

    Attributes:
        seq: The request; only the step thread reads its progress.
        outputs: Its answer; the last one has a finish reason or is an error.
    """

    seq: Sequence
    outputs: asyncio.Queue[Output]


class Streams:
    """The requests that are accepted and have not ended.

    Args:
        max_requests: How many there may be.

    Invariants:
        1. There are at most `max_requests`, each with its own id.
        2. A stream buffers at most its `max_tokens` tokens and one error.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._open: dict[str, Stream] = {}

    def open(self, seq: Sequence) -> Stream:
        """Accepts a request.

        Raises:
            InvalidRequest: If one of the same id has not ended.
            Overloaded: If there are too many.
        """
        if seq.request_id in self._open:
            raise InvalidRequest(
                f"A request with the id {seq.request_id!r} is running; use another id.",
                param="request_id",
            )
        if len(self._open) >= self._max_requests:
            raise Overloaded(
                f"{len(self._open)} requests are running or waiting, as many as may be; "
                "try again later."
            )
        stream = Stream(seq, asyncio.Queue(maxsize=seq.params.max_tokens + 1))
        self._open[seq.request_id] = stream
        return stream

    def close(self, stream: Stream) -> bool:
        """Drops a request; says whether it had not ended before."""
        if self._open.get(stream.seq.request_id) is not stream:
            return False
        del self._open[stream.seq.request_id]
        return True

    def put(self, outputs: Iterable[tuple[Stream, Output]]) -> None:
        """Gives readers what a step made for them; the last output of a request ends it."""
        for stream, output in outputs:
            stream.outputs.put_nowait(output)
            if isinstance(output, KvwayError) or output.finish_reason is not None:
                self.close(stream)
