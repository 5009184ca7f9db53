"""What each replica has been given and has not finished: the router's own count of load.

A request is charged to its replica when that is chosen, so it counts before any byte of an answer:

    charge -------------- first token -------------- close
      |-- prefill work --------|
      |-- in flight, KV blocks ------------------------|

A `Charge` belongs to the connection: leaving its context settles whatever is open, on every path
and exactly once. What replicas say of themselves adds what the router cannot see, such as the work
of other routers. A report that is too old is ignored, and the router's own count always works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean, median_low
from typing import Final

from kvway_core.clock import Clock
from kvway_router.accounts import Account
from kvway_router.charges import Charge
from kvway_router.loads import Loads
from kvway_router.policy import Candidate, PolicyParams, running_mean
from kvway_router.telemetry import Telemetry

_BUSY_S: Final = 20.0
"""Over how long it is averaged how many replicas are busy."""
_NOTE_BUSY_S: Final = 0.1
"""How often that is noted at most."""


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
        self._accounts: dict[str, Account] = {}
        self._unknown = self._new_account(lambda: None)
        """Stands for any replica that was neither sent nor reported anything; never charged."""
        self._loads = Loads((), params)
        self._mean_tokens: float | None = None
        self.mean_work_s: float | None = None
        """Running mean of the own work of chosen candidates, seconds: for the policy."""
        self.busy_share = 0.0
        """Share of the replicas that had prefill work, a mean over `_BUSY_S`: for the policy."""
        self._busy_noted_s = self.now()

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return self._clock.monotonic()

    def charge(self, chosen: Candidate, *, is_stream: bool = True) -> Charge:
        """Charges a request to the replica that was chosen for it, and returns what settles it.

        Args:
            chosen: What was weighed.
            is_stream: Whether its tokens will be seen one by one. Of an answer that comes whole
                the prefill counts for as long as it was predicted to take, unless the replica's
                reports tell when it is over.
        """
        self.mean_work_s = running_mean(self.mean_work_s, chosen.work_s)
        self._mean_tokens = running_mean(self._mean_tokens, chosen.uncached_tokens)
        return self._account(chosen.replica_id).charge(chosen, is_stream=is_stream)

    def report(self, replica_id: str, told: Telemetry, *, asked_s: float) -> None:
        """Takes in what a replica says of itself, asked for at `asked_s` and received now.

        What it counts beyond the router's own requests is taken as the work of others: if it does
        not say how many tokens those in its queue have to compute, as many as ours on average, and
        before there are any, a whole chunk. Its rates, where it has measured any, replace those
        seen from here.
        """
        mean = self._params.chunk_tokens if self._mean_tokens is None else self._mean_tokens
        self._account(replica_id).report(told, asked_s=asked_s, mean_tokens=mean)

    def loads(self, replicas: Iterable[tuple[str, int]]) -> Loads:
        """Returns the load of each replica now, in order.

        What did not change since the last call is not reckoned again.

        Args:
            replicas: Id and blocks listed in the index of each.
        """
        now, pairs = self.now(), list(replicas)
        self._loads = self._loads_now(now, pairs)
        self._note_busy(now)
        return self._loads

    def _loads_now(self, now: float, pairs: Sequence[tuple[str, int]]) -> Loads:
        before = self._loads
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
            accounts[place].keep_up(now)
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
            load = account.load_now(
                *pairs[place],
                fleet_rate=fleet_rate,
                step_s=account.rates.step_s(now, fleet_s=fleet_step_s),
                block_size=self._block_size,
            )
            loads[place] = load
            if account is not self._unknown:
                account.load = load
        return before.replaced(loads) if is_same else Loads(list(loads.values()), self._params)

    def _note_busy(self, now: float) -> None:
        """Takes what share is busy now for what was since it was noted last.

        Requests that come at random see, on average, what there is over time.
        """
        since_s, queued_s = now - self._busy_noted_s, self._loads.queued_s
        if since_s >= _NOTE_BUSY_S and queued_s:
            busy = sum(map(bool, queued_s)) / len(queued_s)
            self.busy_share += (1.0 - math.exp(-since_s / _BUSY_S)) * (busy - self.busy_share)
            self._busy_noted_s = now

    def failed(self, replica_id: str) -> None:
        """Notes that a request failed at a replica by its fault: see `failures.py`."""
        account = self._account(replica_id)
        account.load = None
        account.failures.note(self.now())

    def forgive(self, replica_id: str, *, noted_s: float) -> None:
        """Takes back a failure that was noted at `noted_s`: it was not the replica's."""
        account = self._accounts.get(replica_id)
        if account is not None:
            account.load = None
            account.failures.forgive(self.now(), noted_s=noted_s)

    def num_in_flight(self, replica_id: str) -> int:
        """Counts the requests of this router at a replica that are not finished."""
        account = self._accounts.get(replica_id)
        return len(account.charges) if account else 0

    def forget(self, replica_id: str) -> None:
        """Drops what is known of a replica; its open charges stay counted until they close."""
        account = self._accounts.get(replica_id)
        if account is not None:
            account.forget()
            self._drop_if_over(replica_id)

    # -- inside ---------------------------------------------------------------------------------

    def _account(self, replica_id: str) -> Account:
        account = self._accounts.get(replica_id)
        if account is None:
            over = partial(self._drop_if_over, replica_id)
            account = self._accounts[replica_id] = self._new_account(over)
        account.is_forgotten = False
        return account

    def _new_account(self, over: Callable[[], None]) -> Account:
        return Account(
            clock=self._clock,
            params=self._params,
            stale_after_s=self._stale_after_s,
            over=over,
        )

    def _drop_if_over(self, replica_id: str) -> None:
        """Drops the account of a replica that is forgotten, with its last charge."""
        account = self._accounts[replica_id]
        if account.is_forgotten and not account.charges:
            del self._accounts[replica_id]
