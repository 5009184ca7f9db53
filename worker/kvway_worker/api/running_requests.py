"""The requests that are being read or answered, by the names that clients know them by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from aiohttp import web

from kvway_core.errors import InvalidRequest
from kvway_worker.api.jobs import Job
from kvway_worker.engine import EngineLoop
from kvway_worker.scheduling.sequence import Sequence
from kvway_worker.streams import TokenStream


class Held:
    """A request that has not ended, from before its prompt is read."""

    def __init__(self) -> None:
        self._is_aborted = False
        self._sequences: tuple[Sequence, ...] = ()

    def submit(self, job: Job, engine: EngineLoop) -> tuple[TokenStream, ...]:
        """Hand all answers of the request to the engine, or none if it was aborted before.

        Returns:
            The answers in their order; whoever gets them closes each.

        Raises:
            KvwayError: What `EngineLoop.submit` raises; nothing runs then.
        """
        if self._is_aborted:
            return tuple(map(TokenStream.aborted, job.sequences))
        streams = engine.submit(*job.leaders)
        self._sequences = job.sequences
        return streams

    def abort(self, engine: EngineLoop) -> bool:
        """End all answers, also those to come; say whether one of them had not ended."""
        if not self._sequences:
            self._is_aborted = True
            return True
        return sum(engine.abort(sequence.request_id) for sequence in self._sequences) > 0


class RunningRequests:
    """Finds a request that has not ended by its id, or by the `id` of its answer.

    Invariants:
        1. No two requests have a name in common.
        2. A request is here for as long as its `hold` lasts, and no longer.
    """

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    @contextmanager
    def hold(self, request_id: str, answer_id: str) -> Iterator[Held]:
        """Know a request by its id and its answer's id until the block is left.

        Raises:
            InvalidRequest: Another request of this id is running.
        """
        names = {request_id, answer_id}
        if not names.isdisjoint(self._held):
            raise InvalidRequest(
                "A request of this id is running; give each request an id of its own, or none.",
                param="request_id",
            )
        held = Held()
        self._held.update(dict.fromkeys(names, held))
        try:
            yield held
        finally:
            for name in names:
                del self._held[name]

    def abort(self, names: Iterable[str], engine: EngineLoop) -> list[str]:
        """End requests; their answers end with the finish reason "abort".

        Returns:
            The names, each once, of those that had not ended.
        """
        aborted: list[str] = []
        for name in dict.fromkeys(names):
            held = self._held.get(name)
            if held is not None and held.abort(engine):
                aborted.append(name)
        return aborted


RUNNING: Final = web.AppKey("running", RunningRequests)
