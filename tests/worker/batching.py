"""Sequences, steps and an engine that audits each step; for the tests of pool and scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, SupportsIndex

from typing_extensions import override

from kvway_core.blocks import BlockHash, Namespace
from kvway_core.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.scheduling.sampling_params import SamplingParams, TokenLogprobs
from kvway_worker.scheduling.scheduler import Scheduler
from kvway_worker.scheduling.sequence import Chain, Status
from kvway_worker.scheduling.sequence import Sequence as Request
from kvway_worker.scheduling.step import SeqOutput, StepPlan, StepResult
from kvway_worker.scheduling.waiting import AGEING, QueueOrder
from kvway_worker.sim import PRINTABLE_ASCII, SimEngine, fingerprints, next_token

BLOCK_SIZE = 16

COMMON = [token for token in (0, 1, 2) for _ in range(16)]
"""48 tokens, three full blocks."""


def request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 1,
    block_size: int = BLOCK_SIZE,
    salt: str = "",
    chain: Chain | None = None,
    stop_token_ids: frozenset[int] = frozenset(),
    priority: int = 0,
    prompt_logprobs: int | None = None,
    ephemeral: bool = False,
    forks: Sequence[Request] = (),
) -> Request:
    """Makes a sequence of a model named "m"."""
    return Request(
        request_id,
        prompt,
        params=SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            prompt_logprobs=prompt_logprobs,
        ),
        namespace=Namespace("m", block_size=block_size, cache_salt=salt),
        priority=priority,
        ephemeral=ephemeral,
        forks=forks,
        chain=chain,
    )


FEW_WORDS = (97, 98, 99)
"""Answers of so few different tokens often repeat themselves: drafts get accepted."""


def answer(
    prompt: Sequence[int], num_tokens: int, *, answer_ids: Sequence[int] = PRINTABLE_ASCII
) -> list[int]:
    """What a SimEngine says to a prompt: computed with no blocks, no batch and no cache."""
    known = list(prompt)
    for _ in range(num_tokens):
        known.append(next_token(known, answer_ids))
    return known[len(prompt) :]


def prompt_logprobs_of(prompt: Sequence[int]) -> list[TokenLogprobs]:
    """What an AuditedSim gives for a prompt's tokens, from the second one on."""
    states = islice(fingerprints(prompt), 1, None)
    return [
        TokenLogprobs(token, -float(state % 1000), 1)
        for token, state in zip(prompt[1:], states, strict=False)
    ]


class OneHash:
    """The worst hash function there is: every block of every prompt has the same hash."""

    def __init__(self, block_size: int = BLOCK_SIZE) -> None:
        self.hashes: list[BlockHash] = []
        self._block_size = block_size
        self._num_tokens = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends the one hash for every block that got full."""
        self._num_tokens += len(token_ids)
        missing = self._num_tokens // self._block_size - len(self.hashes)
        self.hashes += [BlockHash(b"0123456789abcdef")] * missing


class Counted(list[int]):
    """Tokens that count how often one is looked at.

    Attributes:
        num_read: So often, slices included.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(tokens)
        self.num_read = 0

    @override
    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(found, list) else 1
        return found


class AuditedSim(SimEngine):
    """A SimEngine that checks each step against the rules of blocks.

    No row writes a block that others may find or another row writes; after the step the KV of each
    row, read through its block table, is that of its own tokens, from the first on.
    """

    def __init__(self, pool: BlockPool, *, answer_ids: Sequence[int] = PRINTABLE_ASCII) -> None:
        super().__init__(
            num_blocks=pool.num_blocks, block_size=pool.block_size, answer_ids=answer_ids
        )
        self._pool = pool
        self.num_steps = 0

    @override
    def execute(self, plan: StepPlan) -> StepResult:
        size = self.block_size
        written: list[int] = []
        for row in plan.rows:
            end = row.start + row.num_tokens
            written += row.block_table[row.start // size : -(-end // size)]
        assert len(set(written)) == len(written), "two rows write one block"
        for block in written:
            assert self._pool.content(block) is None or self._pool.is_pending(block), "shared"
        result = super().execute(plan)
        prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        for row in plan.rows:
            end = row.start + row.num_tokens
            tokens = [*row.seq.token_ids[: row.start], *row.token_ids]
            own = list(islice(fingerprints(tokens), 1, None))
            assert [self._kv[self._slot(row, position)] for position in range(end)] == own
            if row.wants_prompt_logprobs:
                expected = prompt_logprobs_of(row.seq.prompt_token_ids)
                prompt_logprobs[row.seq.request_id] = tuple(expected[row.start : end])
        self.num_steps += 1
        return StepResult(result.sampled, prompt_logprobs)


def step(scheduler: Scheduler, engine: SimEngine) -> tuple[StepPlan, list[SeqOutput]]:
    """Runs one step and checks every invariant before and after its result is in."""
    plan = scheduler.plan()
    scheduler.check_invariants()
    assert plan.num_tokens <= scheduler.max_num_batched_tokens
    assert len(plan.rows) <= scheduler.max_num_seqs
    if not plan.rows:
        return plan, []
    outputs = scheduler.commit(plan, engine.execute(plan))
    scheduler.check_invariants()
    return plan, outputs


def run(scheduler: Scheduler, engine: SimEngine) -> Iterator[tuple[StepPlan, list[SeqOutput]]]:
    """Runs steps until nothing is left to do."""
    while scheduler.has_work:
        plan, outputs = step(scheduler, engine)
        assert plan.rows, "requests are there and nothing is computed"
        yield plan, outputs


def scheduled(plan: StepPlan) -> dict[str, int]:
    """Returns how many tokens a step computes of each request."""
    return {row.seq.request_id: row.num_tokens for row in plan.rows}


class Replay:
    """What a router knows of a pool that it only knows through events.

    Attributes:
        parents: Event hash of each block that is stored -> that of its parent.
        tokens: Event hash -> the block's tokens.
    """

    def __init__(self) -> None:
        self.parents: dict[int | bytes, int | bytes | None] = {}
        self.tokens: dict[int | bytes, list[int]] = {}

    def apply(self, events: Sequence[KVEvent]) -> None:
        """Follows the pool; an event that makes no sense is an error."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for block_hash in event.block_hashes:
                        del self.parents[block_hash]
                        del self.tokens[block_hash]
                case AllBlocksCleared():
                    self.parents.clear()
                    self.tokens.clear()

    def _store(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        for index, block_hash in enumerate(event.block_hashes):
            assert block_hash not in self.parents, "stored twice"
            assert parent is None or parent in self.parents, "the parent is unknown"
            self.parents[block_hash] = parent
            self.tokens[block_hash] = list(event.token_ids[index * size : (index + 1) * size])
            parent = block_hash


class Bench:
    """A scheduler, its pool and an engine that audits every step."""

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int = 16,
        max_num_seqs: int = 16,
        budget: int = 8192,
        prefix_caching: bool = True,
        queue_order: QueueOrder = "arrival",
        ageing: float = AGEING,
        num_drafts: int = 0,
        draft_min_match: int = 1,
        answer_ids: Sequence[int] = PRINTABLE_ASCII,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=100_000,
            queue_order=queue_order,
            ageing=ageing,
            num_drafts=num_drafts,
            draft_min_match=draft_min_match,
        )
        self.engine = AuditedSim(self.pool, answer_ids=answer_ids)

    def add(self, *seqs: Request) -> None:
        for seq in seqs:
            self.scheduler.add(seq)

    def step(self) -> dict[str, int]:
        """Runs a step and returns how many tokens of each request it computed."""
        return scheduled(step(self.scheduler, self.engine)[0])

    def finish(self, *seqs: Request) -> None:
        """Adds requests and runs until nothing is left."""
        self.add(*seqs)
        for _ in run(self.scheduler, self.engine):
            pass
        assert all(seq.status is Status.FINISHED for seq in seqs)

    def abort(self, seq: Request) -> None:
        assert self.scheduler.abort(seq.request_id)
        self.scheduler.check_invariants()


def first_step_table(bench: Bench, seq: Request) -> list[int]:
    """Adds a request that has more to say and returns its blocks after its first step."""
    bench.add(seq)
    bench.step()
    return list(seq.block_table)
