"""What each replica has been given and has not finished: the router's own count of load.

A request is charged to its replica when that is chosen, so it counts before any byte of an answer:

    charge -------------- first token -------------- close
      |-- prefill work --------|
      |-- in flight, KV blocks ------------------------|

A `Charge` belongs to the connection: leaving its context settles whatever is open, on every path
and exactly once. The replica's reports add what the router cannot see, such as the work of other
routers. A report that is too old is ignored, and the router's own count always works.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from statistics import fmean, median_low
from typing import Final, Self

from kvway_core.api import LoadReport
from kvway_core.clock import Clock
from kvway_router.failures import Failures
from kvway_router.loads import Loads
from kvway_router.policy import (
    Candidate,
    PolicyParams,
    ReplicaLoad,
    own_work_tokens,
    running_mean,
)
from kvway_router.rates import PrefillSample, Rates

_ARRIVAL_S: Final = 0.25
"""Time in which a request has surely been counted by its replica."""
_STRETCH_TOKENS: Final = 8192
"""A replica that never stops prefilling teaches its rates each time it has done so many."""
_MAX_PROMISES: Final = 64
"""Estimates that may outlive their requests, before they are sorted out."""


class _Account:
    """The books of one replica.

    Invariants:
        1. `num_prefills`, `prefill_tokens` (work) and `uncached_tokens` (plain) are those of the
           open charges without a first token.
        2. `num_blocks` is that of all open charges, `num_blocks_unseen` of those that the last
           report cannot have counted.
        3. While `stretch` is not None the replica has prefilled since `stretch_s` without a pause,
           and what it finished is in there.
    """

    __slots__ = (
        "charges",
        "due_s",
        "failing_s",
        "failures",
        "foreign_prefills",
        "foreign_requests",
        "foreign_tokens",
        "forgotten",
        "has_fresh_report",
        "load",
        "num_blocks",
        "num_blocks_unseen",
        "num_prefills",
        "prefill_tokens",
        "promises",
        "rates",
        "report",
        "reported_s",
        "stretch",
        "stretch_s",
        "uncached_tokens",
    )

    def __init__(self, rates: Rates) -> None:
        self.charges: set[Charge] = set()
        self.rates = rates
        self.num_prefills = 0
        self.prefill_tokens = 0.0
        self.uncached_tokens = 0
        self.num_blocks = 0
        self.num_blocks_unseen = 0
        self.promises: list[tuple[float, int, Charge]] = []
        self.report: LoadReport | None = None
        self.reported_s = -math.inf
        self.foreign_prefills = 0
        self.foreign_requests = 0
        self.foreign_tokens = 0.0
        self.forgotten = False
        self.has_fresh_report = False
        self.load: ReplicaLoad | None = None
        self.due_s = -math.inf
        self.failures = Failures()
        self.failing_s = 0.0
        self.stretch: PrefillSample | None = None
        self.stretch_s = 0.0


class Charge:
    """One request at one replica, from the choice to the end of the connection.

    Use it as a context manager, or call `close`. All methods may be called any number of times, in
    any order; each settles its part once.
    """

    __slots__ = (
        "_account",
        "_charged_s",
        "_last_token_s",
        "_ledger",
        "_open",
        "_prefilling",
        "_seen",
        "cached_tokens",
        "num_blocks",
        "replica_id",
        "uncached_tokens",
        "work_tokens",
    )

    def __init__(
        self, ledger: Ledger, account: _Account, *, chosen: Candidate, work_tokens: float
    ) -> None:
        """Open an entry; for `Ledger.charge`, which is how to get one."""
        self.replica_id = chosen.replica_id
        self.work_tokens = work_tokens
        self.uncached_tokens = chosen.uncached_tokens
        self.cached_tokens = chosen.cached_tokens
        self.num_blocks = chosen.own_blocks
        self._ledger = ledger
        self._account = account
        self._charged_s = ledger.now()
        self._last_token_s: float | None = None
        self._open = True
        self._prefilling = True
        self._seen = False
        account.charges.add(self)
        account.num_prefills += 1
        account.prefill_tokens += work_tokens
        account.uncached_tokens += self.uncached_tokens
        account.num_blocks += self.num_blocks
        account.num_blocks_unseen += self.num_blocks
        account.load = None

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Settle whatever is open."""
        self.close()

    def token(self) -> None:
        """Note that content arrived: the first releases the prefill, later ones time a step."""
        if not self._open:
            return
        now = self._ledger.now()
        if self._prefilling:
            self._release_prefill()
            self._ledger.prefilled(self._account, self)
        elif self._last_token_s is not None:
            self._account.rates.gap(now - self._last_token_s, now_s=now)
            self._account.load = None
        self._last_token_s = now

    def pause(self) -> None:
        """Note that nobody listened for a while: the time up to the next token says nothing."""
        self._last_token_s = None

    def recount(self, *, uncached_tokens: int, cached_tokens: int, num_blocks: int) -> None:
        """Takes what was counted of a prompt in place of the estimate it was charged for.

        Args:
            uncached_tokens: Tokens to compute.
            cached_tokens: Tokens before them.
            num_blocks: Blocks for them and the answer.
        """
        if not self._open:
            return
        account = self._account
        account.load = None
        account.num_blocks += num_blocks - self.num_blocks
        if not self._seen:
            account.num_blocks_unseen += num_blocks - self.num_blocks
        self.num_blocks = num_blocks
        if not self._prefilling:
            return
        work = self._ledger.work_tokens(account, uncached_tokens, cached_tokens)
        account.uncached_tokens += uncached_tokens - self.uncached_tokens
        account.prefill_tokens += work - self.work_tokens
        self.uncached_tokens, self.cached_tokens = uncached_tokens, cached_tokens
        self.work_tokens = work

    def close(self) -> None:
        """Release everything: the answer is complete, failed or nobody waits for it any more."""
        if not self._open:
            return
        self._open = False
        self.expect_prefilled()
        account = self._account
        account.charges.discard(self)
        account.load = None
        account.num_blocks -= self.num_blocks
        if not self._seen:
            account.num_blocks_unseen -= self.num_blocks
        self._ledger.closed(self.replica_id, account)

    def see(self, *, asked_s: float, nothing_waits: bool) -> None:
        """Note that a report was made: what is past its prefill is in its count of blocks.

        Of an answer that is no stream no first token is seen; that its prefill is over shows in a
        report by which nothing waits.

        Args:
            asked_s: When the report was asked for, by the ledger's clock.
            nothing_waits: Whether the replica has no prefill left, queued or running.
        """
        if nothing_waits and asked_s - self._charged_s >= _ARRIVAL_S:
            self.expect_prefilled()
        if not self._prefilling and not self._seen:
            self._seen = True
            self._account.num_blocks_unseen -= self.num_blocks

    def expect_prefilled(self) -> None:
        """Release the prefill although no token was seen: how long it took is not known."""
        if self._prefilling:
            self._release_prefill()
            self._account.stretch = None

    @property
    def is_prefilling(self) -> bool:
        """Whether its prefill is still counted."""
        return self._prefilling

    def _release_prefill(self) -> None:
        self._prefilling = False
        account = self._account
        account.load = None
        account.num_prefills -= 1
        account.uncached_tokens -= self.uncached_tokens
        # Sums of floats drift; an empty queue is exactly empty.
        account.prefill_tokens = (
            account.prefill_tokens - self.work_tokens if account.num_prefills else 0.0
        )


class Ledger:
    """Load of every replica: charges of this router, corrected by the replicas' reports.

    Not thread-safe and without awaits: it belongs to the event loop. Bounded by the requests in
    flight and the replicas known.

    Args:
        clock: Tells the time.
        params: The constants that turn tokens into seconds; those of the policy.
        stale_after_s: Reports older than this are ignored.
        block_size: Tokens per block of all counts; those of replicas with other blocks become
            such.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        params: PolicyParams,
        stale_after_s: float = 5.0,
        block_size: int = 16,
    ) -> None:
        """Start with nothing in flight and nothing known."""
        self._clock = clock
        self._params = params
        self._stale_after_s = stale_after_s
        self._block_size = block_size
        self._accounts: dict[str, _Account] = {}
        self._unknown = self._new_account()
        """Stands for any replica that was neither sent nor reported anything; never charged."""
        self._loads = Loads((), params)
        self._numbers = count()
        self.mean_work_s: float | None = None
        """Running mean of the own work of chosen candidates, seconds: for the policy."""

    def charge(self, chosen: Candidate, *, is_stream: bool = True) -> Charge:
        """Charges a request to the replica that was chosen for it, and returns what settles it.

        Args:
            chosen: What was weighed.
            is_stream: Whether its tokens will be seen one by one. Of an answer that comes whole
                the prefill counts for as long as it was predicted to take, unless the replica's
                reports tell when it is over.
        """
        self.mean_work_s = running_mean(self.mean_work_s, chosen.work_s)
        account = self._account(chosen.replica_id)
        if self._others_queue(account):
            account.stretch = None
        elif account.num_prefills == 0:
            account.stretch, account.stretch_s = PrefillSample(), self.now()
        charge = Charge(
            self,
            account,
            chosen=chosen,
            work_tokens=self.work_tokens(account, chosen.uncached_tokens, chosen.cached_tokens),
        )
        if not is_stream:
            self._promise(account, charge, self.now() + chosen.ttft_s)
        return charge

    def report(self, replica_id: str, report: LoadReport, *, asked_s: float) -> None:
        """Takes in what a replica says of itself, asked for at `asked_s` and received now.

        What it counts beyond the router's own requests is taken as the work of others. Its rates,
        where it has measured any, replace those seen from here.
        """
        account = self._account(replica_id)
        account.load = None
        account.report = report
        account.reported_s = self.now()
        account.foreign_tokens = max(0.0, report.waiting_uncached_tokens - account.uncached_tokens)
        account.foreign_prefills = max(0, report.num_waiting - account.num_prefills)
        account.foreign_requests = max(
            0, report.num_running + report.num_waiting - len(account.charges)
        )
        account.rates.report(
            prefill_tokens_per_s=report.prefill_tokens_per_s,
            decode_step_s=report.decode_step_s,
            now_s=account.reported_s,
        )
        if account.foreign_prefills:
            account.stretch = None
        nothing_waits = report.num_waiting == 0 and report.waiting_uncached_tokens == 0
        for charge in account.charges:
            charge.see(asked_s=asked_s, nothing_waits=nothing_waits)

    def loads(self, replicas: Iterable[tuple[str, int]]) -> Loads:
        """Returns the load of each replica now, in order.

        What did not change since the last call is not reckoned again.

        Args:
            replicas: Id and blocks listed in the index of each.
        """
        now, pairs, before = self.now(), list(replicas), self._loads
        names = [replica_id for replica_id, _ in pairs]
        accounts = [self._accounts.get(name, self._unknown) for name in names]
        is_same = before.ids == names
        changed: Sequence[int] = range(len(names))
        if is_same:
            rows = enumerate(zip(accounts, pairs, before, strict=True))
            changed = [
                place
                for place, (account, (_, held), load) in rows
                if account.load is not load or load.blocks_held != held or now >= account.due_s
            ]
            if not changed:
                return before
        for place in changed:
            self._keep_up(accounts[place], now)
        fleet_rate = None
        if any(accounts[place].rates.prefill_tokens_per_s is None for place in changed):
            known = [rate for each in accounts if (rate := each.rates.prefill_tokens_per_s)]
            fleet_rate = fmean(known) if known else self._params.default_prefill_tokens_per_s
        fleet_step_s = 0.0
        if any(accounts[place].rates.step_aged_from_s < now for place in changed):
            known = [step for each in accounts if (step := each.rates.decode_step_s) is not None]
            fleet_step_s = median_low(known)
        loads = {}
        for place in changed:
            account = accounts[place]
            load = _load(
                *pairs[place],
                account,
                fleet_rate=fleet_rate,
                step_s=account.rates.step_s(now, fleet_s=fleet_step_s),
                block_size=self._block_size,
            )
            loads[place] = load
            if account is not self._unknown:
                account.load = load
        self._loads = (
            before.replaced(loads) if is_same else Loads(list(loads.values()), self._params)
        )
        return self._loads

    def failed(self, replica_id: str) -> None:
        """Notes that a request failed at a replica by its fault: see `failures.py`."""
        account = self._account(replica_id)
        account.load = None
        account.failures.note(self.now())

    def num_in_flight(self, replica_id: str) -> int:
        """Counts the requests of this router at a replica that are not finished."""
        account = self._accounts.get(replica_id)
        return len(account.charges) if account else 0

    def forget(self, replica_id: str) -> None:
        """Drops what is known of a replica; its open charges stay counted until they close."""
        account = self._accounts.get(replica_id)
        if account is None:
            return
        account.forgotten = True
        account.report = None
        account.rates = self._new_rates()
        account.failures = Failures()
        account.stretch = None
        account.load = None
        self.closed(replica_id, account)

    # -- for Charge -----------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return self._clock.monotonic()

    def work_tokens(self, account: _Account, num_uncached: int, num_cached: int) -> float:
        """Returns the work of so many tokens behind so many, as tokens at an empty context."""
        attention = account.rates.attention_tokens or self._params.attention_tokens
        return own_work_tokens(num_uncached, num_cached, attention_tokens=attention)

    def prefilled(self, account: _Account, charge: Charge) -> None:
        """Notes a first token, and learns from what was prefilled without a pause up to now."""
        sample = account.stretch
        if sample is None:
            return
        sample.add(
            charge.uncached_tokens, charge.cached_tokens, chunk_tokens=self._params.chunk_tokens
        )
        if account.num_prefills and sample.tokens < _STRETCH_TOKENS:
            return
        decoding = len(account.charges) - account.num_prefills > 1
        now = self.now()
        account.rates.prefilled(sample, now - account.stretch_s, decoding=decoding)
        account.stretch = PrefillSample() if account.num_prefills else None
        account.stretch_s = now

    def closed(self, replica_id: str, account: _Account) -> None:
        """Drops the account of a forgotten replica with its last charge."""
        if account.forgotten and not account.charges:
            self._accounts.pop(replica_id, None)

    # -- inside ---------------------------------------------------------------------------------

    def _account(self, replica_id: str) -> _Account:
        account = self._accounts.get(replica_id)
        if account is None:
            account = self._accounts[replica_id] = self._new_account()
        account.forgotten = False
        return account

    def _new_account(self) -> _Account:
        return _Account(self._new_rates())

    def _new_rates(self) -> Rates:
        return Rates(attention_tokens=self._params.attention_tokens)

    def _fresh_report(self, account: _Account) -> LoadReport | None:
        if account.report is None or self.now() - account.reported_s > self._stale_after_s:
            return None
        return account.report

    def _others_queue(self, account: _Account) -> bool:
        return account.foreign_prefills > 0 and self._fresh_report(account) is not None

    def _promise(self, account: _Account, charge: Charge, when_s: float) -> None:
        """Notes when the prefill of an answer that comes whole should be over."""
        promises = account.promises
        heappush(promises, (when_s, next(self._numbers), charge))
        if len(promises) > _MAX_PROMISES + 2 * len(account.charges):
            promises[:] = [p for p in promises if p[2].is_prefilling]
            heapify(promises)

    def _keep_up(self, account: _Account, now: float) -> None:
        """Sees whether the report is too old; if so, takes what was promised for done."""
        account.has_fresh_report = self._fresh_report(account) is not None
        promises = account.promises
        if account.has_fresh_report:
            account.due_s = account.reported_s + self._stale_after_s
        else:
            account.rates.distrust_report()
            while promises and promises[0][0] <= now:
                heappop(promises)[2].expect_prefilled()
            account.due_s = promises[0][0] if promises else math.inf
        account.failing_s = account.failures.cost_s(now)
        aged_from_s = account.rates.step_aged_from_s
        account.due_s = min(account.due_s, aged_from_s)
        borrows_rate = account.rates.prefill_tokens_per_s is None
        # What is forgotten with time or depends on the others is reckoned anew each time.
        if borrows_rate or account.failing_s or aged_from_s <= now:
            account.due_s = -math.inf


def _load(
    replica_id: str,
    blocks_held: int,
    account: _Account,
    *,
    fleet_rate: float | None,
    step_s: float,
    block_size: int,
) -> ReplicaLoad:
    """Puts an account and its report, if that is not too old, together.

    `fleet_rate` is there if the replica's own is not known; `step_s` is what a step of it takes.
    """
    rate = account.rates.prefill_tokens_per_s
    tokens, num_prefills = account.prefill_tokens, account.num_prefills
    queued_tokens = float(account.uncached_tokens)
    in_flight, blocks_pinned = len(account.charges), account.num_blocks
    report, blocks_total = account.report, None
    if report is not None:
        blocks_total = report.blocks.total * report.block_size // block_size
    if report is not None and account.has_fresh_report:
        tokens += account.foreign_tokens
        queued_tokens += account.foreign_tokens
        num_prefills += account.foreign_prefills
        in_flight += account.foreign_requests
        blocks = report.blocks
        num_used = max(0, blocks.total - blocks.free - blocks.cached)
        blocks_pinned = account.num_blocks_unseen + -(-num_used * report.block_size // block_size)
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
        attention_tokens=account.rates.attention_tokens,
        least_step_s=step_s,
        failing_s=account.failing_s,
    )
