"""The default: the least predicted cost in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvway_router import policy
from kvway_router.policies.base import ANY_POLICY
from kvway_router.policies.reasons import Reason

if TYPE_CHECKING:
    from kvway_router.policies.base import Situation
    from kvway_router.policies.state import PolicyState


@dataclass(frozen=True, slots=True)
class Cost:
    """Our own rule, `kvway_router.policy.choose`. It remembers nothing."""

    name: ClassVar[str] = "cost"
    reasons: ClassVar[tuple[Reason, ...]] = (
        Reason.PREFIX,
        Reason.LEAST_LOADED,
        Reason.SPILL,
        *ANY_POLICY,
    )
    remember_s: ClassVar[float] = 0.0

    def choose(self, situation: Situation, state: PolicyState) -> policy.Decision:
        """Chooses the candidate of least cost.

        Raises:
            NoReplicaAvailable: There is no candidate.
        """
        del state
        return policy.choose(
            situation.prompt,
            situation.matches,
            situation.loads,
            params=situation.params,
            mean_own_s=situation.mean_own_s,
            retry=situation.retry,
        )
