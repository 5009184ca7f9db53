"""What sending a request to each candidate would cost, for all candidates at once.

    cost = queued + step + own + reload + lambda * work + kv                      in seconds

    queued  Q                            prefill work sent to the replica and not yet done
    step    (n + k) tau                  each prefill before ours and each of our k chunks shares a
                                         step with what the replica is decoding
    work    W = u / R (1 + (c + u/2)/A)  our own uncached tokens u behind c cached ones
    own     max(W, k (s - tau))          no chunk takes less than a step s with nothing else in it
    reload                               blocks on a slower tier are brought back first
    lambda  see `price_of_work`          what saved work is worth: the more all queue, the more
    kv      km max(0, P / C - theta)     memory of the replica that is or will be taken

queued + step + own + reload is the predicted time to first token. There is no switch for the
fleet: each request weighs each candidate, so a hot prefix comes to a second replica exactly when
waiting for the first costs more than computing it again, and leaves it by not being used there.
"""

from __future__ import annotations

from math import fsum
from typing import TYPE_CHECKING

import numpy as np

from kvway_core.errors import NoReplicaAvailable
from kvway_router.policy import Candidate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from kvway_router.policy import PolicyParams, Prompt, ReplicaLoad

    Column = npt.NDArray[np.float64]


def weigh(
    prompt: Prompt,
    matches: Mapping[str, int],
    loads: Sequence[ReplicaLoad],
    *,
    params: PolicyParams,
    mean_work_s: float | None = None,
    slower: Mapping[str, tuple[int, int]] | None = None,
) -> tuple[tuple[Candidate, ...], float]:
    """Weighs every candidate without choosing one.

    Args:
        prompt: The request.
        matches: Leading blocks held per replica on its device; those not named hold none.
        loads: The candidates: usable replicas, without those already tried.
        params: Constants of the cost.
        mean_work_s: Running mean of the own work of chosen candidates (`running_mean`), kept by
            the caller; None before the first choice.
        slower: Blocks that follow those on the device without a gap, per replica: on the host,
            and behind those on a disk.

    Returns:
        All candidates, the cheapest first and of equal ones that with the least work, and the
        price of work.

    Raises:
        NoReplicaAvailable: There is no candidate.
    """
    if not loads:
        msg = "No replica can take the request now; try again in a few seconds."
        raise NoReplicaAvailable(msg)
    queued, prefills, tau, rate, pinned, total, attention, least_step = np.array(
        [
            (
                load.queued_prefill_s,
                load.num_prefills,
                load.decode_step_s,
                load.prefill_tokens_per_s or 0.0,
                load.blocks_pinned,
                load.blocks_total or 0.0,
                load.attention_tokens or 0.0,
                load.least_step_s,
            )
            for load in loads
        ],
        dtype=np.float64,
    ).T
    ids = [load.replica_id for load in loads]
    matched = np.array([matches.get(name, 0) for name in ids])
    slow = np.zeros_like(matched)
    reload: Column = np.zeros(len(loads))
    if slower:
        host, disk = np.array([slower.get(name, (0, 0)) for name in ids]).T
        slow = host + disk
        matched = matched + slow
        reload = prompt.block_size * (host * params.host_token_s + disk * params.disk_token_s)

    # A replica that holds the whole prompt still computes its last token.
    uncached = np.maximum(1, prompt.num_tokens - matched * prompt.block_size)
    cached = np.maximum(0, prompt.num_tokens - uncached)
    rate = _borrow(rate, params.default_prefill_tokens_per_s)
    attention = _borrow(attention, params.attention_tokens)
    work = uncached * (1.0 + (cached + uncached / 2.0) / attention) / rate
    chunks = -(-uncached // params.chunk_tokens)
    step = (prefills + chunks) * tau
    own = np.maximum(work, chunks * (least_step - tau))
    own_blocks = -(-(uncached + prompt.num_output_tokens) // prompt.block_size)
    taken = (pinned + own_blocks) / np.where(total > 0, total, np.inf)
    kv = params.kv_weight_s * np.maximum(0.0, taken - params.kv_threshold)
    queued_s = queued.tolist()
    price = price_of_work(queued_s, mean_work_s, params=params)

    ttft = queued + step + own + reload
    ahead = price * work
    cost = (ttft + ahead + kv).tolist()
    candidates = list(
        map(
            Candidate,
            ids,
            matched.tolist(),
            slow.tolist(),
            uncached.tolist(),
            cached.tolist(),
            own_blocks.tolist(),
            queued_s,
            step.tolist(),
            own.tolist(),
            work.tolist(),
            ahead.tolist(),
            kv.tolist(),
            reload.tolist(),
            [load.in_flight for load in loads],
            [load.blocks_held for load in loads],
            ttft.tolist(),
            cost,
        )
    )
    order = sorted(zip(cost, work.tolist(), ids, candidates, strict=True))
    return tuple([candidate for _, _, _, candidate in order]), price


def price_of_work(
    queued_s: Sequence[float], mean_work_s: float | None, *, params: PolicyParams
) -> float:
    """Returns lambda = min(mean(Q), 4 min(Q) + EMA(W)) / EMA(W); 0 while nothing queues.

    The mean alone holds on to a hot prefix: a burst of siblings makes one queue long and the mean
    of own work small, and then no queue is too long to wait in while others idle. What the idlest
    replica has queued is what really all wait for; beyond it the price is bounded.
    """
    if not mean_work_s:
        return 0.0
    # fsum: the order of the replicas must not show in the last digits.
    mean_s, least_s = fsum(queued_s) / len(queued_s), min(queued_s)
    bound_s = params.idlest_weight * least_s + params.max_price * mean_work_s
    return min(mean_s, bound_s) / mean_work_s


def _borrow(column: Column, default: float) -> Column:
    """Puts the mean of the known values, else `default`, in the place of those that are 0."""
    known = column > 0
    if np.count_nonzero(known) == len(column):
        return column
    mean = column.sum() / known.sum() if known.any() else default
    return np.where(known, column, mean)
