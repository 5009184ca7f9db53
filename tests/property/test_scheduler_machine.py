"""Random adds, aborts, steps and failures against a scheduler; a request alone is the model.

The audited engine checks each step (no shared block is written, the KV of each row is that of its
own tokens), `check_invariants` checks the books after each rule, and the events, replayed, must
give exactly what the pool holds. At the end all blocks are back.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)
from typing_extensions import override

from kvway_core.blocks import event_hash
from kvway_core.errors import ContextLengthExceeded
from kvway_worker.block_pool import BlockPool
from kvway_worker.scheduler import Scheduler
from kvway_worker.sequence import Sequence, Status
from kvway_worker.step import StepPlan
from tests.worker.batching import AuditedSim, OneHash, Replay, answer, request

pytestmark = pytest.mark.property

MAX_TOKENS = 9
FINAL = (Status.FINISHED, Status.ABORTED, Status.FAILED)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prompts that often share a beginning: a few documents, cut anywhere, with short tails."""
    document = draw(st.integers(0, 2))
    length = draw(st.sampled_from([4, 8, 16]) | st.integers(1, 30))
    tail = draw(st.just([]) | st.lists(st.integers(0, 1), max_size=5))
    return [100 * document + position // 2 for position in range(length)] + tail


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler over its life."""

    requests: Bundle[Sequence] = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.num_requests = 0
        self.plan: StepPlan | None = None
        self.live: list[Sequence] = []
        self.expected: dict[str, list[int]] = {}
        self.first_cached: dict[str, int] = {}
        self.replay = Replay()

    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 30),
        prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def make(  # the five numbers that shape a scheduler
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra_budget: int,
        prefix_caching: bool,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            max_model_len=64,
        )
        self.engine = AuditedSim(self.pool)

    @rule(
        target=requests,
        prompt=prompts(),
        max_tokens=st.integers(1, MAX_TOKENS),
        salt=st.sampled_from(["", "", "tenant"]),
        collide=st.sampled_from([False, False, False, True]),
    )
    def add(self, *, prompt: list[int], max_tokens: int, salt: str, collide: bool) -> Sequence:
        size = self.pool.block_size
        seq = request(
            str(self.num_requests),
            prompt,
            max_tokens=max_tokens,
            block_size=size,
            salt=salt,
            chain=OneHash(size) if collide else None,
        )
        self.num_requests += 1
        fits = len(prompt) + max_tokens - 1 <= self.pool.num_blocks * size
        if not fits or len(prompt) + max_tokens > self.scheduler.max_model_len:
            with pytest.raises(ContextLengthExceeded):
                self.scheduler.add(seq)
            return seq
        self.scheduler.add(seq)
        self.live.append(seq)
        self.expected[seq.request_id] = answer(prompt, max_tokens)
        return seq

    @rule(seq=consumes(requests))
    def abort(self, seq: Sequence) -> None:
        was_live = seq in self.live and seq.status not in FINAL
        assert self.scheduler.abort(seq.request_id) == was_live

    @precondition(lambda self: self.plan is None)
    @rule()
    def begin(self) -> None:
        had_work = self.scheduler.has_work
        running = [seq for seq in self.live if seq.status is Status.RUNNING]
        num_preempted = self.scheduler.counters.preemptions
        plan = self.scheduler.plan()
        if self.scheduler.counters.preemptions > num_preempted:
            assert all(row.seq in running for row in plan.rows), "P38: nobody is admitted"
        assert bool(plan.rows) == had_work, "whoever is there makes progress"
        assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len(plan.rows) <= self.scheduler.max_num_seqs
        self.plan = plan if plan.rows else None

    @precondition(lambda self: self.plan is not None)
    @rule()
    def commit(self) -> None:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        sampled = self.engine.execute(plan)
        for out in self.scheduler.commit(plan, sampled):
            assert (out.finish_reason is None) == (out.seq.status is Status.RUNNING)
        assert self.pool.num_pending == 0

    @precondition(lambda self: self.plan is not None)
    @rule()
    def fail(self) -> None:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        before = self.pool.committed()
        for seq in self.scheduler.fail(plan):
            assert seq.status is Status.FAILED
        assert self.pool.committed() == before, "a failed step publishes nothing"
        assert self.pool.num_pending == 0

    @precondition(lambda self: self.plan is None)
    @rule()
    def reset(self) -> None:
        idle = self.scheduler.num_running == 0
        assert self.scheduler.reset_prefix_cache() == idle
        assert not idle or self.pool.committed() == {}

    @invariant()
    def books_add_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_invariants()
        assert self.pool.num_free + self.pool.num_referenced == self.pool.num_blocks
        self.replay.apply(self.pool.take_events())
        expected: dict[int, tuple[int | None, list[int]]] = {}
        for block_hash, block in self.pool.committed().items():
            content = self.pool.content(block)
            assert content is not None
            before = content.parent
            parent = self.pool.content(before) if isinstance(before, int) else None
            expected[event_hash(block_hash)] = (
                None if parent is None else event_hash(parent.block_hash),
                list(content.token_ids),
            )
        known = {key: (self.replay.parents[key], self.replay.tokens[key]) for key in expected}
        assert known == expected
        assert len(self.replay.parents) == len(expected)

    @invariant()
    def everyone_says_what_they_would_say_alone(self) -> None:
        for seq in self.live:
            said = seq.output_token_ids
            expected = self.expected[seq.request_id]
            assert said == (expected if seq.status is Status.FINISHED else expected[: len(said)])
            if seq.cached_tokens is not None:
                first = self.first_cached.setdefault(seq.request_id, seq.cached_tokens)
                assert seq.cached_tokens == first < seq.num_prompt_tokens
            if seq.status in FINAL:
                assert seq.block_table == []
        self.live = [seq for seq in self.live if seq.status not in FINAL]

    @override
    def teardown(self) -> None:
        """Lets everything end, and wants all blocks back."""
        if not hasattr(self, "scheduler"):
            return
        if self.plan is not None:
            self.commit()
        left = [seq for seq in self.live if seq.status not in FINAL]
        # Each step computes at least a token, and preemption never takes the oldest request.
        bound = 1 + sum(seq.num_tokens + MAX_TOKENS for seq in left) * (1 + len(left))
        while self.scheduler.has_work:
            assert bound > 0, "somebody starves"
            bound -= 1
            self.begin()
            self.commit()
            self.books_add_up()
        self.everyone_says_what_they_would_say_alone()
        assert all(seq.status is Status.FINISHED for seq in left)
        assert self.pool.num_free == self.pool.num_blocks


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=max(200, settings().max_examples), stateful_step_count=40
)
