"""Who goes next when all replicas are full: a bounded line, fair between tenants.

A replica has a bounded number of requests from here, those it runs and as many that wait there;
what is beyond waits in this line, where it can still go to any of them, and where a client that
leaves costs nothing.

    fair       between tenants by the work they ask for: the one that was given the least is next
    in turn    within a tenant; but once the oldest has waited for half of its time the newest goes
               first, as most of the old ones would be too late anyway
    bounded    when the line is full, the newest of the tenant that has the most in it makes room
               for one that has less; otherwise the newcomer is refused
    honest     who would wait longer than he may, at the pace of late, is refused at once

The fairness is start-time fair queueing (Goyal, Vin and Cheng, 1996). `FairQueue` is pure;
`Admission` is the part of it that waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvway_core.clock import Clock
from kvway_core.errors import KvwayError, NoReplicaAvailable, Overloaded, QueueTimeout

WAITING_PER_SLOT: Final = 4
"""Requests in line per slot of the replicas together: more would only wait until they are late."""
RECHECK_S: Final = 0.1
"""While some wait it is looked again whether there is room, besides whenever there may be."""
_PACE_WEIGHT: Final = 0.1


@dataclass(eq=False, slots=True)
class Waiter:
    """A request in line.

    Attributes:
        tenant: Who it belongs to.
        cost: Work it asks for, in any unit that is the same for all.
        since_s: When it came.
        until_s: When it is refused.
        turn: Set when it may go, or what it is refused with.
    """

    tenant: str
    cost: float
    since_s: float
    until_s: float
    turn: asyncio.Future[None] | None = None


class FairQueue:
    """The line. Pure: it is told the time.

    Invariants:
        1. It knows only tenants that wait, or that were given more than those that wait.
    """

    def __init__(self) -> None:
        """Nobody waits."""
        self._lines: dict[str, deque[Waiter]] = {}
        self._given: dict[str, float] = {}
        self._level = 0.0
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def num_of(self, tenant: str) -> int:
        """Counts those of one tenant."""
        return len(self._lines.get(tenant, ()))

    def push(self, waiter: Waiter) -> None:
        """Puts a request at the end of its tenant's line."""
        line = self._lines.get(waiter.tenant)
        if line is None:
            line = self._lines[waiter.tenant] = deque()
            # Who did not wait has no claim to the time when he did not.
            self._given[waiter.tenant] = max(self._given.get(waiter.tenant, 0.0), self._level)
        line.append(waiter)
        self._num += 1

    def pop(self, now_s: float) -> Waiter:
        """Takes out who goes next; there must be one."""
        tenant = min(self._lines, key=lambda name: (self._given[name], name))
        line = self._lines[tenant]
        oldest = line[0]
        is_late = now_s - oldest.since_s > (oldest.until_s - oldest.since_s) / 2.0
        waiter = line.pop() if is_late else line.popleft()
        self._num -= 1
        self._level = self._given[tenant]
        self._given[tenant] += waiter.cost
        self._tidy(tenant)
        return waiter

    def remove(self, waiter: Waiter) -> bool:
        """Takes out one that leaves; False when it is not there."""
        line = self._lines.get(waiter.tenant)
        if line is None or waiter not in line:
            return False
        line.remove(waiter)
        self._num -= 1
        self._tidy(waiter.tenant)
        return True

    def make_room(self, tenant: str) -> Waiter | None:
        """Takes out the newest of the tenant with the most, if that has more than another one.

        It must have two more, so that the newcomer does not become what it replaced.
        """
        most = self.heaviest(tenant)
        if most is None:
            return None
        waiter = self._lines[most].pop()
        self._num -= 1
        self._tidy(most)
        return waiter

    def heaviest(self, tenant: str) -> str | None:
        """Returns who would make room for a tenant; None if nobody would."""
        most = max(self._lines, key=lambda name: (len(self._lines[name]), name), default=None)
        if most is None or len(self._lines[most]) < self.num_of(tenant) + 2:
            return None
        return most

    def _tidy(self, tenant: str) -> None:
        if not self._lines[tenant]:
            del self._lines[tenant]
        for name in [name for name, given in self._given.items() if given <= self._level]:
            if name not in self._lines:
                del self._given[name]
        if not self._lines:
            self._given.clear()
            self._level = 0.0


class Admission:
    """Lets requests go on when a replica has room. It belongs to the event loop.

    Attributes:
        num_shed: Requests that were refused, by why: "full", "slow" or "timeout".
        max_waiting: As below, like `timeout_s`; both count for requests that come from now on.

    Args:
        room: Returns how many more requests the replicas take now; None while there is none that
            could take any, however long one waits.
        slots: Returns how many requests all of them run at once.
        clock: Tells the time.
        max_waiting: Requests in line at most, however many slots there are.
        timeout_s: Longest wait.
    """

    def __init__(
        self,
        *,
        room: Callable[[], int | None],
        slots: Callable[[], int],
        clock: Clock,
        max_waiting: int,
        timeout_s: float,
    ) -> None:
        """Starts with nobody in line."""
        self._room = room
        self._slots = slots
        self._clock = clock
        self.max_waiting = max_waiting
        self.timeout_s = timeout_s
        self._queue = FairQueue()
        self._num_called = 0
        self._gap_s: float | None = None
        self._called_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.num_shed = {"full": 0, "slow": 0, "timeout": 0}

    @property
    def num_waiting(self) -> int:
        """Requests in line."""
        return len(self._queue)

    def check(self, tenant: str) -> None:
        """Refuses a request, before any work is done for it, that would only be refused later.

        Raises:
            Overloaded: Too many wait.
        """
        is_full = len(self._queue) >= max(1, self._most())
        if is_full and self._queue.heaviest(tenant) is None:
            self.num_shed["full"] += 1
            raise self._full()

    async def turn(self, *, tenant: str, cost: float, left_s: float) -> None:
        """Returns when a request may be sent to a replica; it must be charged in the same step.

        Args:
            tenant: Who it belongs to.
            cost: Work it asks for.
            left_s: Seconds that are left of its time.

        Raises:
            NoReplicaAvailable: There is none that could take it.
            Overloaded: Too many wait, or it would have to for longer than it may.
            QueueTimeout: It has waited for as long as it may.
        """
        room = self._room()
        if not self._queue and (room is None or room > self._num_called):
            return  # without any replica the choice says so
        await self._wait(tenant, cost, min(self.timeout_s, left_s))

    def look(self) -> None:
        """Lets go on as many as there is room for; called whenever there may be more."""
        if not self._queue:
            return
        room = self._room()
        if room is None:
            while self._queue:
                gone = self._queue.pop(self._clock.monotonic())
                _end(gone, NoReplicaAvailable("No replica can take the request now."))
            return
        while self._queue and room > self._num_called:
            now = self._clock.monotonic()
            waiter = self._queue.pop(now)
            if waiter.turn is None or waiter.turn.done():
                continue  # it is leaving
            waiter.turn.set_result(None)
            self._num_called += 1
            self._note_pace(now)
        self._look_again()

    async def _wait(self, tenant: str, cost: float, limit_s: float) -> None:
        now = self._clock.monotonic()
        if not self._queue:
            self._gap_s, self._called_s = None, now
        self._check_bounds(tenant, limit_s)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = Waiter(tenant, cost, now, now + limit_s, turn)
        self._queue.push(waiter)
        self._look_again()
        try:
            async with asyncio.timeout(limit_s):
                await turn
        except TimeoutError:
            self.num_shed["timeout"] += 1
            raise QueueTimeout(
                f"No replica had room for the request within {limit_s:.3g} s; try again later."
            ) from None
        finally:
            self._queue.remove(waiter)
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._num_called -= 1

    def _check_bounds(self, tenant: str, limit_s: float) -> None:
        if len(self._queue) >= self._most():
            evicted = self._queue.make_room(tenant)
            self.num_shed["full"] += 1
            if evicted is None:
                raise self._full()
            _end(evicted, self._full())
        if self._gap_s is not None and (len(self._queue) + 1) * self._gap_s > limit_s:
            self.num_shed["slow"] += 1
            raise Overloaded(
                f"At the present pace the request would wait longer than {limit_s:.3g} s; "
                "try again later."
            )

    def _most(self) -> int:
        """Returns how many may wait."""
        return min(self.max_waiting, WAITING_PER_SLOT * self._slots())

    def _full(self) -> Overloaded:
        return Overloaded(f"{len(self._queue)} requests wait already; try again later.")

    def _note_pace(self, now_s: float) -> None:
        gap_s = now_s - self._called_s
        self._called_s = now_s
        if self._gap_s is None:
            self._gap_s = gap_s
        else:
            self._gap_s += _PACE_WEIGHT * (gap_s - self._gap_s)

    def _look_again(self) -> None:
        if self._queue and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(RECHECK_S, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.look()
        self._look_again()


def _end(waiter: Waiter, error: KvwayError) -> None:
    if waiter.turn is not None and not waiter.turn.done():
        waiter.turn.set_exception(error)
