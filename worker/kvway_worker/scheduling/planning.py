"""What the next step computes: rows for running requests, then for new ones, then drafts. Pure.

budget of tokens
├── running, by priority and arrival: a token each, and a prompt what the others leave ──┤
│                                        ├── admitted from the queue, in order ──┤
│                                                                        ├ drafts ┤
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.scheduling.block_tables import BlockTables
from kvway_worker.scheduling.counters import Counters
from kvway_worker.scheduling.drafts import Drafter
from kvway_worker.scheduling.limits import Limits
from kvway_worker.scheduling.requests import Requests
from kvway_worker.scheduling.sequence import Sequence, Status
from kvway_worker.scheduling.step import Copy, Row

MAX_SENT_BACK: Final = 16
"""Waiting requests that one plan sends back in the queue because the cache lacks more for them
than when they were counted; after that the first one is taken as it is."""
MAX_LOOKED_UP: Final = 2**17
"""Tokens of waiting requests that one plan looks up, before the last one: nobody gets in after
that. A request of 100,000 cached tokens takes about 10 ms, which everybody who runs waits for."""


@dataclass(slots=True)
class PlannedStep:
    """A step while it is planned.

    Attributes:
        budget: Tokens it may still compute.
        rows: What it computes.
        copies: What it copies before, in order.
        num_sent_back: Waiting requests that went back in the queue.
        num_looked_up: Tokens of waiting requests that were looked up.
    """

    budget: int
    rows: list[Row] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    num_sent_back: int = 0
    num_looked_up: int = 0


@dataclass(frozen=True, slots=True)
class Planner:
    """Decides one step after the other; what was decided is then taken in by the scheduler.

    Attributes:
        limits: How much a step may compute.
        pool: Told what requests found in it.
        tables: Where blocks come from.
        requests: Who is there.
        drafter: Where drafts come from.
        counters: Where it counts.
    """

    limits: Limits
    pool: BlockPool
    tables: BlockTables
    requests: Requests
    drafter: Drafter
    counters: Counters

    def plan(self) -> PlannedStep:
        """Returns the next step; blocks are taken and published for it."""
        num_preemptions = self.counters.preemptions
        step = PlannedStep(self.limits.max_num_batched_tokens)
        self._continue(step)
        # After a preemption nobody gets in and nobody drafts: the victim is first in line and
        # needs the blocks that it lost.
        if self.counters.preemptions == num_preemptions:
            self._admit(step)
            self._draft(step)
        return step

    def _continue(self, step: PlannedStep) -> None:
        """Schedules the running requests, at the expense of the last ones if blocks are short."""
        running = self.requests.running
        for index, seq in enumerate(tuple(running)):
            # One token is kept for each request behind: a prompt takes only what they leave.
            budget = step.budget - (len(running) - index - 1)
            end = min(seq.num_tokens, seq.num_computed_tokens + budget)
            copies = self._grow(seq, end)
            if copies is None:
                return  # whoever lost its blocks was the last: nobody comes after it
            self._schedule(step, seq, end, copies)

    def _grow(self, seq: Sequence, end: int) -> tuple[Copy, ...] | None:
        """Gives a running request blocks for its next tokens, at the expense of the last.

        Returns:
            The copies its row needs; None when the request has no blocks any more.
        """
        while seq.status is Status.RUNNING:
            copies = self.tables.extend(seq, end)
            if copies is not None:
                return copies
            self.requests.preempt(self.requests.running[-1])
        return None

    def _admit(self, step: PlannedStep) -> None:
        """Moves waiting requests into the batch, in order, as long as the first one fits."""
        while (
            step.budget
            and step.num_looked_up < MAX_LOOKED_UP
            and (seq := self._next_waiting(step)) is not None
        ):
            copies = self.tables.open(seq, step.budget)
            if copies is None:
                return
            self.requests.admit(seq)
            if seq.cached_tokens is None:
                self._count_admission(seq)
            end = min(seq.num_tokens, seq.num_computed_tokens + step.budget)
            self._schedule(step, seq, end, copies)

    def _next_waiting(self, step: PlannedStep) -> Sequence | None:
        """Returns who gets in next, None if nobody does.

        What the cache lacks for it is counted anew: if that grew since it was queued, others may
        be shorter now.
        """
        waiting = self.requests.waiting
        while (seq := waiting.head) is not None:
            if not self.requests.has_place(seq):
                return None
            is_last = step.num_looked_up >= MAX_LOOKED_UP
            step.num_looked_up += seq.num_tokens
            if is_last or step.num_sent_back == MAX_SENT_BACK:
                return seq
            waiting.recount(seq, self.tables.num_uncached(seq, is_next=True))
            if waiting.head is seq:
                return seq
            step.num_sent_back += 1
        return None

    def _draft(self, step: PlannedStep) -> None:
        """Lets decoding requests check drafts with what is left of the budget and blank blocks."""
        if not self.drafter.num_drafts:
            return
        self.drafter.begin_plan()
        for index, row in enumerate(step.rows):
            seq = row.seq
            if row.is_prefill or not row.sampling:
                continue
            # What is sampled behind the drafts is a token of the answer, too.
            limit = min(step.budget, seq.params.max_tokens - seq.num_output_tokens - 1)
            drafts = self.drafter.propose(seq, limit)
            if drafts:
                end = self.tables.reserve(seq, row.end + len(drafts))
                drafts = drafts[: end - row.end]
            if not drafts:
                continue
            step.budget -= len(drafts)
            step.rows[index] = replace(
                row,
                num_tokens=row.num_tokens + len(drafts),
                token_ids=(*row.token_ids, *drafts),
                block_table=tuple(seq.block_table),
                num_drafts=len(drafts),
            )
            self.counters.num_draft_rows += 1
            self.counters.num_drafts += len(drafts)

    def _schedule(
        self, step: PlannedStep, seq: Sequence, end: int, copies: tuple[Copy, ...]
    ) -> None:
        """Adds a row for the tokens up to `end` and publishes the blocks that they fill."""
        start = seq.num_computed_tokens
        self.tables.publish(seq, end)
        step.copies += copies
        step.budget -= end - start
        step.rows.append(
            Row(
                seq=seq,
                start=start,
                num_tokens=end - start,
                token_ids=tuple(seq.token_ids[start:end]),
                block_table=tuple(seq.block_table),
                sampling=(seq, *seq.forks) if end == seq.num_tokens else (),
            )
        )

    def _count_admission(self, seq: Sequence) -> None:
        """Counts what a request found in the cache when it first got in."""
        seq.cached_tokens = seq.num_computed_tokens
        self.pool.stats.admitted(
            hashes=seq.chain.hashes,
            token_ids=seq.token_ids,
            num_prompt_tokens=seq.num_prompt_tokens,
            num_cached_tokens=seq.cached_tokens,
            namespace=seq.namespace,
            bypassed=not self.pool.reads_cache or seq.params.prompt_logprobs is not None,
        )
