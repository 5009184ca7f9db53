"""Bursts of prompts that begin alike, before any of them has answered: how long until all have.

A replica computes one prompt after the other, in the order they came.
"""

from __future__ import annotations

from statistics import fmean

import pytest

from kvway_core.testing.fake_clock import FakeClock
from kvway_router.index import BlockIndex
from kvway_router.ledger import Ledger
from kvway_router.policies.base import Situation, decide
from kvway_router.policies.registry import POLICIES, first_state
from kvway_router.policy import PolicyParams, Prompt, own_work_tokens

PARAMS = PolicyParams()
SHARED_BLOCKS, BLOCK_SIZE = 188, 16
SHARED_S = (
    own_work_tokens(SHARED_BLOCKS * BLOCK_SIZE, 0, attention_tokens=PARAMS.attention_tokens)
    / PARAMS.default_prefill_tokens_per_s
)


def burst(
    policy: str,
    num_siblings: int,
    num_replicas: int,
    *,
    own_blocks: int = 20,
    held_by: int = 0,
    busy_share: float = 0.0,
) -> tuple[float, float]:
    """Returns when the last of a burst has its first token, and the mean of all, seconds.

    Args:
        policy: Who chooses.
        num_siblings: How many there are.
        num_replicas: All of them idle.
        own_blocks: What each has behind the shared beginning.
        held_by: How many of them have the shared beginning when the burst comes.
        busy_share: How many were busy before, on average.
    """
    index, ledger = BlockIndex(), Ledger(clock=FakeClock(), params=PARAMS)
    names = [f"r{number}:1" for number in range(num_replicas)]
    shared = list(range(1, SHARED_BLOCKS + 1))
    for name in names[:held_by]:
        index.store(name, None, shared)
    rule = POLICIES[policy]
    state = first_state(rule)
    done_s: list[float] = []
    queued_s = dict.fromkeys(names, 0.0)
    for number in range(num_siblings):
        own = range((number + 1) * 10_000, (number + 1) * 10_000 + own_blocks)
        hashes = [*shared, *own]
        situation = Situation(
            prompt=Prompt(len(hashes) * BLOCK_SIZE, BLOCK_SIZE, prefix_key=b"shared"),
            matches=index.match(hashes),
            loads=ledger.loads([(name, index.num_blocks(name)) for name in names]),
            params=PARAMS,
            mean_work_s=ledger.mean_work_s,
            busy_share=busy_share,
        )
        decision, state = decide(rule, situation, state)
        ledger.charge(decision.chosen)
        index.speculate(decision.replica_id, hashes)
        queued_s[decision.replica_id] += decision.chosen.work_s
        done_s.append(queued_s[decision.replica_id])
    return max(done_s), fmean(done_s)


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
@pytest.mark.parametrize("own_blocks", [1, 10, 20, 60])
def test_a_burst_at_an_idle_fleet_takes_hardly_longer_than_in_turns(
    num_replicas: int, own_blocks: int
) -> None:
    """Where nothing waits, siblings meet only if that costs a tenth of the beginning at most."""
    for num_siblings in (2, 3, 4, 6, 8, 12, 24, 48):
        ours = burst("cost", num_siblings, num_replicas, own_blocks=own_blocks)
        in_turns = burst("round_robin", num_siblings, num_replicas, own_blocks=own_blocks)
        assert ours[0] <= in_turns[0] + 0.1 * SHARED_S, num_siblings
        assert ours[1] <= 1.05 * in_turns[1], num_siblings


def test_siblings_with_little_of_their_own_meet_at_an_idle_fleet() -> None:
    ours, _ = burst("cost", 8, 2, own_blocks=1)
    in_turns, _ = burst("round_robin", 8, 2, own_blocks=1)
    assert ours > in_turns, "one replica computes them all, and the other nothing"


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("num_siblings", [6, 12, 24, 48])
def test_a_burst_at_a_busy_fleet_meets_and_takes_half_of_the_prefix_longer_at_most(
    num_siblings: int, num_replicas: int
) -> None:
    """What it may take more is the price of not computing the prefix everywhere at once."""
    ours, _ = burst("cost", num_siblings, num_replicas, busy_share=1.0)
    in_turns, _ = burst("round_robin", num_siblings, num_replicas)
    assert ours <= in_turns + SHARED_S / 2
    if num_siblings == 6:
        assert ours > in_turns * 1.0001, "all went to one replica"


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("num_siblings", [6, 12, 24, 48])
@pytest.mark.parametrize("busy_share", [0.0, 1.0])
def test_once_all_have_the_prefix_a_burst_takes_no_longer_than_in_turns(
    num_siblings: int, num_replicas: int, busy_share: float
) -> None:
    had = {"held_by": num_replicas}
    ours, _ = burst("cost", num_siblings, num_replicas, busy_share=busy_share, **had)
    in_turns, _ = burst("round_robin", num_siblings, num_replicas, **had)
    assert ours <= in_turns * 1.0001


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_long_burst_of_a_cold_prefix_takes_no_longer_than_in_turns(num_replicas: int) -> None:
    """From twelve for each replica on, however busy the fleet was."""
    ours, _ = burst("cost", 12 * num_replicas, num_replicas, busy_share=1.0)
    in_turns, _ = burst("round_robin", 12 * num_replicas, num_replicas)
    assert ours <= in_turns * 1.0001
