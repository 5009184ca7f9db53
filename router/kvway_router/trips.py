"""The story of each request: its decision record, its tokens, its one line of log.

Dispatch says what happens as it happens; what is made of it is decided here. No part of it holds
prompt text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, Final

import msgspec
import structlog

from kvway_core.clock import Clock
from kvway_core.errors import ClientDisconnected, InternalError, KvwayError, ShuttingDown
from kvway_router.decisions import (
    MAX_CANDIDATES,
    AttemptRecord,
    DecisionRecord,
    DecisionStore,
    UnusableRecord,
)
from kvway_router.ends import Where, end_by_client, end_of_answer, end_of_failure
from kvway_router.fleet import Traffic
from kvway_router.policy import Decision
from kvway_router.reading import Reading, ReadRequest, Route
from kvway_router.recent import RecentPrompts, SentPrompt
from kvway_router.retry import Refusal

REQUEST_FINISHED: Final = "request_finished"

_log = structlog.get_logger(__name__)


class Trip:
    """One request from its arrival to its end, as it is told by dispatch.

    Attributes:
        is_event_stream: Whether the answer is a stream of events, once there is one.
        end: How it ended, by `ends.py`; empty until then.
        arrived_s: When it came, by the monotonic clock.
        queued_s: How long it waited for a replica with room; None before it was chosen for.
        refusal: Why it was not tried again, if that was so.
        ttft_s: From arrival to the first byte of the answer, of a stream to its first data; None
            before it.
        prompt_read: How far the first prompt was read before the choice: "whole", "front", or
            "overdue" when its time was up; None before that.
        reading: The prompt; None before it is read.
        token_s: What one more token of the prompt takes at the chosen replica, as predicted.
        rest_pending: Whether the prompt is counted by estimate, and will be known.
        when_known: Called once it is, if the request has ended before.
    """

    def __init__(
        self, request_id: str, route: Route, *, clock: Clock, decisions: DecisionStore
    ) -> None:
        """Begins with the arrival."""
        self.request_id = request_id
        self.route = route
        self.reading: Reading | None = None
        self.request: ReadRequest | None = None
        self.record: DecisionRecord | None = None
        self.is_event_stream = False
        self.status: int | None = None
        self.finish = "running"
        self.end = ""
        self.error: str | None = None
        self.read_s: float | None = None
        self.queued_s: float | None = None
        self.refusal: Refusal | None = None
        self.prompt_read: str | None = None
        self.ttft_s: float | None = None
        self.token_s: float | None = None
        self.rest_pending = False
        self.when_known: Callable[[], None] | None = None
        self._reported_tokens: int | None = None
        self._clock = clock
        self._decisions = decisions
        self.arrived_s = clock.monotonic()
        self._arrived_unix_s = clock.time()
        self._block_size = 0

    @property
    def elapsed_s(self) -> float:
        """Time since arrival."""
        return self._clock.monotonic() - self.arrived_s

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the replica says it had cached, as many as the prompt has at most."""
        if self._reported_tokens is None or self.request is None:
            return None
        return min(self._reported_tokens, self.request.num_tokens)

    @property
    def shows_ttft(self) -> bool:
        """Whether its first token was seen, at the replica for which it was predicted."""
        record = self.record
        if record is None or self.ttft_s is None or not self.is_event_stream:
            return False
        return record.num_prompts > 0 and len(record.attempts) == 1

    @property
    def where(self) -> Where:
        """How far it has come."""
        if self.request is None:
            return Where.READING
        if self.record is None or not self.record.replica_id:
            return Where.QUEUE
        return Where.WAITING if self.ttft_s is None else Where.DATA

    @property
    def headers(self) -> dict[str, str]:
        """What the router adds to the head of the answer."""
        headers = {"x-kvway-request-id": self.request_id}
        if self.record is not None and self.record.replica_id:
            headers["x-kvway-replica"] = self.record.replica_id
            about = "" if self.record.prompt_tokens_exact else "about "
            headers["x-kvway-reason"] = (
                f"{self.record.reason}; {self.record.matched_tokens} of {about}"
                f"{self.record.prompt_tokens} prompt tokens matched"
            )
        return headers

    def read(self, reading: Reading, *, block_size: int) -> None:
        """The prompt is known, as far as the choice needs it."""
        self.reading = reading
        self.request = reading.request
        self.prompt_read = (
            "overdue" if reading.overdue else "whole" if reading.front_done else "front"
        )
        self.read_s = self.elapsed_s
        self._block_size = block_size

    def admitted(self) -> None:
        """It has waited for a replica with room."""
        self.queued_s = self.elapsed_s - (self.read_s or 0.0)

    def chose(self, decision: Decision) -> None:
        """A replica was chosen: the first record, or a newer one after a failed attempt."""
        assert self.request is not None  # noqa: S101  what is not read cannot be routed
        attempts = self.record.attempts if self.record is not None else ()
        attempt = AttemptRecord(replica_id=decision.replica_id, reason=decision.reason.value)
        chosen = decision.chosen
        self.token_s = chosen.work_s / max(1, chosen.uncached_tokens)
        record = DecisionRecord(
            **self._asked(self.request),
            replica_id=decision.replica_id,
            reason=decision.reason.value,
            price_of_work=decision.price_of_work,
            mean_work_s=decision.mean_work_s,
            busy_share=decision.busy_share,
            matched_tokens=chosen.matched_blocks * self._block_size,
            reachable_tokens=decision.reachable_blocks * self._block_size,
            predicted_ttft_s=chosen.ttft_s,
            num_candidates=decision.num_candidates,
            attempts=(*attempts, attempt),
        )
        if self.record is None:
            self._decisions.add(record, decision)
        else:
            self._decisions.update(record, decision)
        self.record = record

    def not_placed(self, error: KvwayError, unusable: Mapping[str, str]) -> None:
        """No replica was chosen: that is recorded too, with why each was not usable."""
        if self.request is None or self.record is not None:
            return
        self.record = DecisionRecord(
            **self._asked(self.request),
            replica_id="",
            reason=error.code,
            detail=error.message,
            price_of_work=0.0,
            matched_tokens=0,
            reachable_tokens=0,
            predicted_ttft_s=0.0,
            num_candidates=0,
            attempts=(),
            unusable=tuple(
                UnusableRecord(replica_id=name, why=why)
                for name, why in islice(unusable.items(), MAX_CANDIDATES)
            ),
        )
        self._decisions.add(self.record, None)

    def _asked(self, request: ReadRequest) -> dict[str, Any]:
        """Returns the fields of a record that tell what was asked for."""
        return {
            "id": self.request_id,
            "time": self._arrived_unix_s,
            "route": self.route.value,
            "model": request.model,
            "stream": request.stream,
            "num_prompts": request.num_prompts,
            "prompt_tokens": request.num_tokens,
            "prompt_blocks": len(request.hashes),
            "prompt_tokens_exact": request.exact,
            "block_size": self._block_size,
            "sticky": request.sticky,
        }

    def recounted(self, reading: Reading) -> None:
        """What was left of the prompt is read: an estimate becomes a count."""
        self.request = reading.request
        if self.record is not None:
            self.record = msgspec.structs.replace(
                self.record,
                prompt_tokens=self.request.num_tokens,
                prompt_blocks=len(self.request.hashes),
                prompt_tokens_exact=True,
                cached_tokens=self.cached_tokens,
            )
            self._decisions.update(self.record)
        self.rest_pending = False
        then, self.when_known = self.when_known, None
        if then is not None:
            then()

    def attempt_failed(self, error: KvwayError) -> None:
        """The attempt at the chosen replica came to nothing, or broke in the middle."""
        assert self.record is not None  # noqa: S101  an attempt follows a choice
        *others, last = self.record.attempts
        failed = msgspec.structs.replace(last, error=error.code)
        self.record = msgspec.structs.replace(self.record, attempts=(*others, failed))

    def answered(self, status: int, *, is_event_stream: bool) -> None:
        """The answer begins to go to the client; from here on there is no retry."""
        self.status = status
        self.is_event_stream = is_event_stream
        self.ttft_s = self.elapsed_s
        if self.record is not None:
            self.record = msgspec.structs.replace(self.record, status=status, ttft_s=self.ttft_s)
            self._decisions.update(self.record)

    def first_data(self) -> None:
        """The first data of an event stream have come: what came before were comments."""
        self.ttft_s = self.elapsed_s
        if self.record is not None:
            self.record = msgspec.structs.replace(self.record, ttft_s=self.ttft_s)
            self._decisions.update(self.record)

    def done(self, *, cached_tokens: int | None = None) -> None:
        """The client has the whole answer."""
        self.finish = "done"
        self.end = end_of_answer(self.status or 0)
        self._reported_tokens = cached_tokens

    def failed(self, error: KvwayError) -> None:
        """It ends with an error; before the first byte the client gets the error's status."""
        if isinstance(error, ClientDisconnected):
            self.client_left()
            return
        self.end = end_of_failure(error, self.where)
        self.finish = "shut_down" if isinstance(error, ShuttingDown) else "failed"
        self.error = error.code
        if self.ttft_s is None:
            self.status = error.http_status

    def client_left(self) -> None:
        """The client went away."""
        self.finish = "client_gone"
        self.end = end_by_client(self.where)
        self.error = ClientDisconnected.code
        self.status = ClientDisconnected.http_status

    def settle(self) -> None:
        """Puts the end into the record."""
        if self.finish == "running":  # left by an exception that nobody foresaw
            self.failed(InternalError())
        if self.record is None:
            return
        self.record = msgspec.structs.replace(
            self.record,
            status=self.status,
            finish=self.finish,
            end=self.end,
            error=self.error,
            cached_tokens=self.cached_tokens,
            ttft_s=self.ttft_s,
            duration_s=self.elapsed_s,
        )
        self._decisions.update(self.record)


class TripLog:
    """Gives each request its trip, and writes down how it ended.

    Args:
        decisions: Where records go.
        traffic: Where tokens are counted.
        recent: Told of every prompt that was answered.
        observe: Told of every request that has ended: the metrics.
        clock: Tells the time.
    """

    def __init__(
        self,
        *,
        decisions: DecisionStore,
        traffic: Traffic,
        recent: RecentPrompts,
        observe: Callable[[Trip], None],
        clock: Clock,
    ) -> None:
        """Takes where the stories go."""
        self._decisions = decisions
        self._traffic = traffic
        self._recent = recent
        self._observe = observe
        self._clock = clock

    @contextmanager
    def trip(self, request_id: str, route: Route) -> Iterator[Trip]:
        """Follows a request; on leaving, whatever the way, its end is written down once."""
        trip = Trip(request_id, route, clock=self._clock, decisions=self._decisions)
        try:
            yield trip
        except asyncio.CancelledError:
            trip.client_left()
            raise
        finally:
            trip.settle()
            if trip.rest_pending:
                trip.when_known = partial(self._count_tokens, trip)
            else:
                self._count_tokens(trip)
            self._observe(trip)
            _log_line(trip)

    def _count_tokens(self, trip: Trip) -> None:
        record, request = trip.record, trip.request
        if record is None or request is None or trip.finish != "done" or trip.status != 200:
            return
        sent = SentPrompt(trip.request_id, record.replica_id, request.hashes)
        known_tokens = self._recent.add(sent) * record.block_size
        # Of several prompts only the first is matched, while the replica reports all: the rates
        # could not be compared.
        is_known = trip.cached_tokens is not None and record.num_prompts == 1
        self._traffic.add(
            record.replica_id,
            prompt_tokens=record.prompt_tokens if is_known else 0,
            cached_tokens=(trip.cached_tokens or 0) if is_known else 0,
            matched_tokens=record.matched_tokens if is_known else 0,
            reachable_tokens=record.reachable_tokens if is_known else 0,
            # A replica may reuse parts of blocks, and answers as well as prompts.
            ceiling_tokens=max(known_tokens, record.reachable_tokens, trip.cached_tokens or 0)
            if is_known
            else 0,
        )
        if trip.shows_ttft and trip.ttft_s is not None:
            self._traffic.add_ttft(
                record.replica_id, predicted_s=record.predicted_ttft_s, real_s=trip.ttft_s
            )


def _log_line(trip: Trip) -> None:
    request, record = trip.request, trip.record
    fields: dict[str, object] = {
        "request_id": trip.request_id,
        "route": trip.route.value,
        "end": trip.end,
        "status": trip.status,
        "finish": trip.finish,
        "error": trip.error,
        "duration_s": round(trip.elapsed_s, 4),
    }
    if request is not None:
        fields |= {
            "stream": request.stream,
            "prompt_tokens": request.num_tokens,
            "prompt_read": trip.prompt_read,
            "read_s": None if trip.read_s is None else round(trip.read_s, 4),
            "queued_s": None if trip.queued_s is None else round(trip.queued_s, 4),
        }
    if record is not None:
        fields |= {
            "replica": record.replica_id,
            "reason": record.reason,
            "attempts": len(record.attempts),
            "retry_refused": None if trip.refusal is None else trip.refusal.value,
            "matched_tokens": record.matched_tokens,
            "cached_tokens": trip.cached_tokens,
            "predicted_ttft_s": round(record.predicted_ttft_s, 4),
            "ttft_s": None if trip.ttft_s is None else round(trip.ttft_s, 4),
        }
    if trip.status is not None and trip.status >= 500:
        _log.error(REQUEST_FINISHED, **fields)
    else:
        _log.info(REQUEST_FINISHED, **fields)
