"""What sending a request to each candidate would cost, for all candidates at once.

    cost = queued + step + own + reload + lambda * work + kv + failing            in seconds

    queued  Q                            prefill work sent to the replica and not yet done
    step    (n + k) tau                  each prefill before ours and each of our k chunks shares a
                                         step with what the replica is decoding
    work    W = u / R (1 + (c + u/2)/A)  our own uncached tokens u behind c cached ones
    own     max(W, k (s - tau))          no chunk takes less than a step s with nothing else in it
    reload                               blocks on a slower tier are brought back first
    lambda  see `price_of_work`          what saved work is worth: the more all queue, the more
    kv      km max(0, P / C - theta)     memory of the replica that is or will be taken
    failing see `failures.py`            who fails at once is idle, which must not make it cheap

queued + step + own + reload is the predicted time to first token. There is no switch for the
fleet: each request weighs each candidate, so a hot prefix comes to a second replica exactly when
waiting for the first costs more than computing it again, and leaves it by not being used there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import fsum

import numpy as np

from kvway_core.errors import NoReplicaAvailable
from kvway_router.loads import NUM_TERMS, Loads
from kvway_router.policy import Candidate, PolicyParams, Prompt, ReplicaLoad


class Weighing:
    """What sending a request to each candidate would cost. Lists are in the order of the loads.

    Reckoned with at once is what a choice looks at; `Candidate`s are made when they are asked for.

    Attributes:
        loads: The candidates.
        matched: Leading blocks of the prompt that each holds, on any tier.
        price: lambda, the price of work.
        mean_work_s: As given.
        busy_share: As given.
        cost: What is compared, seconds.
        own: Own prefill, seconds.
        work: The work alone, seconds.

    Args:
        prompt: The request.
        matches: Leading blocks held per replica on its device; those not named hold none.
        loads: The candidates: usable replicas, without those already tried.
        params: Constants of the cost.
        mean_work_s: Running mean of the own work of chosen candidates (`running_mean`), kept by
            the caller; None before the first choice.
        slower: Blocks that follow those on the device without a gap, per replica: on the host,
            and behind those on a disk.
        busy_share: Share of the replicas that had prefill work of late, 0 to 1.

    Raises:
        NoReplicaAvailable: There is no candidate.
    """

    __slots__ = (
        "_ahead",
        "_kv",
        "_num_output",
        "_reload",
        "_size",
        "_slow",
        "_step",
        "_total",
        "_ttft",
        "busy_share",
        "cost",
        "loads",
        "matched",
        "mean_work_s",
        "own",
        "price",
        "work",
    )

    def __init__(
        self,
        prompt: Prompt,
        matches: Mapping[str, int],
        loads: Sequence[ReplicaLoad],
        *,
        params: PolicyParams,
        mean_work_s: float | None = None,
        slower: Mapping[str, tuple[int, int]] | None = None,
        busy_share: float = 1.0,
    ) -> None:
        if not loads:
            msg = "No replica can take the request now; try again in a few seconds."
            raise NoReplicaAvailable(msg)
        self.loads = loads = Loads.of(loads, params)
        self.matched = matched = [matches.get(name, 0) for name in loads.ids]
        self._slow: list[int] = []
        self._reload: list[float] = []
        if slower:
            tiers = [slower.get(name, (0, 0)) for name in loads.ids]
            self._slow = [host + disk for host, disk in tiers]
            self.matched = matched = list(map(sum, zip(matched, self._slow, strict=True)))
            host_s = prompt.block_size * params.host_token_s
            disk_s = prompt.block_size * params.disk_token_s
            self._reload = [host * host_s + disk * disk_s for host, disk in tiers]

        size, total = prompt.block_size, max(1, prompt.num_tokens)
        self._size, self._total, self._num_output = size, total, prompt.num_output_tokens
        # A replica that holds the whole prompt still computes its last token.
        uncached = np.maximum(total - size * np.array(matched, np.float64), 1.0)
        numbers = np.empty((NUM_TERMS, len(matched)))
        np.subtract(2.0 * total, uncached, out=numbers[0])  # u + 2c
        numbers[1:3] = np.ceil(uncached / params.chunk_tokens)
        np.ceil((uncached + prompt.num_output_tokens) / size, out=numbers[3])
        terms = loads.factors * numbers
        terms += loads.summands
        token_s, self._step, least_own, kv = terms
        work = token_s * uncached
        own = np.maximum(work, least_own)
        self._kv = np.maximum(kv, 0.0)
        self._ttft = loads.queued + self._step + own
        if self._reload:
            self._ttft += self._reload
        self.mean_work_s, self.busy_share = mean_work_s, busy_share
        self.price = price_of_work(
            loads.queued_s, mean_work_s, params=params, busy_share=busy_share
        )
        self._ahead = self.price * work
        cost = self._ttft + self._ahead + self._kv
        if loads.failing is not None:
            cost += loads.failing
        self.cost: list[float] = cost.tolist()
        self.own: list[float] = own.tolist()
        self.work: list[float] = work.tolist()

    def least(self) -> int:
        """Returns the place of the cheapest, of equal ones that with the least work."""
        cost = min(self.cost)
        if self.cost.count(cost) == 1:
            return self.cost.index(cost)
        return min(self._order())[-1]

    def longest_cost(self) -> float:
        """Returns what the longest match costs, of equal ones the cheapest."""
        most = max(self.matched)
        rows = zip(self.cost, self.matched, strict=True)
        return min([cost for cost, matched in rows if matched == most])

    def candidates(self) -> tuple[Candidate, ...]:
        """Returns all candidates, the cheapest first, of equal ones that with the least work."""
        return tuple([self.candidate(place) for *_, place in sorted(self._order())])

    def candidate(self, place: int) -> Candidate:
        """Returns all terms of one candidate."""
        load, matched = self.loads[place], self.matched[place]
        uncached = max(1, self._total - matched * self._size)
        return Candidate(
            replica_id=load.replica_id,
            matched_blocks=matched,
            slow_blocks=self._slow[place] if self._slow else 0,
            uncached_tokens=uncached,
            cached_tokens=self._total - uncached,
            own_blocks=-(-(uncached + self._num_output) // self._size),
            queued_s=load.queued_prefill_s,
            step_s=float(self._step[place]),
            own_s=self.own[place],
            work_s=self.work[place],
            price_s=float(self._ahead[place]),
            kv_s=float(self._kv[place]),
            reload_s=self._reload[place] if self._reload else 0.0,
            in_flight=load.in_flight,
            blocks_held=load.blocks_held,
            ttft_s=float(self._ttft[place]),
            cost_s=self.cost[place],
            failing_s=load.failing_s,
        )

    def _order(self) -> Iterator[tuple[float, float, str, int]]:
        """Yields what candidates are put in order by, their places last."""
        return zip(self.cost, self.work, self.loads.ids, range(len(self.cost)), strict=True)


def price_of_work(
    queued_s: Sequence[float],
    mean_work_s: float | None,
    *,
    params: PolicyParams,
    busy_share: float,
) -> float:
    """Returns lambda = min(mean(Q), 4 min(Q) + B EMA(W)) / EMA(W); 0 while nothing queues.

    The mean alone holds on to a hot prefix: a burst of siblings makes one queue long and the mean
    of own work small, and then no queue is too long to wait in while others idle. What the idlest
    replica has queued is what really all wait for; beyond it the price is at most B, how busy the
    fleet was of late, or a tenth: work given to a replica that would idle costs others little.
    """
    if not mean_work_s:
        return 0.0
    # fsum: the order of the replicas must not show in the last digits.
    mean_s, least_s = fsum(queued_s) / len(queued_s), min(queued_s)
    most = max(params.idle_price, params.max_price * busy_share)
    bound_s = params.idlest_weight * least_s + most * mean_work_s
    return min(mean_s, bound_s) / mean_work_s
