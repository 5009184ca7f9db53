"""A request, phase by phase: the page to read first.

    client --> 1 read      body -> tokens -> block hashes           intake.py   (in threads)
               2 wait      until some replica has room              admission.py
               3 choose    who holds how much, who is how busy      chooser.py, policy.py
               4 charge    count the work, expect the blocks        attempts.py, ledger.py
               5 attempt   send it, wait for the first content      attempts.py, proxy.py
                   |           failed before the client saw a byte?
                   |           take 4 back, and choose (3) again if that is allowed: retry.py
               6 relay     bytes as they come, at the client's pace relay.py
    client <-- 7 settle    on every path, once: release, record, count, one line of log

The end of 2, 3 and 4 are one step of the event loop without an await: two requests that arrive
together see each other, so a burst of siblings meets at one replica.

What fails before the client has content is made good elsewhere as far as `retry.py` allows; what
fails later is told to the client: an event stream gets an error as its last event and no
``[DONE]``, and no answer gets an end that could pass for its own.

Whoever leaves, fails or runs out of time leaves through the context managers on this page: what
was charged, listed, opened or queued for the request is given back by them.
"""

from __future__ import annotations

from kvway_core.errors import (
    ConnectFailed,
    DeadlineExceeded,
    KvwayError,
    NoReplicaAvailable,
    Overloaded,
    QueueTimeout,
    ReplicaError,
    ReplicaFailed,
    RequestCrashedReplica,
)
from kvway_router.admission import Admission
from kvway_router.attempts import Attempts, Failed, Rejected
from kvway_router.blame import Blame
from kvway_router.call import Call, Downstream
from kvway_router.chooser import Choice, Chooser
from kvway_router.cut import Watch
from kvway_router.intake import Intake
from kvway_router.ledger import Ledger
from kvway_router.reading import STICKY_HEADER, Reading
from kvway_router.relay import pass_on
from kvway_router.replicas import ReplicaSet
from kvway_router.retry import Quarantine, Retries, RetryBudget
from kvway_router.running import RunningRequests
from kvway_router.trips import Trip, TripLog


class Dispatcher:
    """Takes every request through its phases.

    Attributes:
        max_attempts: As below, like `timeout_s`; both count for requests that begin from now on.

    Args:
        intake: Phase 1.
        admission: Phase 2.
        chooser: Phase 3.
        attempts: Phases 4 to 6.
        replicas: Who there is.
        ledger: Who is how busy.
        trips: Where the story of each request goes.
        block_size: Tokens per block.
        max_attempts: Replicas that one request is sent to, at most.
        timeout_s: Time of a request from its arrival to its end, at most.
    """

    def __init__(  # noqa: PLR0913  it is where all parts meet
        self,
        *,
        intake: Intake,
        admission: Admission,
        chooser: Chooser,
        attempts: Attempts,
        replicas: ReplicaSet,
        ledger: Ledger,
        trips: TripLog,
        block_size: int,
        max_attempts: int,
        timeout_s: float,
    ) -> None:
        """Starts with nothing in flight."""
        self._intake = intake
        self._admission = admission
        self._chooser = chooser
        self._attempts = attempts
        self._replicas = replicas
        self._ledger = ledger
        self._trips = trips
        self._block_size = block_size
        self.max_attempts = max_attempts
        self.timeout_s = timeout_s
        self.budget = RetryBudget(ledger.now())
        self.quarantine = Quarantine()
        self.running = RunningRequests()

    async def dispatch(self, call: Call, downstream: Downstream) -> None:
        """Answers one request.

        Raises:
            KvwayError: It failed before the client was sent anything; the caller says so. What
                fails later is told to the client here.
        """
        with self.running.entry(), self._trips.trip(call.request_id, call.route) as trip:
            self.budget.deposit(self._ledger.now(), num_running=self.running.num_running)
            try:
                time_s = call.time_s(most_s=self.timeout_s)
                async with self.running.breakable() as cut:
                    with Watch(cut) as clock:
                        late = DeadlineExceeded(f"The request was not done within {time_s:g} s.")
                        clock.expect(time_s, late)
                        await self._serve(call, downstream, trip, until_s=trip.arrived_s + time_s)
            except KvwayError as exc:
                if isinstance(exc, NoReplicaAvailable | Overloaded | QueueTimeout):
                    trip.not_placed(exc, self._replicas.unusable())
                trip.failed(exc)
                if not downstream.started:
                    raise
                # Of an error in the replica's own stream the client knows by that.
                as_event = trip.is_event_stream and not isinstance(exc, ReplicaFailed)
                await downstream.break_off(exc, as_event=as_event)

    async def _serve(
        self, call: Call, downstream: Downstream, trip: Trip, *, until_s: float
    ) -> None:
        body = await downstream.body()
        self.quarantine.check(body, self._ledger.now())
        self._admission.check(call.tenant)
        sticky = call.headers.get(STICKY_HEADER)
        reading = await self._intake.read(body, route=call.route, sticky=sticky)
        trip.read(reading, block_size=self._block_size)
        work = float(reading.request.num_tokens + reading.request.num_output_tokens)
        left_s = until_s - self._ledger.now()
        await self._admission.turn(tenant=call.tenant, cost=work, left_s=left_s)
        trip.admitted()
        retries = Retries(
            self.budget, max_attempts=self.max_attempts, may_repeat=call.may_be_repeated
        )
        choice = self._chooser.choose(reading, tried=retries.tried)
        with Blame(self._replicas, self._ledger) as blame:
            while True:
                replica_id = choice.decision.replica_id
                trip.chose(choice.decision)
                try:
                    status = await self._attempts.attempt(call, reading, choice, downstream, trip)
                except ReplicaError as exc:
                    trip.attempt_failed(exc)
                    blame.failed(replica_id, exc)
                    if downstream.started:
                        self._replicas.look_at(replica_id)
                        raise
                    failure = exc
                else:
                    blame.answered(replica_id, status)
                    return
                finally:
                    self._admission.look()
                is_gone = await self._replicas.report_failure(replica_id, failure)
                now_s = self._ledger.now()
                trip.refusal = retries.refuse(replica_id, failure, is_gone=is_gone, now_s=now_s)
                another = self._another(reading, retries, trip, until_s=until_s)
                if another is None:
                    break
                choice = another
        if retries.num_crashed > 1 and body:
            self.quarantine.put(body, self._ledger.now())
        await self._give_up(failure, downstream, trip, num_crashed=retries.num_crashed)

    def _another(
        self, reading: Reading, retries: Retries, trip: Trip, *, until_s: float
    ) -> Choice | None:
        """Chooses again; None if it may not, or nobody is left who could answer in time."""
        if trip.refusal is not None:
            return None
        try:
            choice = self._chooser.choose(reading, tried=retries.tried)
        except NoReplicaAvailable:
            return None
        is_in_time = self._ledger.now() + choice.decision.chosen.ttft_s < until_s
        return choice if is_in_time else None

    async def _give_up(
        self, failure: ReplicaError, downstream: Downstream, trip: Trip, *, num_crashed: int
    ) -> None:
        """Ends a request that is not tried again; the replica's own error is passed on unchanged.

        Not so a 429: the client did not ask too often, all replicas are busy.
        """
        if num_crashed > 1:
            message = "Two replicas were lost while they worked on this request."
            raise RequestCrashedReplica(message) from failure
        if isinstance(failure, ConnectFailed):
            raise NoReplicaAvailable("No replica could be reached; try again.") from failure
        if not isinstance(failure, Rejected | Failed):
            raise failure
        if failure.status == 429:
            raise Overloaded("Every replica is busy; try again later.") from failure
        trip.failed(failure)
        await pass_on(failure.answer, downstream, trip=trip)
