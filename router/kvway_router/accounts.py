"""The books of one replica: what this router sent it, what it says of itself, how fast it is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

from kvway_core.clock import Clock
from kvway_router.charges import Charge
from kvway_router.failures import Failures
from kvway_router.policy import Candidate, PolicyParams, ReplicaLoad, own_work_tokens
from kvway_router.rates import PrefillSample, Rates
from kvway_router.telemetry import Telemetry

_STRETCH_TOKENS: Final = 8192
"""A replica that never stops prefilling teaches its rates each time it has done so many."""
_MAX_PROMISES: Final = 64
"""Estimates that may outlive their requests, before they are sorted out."""
_KEEP_COUNTS_S: Final = 60.0
"""How long it is known how many requests there were; no report lags further behind."""


class Account:
    """The books of one replica. Bounded by the requests in flight and those of late.

    Invariants:
        1. `num_prefills`, `prefill_tokens` (work) and `uncached_tokens` (plain) are those of the
           open charges without a first token.
        2. `num_blocks` is that of all open charges, `num_blocks_unseen` of those that the last
           report cannot have counted.
        3. While `stretch` is not None the replica has prefilled since `stretch_s` without a pause,
           and what it finished is in there.

    Args:
        clock: Tells the time.
        params: The constants that turn tokens into seconds.
        stale_after_s: Reports older than this are ignored.
        over: Called when a charge closes while the replica is forgotten.
    """

    __slots__ = (
        "_before",
        "_clock",
        "_numbers",
        "_over",
        "_params",
        "_promises",
        "_stale_after_s",
        "_told_s",
        "charges",
        "due_s",
        "failing_s",
        "failures",
        "foreign_prefills",
        "foreign_requests",
        "foreign_tokens",
        "is_forgotten",
        "load",
        "num_blocks",
        "num_blocks_unseen",
        "num_prefills",
        "prefill_tokens",
        "rates",
        "stretch",
        "stretch_s",
        "told",
        "uncached_tokens",
    )

    def __init__(
        self,
        *,
        clock: Clock,
        params: PolicyParams,
        stale_after_s: float,
        over: Callable[[], None],
    ) -> None:
        """Nothing is in flight and nothing is known."""
        self._over = over
        self._clock = clock
        self._params = params
        self._stale_after_s = stale_after_s
        self.charges: set[Charge] = set()
        self.num_prefills = 0
        self.prefill_tokens = 0.0
        self.uncached_tokens = 0
        self.num_blocks = 0
        self.num_blocks_unseen = 0
        self.foreign_prefills = 0
        self.foreign_requests = 0
        self.foreign_tokens = 0.0
        self.failing_s = 0.0
        self.load: ReplicaLoad | None = None
        self.due_s = -math.inf
        """Until when `load` stays as it is while nothing happens."""
        # How many requests there were when one left, each time fewer than the time before.
        self._before: deque[tuple[float, int]] = deque()
        self._promises: list[tuple[float, int, Charge]] = []
        self._numbers = count()
        self.told: Telemetry | None = None
        self._told_s = -math.inf
        self.rates = self._new_rates()
        self.failures = Failures()
        self.stretch: PrefillSample | None = None
        self.stretch_s = 0.0
        self.is_forgotten = False

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return self._clock.monotonic()

    def work_tokens(self, num_uncached: int, num_cached: int) -> float:
        """Returns the work of so many tokens behind so many, as tokens at an empty context."""
        attention = self.rates.attention_tokens or self._params.attention_tokens
        return own_work_tokens(num_uncached, num_cached, attention_tokens=attention)

    # -- what happens ---------------------------------------------------------------------------

    def charge(self, chosen: Candidate, *, is_stream: bool) -> Charge:
        """Opens the entry of a request; see `Ledger.charge`."""
        if chosen.slow_blocks or (self.foreign_prefills and self.fresh() is not None):
            self.stretch = None  # what else will take time shows nowhere
        elif self.num_prefills == 0:
            self.stretch, self.stretch_s = PrefillSample(), self.now()
        charge = Charge(self, chosen)
        if not is_stream:
            self._promise(charge, self.now() + chosen.ttft_s)
        return charge

    def prefilled(self, charge: Charge) -> None:
        """Notes a first token, and learns from what was prefilled without a pause up to now."""
        sample = self.stretch
        if sample is None:
            return
        sample.add(
            charge.uncached_tokens, charge.cached_tokens, chunk_tokens=self._params.chunk_tokens
        )
        if self.num_prefills and sample.tokens < _STRETCH_TOKENS:
            return
        decoding = len(self.charges) - self.num_prefills > 1
        now = self.now()
        self.rates.prefilled(sample, now - self.stretch_s, decoding=decoding)
        self.stretch = PrefillSample() if self.num_prefills else None
        self.stretch_s = now

    def leave(self, charge: Charge) -> None:
        """Takes a request that is over out of the books, and remembers how many there were."""
        num, now, before = len(self.charges), self.now(), self._before
        while before and before[-1][1] <= num:
            before.pop()
        while before and before[0][0] < now - _KEEP_COUNTS_S:
            before.popleft()
        before.append((now, num))
        self.charges.discard(charge)
        if self.is_forgotten:
            self._over()

    def report(self, told: Telemetry, *, asked_s: float, mean_tokens: float) -> None:
        """Takes in what the replica says of itself: see `Ledger.report`.

        Args:
            told: What it says.
            asked_s: When it was asked.
            mean_tokens: What a prompt in its queue is taken for, where it does not count tokens.
        """
        self.load = None
        self.told, self._told_s = told, self.now()
        own = self._most_requests(since_s=asked_s - told.lag_s)
        self.foreign_requests = max(0, told.num_running + told.num_waiting - own)
        self.foreign_prefills = min(
            self.foreign_requests, max(0, told.num_waiting - self.num_prefills)
        )
        if told.waiting_tokens is None:
            self.foreign_tokens = self.foreign_prefills * mean_tokens
        else:
            self.foreign_tokens = max(0.0, told.waiting_tokens - self.uncached_tokens)
        self.rates.report(
            prefill_tokens_per_s=told.prefill_tokens_per_s,
            decode_step_s=told.decode_step_s,
            now_s=self._told_s,
        )
        if self.foreign_prefills:
            self.stretch = None
        nothing_waits = told.num_waiting == 0 and told.waiting_tokens == 0
        for charge in self.charges:
            charge.see(asked_s=asked_s, nothing_waits=nothing_waits)

    def forget(self) -> None:
        """Drops what is known of the replica; open charges stay counted until they close."""
        self.is_forgotten = True
        self.told = None
        self.rates = self._new_rates()
        self.failures = Failures()
        self.stretch = None
        self.load = None

    # -- what comes of it -----------------------------------------------------------------------

    def fresh(self) -> Telemetry | None:
        """Returns what the replica said last, None once that is too old."""
        is_old = self.told is None or self.now() - self._told_s > self._stale_after_s
        return None if is_old else self.told

    def keep_up(self, now: float) -> None:
        """Sees whether the report is too old, and takes what was promised for done."""
        told = self.fresh()
        promises = self._promises
        self.due_s = math.inf if told is None else self._told_s + self._stale_after_s
        if told is None:
            self.rates.distrust_report()
        if told is None or told.waiting_tokens is None:
            while promises and promises[0][0] <= now:
                heappop(promises)[2].expect_prefilled()
            self.due_s = min(self.due_s, promises[0][0] if promises else math.inf)
        self.failing_s = self.failures.cost_s(now)
        aged_from_s = self.rates.step_aged_from_s
        self.due_s = min(self.due_s, aged_from_s)
        borrows_rate = self.rates.prefill_tokens_per_s is None
        # What is forgotten with time or depends on the others is reckoned anew each time.
        if borrows_rate or self.failing_s or aged_from_s <= now:
            self.due_s = -math.inf

    def load_now(
        self,
        replica_id: str,
        blocks_held: int,
        *,
        fleet_rate: float | None,
        step_s: float,
        block_size: int,
    ) -> ReplicaLoad:
        """Puts books and report together, as `keep_up` left them.

        Args:
            replica_id: Whose load it is.
            blocks_held: Blocks that the index lists.
            fleet_rate: The rate to borrow; there if the replica's own is not known.
            step_s: What a step of it takes.
            block_size: Tokens per block of all counts.
        """
        rate = self.rates.prefill_tokens_per_s
        tokens, num_prefills = self.prefill_tokens, self.num_prefills
        queued_tokens = float(self.uncached_tokens)
        in_flight, blocks_pinned = len(self.charges), self.num_blocks
        blocks_total = None
        if self.told is not None and self.told.total_tokens is not None:
            blocks_total = self.told.total_tokens // block_size
        told = self.fresh()
        if told is not None:
            tokens += self.foreign_tokens
            queued_tokens += self.foreign_tokens
            num_prefills += self.foreign_prefills
            in_flight += self.foreign_requests
            if told.used_tokens is not None:
                blocks_pinned = self.num_blocks_unseen + -(-told.used_tokens // block_size)
        return ReplicaLoad(
            replica_id,
            queued_prefill_s=tokens / (rate or fleet_rate or 1.0),
            queued_tokens=queued_tokens,
            num_prefills=num_prefills,
            decode_step_s=step_s if in_flight else 0.0,
            prefill_tokens_per_s=rate,
            blocks_pinned=blocks_pinned,
            blocks_total=blocks_total,
            in_flight=in_flight,
            blocks_held=blocks_held,
            attention_tokens=self.rates.attention_tokens,
            least_step_s=step_s,
            failing_s=self.failing_s,
        )

    # -- inside ---------------------------------------------------------------------------------

    def _most_requests(self, *, since_s: float) -> int:
        """Returns the most requests of this router that were open at once since then.

        A count that lags behind may still have them, and they are not the work of others.
        """
        most = max((num for when_s, num in self._before if when_s >= since_s), default=0)
        return max(len(self.charges), most)

    def _new_rates(self) -> Rates:
        return Rates(attention_tokens=self._params.attention_tokens)

    def _promise(self, charge: Charge, when_s: float) -> None:
        """Notes when the prefill of an answer that comes whole should be over."""
        promises = self._promises
        heappush(promises, (when_s, next(self._numbers), charge))
        if len(promises) > _MAX_PROMISES + 2 * len(self.charges):
            promises[:] = [p for p in promises if p[2].is_prefilling]
            heapify(promises)
