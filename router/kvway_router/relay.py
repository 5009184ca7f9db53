"""Phase 6 of a request: an answer on its way to the client, and what is learned while it passes.

Bytes go as they come, at the client's pace, an event stream in whole events. The time in which
the client does not read is not the replica's: it says nothing of its steps, and of its silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from multidict import CIMultiDict

from kvway_core.errors import TokenTimeout
from kvway_router.call import Downstream
from kvway_router.charges import Charge
from kvway_router.cut import Watch
from kvway_router.passing import Passing, WholeEvents, opening
from kvway_router.proxy import ReplicaAnswer
from kvway_router.trips import Trip

SLOW_CLIENT_S: Final = 0.01
"""A client that needs longer to take a chunk is waited for."""


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that is worth a try elsewhere, kept in case there is nobody else."""

    status: int
    headers: CIMultiDict[str]
    body: bytes


class Relay:
    """One answer that is relayed.

    Args:
        answer: What is relayed.
        passing: Looks at it.
        downstream: Where it goes.
        charge: Of the request: told of its tokens.
        watch: The clock of the attempt; until there is content it runs for the first token.
        token_s: How long a stream may be silent between two tokens.
        now: Tells the time.
        trip: Told how the request fares.
    """

    def __init__(  # noqa: PLR0913  it is where both sides of a request meet
        self,
        answer: ReplicaAnswer,
        passing: Passing,
        downstream: Downstream,
        charge: Charge,
        watch: Watch,
        *,
        token_s: float,
        now: Callable[[], float],
        trip: Trip,
    ) -> None:
        """Nothing is sent yet."""
        self._answer = answer
        self._passing = passing
        self._downstream = downstream
        self._charge = charge
        self._watch = watch
        self._token_s = token_s
        self._now = now
        self._trip = trip
        self._events = WholeEvents()
        self._silent = TokenTimeout(f"The replica sent no token for {token_s:g} s.")
        self._silent_s = 0.0
        self._has_content = True
        self._is_before_data = True

    async def run(self, held: bytes) -> None:
        """Sends the whole answer; `held` is its beginning, which was held back.

        Raises:
            ReplicaError: It broke, fell silent, or did not end as an answer must.
            ClientDisconnected: The client left.
        """
        answer, trip = self._answer, self._trip
        trip.answered(answer.status, is_event_stream=answer.is_event_stream)
        self._has_content = not answer.is_event_stream or opening(held).has_content
        self._silent_s = self._now() + self._token_s
        if self._has_content:
            self._watch.rest()
        await self._downstream.start(answer.status, answer_headers(answer.headers, trip))
        if held:
            self._see(held, is_held=True)
            await self._send(held)
        while chunk := await answer.read_chunk():
            self._see(chunk)
            await self._send(chunk)
        failure = self._passing.failure()
        if failure is not None:
            raise failure
        if self._events.rest():
            await self._downstream.write(self._events.rest())
        await self._downstream.end()
        trip.done(cached_tokens=self._passing.cached_tokens())

    def _see(self, chunk: bytes, *, is_held: bool = False) -> None:
        """Notes the tokens in the next bytes."""
        if not self._passing.push(chunk):
            return
        self._charge.token()
        if not is_held:
            self._has_content = True
            if self._is_before_data:
                self._trip.first_data()
        self._is_before_data = False
        self._silent_s = self._now() + self._token_s

    async def _send(self, chunk: bytes) -> None:
        """Sends them; while the client takes them, nothing is expected of the replica."""
        is_event_stream = self._answer.is_event_stream
        if self._has_content:
            self._watch.rest()
        begun_s = self._now()
        whole = self._events.push(chunk) if is_event_stream else chunk
        if whole:
            await self._downstream.write(whole)
        now = self._now()
        if now - begun_s > SLOW_CLIENT_S:
            self._charge.pause()
            self._silent_s += now - begun_s
        if is_event_stream and self._has_content:
            self._watch.expect(self._silent_s - now, self._silent)


async def pass_on(answer: WholeAnswer, downstream: Downstream, *, trip: Trip) -> None:
    """Gives the client a replica's own error, unchanged, as there is nobody else to ask."""
    trip.answered(answer.status, is_event_stream=False)
    headers = answer_headers(answer.headers, trip)
    if answer.status == 503:
        headers.setdefault("Retry-After", "1")
    await downstream.start(answer.status, headers)
    await downstream.write(answer.body)
    await downstream.end()


def answer_headers(headers: CIMultiDict[str], trip: Trip) -> CIMultiDict[str]:
    """Returns the replica's headers with the router's own in place of any of the same name."""
    merged = headers.copy()
    merged.update(trip.headers)
    return merged
