"""Plans, computes and commits steps, and knows who gets what. No threads here; one uses it.

add, abort ──> scheduler.plan ──> engine.execute ──> scheduler.commit ──> outputs
                                       │ raises
                                       └──> scheduler.fail: the step's requests end with an
                                            error; after some in a row the engine is probed
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import structlog

from kvway_core.blocks import Namespace
from kvway_core.clock import Clock
from kvway_core.errors import EngineFailed
from kvway_worker.load import AttentionReading, EngineLoad, Meter, StepStats
from kvway_worker.scheduling.sampling_params import SamplingParams
from kvway_worker.scheduling.scheduler import Scheduler
from kvway_worker.scheduling.sequence import Sequence as Request
from kvway_worker.scheduling.step import Row, SeqOutput, StepPlan, StepResult
from kvway_worker.streams import Output, Stream, TokenOut

FAILURES_BEFORE_PROBE: Final = 3
"""So many failing steps in a row, and the engine has to show that it computes at all."""

_log = structlog.get_logger(__name__)


class Engine(Protocol):
    """What computes steps; used by one thread, except for `close`."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks it has room for."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request that it can compute."""
        ...

    @property
    def kv_dtype(self) -> str | None:
        """What keys and values are kept as, such as "int8"; None where there are none."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Computes a step: copies first, then the KV of all rows, then what the rows read."""
        ...

    def attention(self) -> AttentionReading | None:
        """Tells what attends and what it read once; None where no attention is computed."""
        ...

    def close(self) -> None:
        """Ends the engine, from any thread; a step under way returns or raises soon."""
        ...


class Stepper:
    """An engine, its scheduler, and the streams of the requests between them.

    Args:
        engine: What computes.
        scheduler: What is computed.
        clock: Measures steps and waits.
        debug_invariants: Check the books when a step is planned, and when its result is in.

    Invariants:
        1. `live` has exactly the requests that the scheduler has, forks that have not begun
           included.
    """

    def __init__(
        self, engine: Engine, scheduler: Scheduler, *, clock: Clock, debug_invariants: bool
    ) -> None:
        self.scheduler = scheduler
        self._engine = engine
        self._clock = clock
        self._debug_invariants = debug_invariants
        self._live: dict[str, Stream] = {}
        self._meter = Meter()
        self._failures: list[Exception] = []
        self._closing = False

    @property
    def live(self) -> Iterable[Stream]:
        """The requests that have not ended."""
        return self._live.values()

    def load(self) -> EngineLoad:
        """Returns how busy the engine is, between steps."""
        return self._meter.read(self.scheduler, self._engine.attention())

    def close(self) -> None:
        """Ends the engine, from any thread; a step that fails for it fails no request."""
        self._closing = True
        self._engine.close()

    def add(self, streams: Sequence[Stream]) -> None:
        """Queues a request; the streams behind the first are those of its forks."""
        self.scheduler.add(streams[0].seq)
        self._live.update((stream.seq.request_id, stream) for stream in streams)

    def abort(self, stream: Stream) -> bool:
        """Ends a request and frees its blocks; says whether it had not ended before."""
        if self._live.get(stream.seq.request_id) is not stream:
            return False
        self.scheduler.abort(stream.seq.request_id)
        self._ended(stream)
        return True

    def plan(self) -> StepPlan:
        """Decides the next step; without rows when there is nothing to do.

        Raises:
            InvariantViolated: If the books do not add up; only where they are checked.
        """
        now_s = self._clock.monotonic()
        plan = self.scheduler.plan(now_s)
        self._check()
        for row in plan.rows:
            if self._live[row.seq.request_id].scheduled_s is None:
                for seq in (row.seq, *row.seq.forks):
                    self._meter.scheduled(self._live[seq.request_id], now_s)
        return plan

    def step(self, plan: StepPlan) -> list[tuple[Stream, Output]]:
        """Computes a step and returns what it gave whom.

        Raises:
            InvariantViolated: If the books do not add up; only where they are checked.
        """
        started_s = self._clock.monotonic()
        try:
            result = self._execute(plan)
        except Exception as exc:  # noqa: BLE001 - this is what supervises a step
            return self._failed(plan, exc)
        ended_s = self._clock.monotonic()
        self._failures.clear()
        self._meter.observe(StepStats.of(plan, duration_s=ended_s - started_s))
        outputs = self.scheduler.commit(plan, result)
        self._check()
        return [self._output(out, ended_s) for out in outputs]

    def probe(self) -> None:
        """After some failures in a row computes one token of no request: who is it that fails?

        Raises:
            EngineFailed: If it is the engine.
        """
        if len(self._failures) < FAILURES_BEFORE_PROBE:
            return
        pool = self.scheduler.pool
        seq = Request(
            "probe",
            [0],
            params=SamplingParams(max_tokens=1),
            namespace=Namespace("probe", block_size=pool.block_size),
        )
        blocks = pool.allocate(1)  # there is one: the requests of the failed step gave theirs back
        try:
            self._execute(StepPlan(0, (Row(seq, 0, 1, seq.token_ids, blocks, sampling=(seq,)),)))
        except Exception as exc:
            message = f"{len(self._failures)} steps failed in a row, and then a probe"
            raise EngineFailed(message) from exc
        finally:
            pool.free(blocks)
        self._failures.clear()

    def _check(self) -> None:
        """Checks the books, if they are to be: before anybody is told that it has ended."""
        if self._debug_invariants:
            self.scheduler.check_invariants()

    def _execute(self, plan: StepPlan) -> StepResult:
        result = self._engine.execute(plan)
        if missing := plan.missing(result):
            raise EngineFailed(f"the engine gave no token for {missing}")
        return result

    def _failed(self, plan: StepPlan, exc: Exception) -> list[tuple[Stream, Output]]:
        """Fails the requests of a step that raised; the others go on."""
        if self._closing:
            return []
        _log.error("step_failed", step_id=plan.step_id, num_requests=len(plan.rows), exc_info=exc)
        self._failures.append(exc)
        self._meter.num_failed_steps += 1
        message = "The engine failed while it computed this request; try again."
        failed = self.scheduler.fail(plan)
        self._check()
        return [(self._live.pop(seq.request_id), EngineFailed(message)) for seq in failed]

    def _output(self, out: SeqOutput, now_s: float) -> tuple[Stream, Output]:
        """Returns what a request's reader gets of a new token."""
        stream = self._live[out.seq.request_id]
        is_first = stream.first_token_s is None
        if is_first:
            self._meter.first_token(stream, now_s)
        if out.finish_reason is not None:
            self._ended(stream)
        return stream, TokenOut(
            out.token_id,
            out.finish_reason,
            out.seq.cached_tokens or 0,
            logprobs=out.logprobs,
            prompt_logprobs=tuple(out.seq.prompt_logprobs) if is_first else (),
        )

    def _ended(self, stream: Stream) -> None:
        del self._live[stream.seq.request_id]
        self._meter.ended(stream, self._clock.monotonic())
