"""Cascade attention in the worker: decode steps with it and without, and what grouping takes."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from itertools import count

from kvway_core.blocks import Namespace
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.engine import Engine
from kvway_worker.scheduling.prefix_groups import CascadeCosts, PrefixGroups, TableRow, paying
from kvway_worker.scheduling.sampling_params import SamplingParams
from kvway_worker.scheduling.scheduler import Scheduler
from kvway_worker.scheduling.sequence import Sequence as Request

CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests on one prefix, each with some tokens of its own.

    Attributes:
        num_requests: All at once.
        prefix_tokens: What they share.
        own_tokens: Of each prompt, behind the prefix.
        max_tokens: Of each answer; one comes from the prompt, each other one takes a step.
    """

    num_requests: int = 32
    prefix_tokens: int = 4096
    own_tokens: int = 16
    max_tokens: int = 33

    def num_blocks(self, block_size: int) -> int:
        """Blocks that hold everything."""
        own = -(-(self.own_tokens + self.max_tokens) // block_size) + 1
        return -(-self.prefix_tokens // block_size) + self.num_requests * own + 1

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Make the prompts, the same ones every time."""
        chooser = random.Random(7)
        prefix = chooser.choices(range(vocab_size), k=self.prefix_tokens)
        own = (
            chooser.choices(range(vocab_size), k=self.own_tokens) for _ in range(self.num_requests)
        )
        return [[*prefix, *tokens] for tokens in own]


class Decoding:
    """Requests that have computed their prompts and decode, step by step.

    Args:
        engine: What computes.
        workload: What is asked.
        vocab_size: Of the model.
    """

    def __init__(self, engine: Engine, workload: Workload, *, vocab_size: int) -> None:
        self._engine = engine
        self._scheduler = Scheduler(
            BlockPool(engine.num_blocks, engine.block_size),
            max_num_seqs=workload.num_requests,
            max_num_batched_tokens=CHUNK_TOKENS,
            max_model_len=workload.prefix_tokens + workload.own_tokens + workload.max_tokens,
        )
        params = SamplingParams(max_tokens=workload.max_tokens, temperature=0.0)
        namespace = Namespace("bench", block_size=engine.block_size)
        self.requests = [
            Request(str(index), prompt, params=params, namespace=namespace)
            for index, prompt in enumerate(workload.prompts(vocab_size))
        ]
        for request in self.requests:
            self._scheduler.add(request)
        while any(request.num_output_tokens == 0 for request in self.requests):
            self.step_s()

    @property
    def has_work(self) -> bool:
        """Whether answers are not at their end."""
        return self._scheduler.has_work

    @property
    def answers(self) -> list[list[int]]:
        """The tokens of each request so far."""
        return [request.output_token_ids for request in self.requests]

    def step_s(self) -> float:
        """Compute a step; return what the engine took, by the clock."""
        plan = self._scheduler.plan()
        started = time.perf_counter()
        result = self._engine.execute(plan)
        taken = time.perf_counter() - started
        self._scheduler.commit(plan, result)
        return taken


@dataclass(frozen=True, slots=True)
class Steps:
    """What steps took that were computed in turn.

    Attributes:
        on_s: With cascade attention, each step.
        off_s: Without, the same steps.
        num_differing: Answers that are not the same.
    """

    on_s: list[float] = field(default_factory=list)
    off_s: list[float] = field(default_factory=list)
    num_differing: int = 0


def in_turn(on: Decoding, off: Decoding) -> Steps:
    """Decode with both to the end, step by step in turn; who goes first alternates.

    A request that ends early makes the steps behind it smaller, for both alike: they are counted
    while all decode.
    """
    steps = Steps()
    for index in count():
        if not (on.has_work and off.has_work):
            break
        order = ((on, steps.on_s), (off, steps.off_s))
        for decoding, times in order if index % 2 else reversed(order):
            times.append(decoding.step_s())
    differing = sum(a != b for a, b in zip(on.answers, off.answers, strict=True))
    return Steps(steps.on_s, steps.off_s, differing)


def grouping_s(
    costs: CascadeCosts, *, num_requests: int, num_tokens: int, num_steps: int = 96
) -> float:
    """Return the mean time per step to find and choose what is shared, processor seconds.

    Tables grow as in decode, and one request in sixteen steps ends and another takes its place.
    """
    block_size, own_tokens = 16, 64
    num_shared = (num_tokens - own_tokens) // block_size
    fresh = count(num_shared)
    chooser = random.Random(2)

    def table() -> list[int]:
        own = -(-chooser.randrange(16, own_tokens) // block_size)
        return [*range(num_shared), *(next(fresh) for _ in range(own))]

    tables = {str(index): table() for index in range(num_requests)}
    ends = {name: len(blocks) * block_size for name, blocks in tables.items()}
    groups = PrefixGroups(block_size)
    total = 0.0
    for step in range(num_steps):
        if step % 16 == 8:
            old = next(iter(tables))
            del tables[old], ends[old]
            new = f"new-{step}"
            tables[new] = table()
            ends[new] = len(tables[new]) * block_size
        rows: list[TableRow | None] = []
        for name, blocks in tables.items():
            ends[name] += 1
            if ends[name] > len(blocks) * block_size:
                blocks.append(next(fresh))
            rows.append(TableRow(name, tuple(blocks), ends[name] - 1, ends[name]))
        started = time.process_time()
        paying(groups.update(rows), costs, block_size=block_size)
        if step:  # the first enters everything: it belongs to the prompts
            total += time.process_time() - started
    return total / (num_steps - 1)
