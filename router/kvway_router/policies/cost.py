"""The default: the least predicted cost in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, ClassVar

from kvway_router.policies.base import ANY_POLICY
from kvway_router.policies.details import detail_of, reason_of
from kvway_router.policies.reasons import Reason
from kvway_router.policies.weighing import weigh
from kvway_router.policy import Candidate, Decision, PolicyParams, Prompt, ReplicaLoad, rendezvous

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvway_router.policies.base import Situation
    from kvway_router.policies.state import PolicyState


@dataclass(frozen=True, slots=True)
class Cost:
    """Our own rule. It remembers nothing."""

    name: ClassVar[str] = "cost"
    reasons: ClassVar[tuple[Reason, ...]] = (
        Reason.PREFIX,
        Reason.LEAST_LOADED,
        Reason.SPILL,
        *ANY_POLICY,
    )
    remember_s: ClassVar[float] = 0.0

    def choose(self, situation: Situation, state: PolicyState) -> Decision:
        """Chooses the candidate of least cost.

        Raises:
            NoReplicaAvailable: There is no candidate.
        """
        del state
        return choose(
            situation.prompt,
            situation.matches,
            situation.loads,
            params=situation.params,
            mean_work_s=situation.mean_work_s,
            slower=situation.slower,
            retry=situation.retry,
        )


def choose(
    prompt: Prompt,
    matches: Mapping[str, int],
    loads: Sequence[ReplicaLoad],
    *,
    params: PolicyParams,
    mean_work_s: float | None = None,
    slower: Mapping[str, tuple[int, int]] | None = None,
    retry: bool = False,
) -> Decision:
    """Chooses the candidate of least cost.

    Candidates that cost about the same, and have as little to compute, are tied. Those that have
    more than their share of blocks and requests are passed by; of the others a rendezvous hash of
    the sticky key, or else of the prompt's beginning, takes one. So routers that do not talk place
    a beginning alike, and none piles up what it places.

    Args:
        prompt: The request.
        matches: As in `weigh`.
        loads: As in `weigh`.
        params: Constants of the cost.
        mean_work_s: As in `weigh`.
        slower: As in `weigh`.
        retry: True when an earlier attempt at another replica failed.

    Raises:
        NoReplicaAvailable: There is no candidate.
    """
    candidates, price = weigh(
        prompt, matches, loads, params=params, mean_work_s=mean_work_s, slower=slower
    )
    best = candidates[0]
    # They come in the order of their cost, and no tie goes further than this.
    limit_s = best.cost_s + params.tie_share * best.own_s
    near = takewhile(lambda c: c.cost_s <= limit_s, candidates)
    tied = [c for c in near if _is_tied(c, best, params=params)]
    chosen = best
    if len(tied) > 1:
        most = params.placement_factor * sum(map(_placement, tied)) / len(tied)
        key = prompt.sticky_key or prompt.prefix_key
        chosen = max(
            (c for c in tied if _placement(c) <= most),
            key=lambda c: rendezvous(key, c.replica_id),
        )
    reason = reason_of(chosen, candidates, retry=retry)
    return Decision(
        replica_id=chosen.replica_id,
        reason=reason,
        detail=detail_of(reason, chosen, candidates=candidates, prompt=prompt),
        candidates=candidates,
        price_of_work=price,
    )


def _is_tied(candidate: Candidate, best: Candidate, *, params: PolicyParams) -> bool:
    """Tells it of a candidate that costs little more than the best one."""
    if candidate.matched_blocks >= best.matched_blocks:
        return True
    # What it does not hold must not matter, neither in cost nor, below a step's time, in work.
    dearer_s = candidate.cost_s - best.cost_s
    more_s = candidate.work_s - best.work_s
    return (
        dearer_s <= params.spread_share * best.own_s
        and more_s <= params.spread_share * best.work_s
    )


def _placement(candidate: Candidate) -> int:
    """What a candidate has: a running request weighs as much as 50 blocks held."""
    return candidate.blocks_held + 50 * candidate.in_flight
