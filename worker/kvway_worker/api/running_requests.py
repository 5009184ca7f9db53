"""The requests that are being answered, by the names that clients know them by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from aiohttp import web

from kvway_core.errors import InvalidRequest
from kvway_worker.api.jobs import Job
from kvway_worker.engine import EngineLoop


class RunningRequests:
    """Finds a running request by its id, or by the `id` of its answer.

    Invariants:
        1. No two requests have a name in common.
        2. A request is here for as long as its `hold` lasts, and no longer.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}

    @contextmanager
    def hold(self, request_id: str, job: Job) -> Iterator[None]:
        """Know a request by its id and its answer's id until the block is left.

        Raises:
            InvalidRequest: Another request of this id is running.
        """
        names = {request_id, job.answer_id}
        if not names.isdisjoint(self._jobs):
            raise InvalidRequest(
                "A request of this id is running; give each request an id of its own, or none.",
                param="request_id",
            )
        self._jobs.update(dict.fromkeys(names, job))
        try:
            yield
        finally:
            for name in names:
                del self._jobs[name]

    def abort(self, names: Iterable[str], engine: EngineLoop) -> list[str]:
        """End requests; their answers end with the finish reason "abort".

        Returns:
            The names, each once, of those that were running.
        """
        aborted: list[str] = []
        for name in dict.fromkeys(names):
            job = self._jobs.get(name)
            if job is not None and _abort(job, engine):
                aborted.append(name)
        return aborted


def _abort(job: Job, engine: EngineLoop) -> bool:
    """End all answers of a job; say whether one of them had not ended."""
    return sum(engine.abort(sequence.request_id) for sequence in job.sequences) > 0


RUNNING: Final = web.AppKey("running", RunningRequests)
