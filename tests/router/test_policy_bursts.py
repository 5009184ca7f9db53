"""Bursts of prompts that begin alike, before any of them has answered: how long until all have."""

from __future__ import annotations

import pytest

from kvway_core.testing.fake_clock import FakeClock
from kvway_router.index import BlockIndex
from kvway_router.ledger import Ledger
from kvway_router.policies.base import Situation, decide
from kvway_router.policies.registry import POLICIES, first_state
from kvway_router.policy import PolicyParams, Prompt, own_work_tokens

PARAMS = PolicyParams()
SHARED_BLOCKS, OWN_BLOCKS, BLOCK_SIZE = 188, 20, 16
SHARED_S = (
    own_work_tokens(SHARED_BLOCKS * BLOCK_SIZE, 0, attention_tokens=PARAMS.attention_tokens)
    / PARAMS.default_prefill_tokens_per_s
)


def longest_queue_s(
    policy: str, num_siblings: int, num_replicas: int, *, held_by: int = 0
) -> float:
    """Returns the work of the busiest replica after a burst, seconds.

    `held_by` replicas have the shared beginning when it comes.
    """
    clock, index = FakeClock(), BlockIndex()
    ledger = Ledger(clock=clock, params=PARAMS)
    names = [f"r{number}:1" for number in range(num_replicas)]
    shared = list(range(1, SHARED_BLOCKS + 1))
    for name in names[:held_by]:
        index.store(name, None, shared)
    rule = POLICIES[policy]
    state = first_state(rule)
    for number in range(num_siblings):
        own = range((number + 1) * 10_000, (number + 1) * 10_000 + OWN_BLOCKS)
        hashes = [*shared, *own]
        situation = Situation(
            prompt=Prompt(len(hashes) * BLOCK_SIZE, BLOCK_SIZE, prefix_key=b"shared"),
            matches=index.match(hashes),
            loads=ledger.loads([(name, index.num_blocks(name)) for name in names]),
            params=PARAMS,
            mean_work_s=ledger.mean_work_s,
        )
        decision, state = decide(rule, situation, state)
        ledger.charge(decision.chosen)
        index.speculate(decision.replica_id, hashes)
    return max(load.queued_prefill_s for load in ledger.loads([(name, 0) for name in names]))


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("num_siblings", [6, 12, 24, 48])
def test_a_burst_takes_no_longer_than_in_turns_and_half_of_the_prefix_more(
    num_siblings: int, num_replicas: int
) -> None:
    """What it may take more is the price of not computing the prefix everywhere at once."""
    ours = longest_queue_s("cost", num_siblings, num_replicas)
    in_turns = longest_queue_s("round_robin", num_siblings, num_replicas)
    assert ours <= in_turns + SHARED_S / 2


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("num_siblings", [6, 12, 24, 48])
def test_once_all_have_the_prefix_a_burst_takes_no_longer_than_in_turns(
    num_siblings: int, num_replicas: int
) -> None:
    ours = longest_queue_s("cost", num_siblings, num_replicas, held_by=num_replicas)
    in_turns = longest_queue_s("round_robin", num_siblings, num_replicas, held_by=num_replicas)
    assert ours <= in_turns * 1.0001


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_long_burst_of_a_cold_prefix_takes_no_longer_than_in_turns(num_replicas: int) -> None:
    """From twelve for each replica on."""
    ours = longest_queue_s("cost", 12 * num_replicas, num_replicas)
    in_turns = longest_queue_s("round_robin", 12 * num_replicas, num_replicas)
    assert ours <= in_turns * 1.0001
