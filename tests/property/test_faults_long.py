"""A long random life of one scheduler with all faults; seeded, so that it can be run again.

    pytest tests/property/test_faults_long.py --fault-steps 20000 --fault-seed 7

Unlike the hypothesis machine, which starts anew after some rules, this one goes on: cache and
queue stay full, and what leaks a little shows. States that chance has not come to are brought
about in the end, in the same scheduler.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvway_worker.scheduling.waiting import QueueOrder
from tests.property.scheduler_world import MAX_TOKENS, STATES, Shape, Wish, World

pytestmark = pytest.mark.property

MAX_LIVE = 12

SHAPE = Shape(
    num_blocks=24,
    block_size=4,
    max_num_seqs=5,
    extra_budget=6,
    prefix_caching=True,
    force_miss=False,
    queue_order="shortest",
    num_drafts=3,
    draft_min_match=1,
)

LONG = Wish(prompt=range(1000, 1040), max_tokens=MAX_TOKENS)
"""Takes several chunks, and nearly half of the blocks."""
LEADERS = Wish(prompt=range(2000, 2040), max_tokens=2, num_forks=1)
REPEATS = Wish(prompt=[1, 2] * 8, max_tokens=MAX_TOKENS)
"""What its answer begins with is found further up."""
WAYS = {
    "waiting": LONG,
    "waiting with forks": LEADERS,
    "preempted": REPEATS,
    "first chunk in flight": LONG,
    "chunk in flight": LONG,
    "between chunks": LONG,
    "decoding": REPEATS,
    "drafts in flight": REPEATS,
    "leads forks": LEADERS,
    "fork of a waiting request": LEADERS,
    "fork of a running request": LEADERS,
}
"""Requests of which one comes to a state when enough of them are sent."""
MAX_EVENTS = 400
"""Steps planned and ended in which it has to."""


@pytest.fixture
def num_steps(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--fault-steps"))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--fault-seed"))


def a_wish(rng: random.Random) -> Wish:
    """Makes up a request; half of them begin like others."""
    length = rng.choice([4, 8, 16, rng.randint(1, 40)])
    document = 100 * rng.randrange(3)
    prompt = [document + position // 2 for position in range(length)]
    prompt += [rng.randrange(2) for _ in range(rng.choice([0, 0, 3, 5]))]
    return Wish(
        prompt=prompt,
        max_tokens=rng.randint(1, MAX_TOKENS),
        salt=rng.choice(["", "", "", "tenant"]),
        collide=rng.random() < 0.1,
        priority=rng.choice([0, 0, 0, 1, -1]),
        num_forks=rng.choice([0, 0, 0, 1, 3]),
        stops=rng.random() < 0.5,
        prompt_logprobs=rng.random() < 0.1,
        ephemeral=rng.random() < 0.1,
    )


def end_a_step(rng: random.Random, world: World) -> None:
    """Ends the step in flight, after what may happen while it is computed."""
    while rng.random() < 0.3:
        one_event(rng, world)
    if rng.random() < 0.03:
        world.fail()
    else:
        world.commit()


def one_event(rng: random.Random, world: World) -> None:
    """Lets something happen: mostly new requests, often an abort, rarely a reset."""
    chance = rng.random()
    if chance < 0.02:
        world.reset(reset_running=rng.random() < 0.5)
    elif chance < 0.05 and world.live:
        world.pin(rng.choice(world.live), num_steps=rng.randrange(40))
    elif chance < 0.35 and world.live:
        # The state first, then who is in it: rare states get their share.
        states = sorted({world.state(seq) for seq in world.live})
        state = rng.choice(states)
        world.abort(rng.choice([seq for seq in world.live if world.state(seq) == state]))
    elif len(world.live) < MAX_LIVE:
        world.add(a_wish(rng))
    world.check()


def abort_in(world: World, state: str) -> None:
    """Brings a request to a state, and aborts it there."""
    way = WAYS[state]
    for index in range(MAX_EVENTS):
        if len(world.live) < MAX_LIVE:  # no two have anything in common
            world.add(replace(way, prompt=[100 * index + token for token in way.prompt]))
        found = [seq for seq in world.live if world.state(seq) == state]
        if found:
            world.abort(found[-1])
            world.check()
            return
        if world.plan is None:
            world.begin()
        else:
            world.commit()
        world.check()
    pytest.fail(f"no request came to the state {state!r}")


@pytest.mark.timeout(0)  # as long as it was told to
@pytest.mark.parametrize("queue_order", ["shortest", "arrival"])
def test_faults_in_every_state_leave_nothing_behind(
    queue_order: QueueOrder, num_steps: int, seed: int
) -> None:
    """Section 6 numbers 11, 20, 21, 22: blocks come back, nothing hangs, no token is wrong."""
    rng = random.Random(seed)
    world = World(replace(SHAPE, queue_order=queue_order))
    while world.engine.num_steps < num_steps:
        one_event(rng, world)
        if world.plan is None and world.scheduler.has_work and rng.random() < 0.8:
            world.begin()
            world.check()
            end_a_step(rng, world)
            world.check()
    for state in STATES:
        if state not in world.aborted_in:
            abort_in(world, state)
    world.finish()
    counters = world.scheduler.counters
    assert 0 < counters.num_accepted < counters.num_drafts


@pytest.mark.parametrize("state", STATES)
def test_every_state_can_be_brought_about(state: str) -> None:
    world = World(SHAPE)
    abort_in(world, state)
    assert world.aborted_in == {state: 1}
    world.finish()
