"""A worker's inner loop without its thread and its sockets: for benchmarks in one process."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvway_core.blocks import BlockHash, Namespace
from kvway_core.events import EventBatch, encode_batch
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.engine import Engine
from kvway_worker.scheduling.sampling_params import SamplingParams
from kvway_worker.scheduling.scheduler import Scheduler
from kvway_worker.scheduling.sequence import Sequence as Request
from kvway_worker.sim import CostModel

TokenIds = Sequence[int]


class NoHashes:
    """Hashes nothing: what a sequence would cost in a worker that knows no prefix cache at all."""

    def __init__(self, block_size: int) -> None:
        self.hashes: list[BlockHash] = []
        self._block_size = block_size
        self._num_tokens = 0

    def extend(self, token_ids: TokenIds) -> None:
        """Takes tokens, and has an empty hash for each full block."""
        self._num_tokens += len(token_ids)
        missing = self._num_tokens // self._block_size - len(self.hashes)
        self.hashes += [BlockHash(b"")] * missing


@dataclass(frozen=True, slots=True)
class Run:
    """What some requests took together.

    Attributes:
        total_s: From the first sequence made to the last token taken in, by the clock.
        books_s: Processor time of this thread outside the engine: hashes, scheduler, pool, KV
            events. What else runs on the machine does not count.
        modelled_s: What the steps would take by the cost model, without the books.
        num_steps: Steps.
        num_blocks: Most blocks that had content or an owner after any step.
        cached_tokens: Prompt tokens that were not computed, over all requests.
        answers: The tokens of each request.
    """

    total_s: float
    books_s: float
    modelled_s: float
    num_steps: int
    num_blocks: int
    cached_tokens: int
    answers: list[list[int]]


class StepLoop:
    """Runs requests on an engine, over one pool that stays from run to run.

    Args:
        engine: What computes.
        prefix_caching: False as `--no-prefix-caching`, and without hashing tokens either.
        max_num_seqs: Requests in one step at most.
        max_num_batched_tokens: Tokens in one step at most.
        costs: A model of the time of steps; by default they take none.
        options: More options of the scheduler.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        prefix_caching: bool = True,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        costs: CostModel | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.pool = BlockPool(engine.num_blocks, engine.block_size, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=engine.num_blocks * engine.block_size,
            **(options or {}),
        )
        self._engine = engine
        self._costs = costs or CostModel()
        self._namespace = Namespace("bench", block_size=engine.block_size)
        self._num_requests = 0

    def run(
        self, prompts: Sequence[TokenIds], max_tokens: int, *, temperature: float = 0.0
    ) -> Run:
        """Adds a request per prompt, all at once, and runs them to their end.

        Each has its place among the prompts as seed, so that other loops sample the same.
        """
        gc.collect(1)  # the young: so that no run pays for what an earlier one left
        engine_s = modelled_s = 0.0
        num_steps = num_blocks = 0
        own_s = time.thread_time
        started, begun = time.perf_counter(), own_s()
        requests = [
            self._request(
                prompt, SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
            )
            for seed, prompt in enumerate(prompts)
        ]
        for request in requests:
            self.scheduler.add(request)
        while self.scheduler.has_work:
            plan = self.scheduler.plan()
            entered = own_s()
            result = self._engine.execute(plan)
            modelled_s += self._costs.step_s(plan)
            num_blocks = max(num_blocks, self.pool.num_referenced + self.pool.num_cached)
            num_steps += 1
            engine_s += own_s() - entered
            self.scheduler.commit(plan, result)
            if events := self.pool.take_events():
                encode_batch(EventBatch(ts=0.0, events=tuple(events), boot_id="bench"))
        return Run(
            total_s=time.perf_counter() - started,
            books_s=own_s() - begun - engine_s,
            modelled_s=modelled_s,
            num_steps=num_steps,
            num_blocks=num_blocks,
            cached_tokens=sum(request.cached_tokens or 0 for request in requests),
            answers=[request.output_token_ids for request in requests],
        )

    def _request(self, prompt: TokenIds, params: SamplingParams) -> Request:
        self._num_requests += 1
        return Request(
            str(self._num_requests),
            prompt,
            params=params,
            namespace=self._namespace,
            chain=None if self.pool.prefix_caching else NoHashes(self.pool.block_size),
        )
