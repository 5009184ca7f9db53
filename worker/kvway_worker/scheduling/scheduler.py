"""Which tokens of which requests the next step computes. Pure: no clock, no threads, no tensors.

One rule: every request catches up from its computed tokens to its known tokens, within a budget
of tokens per step. Prompts, chunks of prompts, cache hits, drafts and generated tokens are all
this arithmetic.

    waiting ──admit──> running ──stop, length──> finished
       ▲                │   │
       └─── preempt ────┘   └──prompt computed──> its forks run, on the same blocks
       last of the running first; hashes and arrival are kept

A step is `plan`, then either `commit` with the sampled tokens or `fail`. Between the two nothing
else may be planned; requests may be added and aborted at any time.
"""

from __future__ import annotations

from kvway_core.errors import InvariantViolated
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.scheduling.block_tables import BlockTables
from kvway_worker.scheduling.checks import SchedulerState
from kvway_worker.scheduling.counters import Counters
from kvway_worker.scheduling.drafts import Drafter
from kvway_worker.scheduling.limits import Limits
from kvway_worker.scheduling.planning import Planner
from kvway_worker.scheduling.requests import Requests
from kvway_worker.scheduling.sequence import FinishReason, Sequence, Status
from kvway_worker.scheduling.step import Row, Sampled, SeqOutput, StepPlan, StepResult
from kvway_worker.scheduling.waiting import AGEING, QueueOrder, WaitingQueue


class Scheduler:
    """Continuous batching over a block pool.

    Running requests come first, by priority and arrival; then waiting ones are admitted in the
    order of `WaitingQueue`. A request whose prefix is being computed waits until it is there.

    Args:
        pool: The blocks.
        max_num_seqs: Requests in one step at most.
        max_num_batched_tokens: Tokens in one step at most, at least `max_num_seqs`.
        max_model_len: Tokens of prompt and answer at most.
        queue_order: Who of a priority gets in first: as in `WaitingQueue`.
        ageing: As in `WaitingQueue`; without meaning for the order of arrival.
        num_drafts: Tokens that are guessed and checked per request and step at most; 0 for none.
            Those that are wrong change nothing for other requests and for what is cached.
        draft_min_match: Tokens that must have occurred before what they are thought to precede.

    Raises:
        ValueError: If a number is out of range.

    Invariants:
        1. A step computes at most `max_num_batched_tokens` tokens of `max_num_seqs` requests.
        2. While there is a request there is something to compute: the first running request is
           never preempted, and whatever is accepted fits alone.
        3. `running` is ordered by priority and arrival, and each of them computes at least a
           token in each step. At most one has more than one token to catch up with.
        4. The references of the pool are exactly the blocks of running requests.
        5. Whoever has a row in a plan keeps its blocks through that plan: victims are taken from
           the end, behind all rows.
        6. A fork that has not begun holds nothing; its request has a place for it, and has not
           computed its prompt.
    """

    def __init__(  # noqa: PLR0913 - each is a setting of its own
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        queue_order: QueueOrder = "shortest",
        ageing: float = AGEING,
        num_drafts: int = 0,
        draft_min_match: int = 4,
    ) -> None:
        self.limits = Limits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
        )
        self.pool = pool
        self.counters = Counters()
        self._tables = BlockTables(pool)
        self._drafter = Drafter(num_drafts, min_match=draft_min_match)
        self._waiting = WaitingQueue(order=queue_order, ageing=ageing)
        self._requests = Requests(
            self._tables, self._waiting, self.counters, max_num_seqs=max_num_seqs
        )
        self._running = self._requests.running
        self._planner = Planner(
            self.limits, pool, self._tables, self._requests, self._drafter, self.counters
        )
        self._in_flight: StepPlan | None = None
        self._num_plans = 0
        self._work = 0

    @property
    def max_num_seqs(self) -> int:
        """Requests in one step at most."""
        return self.limits.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens in one step at most."""
        return self.limits.max_num_batched_tokens

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer at most."""
        return self.limits.max_model_len

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place, or as forks for the prompt to be computed."""
        return self._requests.num_waiting

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

        A waiting request counts with what the cache lacked when it was last looked up.
        """
        waiting = sum(seq.num_uncached_tokens for seq in self._waiting)
        return waiting + sum(
            seq.num_tokens - seq.num_computed_tokens
            for seq in self._running
            if seq.num_computed_tokens < seq.num_prompt_tokens
        )

    def validate(self, seq: Sequence) -> None:
        """Refuses what can never run, as `Limits.validate`. Any thread may call it."""
        self.limits.validate(seq)

    def add(self, seq: Sequence) -> None:
        """Queues a request; its forks come with it.

        Raises:
            ContextLengthExceeded: As `validate`.
            InvalidRequest: As `validate`, or if a request of one of these ids has not ended.
            ValueError: As `validate`.
        """
        self.validate(seq)
        self._requests.add(seq, work=self._work)

    def abort(self, request_id: str) -> bool:
        """Ends a request now and frees its blocks; says whether there was one.

        During a step, what the step still writes is dropped unless another request shares it. If
        the request has forks that have not begun, the first of them takes its place: in the queue
        where it was, or at the front if it ran.
        """
        seq = self._requests.find(request_id)
        if seq is None:
            return False
        self._drafter.forget(seq)
        self._requests.abort(seq)
        return True

    def plan(self, now_s: float = 0.0) -> StepPlan:
        """Decides the next step: running requests first, then admits waiting ones in order.

        Args:
            now_s: The time, for the statistics of the cache; it decides nothing.

        Returns:
            The step; without rows when there is nothing to do, and then it is not to be committed.

        Raises:
            InvariantViolated: If the last step was neither committed nor failed, or if nothing can
                run although there are requests: blocks have leaked.
        """
        if self._in_flight is not None:
            raise InvariantViolated(f"step {self._in_flight.step_id} has not ended")
        self.pool.stats.now_s = now_s
        self._num_plans += 1
        step = self._planner.plan()
        plan = StepPlan(self._num_plans, tuple(step.rows), tuple(step.copies))
        if plan.rows:
            self._in_flight = plan
            # Guesses are not counted: they must not move anybody in the queue.
            self._work += plan.num_tokens - plan.num_drafts
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
            The new tokens of each request that got some and was not aborted meanwhile, those of
            one request together and in order. Tokens behind one that ends an answer are dropped.

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
            row.seq.num_computed_tokens = row.end - row.num_drafts
            logprobs = result.prompt_logprobs.get(row.seq.request_id, ())
            row.seq.add_prompt_logprobs(row.start, logprobs)
        self.pool.commit()
        outputs = [output for row in rows for output in self._answer(row, result)]
        self.pool.commit()  # the blocks that accepted drafts filled
        for row in rows:
            self._tell_waiting(row)
        for output in outputs:
            if output.finish_reason is not None:
                self._end(output.seq, Status.FINISHED)
        return outputs

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """Ends every request of a step that could not be computed; what was pending is dropped.

        Returns:
            The requests that failed, and behind each its forks that had not begun; those aborted
            meanwhile are not among them.

        Raises:
            InvariantViolated: If the plan is not the one in flight.
        """
        self._check_in_flight(plan)
        self._in_flight = None
        rows = [row for row in plan.rows if row.seq.status is Status.RUNNING]
        failed = [seq for row in rows for seq in (row.seq, *row.seq.forks)]
        for seq in reversed(failed):
            self._end(seq, Status.FAILED)
        return failed

    def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Forgets all cached content, unless a request holds blocks; says whether it did.

        Args:
            reset_running: Preempt whoever holds blocks, so that it does. They come back in their
                order and say the same; a token of a step under way is sampled again.

        Raises:
            InvariantViolated: If nobody runs and blocks are held.
        """
        if reset_running:
            for seq in tuple(self._running):
                self._requests.preempt(seq)
        if not self.pool.reset():
            if not self._running:
                raise InvariantViolated(f"4: nobody runs; {self.pool.num_referenced} blocks held")
            return False
        for seq in tuple(self._waiting):
            self._waiting.recount(seq, self._tables.num_uncached(seq))
        return True

    def check_invariants(self) -> None:
        """Checks the pool's invariants, the queue's, those of the class, and the step in flight.

        Raises:
            InvariantViolated: If the books do not add up; the message shows them.

        Complexity:
            As `SchedulerState.check`.
        """
        SchedulerState(
            limits=self.limits,
            pool=self.pool,
            tables=self._tables,
            requests=self._requests,
            plan=self._in_flight,
        ).check()

    # --- results ----------------------------------------------------------------------------

    def _answer(self, row: Row, result: StepResult) -> list[SeqOutput]:
        """Appends the new tokens of a row's request and of the forks that begin with it."""
        seq = row.seq
        outputs: list[SeqOutput] = []
        for one in row.sampling:
            if one is not seq:
                if one not in seq.forks:
                    continue  # aborted meanwhile
                self._requests.begin_fork(seq, one)
            outputs += self._accept(one, result.sampled[one.request_id])
        if row.num_drafts:
            self.counters.num_accepted += len(result.sampled[seq.request_id].token_ids) - 1
            # All but the last of the new tokens are computed: what they fill can be found.
            seq.num_computed_tokens = seq.num_tokens - 1
            self._tables.publish(seq, seq.num_computed_tokens)
            self._tables.take_shared(seq)
            self._tables.give_back(seq)
        return outputs

    def _accept(self, seq: Sequence, sampled: Sampled) -> list[SeqOutput]:
        """Appends sampled tokens up to the one that ends the answer, if one does."""
        outputs: list[SeqOutput] = []
        for index, token_id in enumerate(sampled.token_ids):
            seq.append(token_id)
            self.counters.generated_tokens += 1
            reason: FinishReason | None = None
            if token_id in seq.params.stop_token_ids:
                reason = "stop"
            elif seq.num_output_tokens >= seq.params.max_tokens:
                reason = "length"
            logprobs = sampled.logprobs[index] if sampled.logprobs else None
            outputs.append(SeqOutput(seq, token_id, reason, logprobs))
            if reason is not None:
                break
        return outputs

    def _tell_waiting(self, row: Row) -> None:
        """Moves up those in the queue that begin with the blocks that a row filled."""
        first = row.start // self.pool.block_size
        end = row.seq.num_computed_tokens // self.pool.block_size
        if end > first and self._waiting and self.pool.reads_cache:
            self._waiting.computed(row.seq.chain.hashes[:end], first)

    def _end(self, seq: Sequence, status: Status) -> None:
        self._drafter.forget(seq)
        self._requests.end(seq, status)

    def _check_in_flight(self, plan: StepPlan) -> None:
        if plan is not self._in_flight:
            raise InvariantViolated(f"step {plan.step_id} is not the one in flight")
