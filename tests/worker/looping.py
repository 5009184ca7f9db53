"""An engine loop with its real thread, scheduler and pool; the engine is told when to fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

from typing_extensions import override

from kvway_core.clock import Clock, SystemClock
from kvway_core.events import KVEvent
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.engine import EngineLoop, TokenOut, TokenStream
from kvway_worker.scheduling.sampling_params import TokenLogprobs
from kvway_worker.scheduling.scheduler import Scheduler
from kvway_worker.scheduling.sequence import Sequence
from kvway_worker.scheduling.step import Sampled, StepPlan, StepResult
from tests.worker.batching import AuditedSim


class Controlled(AuditedSim):
    """Waits at a gate before each step, and raises in the steps of requests named in `poison`.

    With `one_at_a_time` the gate closes behind each step. All of its steps raise what `broken` is
    set to. It forgets the tokens of requests named in `mute`, and tells log probabilities if it is
    to.
    """

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self.gate = threading.Event()
        self.gate.set()
        self.one_at_a_time = False
        self.entered = threading.Semaphore(0)
        self.poison: set[str] = set()
        self.mute: set[str] = set()
        self.broken: BaseException | None = None
        self.tells_logprobs = False

    @override
    def execute(self, plan: StepPlan) -> StepResult:
        self.entered.release()
        self.gate.wait()
        if self.one_at_a_time:
            self.gate.clear()
        if self.broken is not None:
            raise self.broken
        if any(row.seq.request_id in self.poison for row in plan.rows):
            raise RuntimeError("out of memory")
        sampled = super().execute(plan).sampled
        if self.tells_logprobs:
            return _with_logprobs(plan, sampled)
        return StepResult({key: s for key, s in sampled.items() if key not in self.mute})

    @override
    def close(self) -> None:
        super().close()
        self.gate.set()

    async def step_begins(self) -> None:
        """Waits until one more step is at the gate or through it."""
        await asyncio.to_thread(self.entered.acquire)


def _with_logprobs(plan: StepPlan, sampled: Mapping[str, Sampled]) -> StepResult:
    """Says of every token that it was certain."""
    return StepResult(
        {
            key: Sampled(one.token_ids, tuple(TokenLogprobs(t, 0.0, 1) for t in one.token_ids))
            for key, one in sampled.items()
        },
        {
            row.seq.request_id: tuple(
                TokenLogprobs(token_id, 0.0, 1)
                for token_id in row.seq.prompt_token_ids[row.start + 1 : row.end + 1]
            )
            for row in plan.rows
            if row.wants_prompt_logprobs
        },
    )


class LoopWorker:
    """A loop and what it is made of."""

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        max_num_seqs: int = 8,
        budget: int = 512,
        max_waiting: int = 100,
        clock: Clock | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, 16)
        self.engine = Controlled(self.pool)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=1000,
        )
        self.events: list[KVEvent] = []
        self.loop = EngineLoop(
            self.engine,
            self.scheduler,
            clock=clock or SystemClock(),
            max_waiting=max_waiting,
            debug_invariants=True,
            on_kv_events=self.events.extend,
        )

    async def ask(self, seq: Sequence) -> list[TokenOut]:
        async with aclosing(self.loop.generate(seq)) as parts:
            return [part async for part in parts]

    def start(self, seq: Sequence) -> asyncio.Task[list[TokenOut]]:
        """Sends a request; whoever calls this awaits the task."""
        return asyncio.create_task(self.ask(seq))


@asynccontextmanager
async def worker(**options: Any) -> AsyncIterator[LoopWorker]:
    """Runs a loop; takes what LoopWorker takes."""
    made = LoopWorker(**options)
    async with made.loop:
        yield made


async def rest(stream: TokenStream) -> list[TokenOut]:
    """Reads a stream to its end."""
    return [part async for part in stream]


def tokens(parts: Iterable[TokenOut]) -> list[int]:
    """The tokens of an answer."""
    return [part.token_id for part in parts if part.token_id is not None]
