"""Random requests, aborts, steps, failures and resets against a scheduler.

What can happen, and what must hold after each event, is in `scheduler_world`.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from typing_extensions import override

from tests.property.scheduler_world import MAX_TOKENS, Shape, Wish, World

pytestmark = pytest.mark.property

SHAPES = st.builds(
    Shape,
    num_blocks=st.integers(4, 24),
    block_size=st.sampled_from([1, 2, 4]),
    max_num_seqs=st.integers(1, 5),
    extra_budget=st.integers(0, 30),
    prefix_caching=st.sampled_from([True, True, True, False]),
    force_miss=st.sampled_from([False, False, False, True]),
    queue_order=st.sampled_from(["shortest", "arrival"]),
    num_drafts=st.sampled_from([0, 1, 3]),
    draft_min_match=st.integers(1, 2),
)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prompts that often share a beginning: a few documents, cut anywhere, with short tails."""
    document = draw(st.integers(0, 2))
    length = draw(st.sampled_from([4, 8, 16]) | st.integers(1, 30))
    tail = draw(st.just([]) | st.lists(st.integers(0, 1), max_size=5))
    return [100 * document + position // 2 for position in range(length)] + tail


RARELY = st.sampled_from([False, False, False, True])

WISHES = st.builds(
    Wish,
    prompt=prompts(),
    max_tokens=st.integers(1, MAX_TOKENS),
    salt=st.sampled_from(["", "", "tenant"]),
    collide=RARELY,
    priority=st.sampled_from([0, 0, 1, -1]),
    num_forks=st.sampled_from([0, 0, 0, 1, 2]),
    stops=st.booleans(),
    prompt_logprobs=RARELY,
    ephemeral=RARELY,
)


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler over its life."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None

    @property
    def here(self) -> World:
        assert self.world is not None
        return self.world

    @initialize(shape=SHAPES)
    def make(self, shape: Shape) -> None:
        self.world = World(shape)

    @rule(wish=WISHES)
    def add(self, wish: Wish) -> None:
        self.here.add(wish)

    @precondition(lambda self: self.here.live)
    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        live = self.here.live
        self.here.abort(live[which % len(live)])

    @precondition(lambda self: self.here.plan is None)
    @rule()
    def begin(self) -> None:
        self.here.begin()

    @precondition(lambda self: self.here.plan is not None)
    @rule()
    def commit(self) -> None:
        self.here.commit()

    @precondition(lambda self: self.here.plan is not None)
    @rule()
    def fail(self) -> None:
        self.here.fail()

    @rule(reset_running=RARELY)
    def reset(self, *, reset_running: bool) -> None:
        self.here.reset(reset_running=reset_running)

    @precondition(lambda self: self.here.live)
    @rule(which=st.integers(0, 30), num_steps=st.integers(0, 9))
    def pin(self, which: int, num_steps: int) -> None:
        live = self.here.live
        self.here.pin(live[which % len(live)], num_steps=num_steps)

    @invariant()
    def everything_holds(self) -> None:
        if self.world is not None:
            self.world.check()

    @override
    def teardown(self) -> None:
        if self.world is not None:
            self.world.finish()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=max(200, settings().max_examples), stateful_step_count=40
)
