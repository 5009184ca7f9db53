"""A request, phase by phase: the page to read first.

    client --> 1 read      body -> tokens -> block hashes           reading.py   (in threads)
               2 choose    who holds how much, who is how busy      index.py, ledger.py, policy.py
               3 charge    count the work, expect the blocks        ledger.py, index.py
               4 attempt   send it, wait for the first bytes        proxy.py
                   |           failed before the client saw a byte?
                   |           take 3 back, leave that replica out, and choose again (2)
               5 relay     bytes as they come, at the client's pace
    client <-- 6 settle    on every path, once: release, record, count, one line of log

A prompt is read from the front, and no further than somebody holds it: what is left is counted by
estimate, and read after the choice (rests.py). When its time is up it is chosen for as it is, by
the hash of its text if nothing of it was read.

Phases 2 and 3 are one step of the event loop without an await: two requests that arrive together
see each other, so a burst of siblings meets at one replica.

A retry is only possible while nothing was sent to the client, and never at the same replica. An
answer is held back until its end (up to `HOLD_BYTES`), an event stream until its first bytes; so a
replica that dies before that costs the client nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from multidict import CIMultiDict

from kvway_core.errors import (
    ConnectFailed,
    DeadlineExceeded,
    KvwayError,
    NoReplicaAvailable,
    ReplicaError,
    ReplicaRejected,
)
from kvway_router.charges import Charge
from kvway_router.corrections import Corrections
from kvway_router.holding import Tier
from kvway_router.index import BlockIndex
from kvway_router.ledger import Ledger
from kvway_router.policies.base import Policy, Situation, decide
from kvway_router.policies.state import PolicyState
from kvway_router.policy import Candidate, Decision, PolicyParams, Prompt
from kvway_router.proxy import (
    CachedTokens,
    EventData,
    ReplicaAnswer,
    ReplicaClient,
    request_headers,
)
from kvway_router.reading import (
    STICKY_HEADER,
    ReaderPool,
    Reading,
    ReadRequest,
    Route,
    ServedModel,
)
from kvway_router.replicas import ReplicaSet
from kvway_router.rests import ExpectedBlocks, RestReader
from kvway_router.running import RunningRequests
from kvway_router.trips import Trip, TripLog

HOLD_BYTES: Final = 1024 * 1024
"""Most bytes of a whole answer that are held back from the client, in favour of a retry."""

SLOW_CLIENT_S: Final = 0.01
"""A client that needs longer to take a chunk is waited for: that time says nothing of steps."""

RETRIED_STATUSES: Final = frozenset({429, 502, 503})
"""Answers of a replica that did not take the request; any other is the client's to read.

Not 500: a request that breaks an engine must not be taken through the fleet. Not 504: the replica
may still be at work on it.
"""


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it came in.

    Attributes:
        request_id: Names it everywhere, 32 hex digits made by the router.
        route: Where it was sent.
        headers: The client's headers.
    """

    request_id: str
    route: Route
    headers: CIMultiDict[str]


class Downstream(Protocol):
    """The client's side of one request. Every method may be cancelled: the client left."""

    @property
    def started(self) -> bool:
        """Whether the client has been sent anything."""
        ...

    async def body(self) -> bytes:
        """Returns the whole body of the request.

        Raises:
            RequestError: It is too long, too slow, or encoded.
        """
        ...

    async def start(self, status: int, headers: CIMultiDict[str]) -> None:
        """Sends the head of the answer."""
        ...

    async def write(self, chunk: bytes) -> None:
        """Sends bytes of the body, and waits while the client reads too slowly.

        Raises:
            ClientDisconnected: Nobody is there any more.
        """
        ...

    async def end(self) -> None:
        """Ends the body."""
        ...

    async def break_off(self, error: KvwayError, *, event_stream: bool) -> None:
        """Ends a started answer so that it cannot pass for a whole one.

        An event stream gets `error` as its last event, and no ``[DONE]``.
        """
        ...


class _Rejected(ReplicaRejected):
    """A whole answer that is worth a try elsewhere, kept in case there is nobody else."""

    def __init__(self, answer: ReplicaAnswer, body: bytes) -> None:
        super().__init__(f"The replica answered with status {answer.status}.")
        self.status = answer.status
        self.headers = answer.headers
        self.body = body


class Dispatcher:
    """Takes every request through its phases.

    Args:
        model: What is served.
        replicas: Who there is.
        index: Who holds which blocks.
        ledger: Who is how busy.
        readers: Threads for phase 1.
        parsers: Threads for what is not even parsed when its time is up: nobody tokenizes there,
            so it waits behind no long prompt.
        rests: Reads what phase 1 left.
        client: The way to replicas.
        trips: Where the story of each request goes.
        policy: How a replica is chosen.
        policy_state: What the policy begins with.
        params: The constants of the choice.
        max_attempts: Replicas that one request is tried at, at most.
        read_timeout_s: Time for phase 1; then a replica is chosen by what is known.
    """

    def __init__(  # noqa: PLR0913  it is where all parts meet
        self,
        *,
        model: ServedModel,
        replicas: ReplicaSet,
        index: BlockIndex,
        ledger: Ledger,
        readers: ReaderPool,
        parsers: ReaderPool,
        rests: RestReader,
        client: ReplicaClient,
        trips: TripLog,
        policy: Policy,
        policy_state: PolicyState,
        params: PolicyParams,
        max_attempts: int,
        read_timeout_s: float,
    ) -> None:
        """Starts with nothing in flight."""
        self._model = model
        self._replicas = replicas
        self._index = index
        self._ledger = ledger
        self._readers = readers
        self._parsers = parsers
        self._rests = rests
        self._client = client
        self._trips = trips
        self._policy = policy
        self._policy_state = policy_state
        self._params = params
        self._max_attempts = max_attempts
        self._read_timeout_s = read_timeout_s
        self._corrections = Corrections(index, block_size=model.namespace.block_size)
        self.running = RunningRequests()

    async def dispatch(self, call: Call, downstream: Downstream) -> None:
        """Answers one request.

        Raises:
            KvwayError: It failed before the client was sent anything; the caller says so. What
                fails later is told to the client here.
        """
        with self.running.entry(), self._trips.trip(call.request_id, call.route) as trip:
            try:
                async with self.running.breakable():
                    await self._serve(call, downstream, trip=trip)
            except KvwayError as exc:
                trip.failed(exc)
                if not downstream.started:
                    raise
                await downstream.break_off(exc, event_stream=trip.is_event_stream)

    def max_model_len(self) -> int | None:
        """Returns the longest context of the replicas that are ready, else the model's own."""
        reports = [replica.report for replica in self._replicas.usable()]
        lengths = [report.max_model_len for report in reports if report is not None]
        return max(lengths, default=self._model.encoder.max_model_len)

    # -- the phases -----------------------------------------------------------------------------

    async def _serve(self, call: Call, downstream: Downstream, *, trip: Trip) -> None:
        reading = await self._read(call, await downstream.body())
        trip.read(reading, block_size=self._model.namespace.block_size)
        tried: frozenset[str] = frozenset()
        failure: ReplicaError | None = None
        while len(tried) < self._max_attempts:
            request = reading.request  # a thread may publish more at any time
            try:
                decision = self._choose(request, tried=tried | self._too_small(reading))
            except NoReplicaAvailable:
                if failure is None:
                    raise
                break
            trip.chose(decision)
            try:
                await self._attempt(
                    call, reading, request, decision, downstream=downstream, trip=trip
                )
            except DeadlineExceeded as exc:
                trip.attempt_failed(exc)
                self._note_failure(decision.replica_id)
                raise  # it may still be at work on it: another replica would do it twice
            except ReplicaError as exc:
                trip.attempt_failed(exc)
                self._replicas.report_failure(decision.replica_id, exc)
                if not isinstance(exc, ConnectFailed):  # that takes it out of the choice anyway
                    self._note_failure(decision.replica_id)
                if downstream.started:
                    raise
                failure = exc
                tried |= {decision.replica_id}
            else:
                return
        assert failure is not None  # noqa: S101  the loop ends with a failure or not at all
        await self._give_up(failure, downstream, trip=trip)

    def _note_failure(self, replica_id: str) -> None:
        """Makes a replica dearer for a while, if it is still there."""
        if self._replicas.get(replica_id) is not None:
            self._ledger.failed(replica_id)

    def _too_small(self, reading: Reading) -> frozenset[str]:
        """Returns the replicas that say that their context is too short for the longest prompt.

        None, if by an estimate it is too long for all.
        """
        usable = self._replicas.usable()
        longest = reading.longest_prompt
        small = frozenset(
            replica.id
            for replica in usable
            if replica.report is not None and replica.report.max_model_len <= longest
        )
        return small if len(small) < len(usable) else frozenset()

    async def _read(self, call: Call, body: bytes) -> Reading:
        """Phase 1."""
        reading = Reading(
            body,
            route=call.route,
            model=self._model,
            max_model_len=self.max_model_len(),
            sticky=call.headers.get(STICKY_HEADER),
        )
        try:
            async with asyncio.timeout(self._read_timeout_s):
                await self._readers.run(reading.advance)
                await self._read_on(reading)
        except TimeoutError:
            reading.overdue = True
            if not reading.is_parsed:  # what is malformed must be said
                await self._parsers.run(reading.parse)
        return reading

    async def _read_on(self, reading: Reading) -> None:
        """Reads the first prompt as far as somebody may hold it."""
        while not reading.front_done:
            sibling = self._rests.of_sibling(reading)
            if sibling is not None:
                await asyncio.wait([sibling])
            hashes = reading.request.hashes
            matches = self._index.match(hashes, slowest=Tier.DISK)
            if max(matches.values(), default=0) < len(hashes):
                return
            await self._readers.run(reading.advance)

    def _choose(self, request: ReadRequest, *, tried: frozenset[str]) -> Decision:
        """Phase 2: pure, and on the loop, so that it sees all that was decided before."""
        prompt = Prompt(
            num_tokens=request.num_tokens,
            block_size=self._model.namespace.block_size,
            prefix_key=request.prefix_key,
            num_output_tokens=request.num_output_tokens,
            sticky_key=request.sticky_key,
        )
        matches = self._index.match(request.hashes)
        situation = Situation(
            prompt=prompt,
            matches=matches,
            slower=self._index.match_slower(request.hashes, matches),
            loads=self._replicas.loads(exclude=tried),
            params=self._params,
            mean_work_s=self._ledger.mean_work_s,
            retry=bool(tried),
            now_s=self._ledger.now(),
            busy_share=self._ledger.busy_share,
        )
        decision, self._policy_state = decide(self._policy, situation, self._policy_state)
        return decision

    async def _attempt(
        self,
        call: Call,
        reading: Reading,
        request: ReadRequest,
        decision: Decision,
        *,
        downstream: Downstream,
        trip: Trip,
    ) -> None:
        """Phases 3 to 5 at one replica; leaves no trace of itself when it fails.

        `request` is what the decision was made for.
        """
        replica = self._replicas.get(decision.replica_id)
        assert replica is not None  # noqa: S101  chosen from the set in this step of the loop
        listed = self._corrections.expect(replica.id, request.hashes)
        with (
            self._ledger.charge(decision.chosen, is_stream=request.stream) as charge,
            self._expected(reading, request, decision, charge=charge, trip=trip) as expected,
        ):
            async with self._client.attempt(
                replica.url + call.route.value,
                headers=request_headers(call.headers, request_id=call.request_id),
                body=request.body,
            ) as answer:
                if answer.status in RETRIED_STATUSES:
                    raise _Rejected(answer, await answer.read(limit_bytes=HOLD_BYTES))
                if answer.status >= 500:
                    self._note_failure(replica.id)
                await self._relay(answer, downstream, charge, expected, trip=trip)
        is_told_of = request.num_prompts == 1 and answer.status == 200
        if is_told_of and not self._replicas.is_fed(replica.id):
            self._corrections.learn(listed, cached_tokens=trip.cached_tokens)

    @contextmanager
    def _expected(
        self,
        reading: Reading,
        request: ReadRequest,
        decision: Decision,
        *,
        charge: Charge,
        trip: Trip,
    ) -> Iterator[ExpectedBlocks]:
        """Lists the prompt's blocks at the chosen replica; takes back what was not confirmed.

        What is not read yet follows as soon as it is, even when the answer is done by then.
        """
        replica = self._replicas.get(decision.replica_id)
        boot_id = replica.boot_id if replica is not None else None

        def lives_on() -> bool:
            now = self._replicas.get(decision.replica_id)
            return now is not None and now is replica and now.boot_id == boot_id

        expected = ExpectedBlocks(self._index, decision.replica_id, request.hashes, still=lives_on)

        def rest_is_read() -> None:
            self._recount(charge, request, reading.request, decision.chosen)
            trip.recounted(reading)
            expected.extend(reading.request.hashes)

        if not request.exact:
            trip.rest_pending = True
            trip.rest_pending = self._rests.start(reading, rest_is_read) and trip.rest_pending
        try:
            yield expected
        finally:
            expected.close()

    def _recount(
        self, charge: Charge, before: ReadRequest, whole: ReadRequest, chosen: Candidate
    ) -> None:
        """Corrects a charge once the prompt is read, before its rest is listed.

        Where the replica held all that had been read it may hold more; else what it holds is
        known, and a new match would find what is expected of this very prompt.
        """
        size = self._model.namespace.block_size
        matched = chosen.matched_blocks
        if matched >= len(before.hashes):
            held = self._index.match(whole.hashes, slowest=Tier.DISK)
            matched = max(matched, held.get(chosen.replica_id, 0))
        uncached = max(1, whole.num_tokens - matched * size)
        charge.recount(
            uncached_tokens=uncached,
            cached_tokens=whole.num_tokens - uncached,
            num_blocks=-(-(uncached + whole.num_output_tokens) // size),
        )

    async def _relay(
        self,
        answer: ReplicaAnswer,
        downstream: Downstream,
        charge: Charge,
        expected: ExpectedBlocks,
        *,
        trip: Trip,
    ) -> None:
        """Phase 5. Until `start` a failure costs the client nothing."""
        chunks = answer.chunks()
        held = await _hold(answer, chunks)
        if answer.status == 200:
            expected.confirm()
        cached = CachedTokens(answer.headers, is_event_stream=answer.is_event_stream)
        trip.answered(answer.status, is_event_stream=answer.is_event_stream)
        await downstream.start(answer.status, _answer_headers(answer.headers, trip))
        data, is_first = EventData(), True
        async for chunk in _chain(held, chunks):
            if answer.is_event_stream and data.push(chunk):
                charge.token()
                if is_first and chunk is not held:
                    trip.first_data()
                is_first = False
            cached.push(chunk)
            sent_s = self._ledger.now()
            await downstream.write(chunk)
            if self._ledger.now() - sent_s > SLOW_CLIENT_S:
                charge.pause()
        await downstream.end()
        trip.done(cached_tokens=cached.value())

    async def _give_up(self, failure: ReplicaError, downstream: Downstream, *, trip: Trip) -> None:
        """Passes on the last replica's own answer where it gave one."""
        if not isinstance(failure, _Rejected):
            raise failure
        trip.answered(failure.status, is_event_stream=False)
        await downstream.start(failure.status, _answer_headers(failure.headers, trip))
        await downstream.write(failure.body)
        await downstream.end()
        trip.done()


async def _hold(answer: ReplicaAnswer, chunks: AsyncIterator[bytes]) -> bytes:
    """Returns the first bytes of an event stream, of any other answer all that fits."""
    held = bytearray()
    async for chunk in chunks:
        held += chunk
        if answer.is_event_stream or len(held) > HOLD_BYTES:
            break
    return bytes(held)


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for chunk in rest:
        yield chunk


def _answer_headers(headers: CIMultiDict[str], trip: Trip) -> CIMultiDict[str]:
    """Returns the replica's headers with the router's own in place of any of the same name."""
    merged = headers.copy()
    merged.update(trip.headers)
    return merged
