"""What may be tried again, and how often: pure, so that each rule has a table in the tests.

    failed how                                   tried elsewhere      costs budget
    no connection                                at every other one   no: nothing was sent
    broke off or froze, and is gone              once per request     no: it does so only once
    broke off, and is still there                yes                  yes
    429, 502, 503, or not HTTP                   yes                  yes
    500, 504, an error before any content        once per request     yes
    silent for too long                          never                it may still be at work
    once sent, what must not be done twice       never, but for 429 and 503: it was not begun
    anything once the client has content         never

"Once per request" bounds what a prompt that kills engines can do: it meets two of them, and then
`Quarantine` keeps it away from the others for a while. The budget bounds what retries can add
when all fail: a tenth of the requests, beyond what is stored.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import Final

import xxhash

from kvway_core.errors import (
    ConnectFailed,
    FirstTokenTimeout,
    KvwayError,
    ReplicaFailed,
    ReplicaLost,
    ReplicaRejected,
    RequestCrashedReplica,
    StreamBroken,
)

UNSENT_S: Final = 2.0
"""Connections that fail are free of budget for so long after the first one of a request."""


class Refusal(Enum):
    """Why a request is not tried again."""

    NEVER = "never"
    """A failure of this kind is not."""
    AGAIN = "again"
    """It had its one retry after a failure of this kind."""
    ATTEMPTS = "attempts"
    BUDGET = "budget"


class RetryBudget:
    """Tokens for retries: each request adds a share of one, each retry takes a whole one.

    It starts full, and holds at least `LEAST` of them, or as many as requests are running: the
    end of one replica may break off a good part of those, all at once and only once. So over any
    time retries are at most what was stored, a tenth of the requests, and one in ten seconds.
    """

    SHARE: Final = 0.1
    LEAST: Final = 10.0
    PER_S: Final = 0.1
    """Without any traffic to speak of it still fills, so that a quiet router may retry."""

    def __init__(self, now_s: float) -> None:
        """Starts full."""
        self._tokens = self.LEAST
        self._filled_s = now_s

    @property
    def tokens(self) -> float:
        """Retries that may be made now."""
        return self._tokens

    def deposit(self, now_s: float, *, num_running: int) -> None:
        """Notes a request; `num_running` are those inside the router with it."""
        self._fill(now_s)
        most = max(self.LEAST, float(num_running))
        self._tokens = max(self._tokens, min(most, self._tokens + self.SHARE))

    def withdraw(self, now_s: float) -> bool:
        """Takes a retry; False when there is none left."""
        self._fill(now_s)
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def _fill(self, now_s: float) -> None:
        gained = (now_s - self._filled_s) * self.PER_S
        self._filled_s = now_s
        self._tokens = max(self._tokens, min(self.LEAST, self._tokens + gained))


class Retries:
    """What became of one request so far, and what may follow.

    Attributes:
        tried: Replicas that are not asked again.
        num_crashed: Replicas that went out of service while they had it.

    Args:
        budget: That of the router.
        max_attempts: Replicas it is sent to, at most.
        may_repeat: Whether it does no harm when two of them work on it.
    """

    def __init__(self, budget: RetryBudget, *, max_attempts: int, may_repeat: bool = True) -> None:
        """Nothing was tried."""
        self.tried: frozenset[str] = frozenset()
        self.num_crashed = 0
        self._budget = budget
        self._max_attempts = max_attempts
        self._may_repeat = may_repeat
        self._num_sent = 0
        self._num_errors = 0
        self._unsent_s: float | None = None

    def refuse(
        self, replica_id: str, error: KvwayError, *, is_gone: bool, now_s: float
    ) -> Refusal | None:
        """Notes a failed attempt; returns why there is none after it, or None if there may be.

        Args:
            replica_id: Where it failed.
            error: How.
            is_gone: Whether the replica is known to be out of service now.
            now_s: Of the same clock as the budget's.
        """
        self.tried |= {replica_id}
        if isinstance(error, ConnectFailed):
            if self._unsent_s is None:
                self._unsent_s = now_s
            is_free = now_s - self._unsent_s < UNSENT_S
        else:
            is_free = is_gone and isinstance(error, StreamBroken | ReplicaLost)
            self._num_sent += 1
            self._num_errors += isinstance(error, ReplicaFailed)
            self.num_crashed += is_free
            must_not = not self._may_repeat and not is_neutral(error)
            if must_not or isinstance(error, FirstTokenTimeout):
                return Refusal.NEVER
            if self.num_crashed > 1 or self._num_errors > 1:
                return Refusal.AGAIN
            if self._num_sent >= self._max_attempts:
                return Refusal.ATTEMPTS
        return None if is_free or self._budget.withdraw(now_s) else Refusal.BUDGET


def is_neutral(error: KvwayError) -> bool:
    """Tells whether a failed attempt says nothing against its replica, which is only busy."""
    return isinstance(error, ReplicaRejected) and error.status in (429, 503)


class Quarantine:
    """Requests that two replicas were lost with; they are kept away from the others for a while.

    It knows them by a digest of their bodies: no text is kept.

    Args:
        for_s: How long.
        max_entries: Requests that are remembered; beyond, the oldest are forgotten.
    """

    def __init__(self, *, for_s: float = 60.0, max_entries: int = 1024) -> None:
        """Nobody is in it."""
        self._for_s = for_s
        self._max_entries = max_entries
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def put(self, body: bytes, now_s: float) -> None:
        """Keeps a request away from now on."""
        key = xxhash.xxh3_128_digest(body)
        self._until[key] = now_s + self._for_s
        self._until.move_to_end(key)
        while len(self._until) > self._max_entries:
            self._until.popitem(last=False)

    def check(self, body: bytes, now_s: float) -> None:
        """Lets a request through.

        Raises:
            RequestCrashedReplica: It is in here.
        """
        while self._until and next(iter(self._until.values())) <= now_s:
            self._until.popitem(last=False)
        if self._until and xxhash.xxh3_128_digest(body) in self._until:
            raise RequestCrashedReplica(
                "Two replicas were lost while they worked on this request; "
                f"it is not tried again within {self._for_s:g} s."
            )
