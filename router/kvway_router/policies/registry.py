"""All policies by name: what `--policy` takes."""

from __future__ import annotations

from typing import Final

from kvway_router.policies.base import Policy
from kvway_router.policies.cost import Cost
from kvway_router.policies.counting import (
    ConsistentHash,
    LeastRequests,
    LeastUncachedWork,
    PowerOfTwo,
    Random,
    RoundRobin,
)
from kvway_router.policies.gateways import Dynamo, LlmdSticky, LlmdWeighted, SglangCacheAware
from kvway_router.policies.papers import Lmetric, PrebleE2
from kvway_router.policies.state import PolicyState, Window

DEFAULT_POLICY: Final = Cost.name

_ALL: Final[tuple[Policy, ...]] = (
    Cost(),
    RoundRobin(),
    Random(),
    LeastRequests(),
    PowerOfTwo(),
    LeastUncachedWork(),
    ConsistentHash(),
    SglangCacheAware(),
    Dynamo(),
    LlmdWeighted(),
    LlmdSticky(),
    PrebleE2(),
    Lmetric(),
)

POLICIES: Final = {policy.name: policy for policy in _ALL}


def first_state(policy: Policy, *, seed: int = 0) -> PolicyState:
    """Returns the state that a policy begins with: nothing remembered."""
    return PolicyState(seed=seed, window=Window(length_s=policy.remember_s))
