"""Replicas, prompts and choices for the tests of the policies."""

from __future__ import annotations

from typing import Any

import msgspec

from kvway_router.policies.base import Policy, Situation, decide
from kvway_router.policies.registry import POLICIES, first_state
from kvway_router.policies.state import PolicyState
from kvway_router.policy import Decision, PolicyParams, Prompt, ReplicaLoad

PARAMS = PolicyParams()
PROMPT = Prompt(num_tokens=1600, block_size=16, prefix_key=b"system")
"""One hundred blocks."""


def load(name: str, **changes: Any) -> ReplicaLoad:
    """Returns the load of an idle replica `name:1`, changed."""
    idle = ReplicaLoad(
        replica_id=f"{name}:1",
        queued_prefill_s=0.0,
        queued_tokens=0,
        num_prefills=0,
        decode_step_s=0.0,
        prefill_tokens_per_s=1000.0,
        blocks_pinned=0,
        blocks_total=1000,
        in_flight=0,
        blocks_held=0,
    )
    return msgspec.structs.replace(idle, **changes)


def situation(
    *loads: ReplicaLoad,
    matches: dict[str, int] | None = None,
    prompt: Prompt = PROMPT,
    **more: Any,
) -> Situation:
    """Returns what a policy is asked."""
    return Situation(prompt=prompt, matches=matches or {}, loads=loads, params=PARAMS, **more)


def choose(
    policy: str | Policy, *loads: ReplicaLoad, state: PolicyState | None = None, **more: Any
) -> Decision:
    """Chooses once, with nothing remembered unless `state` says otherwise."""
    rule = POLICIES[policy] if isinstance(policy, str) else policy
    return decide(rule, situation(*loads, **more), state or first_state(rule))[0]


def choose_many(
    policy: str | Policy, asked: Situation, num_choices: int, *, seed: int = 0
) -> list[str]:
    """Chooses again and again in the same situation, remembering; returns the replicas' names."""
    rule = POLICIES[policy] if isinstance(policy, str) else policy
    state = first_state(rule, seed=seed)
    names = []
    for _ in range(num_choices):
        decision, state = decide(rule, asked, state)
        names.append(decision.replica_id.removesuffix(":1"))
    return names
