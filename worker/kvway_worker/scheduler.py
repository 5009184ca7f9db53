"""Which tokens of which requests the next step computes. Pure: no clock, no threads, no tensors.

One rule: every request catches up from its computed tokens to its known tokens, within a budget
of tokens per step. Prompts, chunks of prompts, cache hits and generated tokens are all this
arithmetic.

    waiting ──admit──> running ──stop, length──> finished
       ▲                  │
       └───── preempt ────┘   newest first; hashes and arrival are kept

A step is `plan`, then either `commit` with the sampled tokens or `fail`. Between the two nothing
else may be planned; requests may be added and aborted at any time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvway_core.errors import ContextLengthExceeded, InvalidRequest, InvariantViolated
from kvway_worker.block_pool import BlockPool
from kvway_worker.block_tables import BlockTables
from kvway_worker.sequence import FinishReason, Sequence, Status
from kvway_worker.step import Copy, Row, Sampled, SeqOutput, StepPlan, StepResult


@dataclass(slots=True)
class Counters:
    """Totals since the start.

    Attributes:
        prefix_cache_queries: Prompt tokens looked up; once per request.
        prefix_cache_hits: Prompt tokens whose KV was reused; once per request.
        generated_tokens: Tokens sampled.
        preemptions: Times a request lost its blocks and waited again.
    """

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Continuous batching over a block pool, first come, first served.

    Args:
        pool: The blocks.
        max_num_seqs: Requests in one step at most.
        max_num_batched_tokens: Tokens in one step at most, at least `max_num_seqs`.
        max_model_len: Tokens of prompt and answer at most.

    Invariants:
        1. A step computes at most `max_num_batched_tokens` tokens of `max_num_seqs` requests.
        2. While there is a request there is something to compute: the oldest running request is
           never preempted, and whatever is accepted fits alone.
        3. `running` is in order of arrival; at most its last request has more than one token to
           catch up with.
        4. The references of the pool are exactly the blocks of running requests.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs "
                f"({max_num_seqs}), and that at least 1"
            )
        self.pool = pool
        self._tables = BlockTables(pool)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.counters = Counters()
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._running: list[Sequence] = []
        self._in_flight: StepPlan | None = None
        self._num_plans = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that have blocks and take part in steps."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Says whether the next plan has rows."""
        return bool(self._waiting or self._running)

    def waiting_uncached_tokens(self) -> int:
        """Returns how many tokens are known, not cached and not yet computed.

        A waiting request counts with what the cache lacked when it came or was preempted.
        """
        waiting = sum(seq.num_uncached_tokens for seq in self._waiting.values())
        return waiting + sum(
            seq.num_tokens - seq.num_computed_tokens
            for seq in self._running
            if seq.num_computed_tokens < seq.num_prompt_tokens
        )

    def validate(self, seq: Sequence) -> None:
        """Refuses what can never run. Reads only limits, so any thread may call it.

        Raises:
            ContextLengthExceeded: If prompt and answer do not fit the context or the pool.
            InvalidRequest: If no token is asked for.
            ValueError: If the sequence was made for another block size.
        """
        if seq.namespace.block_size != self.pool.block_size:
            raise ValueError(
                f"sequence of block size {seq.namespace.block_size} in a pool of "
                f"{self.pool.block_size}"
            )
        if seq.params.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1.", param="max_tokens")
        wanted = seq.num_prompt_tokens + seq.params.max_tokens
        what = (
            f"The prompt has {seq.num_prompt_tokens} tokens and {seq.params.max_tokens} more are "
            f"asked for, together {wanted}"
        )
        if wanted > self.max_model_len:
            raise ContextLengthExceeded(
                f"{what}; the context has {self.max_model_len}. Shorten one of them."
            )
        # The last token of an answer is never fed back, so its KV needs no place.
        capacity = self.pool.num_blocks * self.pool.block_size
        if wanted - 1 > capacity:
            raise ContextLengthExceeded(
                f"{what}; the KV cache of this worker holds {capacity}. Shorten one of them."
            )

    def add(self, seq: Sequence) -> None:
        """Queues a request behind all others.

        Raises:
            ContextLengthExceeded: As `validate`.
            InvalidRequest: As `validate`, or if a request of this id has not ended.
            ValueError: As `validate`.
        """
        self.validate(seq)
        if self._find(seq.request_id) is not None:
            raise InvalidRequest(
                f"A request with the id {seq.request_id!r} is running; use another id.",
                param="request_id",
            )
        seq.num_uncached_tokens = self._tables.num_uncached(seq)
        self._waiting[seq.request_id] = seq

    def abort(self, request_id: str) -> bool:
        """Ends a request now and frees its blocks; says whether there was one.

        During a step, what the step still writes is dropped unless another request shares it.
        """
        seq = self._find(request_id)
        if seq is None:
            return False
        self._end(seq, Status.ABORTED)
        return True

    def plan(self) -> StepPlan:
        """Decides the next step: running requests first, then admits waiting ones in order.

        Returns:
            The step; without rows when there is nothing to do, and then it is not to be committed.

        Raises:
            InvariantViolated: If the last step was neither committed nor failed, or if nothing can
                run although there are requests: blocks have leaked.
        """
        if self._in_flight is not None:
            raise InvariantViolated(f"step {self._in_flight.step_id} has not ended")
        self._num_plans += 1
        rows: list[Row] = []
        copies: list[Copy] = []
        budget = self.max_num_batched_tokens
        for seq in tuple(self._running):
            if not budget:
                break
            grown = self._grow(seq, budget) if seq.status is Status.RUNNING else None
            if grown is None:
                break  # whoever lost its blocks is the newest: nobody comes after it
            copies += grown
            rows.append(self._row(seq, budget))
            budget -= rows[-1].num_tokens
        # After a preemption nobody gets in: the victim is first in line and needs what it lost.
        while budget and self._waiting and len(self._running) < self.max_num_seqs:
            seq = next(iter(self._waiting.values()))
            copy = self._admit(seq, budget)
            if copy is None:
                break
            copies += copy
            rows.append(self._row(seq, budget))
            budget -= rows[-1].num_tokens
        plan = StepPlan(self._num_plans, tuple(rows), tuple(copies))
        if rows:
            self._in_flight = plan
        elif self.has_work:
            raise InvariantViolated(
                f"2: {self.num_waiting} requests wait and none can run; "
                f"{self.pool.num_referenced} of {self.pool.num_blocks} blocks are held"
            )
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[SeqOutput]:
        """Takes in the result of a step.

        Args:
            plan: The step that `plan` returned last.
            result: What the engine gave for it.

        Returns:
            The new tokens of each row that sampled and whose request was not aborted meanwhile.

        Raises:
            InvariantViolated: If the plan is not the one in flight or a token is missing; nothing
                has changed then.
        """
        self._check_in_flight(plan)
        if missing := plan.missing(result):
            raise InvariantViolated(f"step {plan.step_id} has no token for {missing}")
        self._in_flight = None
        rows = [row for row in plan.rows if row.seq.status is Status.RUNNING]
        for row in rows:
            self._tables.take_shared(row.seq)
            row.seq.num_computed_tokens = row.start + row.num_tokens
        self.pool.commit()
        return [
            output
            for row in rows
            for seq in row.sampling
            for output in self._accept(seq, result.sampled[seq.request_id])
        ]

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """Ends every request of a step that could not be computed; what was pending is dropped.

        Returns:
            The requests that failed; those aborted meanwhile are not among them.

        Raises:
            InvariantViolated: If the plan is not the one in flight.
        """
        self._check_in_flight(plan)
        self._in_flight = None
        failed = [row.seq for row in plan.rows if row.seq.status is Status.RUNNING]
        for seq in failed:
            self._end(seq, Status.FAILED)
        return failed

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content, unless a request holds blocks; says whether it did."""
        return self.pool.reset()

    def check_invariants(self) -> None:
        """Checks the pool's invariants and that its references are the running requests' blocks.

        Raises:
            InvariantViolated: If the books do not add up.
        """
        self.pool.check_invariants()
        held = [0] * self.pool.num_blocks
        for seq in self._running:
            for block in (*seq.block_table, *seq.shared_blocks.values()):
                held[block] += 1
        for seq in self._waiting.values():
            if seq.block_table or seq.shared_blocks:
                raise InvariantViolated(f"waiting request {seq.request_id!r} holds blocks")
        if held != [self.pool.num_references(block) for block in range(self.pool.num_blocks)]:
            raise InvariantViolated(f"4: requests hold {held}; {self.pool.free_order()} are free")
        if self._in_flight is None and self.pool.num_pending:
            raise InvariantViolated(f"{self.pool.num_pending} blocks are pending between steps")
        behind = [seq for seq in self._running if seq.num_tokens - seq.num_computed_tokens > 1]
        if self._in_flight is None and behind not in ([], self._running[-1:]):
            raise InvariantViolated(f"3: {len(behind)} requests are behind, not only the newest")

    def _find(self, request_id: str) -> Sequence | None:
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            return waiting
        return next((seq for seq in self._running if seq.request_id == request_id), None)

    def _grow(self, seq: Sequence, budget: int) -> tuple[Copy, ...] | None:
        """Gives a running request blocks for its next tokens, at the expense of the newest.

        Returns:
            The copies its row needs; None when the request itself was the newest and lost its
            blocks.
        """
        end = min(seq.num_tokens, seq.num_computed_tokens + budget)
        while (copies := self._tables.extend(seq, end)) is None:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is seq:
                return None
        return copies

    def _preempt(self, seq: Sequence) -> None:
        """Frees a request's blocks, hashes kept, and puts it at the front of the queue."""
        self._running.remove(seq)
        self._tables.close(seq)
        seq.status = Status.WAITING
        seq.num_uncached_tokens = self._tables.num_uncached(seq)
        self._waiting[seq.request_id] = seq
        self._waiting.move_to_end(seq.request_id, last=False)
        self.counters.preemptions += 1

    def _admit(self, seq: Sequence, budget: int) -> tuple[Copy, ...] | None:
        """Moves a waiting request into the batch if all of its known tokens fit.

        Returns:
            The copies its first row needs, None when it does not fit now.
        """
        copies = self._tables.open(seq, budget)
        if copies is None:
            return None
        del self._waiting[seq.request_id]
        self._running.append(seq)
        seq.status = Status.RUNNING
        if seq.cached_tokens is None:
            seq.cached_tokens = seq.num_computed_tokens
            self.counters.prefix_cache_queries += seq.num_prompt_tokens
            self.counters.prefix_cache_hits += seq.cached_tokens
        return copies

    def _row(self, seq: Sequence, budget: int) -> Row:
        """Schedules a request's next tokens and publishes the blocks that they fill."""
        start = seq.num_computed_tokens
        end = min(seq.num_tokens, start + budget)
        self._tables.publish(seq, end)
        return Row(
            seq=seq,
            start=start,
            num_tokens=end - start,
            token_ids=tuple(seq.token_ids[start:end]),
            block_table=tuple(seq.block_table),
            sampling=(seq,) if end == seq.num_tokens else (),
        )

    def _accept(self, seq: Sequence, sampled: Sampled) -> list[SeqOutput]:
        """Appends a sampled token and ends the request if it was the last one."""
        (token_id,) = sampled.token_ids
        seq.append(token_id)
        self.counters.generated_tokens += 1
        reason: FinishReason | None = None
        if token_id in seq.params.stop_token_ids:
            reason = "stop"
        elif seq.num_output_tokens >= seq.params.max_tokens:
            reason = "length"
        if reason is not None:
            self._end(seq, Status.FINISHED)
        return [SeqOutput(seq, token_id, reason)]

    def _end(self, seq: Sequence, status: Status) -> None:
        """Takes a request out, wherever it is, and frees its blocks."""
        if seq.status is Status.WAITING:
            del self._waiting[seq.request_id]
        else:
            self._running.remove(seq)
        self._tables.close(seq)
        seq.status = status

    def _check_in_flight(self, plan: StepPlan) -> None:
        if plan is not self._in_flight:
            raise InvariantViolated(f"step {plan.step_id} is not the one in flight")
