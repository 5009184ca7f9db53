"""The default: the least predicted cost in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from kvway_router.policies.base import ANY_POLICY
from kvway_router.policies.details import detail_of, reason_of
from kvway_router.policies.reasons import Reason
from kvway_router.policies.weighing import Weighing
from kvway_router.policy import Decision, PolicyParams, Prompt, ReplicaLoad, rendezvous

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
            busy_share=situation.busy_share,
            retry=situation.retry,
        )


def choose(  # noqa: PLR0913  one for each thing that is weighed
    prompt: Prompt,
    matches: Mapping[str, int],
    loads: Sequence[ReplicaLoad],
    *,
    params: PolicyParams,
    mean_work_s: float | None = None,
    slower: Mapping[str, tuple[int, int]] | None = None,
    busy_share: float = 1.0,
    retry: bool = False,
) -> Decision:
    """Chooses the candidate of least cost.

    Candidates that cost about the same, and have as little to compute, are tied. Those that have
    more than their share of blocks and requests are passed by; of the others a rendezvous hash of
    the sticky key, or else of the prompt's beginning, takes one. So routers that do not talk place
    a beginning alike, and none piles up what it places.

    Args:
        prompt: The request.
        matches: As in `Weighing`.
        loads: As in `Weighing`.
        params: Constants of the cost.
        mean_work_s: As in `Weighing`.
        slower: As in `Weighing`.
        busy_share: As in `Weighing`.
        retry: True when an earlier attempt at another replica failed.

    Raises:
        NoReplicaAvailable: There is no candidate.
    """
    weighing = Weighing(
        prompt,
        matches,
        loads,
        params=params,
        mean_work_s=mean_work_s,
        slower=slower,
        busy_share=busy_share,
    )
    cost, best = weighing.cost, weighing.least()
    # No tie goes further than this.
    limit_s = cost[best] + params.tie_share * weighing.own[best]
    near = [place for place, cost_s in enumerate(cost) if cost_s <= limit_s]
    chosen = best if len(near) == 1 else _of_tied(near, best, weighing, params, prompt)
    return Decision(
        weighing.candidate(chosen),
        weighing,
        reason=reason_of(chosen, weighing, retry=retry),
        detail=partial(detail_of, prompt=prompt),
    )


def _of_tied(
    near: Sequence[int], best: int, weighing: Weighing, params: PolicyParams, prompt: Prompt
) -> int:
    """Returns the place of one of the candidates that are tied with the best one."""
    matched, cost, work = weighing.matched, weighing.cost, weighing.work
    # What one does not hold must not matter, neither in cost nor, below a step's time, in work.
    most_s = cost[best] + params.spread_share * weighing.own[best]
    most_work_s = work[best] * (1.0 + params.spread_share)
    tied = [
        place
        for place in near
        if matched[place] >= matched[best]
        or (cost[place] <= most_s and work[place] <= most_work_s)
    ]
    if len(tied) == 1:
        return best
    loads = weighing.loads
    # A running request weighs as much as 50 blocks held.
    placed = [loads[place].blocks_held + 50 * loads[place].in_flight for place in tied]
    most = params.placement_factor * sum(placed) / len(placed)
    key = prompt.sticky_key or prompt.prefix_key
    fair = [place for place, num in zip(tied, placed, strict=True) if num <= most]
    return max(fair, key=lambda place: rendezvous(key, loads.keys[place]))
