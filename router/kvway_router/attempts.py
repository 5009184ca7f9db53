"""Phases 4 and 5 of a request: charged to one replica, sent there, its answer awaited.

    charge    the work counts, and the blocks are expected, before anything else runs on the loop
    attempt   the answer is held back: a whole one to its end (up to `HOLD_BYTES`), a stream to its
              first content (`HOLD_S` at most). What fails until then costs the client nothing
    relay     `relay.py`

A replica is alive while tokens come, not while its socket is open: a frozen process still takes
connections, and comments keep a stream open without saying anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Final

from kvway_core.errors import (
    FirstTokenTimeout,
    ReplicaFailed,
    ReplicaRejected,
)
from kvway_router.aborts import Aborts
from kvway_router.call import Call, Downstream
from kvway_router.charges import Charge
from kvway_router.chooser import Choice
from kvway_router.corrections import Corrections
from kvway_router.cut import Cut, Watch
from kvway_router.holding import Tier
from kvway_router.index import BlockIndex
from kvway_router.ledger import Ledger
from kvway_router.passing import Opaque, Passing, opening
from kvway_router.policy import Candidate
from kvway_router.proxy import ReplicaAnswer, ReplicaClient, request_headers
from kvway_router.reading import Reading, ReadRequest, Route
from kvway_router.relay import Relay, WholeAnswer
from kvway_router.replicas import ReplicaSet
from kvway_router.rests import ExpectedBlocks, RestReader
from kvway_router.tracing import Tracer
from kvway_router.trips import Trip

HOLD_BYTES: Final = 1024 * 1024
"""Most bytes of a whole answer that are held back from the client, in favour of a retry."""
HOLD_STREAM_BYTES: Final = 64 * 1024
HOLD_S: Final = 10.0
"""Longest that a stream is held back whose first content does not come."""

_REJECTED: Final = frozenset({429, 502, 503})
_FAILED: Final = frozenset({500, 504})


class Rejected(ReplicaRejected):
    """A replica did not take the request."""

    def __init__(self, answer: WholeAnswer) -> None:
        super().__init__(
            f"The replica answered with status {answer.status}.",
            status=answer.status,
            retry_after_s=_seconds(answer.headers.get("Retry-After", "")),
        )
        self.answer = answer


class Failed(ReplicaFailed):
    """A replica worked on the request and gave an error."""

    def __init__(self, answer: WholeAnswer) -> None:
        super().__init__(
            f"The replica answered with status {answer.status}.", status=answer.status
        )
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take, seconds.

    Attributes:
        first_token_s: A stream's first token, at most; less where it was predicted sooner.
        token_s: From one token of a stream to the next.
    """

    first_token_s: float
    token_s: float


class Attempts:
    """Makes attempts. One that fails leaves no trace of itself in ledger and index.

    Attributes:
        limits: As below; counts for attempts that begin from now on.

    Args:
        replicas: Who there is.
        index: Who holds which blocks.
        ledger: Who is how busy.
        rests: Reads what is left of a prompt.
        client: The way to replicas.
        aborts: Tells engines that have to be told that nobody waits any more.
        limits: How long things may take.
        block_size: Tokens per block.
        tracer: Traces attempts; None for no traces.
    """

    def __init__(  # noqa: PLR0913  it is where a request meets all it touches
        self,
        *,
        replicas: ReplicaSet,
        index: BlockIndex,
        ledger: Ledger,
        rests: RestReader,
        client: ReplicaClient,
        aborts: Aborts,
        limits: Limits,
        block_size: int,
        tracer: Tracer | None,
    ) -> None:
        """Takes what it needs."""
        self._replicas = replicas
        self._index = index
        self._ledger = ledger
        self._rests = rests
        self._client = client
        self._aborts = aborts
        self.limits = limits
        self._block_size = block_size
        self._tracer = tracer
        self._corrections = Corrections(index, block_size=block_size)

    async def attempt(
        self, call: Call, reading: Reading, choice: Choice, downstream: Downstream, trip: Trip
    ) -> int:
        """Sends a request to the replica that was chosen for it, and relays the answer.

        Returns:
            The status of the answer, which the client has whole.

        Raises:
            ReplicaError: It failed; before `downstream` was started another one may be tried.
            ClientDisconnected: The client left, or does not read.
        """
        request, replica_id = choice.request, choice.decision.replica_id
        replica = self._replicas.get(replica_id)
        assert replica is not None  # noqa: S101  chosen from the set in this step of the loop
        listed = self._corrections.expect(replica_id, request.hashes)
        headers = request_headers(call.headers, request_id=call.request_id)
        tracer = self._tracer
        sent = self._aborts.unless_done(
            replica.url,
            request.body,
            headers,
            by_rid=replica.is_sglang and call.route is not Route.OPAQUE,
        )
        async with Cut() as cut:
            with (
                tracer.attempt(call, replica_id, headers) if tracer else nullcontext(),
                Watch(cut) as watch,
                self._replicas.at(replica_id, tell_loss=cut.cut) as place,
                self._ledger.charge(choice.decision.chosen, is_stream=request.stream) as charge,
                self._expected(reading, choice, charge=charge, trip=trip) as expected,
                sent as body,
            ):
                limit_s = choice.first_token_limit_s(most_s=self.limits.first_token_s)
                if request.stream:
                    late = FirstTokenTimeout(f"The replica said nothing for {limit_s:.3g} s.")
                    watch.expect(limit_s, late)
                async with self._client.attempt(
                    replica.url + call.target,
                    method=call.method,
                    headers=headers,
                    body=body,
                    may_be_repeated=call.may_be_repeated,
                ) as answer:
                    held, passing = await self._hold(answer, call.route)
                    place.has_answered()
                    if answer.status == 200 and not self._replicas.tells_ranks(replica_id):
                        expected.confirm()
                    relay = Relay(
                        answer,
                        passing,
                        downstream,
                        charge,
                        watch,
                        token_s=self.limits.token_s,
                        now=self._ledger.now,
                        trip=trip,
                    )
                    await relay.run(held)
        is_told_of = request.num_prompts == 1 and answer.status == 200
        if is_told_of and not self._replicas.is_fed(replica_id):
            self._corrections.learn(listed, cached_tokens=trip.cached_tokens)
        return answer.status

    async def _hold(self, answer: ReplicaAnswer, route: Route) -> tuple[bytes, Passing]:
        """Returns the first content of an event stream, of any other answer all that fits.

        Of what is not looked at nothing: it may be a sound that is heard as it comes.
        """
        if answer.status in _REJECTED:
            raise Rejected(await _whole(answer))
        if answer.status in _FAILED:
            raise Failed(await _whole(answer))
        if route is Route.OPAQUE:
            return b"", Opaque()
        passing = Passing(answer.headers, is_event_stream=answer.is_event_stream)
        held = bytearray()
        if not answer.is_event_stream:
            while len(held) <= HOLD_BYTES and (chunk := await answer.read_chunk()):
                held += chunk
            return bytes(held), passing
        with suppress(TimeoutError):
            async with asyncio.timeout(HOLD_S):
                while chunk := await answer.read_chunk():
                    held += chunk
                    begins = opening(held)
                    if begins.error is not None and not begins.error.is_clients:
                        raise Failed(await _whole(answer, begun=bytes(held)))
                    if begins.has_content or len(held) > HOLD_STREAM_BYTES:
                        return bytes(held), passing
                whole = Passing(answer.headers, is_event_stream=True)
                whole.push(bytes(held))
                failure = whole.failure()
                if failure is not None and not (
                    isinstance(failure, ReplicaFailed) and failure.is_clients
                ):
                    raise failure
        return bytes(held), passing

    @contextmanager
    def _expected(
        self, reading: Reading, choice: Choice, *, charge: Charge, trip: Trip
    ) -> Iterator[ExpectedBlocks]:
        """Lists the prompt's blocks at the chosen replica; takes back what was not confirmed.

        What is not read yet follows as soon as it is, even when the answer is done by then.
        """
        request, chosen = choice.request, choice.decision.chosen
        replica = self._replicas.get(chosen.replica_id)
        boot_id = replica.boot_id if replica is not None else None

        def lives_on() -> bool:
            now = self._replicas.get(chosen.replica_id)
            return now is not None and now is replica and now.boot_id == boot_id

        expected = ExpectedBlocks(self._index, chosen.replica_id, request.hashes, still=lives_on)

        def rest_is_read() -> None:
            self._recount(charge, request, reading.request, chosen)
            trip.recounted(reading)
            expected.extend(reading.request.hashes)

        if request.num_prompts and not request.exact:
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
        size = self._block_size
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


def _seconds(text: str) -> float | None:
    """Reads a Retry-After in seconds; one that is a date is not."""
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    return float(text) if is_number else None


async def _whole(answer: ReplicaAnswer, *, begun: bytes = b"") -> WholeAnswer:
    body = begun + await answer.read(limit_bytes=HOLD_BYTES)
    return WholeAnswer(answer.status, answer.headers, body)
