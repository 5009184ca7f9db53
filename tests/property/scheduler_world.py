"""A scheduler, and everything that can happen to it; each request alone is the model.

The audited engine checks each step (no shared block is written, the KV of each row is that of its
own tokens), `check` checks the books after each event, and the KV events, replayed, must give
exactly what the pool holds. At the end all blocks are back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Tokens
from contextlib import suppress
from dataclasses import dataclass

import pytest

from kvway_core.blocks import event_hash
from kvway_core.errors import ContextLengthExceeded, InvalidRequest, PinQuotaExceeded
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.scheduling.scheduler import Scheduler
from kvway_worker.scheduling.sequence import Sequence, Status
from kvway_worker.scheduling.step import StepPlan
from kvway_worker.scheduling.waiting import QueueOrder
from tests.worker.batching import (
    FEW_WORDS,
    AuditedSim,
    OneHash,
    Replay,
    answer,
    prompt_logprobs_of,
    request,
)

MAX_TOKENS = 12
MAX_MODEL_LEN = 64
STOP = FEW_WORDS[-1]
FINAL = (Status.FINISHED, Status.ABORTED, Status.FAILED)

STATES = (
    "waiting",
    "waiting with forks",
    "preempted",
    "first chunk in flight",
    "chunk in flight",
    "between chunks",
    "decoding",
    "drafts in flight",
    "leads forks",
    "fork of a waiting request",
    "fork of a running request",
)
"""Where a request can be when something happens to it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers that shape a scheduler."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    extra_budget: int
    prefix_caching: bool
    force_miss: bool
    queue_order: QueueOrder
    num_drafts: int
    draft_min_match: int


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks for."""

    prompt: Tokens[int]
    max_tokens: int = 4
    salt: str = ""
    collide: bool = False
    priority: int = 0
    num_forks: int = 0
    stops: bool = False
    prompt_logprobs: bool = False
    ephemeral: bool = False


class World:
    """One scheduler over its life.

    Attributes:
        plan: The step in flight.
        live: Requests that have not ended, forks among them.
        aborted_in: In which states requests were aborted, and how often.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.pool = BlockPool(
            shape.num_blocks,
            shape.block_size,
            prefix_caching=shape.prefix_caching,
            force_miss=shape.force_miss,
        )
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_seqs + shape.extra_budget,
            max_model_len=MAX_MODEL_LEN,
            queue_order=shape.queue_order,
            num_drafts=shape.num_drafts,
            draft_min_match=shape.draft_min_match,
        )
        self.engine = AuditedSim(self.pool, answer_ids=FEW_WORDS)
        self.plan: StepPlan | None = None
        self.live: list[Sequence] = []
        self.aborted_in: Counter[str] = Counter()
        self._num_requests = 0
        self._expected: dict[str, list[int]] = {}
        self._cached: dict[str, int] = {}
        self._num_looked_up = 0
        self._num_found = 0
        self._replay = Replay()

    def add(self, wish: Wish) -> None:
        """Sends a request; one that can never run must be refused and change nothing."""
        forks = [self._sequence(wish) for _ in range(wish.num_forks)]
        seq = self._sequence(wish, forks)
        num_tokens = len(wish.prompt) + wish.max_tokens
        if 1 + wish.num_forks > self.shape.max_num_seqs:
            with pytest.raises(InvalidRequest, match=f"n is {1 + wish.num_forks}"):
                self.scheduler.add(seq)
            return
        capacity = self.pool.num_blocks * self.pool.block_size
        if num_tokens - 1 > capacity or num_tokens > MAX_MODEL_LEN:
            with pytest.raises(ContextLengthExceeded):
                self.scheduler.add(seq)
            return
        self.scheduler.add(seq)
        said = answer(wish.prompt, wish.max_tokens, answer_ids=FEW_WORDS)
        if wish.stops and STOP in said:
            said = said[: said.index(STOP) + 1]
        for one in (seq, *forks):
            self.live.append(one)
            self._expected[one.request_id] = said

    def abort(self, seq: Sequence) -> None:
        """Aborts a request, whether it is still there or not."""
        is_there = seq.status not in FINAL
        if is_there:
            self.aborted_in[self.state(seq)] += 1
        assert self.scheduler.abort(seq.request_id) == is_there
        assert seq.status in FINAL

    def begin(self) -> None:
        """Plans a step."""
        assert self.plan is None
        had_work = self.scheduler.has_work
        running = [seq for seq in self.live if seq.status is Status.RUNNING]
        new = [seq for seq in self.live if seq.cached_tokens is None]
        num_preempted = self.scheduler.counters.preemptions
        plan = self.scheduler.plan(now_s=float(self.engine.num_steps))
        assert bool(plan.rows) == had_work, "whoever is there makes progress"
        assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len(plan.rows) <= self.scheduler.max_num_seqs
        planned = [row.seq for row in plan.rows]
        assert all(seq.status is Status.RUNNING for seq in planned), "P33: no zombies"
        left = [seq for seq in running if seq.status is Status.RUNNING]
        assert all(seq in planned for seq in left), "each running request gets a token"
        if self.scheduler.counters.preemptions > num_preempted:
            assert all(seq in running for seq in planned), "P38: nobody is admitted"
            lost = [seq for seq in running if seq.status is Status.WAITING]
            worst = max((seq.priority, seq.arrival_index) for seq in left)
            assert all((seq.priority, seq.arrival_index) > worst for seq in lost), "P37"
        for seq in planned:
            if seq in new:  # P40: at its first admission, and never again
                self._num_looked_up += seq.num_prompt_tokens
                self._num_found += seq.cached_tokens or 0
        for row in plan.rows:
            assert not row.num_drafts or row.sampling == (row.seq,), "no drafts in a prefill"
            assert row.seq.num_output_tokens + row.num_drafts < row.seq.params.max_tokens
        self.plan = plan if plan.rows else None

    def commit(self) -> None:
        """Computes the step in flight and takes in its result."""
        assert self.plan is not None
        plan, self.plan = self.plan, None
        for out in self.scheduler.commit(plan, self.engine.execute(plan)):
            if out.finish_reason is not None:
                assert out.seq.status is Status.FINISHED
                assert out.token_id == out.seq.token_ids[-1], "nothing comes behind the last one"
        assert self.pool.num_pending == 0

    def fail(self) -> None:
        """Fails the step in flight: its requests end, and nothing of it can be found."""
        assert self.plan is not None
        plan, self.plan = self.plan, None
        before = self.pool.committed()
        there = {row.seq.request_id for row in plan.rows if row.seq.status is Status.RUNNING}
        failed = self.scheduler.fail(plan)
        assert there <= {seq.request_id for seq in failed}
        assert all(seq.status is Status.FAILED for seq in failed)
        assert self.pool.committed().keys() <= before.keys(), "a failed step publishes nothing"
        assert self.pool.num_pending == 0

    def reset(self, *, reset_running: bool) -> None:
        """Forgets the cache."""
        done = reset_running or self.scheduler.num_running == 0
        assert self.scheduler.reset_prefix_cache(reset_running=reset_running) == done
        assert not done or self.pool.committed() == {}
        assert not done or self.pool.num_referenced == 0

    def pin(self, seq: Sequence, *, num_steps: int) -> None:
        """Pins what a request's prompt fills, for so many steps, if the quota allows it."""
        num_blocks = seq.num_prompt_tokens // self.pool.block_size
        now = self.engine.num_steps
        with suppress(PinQuotaExceeded):
            hashes = seq.chain.hashes[:num_blocks]
            self.pool.pin(f"of {seq.priority}", hashes, expires_s=float(now + num_steps))
        self.pool.expire_pins(float(now))

    def state(self, seq: Sequence) -> str:
        """Returns where a request that has not ended is, one of `STATES`."""
        leader = next((one for one in self.live if seq in one.forks), None)
        if leader is not None:
            is_waiting = leader.status is Status.WAITING
            return f"fork of a {'waiting' if is_waiting else 'running'} request"
        if seq.status is Status.WAITING and seq.cached_tokens is not None:
            return "preempted"
        if seq.status is Status.WAITING:
            return "waiting with forks" if seq.forks else "waiting"
        return "leads forks" if seq.forks else self._running_state(seq)

    def _running_state(self, seq: Sequence) -> str:
        row = next((row for row in self.plan.rows if row.seq is seq), None) if self.plan else None
        if row is not None and row.num_drafts:
            return "drafts in flight"
        if row is not None and row.is_prefill:
            is_first = row.start == seq.cached_tokens and not seq.num_output_tokens
            return "first chunk in flight" if is_first else "chunk in flight"
        return "decoding" if seq.num_output_tokens else "between chunks"

    def check(self) -> None:
        """Checks the books, the events, and what everyone has said so far."""
        self.scheduler.check_invariants()
        assert self.pool.num_free + self.pool.num_referenced == self.pool.num_blocks
        counters = self.scheduler.counters
        assert counters.num_accepted <= counters.num_drafts
        read = self.pool.stats.read()
        assert read.hits + sum(read.misses.values()) == self._num_looked_up
        assert read.hits == self._num_found
        self._check_events()
        for seq in self.live:
            self._check_answer(seq)
        self.live = [seq for seq in self.live if seq.status not in FINAL]

    def finish(self) -> None:
        """Lets everything end, and wants all blocks back."""
        if self.plan is not None:
            self.commit()
        left = [seq for seq in self.live if seq.status not in FINAL]
        # Each step computes at least a token, and preemption never takes the first request.
        bound = 1 + sum(seq.num_tokens + MAX_TOKENS for seq in left) * (1 + len(left))
        while self.scheduler.has_work:
            assert bound > 0, "somebody starves"
            bound -= 1
            self.begin()
            self.commit()
            self.check()
        self.check()
        assert all(seq.status is Status.FINISHED for seq in left)
        assert self.pool.num_free == self.pool.num_blocks
        assert (self.scheduler.num_waiting, self.scheduler.num_running) == (0, 0)

    def _sequence(self, wish: Wish, forks: Tokens[Sequence] = ()) -> Sequence:
        self._num_requests += 1
        return request(
            str(self._num_requests),
            wish.prompt,
            max_tokens=wish.max_tokens,
            block_size=self.shape.block_size,
            salt=wish.salt,
            chain=OneHash(self.shape.block_size) if wish.collide else None,
            stop_token_ids=frozenset([STOP] if wish.stops else []),
            priority=wish.priority,
            prompt_logprobs=0 if wish.prompt_logprobs else None,
            ephemeral=wish.ephemeral,
            forks=forks,
        )

    def _check_answer(self, seq: Sequence) -> None:
        said = seq.output_token_ids
        expected = self._expected[seq.request_id]
        assert said == (expected if seq.status is Status.FINISHED else expected[: len(said)])
        if seq.cached_tokens is not None:
            first = self._cached.setdefault(seq.request_id, seq.cached_tokens)
            assert seq.cached_tokens == first < seq.num_prompt_tokens, "fixed at first admission"
        if said and seq.params.prompt_logprobs is not None:
            assert seq.prompt_logprobs == prompt_logprobs_of(seq.prompt_token_ids)
        if seq.status in FINAL:
            assert seq.block_table == []

    def _check_events(self) -> None:
        replay, pool = self._replay, self.pool
        replay.apply(pool.take_events())
        expected: dict[int, tuple[int | None, list[int]]] = {}
        for block_hash, block in pool.committed().items():
            content = pool.content(block)
            assert content is not None
            before = content.parent
            parent = pool.content(before) if isinstance(before, int) else None
            expected[event_hash(block_hash)] = (
                None if parent is None else event_hash(parent.block_hash),
                list(content.token_ids),
            )
        known = {key: (replay.parents[key], replay.tokens[key]) for key in expected}
        assert known == expected
        assert len(replay.parents) == len(expected)
