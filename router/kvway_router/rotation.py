"""Which of the replicas that are ready take requests now: breakers, slow start, pauses.

    CLOSED --- failures in a row, or too many of late ---> OPEN --- its time is up ---> HALF OPEN
       ^                                                    ^                             |    |
       |                                                    +-------- it failed ----------+    |
       +----------------------------- one request succeeded ----------------------------------+

A replica that nobody can connect to, or that does not answer its probes, is out by its state
(`replica.py`), however many others are. What a breaker takes out is soft: never the only one, no
more than half of them, and not at all in a panic, when less than half would be left: then the
sick ones are asked as well rather than the well ones crushed, and what they fail at costs them in
the choice (`failures.py`).

One that is new or comes back is given one request at a time at first, and more with each second,
until it has its full share after `RAMP_S`: its cache is cold, and it looks idler than it is. That
holds for no one when the others are full, nor for those that come while the router starts.

Pure: it knows time only as its clock tells it, and replicas by name.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Final

import structlog

from kvway_core.clock import Clock

FAILURES_IN_A_ROW: Final = 5
WINDOW_S: Final = 30.0
WINDOW_OUTCOMES: Final = 20
"""Outcomes in the window before its rate says anything."""
LEAST_SUCCESS: Final = 0.8
_MAX_OUTCOMES: Final = 512
"""Outcomes of a window that are kept: of the latest of them the rate is reckoned."""

FIRST_OPEN_S: Final = 5.0
MAX_OPEN_S: Final = 300.0
FORGIVEN_S: Final = 60.0
"""A replica that has served so long since it was out starts with the shortest time again."""

RAMP_S: Final = 30.0
START_S: Final = 30.0
"""Who comes for the first time within so many seconds of the router's start is not ramped."""
PER_SLOT: Final = 2
"""Requests per slot of a replica: one that runs, and one that waits there for its end. What more
there is waits in the router, where it can still go elsewhere."""
MAX_PAUSE_S: Final = 5.0
"""Longest time that a replica is left alone because it said so."""

_log = structlog.get_logger(__name__)


class Outcome(Enum):
    """What a request says of its replica."""

    SUCCESS = "success"
    FAILURE = "failure"
    NEUTRAL = "neutral"
    """Nothing: it was busy, the client left, or the request was at fault."""


class Breaker:
    """Takes one replica out of the choice while its answers fail. A pure state machine.

    Args:
        rng: For jitter: half of each time out is left to chance, so that several routers do not
            come back together.
    """

    def __init__(self, rng: random.Random) -> None:
        """Starts closed."""
        self._rng = rng
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=_MAX_OUTCOMES)
        self._num_in_a_row = 0
        self._open_until_s: float | None = None
        self._num_times = 0
        self._back_s = -math.inf
        self._was_out = False
        self._has_trial = False

    @property
    def is_closed(self) -> bool:
        """Whether nothing is held against the replica."""
        return self._open_until_s is None

    def admits(self, now_s: float) -> bool:
        """Says whether a request may go there: one at a time once the time out is over."""
        if self._open_until_s is None:
            return True
        return now_s >= self._open_until_s and not self._has_trial

    def begin(self, now_s: float) -> bool:
        """A request goes there; returns whether it is the one that tries it, which must `end`."""
        is_trial = not self.is_closed and self.admits(now_s)
        self._has_trial = self._has_trial or is_trial
        return is_trial

    def end(self) -> None:
        """The request that tried it has ended."""
        self._has_trial = False

    def record(self, outcome: Outcome, now_s: float) -> bool:
        """Takes in how a request ended; returns whether it opens for that.

        While it is open only what ends after its time counts, and what is neutral changes nothing.
        """
        if outcome is Outcome.NEUTRAL:
            return False
        ok = outcome is Outcome.SUCCESS
        if self._open_until_s is not None:
            if now_s < self._open_until_s:
                return False
            if ok:
                self._close(now_s)
                return False
            return True
        self._outcomes.append((now_s, ok))
        self._num_in_a_row = 0 if ok else self._num_in_a_row + 1
        return not ok and (self._num_in_a_row >= FAILURES_IN_A_ROW or self._is_too_bad(now_s))

    def open(self, now_s: float) -> float:
        """Takes the replica out, longer each time; returns for how long, seconds."""
        if now_s - self._back_s > FORGIVEN_S and self._open_until_s is None:
            self._num_times = 0
        longest = min(MAX_OPEN_S, FIRST_OPEN_S * 2.0**self._num_times)
        self._num_times = min(self._num_times + 1, 16)
        open_s = longest * (0.5 + 0.5 * self._rng.random())
        self._open_until_s = now_s + open_s
        self._outcomes.clear()
        self._num_in_a_row = 0
        return open_s

    def lost(self, now_s: float) -> None:
        """The replica went out of service; one that does so again and again stays out longer."""
        if self._was_out and now_s - self._back_s <= FORGIVEN_S:
            self.open(now_s)
        self._was_out = True

    def returned(self, now_s: float) -> None:
        """The replica is back in service."""
        self._back_s = now_s

    def _close(self, now_s: float) -> None:
        self._open_until_s = None
        self._back_s = now_s

    def _is_too_bad(self, now_s: float) -> bool:
        while self._outcomes and self._outcomes[0][0] < now_s - WINDOW_S:
            self._outcomes.popleft()
        num = len(self._outcomes)
        num_ok = sum(ok for _, ok in self._outcomes)
        return num >= WINDOW_OUTCOMES and num_ok < LEAST_SUCCESS * num


class _Place:
    """What is known of one replica that takes requests."""

    __slots__ = ("breaker", "full_s", "paused_until_s", "seen", "since_s")

    def __init__(self, rng: random.Random) -> None:
        self.breaker = Breaker(rng)
        self.seen = False
        self.since_s = -math.inf
        self.full_s = -math.inf
        self.paused_until_s = -math.inf


class Rotation:
    """Who takes requests now, of the replicas that are ready.

    Attributes:
        num_ejections: Times that a breaker has opened.

    Args:
        clock: Tells the time.
        rng: For jitter.
    """

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        """Knows no replica."""
        self._clock = clock
        self._rng = rng
        self._started_s = clock.monotonic()
        self._places: dict[str, _Place] = {}
        self.num_ejections = 0

    # -- questions ------------------------------------------------------------------------------

    def admitted(self, ready: Sequence[str], *, num_replicas: int) -> Sequence[str]:
        """Returns those of the ready replicas that no breaker keeps out; all in a panic.

        Args:
            ready: Replicas that are ready by their state.
            num_replicas: How many there are of any state.
        """
        if all(not self.is_ejected(name) for name in ready):
            return ready
        if 2 * sum(not self.is_ejected(name) for name in ready) < num_replicas:
            return ready
        now = self._clock.monotonic()
        return [name for name in ready if self._place(name).breaker.admits(now)]

    def room(
        self, names: Iterable[str], *, slots: Callable[[str], int], in_flight: Callable[[str], int]
    ) -> dict[str, int]:
        """Returns those that have room for more, and for how many requests.

        Args:
            names: Replicas, as from `admitted`.
            slots: Requests that each runs at once.
            in_flight: Requests that each has.
        """
        now = self._clock.monotonic()
        ramped: dict[str, int] = {}
        full: dict[str, int] = {}
        for name in names:
            place = self._place(name)
            if now < place.paused_until_s:
                continue
            most, has = PER_SLOT * slots(name), in_flight(name)
            if most > has:
                full[name] = most - has
            share = self._share(place, now)
            allowed = most if share >= 1.0 else max(1, math.floor(most * share))
            if allowed > has:
                ramped[name] = allowed - has
        return ramped or full

    def is_ejected(self, name: str) -> bool:
        """Tells whether a breaker holds something against a replica."""
        place = self._places.get(name)
        return place is not None and not place.breaker.is_closed

    # -- what happens ---------------------------------------------------------------------------

    def returned(self, name: str) -> None:
        """A replica has become ready."""
        now, place = self._clock.monotonic(), self._place(name)
        place.breaker.returned(now)
        if place.seen or now - self._started_s > START_S:
            self._ramp(place, now)
        place.seen = True

    def restarted(self, name: str) -> None:
        """A replica that stayed ready is another process by now, with a cold cache."""
        self._ramp(self._place(name), self._clock.monotonic())

    def lost(self, name: str) -> None:
        """A replica that was ready went out of service by a fault."""
        self._place(name).breaker.lost(self._clock.monotonic())

    def forget(self, name: str) -> None:
        """A replica was removed."""
        self._places.pop(name, None)

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Tells that a request is at a replica while the context is open."""
        breaker = self._place(name).breaker
        is_trial = breaker.begin(self._clock.monotonic())
        try:
            yield
        finally:
            if is_trial:
                breaker.end()

    def pause(self, name: str, for_s: float) -> None:
        """A replica said that it is busy: it is left alone for so long, within reason."""
        now = self._clock.monotonic()
        self._place(name).paused_until_s = now + min(for_s, MAX_PAUSE_S)

    def record(self, name: str, outcome: Outcome, *, ready: Sequence[str]) -> None:
        """Takes in how a request at a replica ended.

        Args:
            name: The replica.
            outcome: What it says of it.
            ready: All that are ready: no more than half of them are out at once.
        """
        if name not in self._places:
            return
        now, breaker = self._clock.monotonic(), self._place(name).breaker
        was_closed = breaker.is_closed
        if breaker.record(outcome, now):
            if was_closed and not self._may_eject(ready):
                return
            open_s = breaker.open(now)
            self.num_ejections += 1
            _log.warning("replica_ejected", replica=name, open_s=round(open_s, 1))
        elif not was_closed and breaker.is_closed:
            self._ramp(self._place(name), now)
            _log.info("replica_admitted", replica=name)

    # -- inside ---------------------------------------------------------------------------------

    def _may_eject(self, ready: Sequence[str]) -> bool:
        num_out = sum(self.is_ejected(name) for name in ready)
        return len(ready) > 1 and num_out < math.ceil(len(ready) / 2)

    def _place(self, name: str) -> _Place:
        place = self._places.get(name)
        if place is None:
            place = self._places[name] = _Place(self._rng)
        return place

    def _ramp(self, place: _Place, now_s: float) -> None:
        place.since_s, place.full_s = now_s, now_s + RAMP_S

    def _share(self, place: _Place, now_s: float) -> float:
        """Returns how much of its full number of requests a replica may have, 0 to 1."""
        if now_s >= place.full_s:
            return 1.0
        return (now_s - place.since_s) / RAMP_S
