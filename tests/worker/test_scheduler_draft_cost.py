"""Who pays for drafts: nobody. With guesses that are all wrong, all is as without guesses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kvway_core.blocks import BlockHash
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.cache.eviction import TIERS
from kvway_worker.scheduling.sequence import Sequence
from kvway_worker.scheduling.waiting import QueueOrder
from kvway_worker.sim import PRINTABLE_ASCII
from tests.worker.batching import Bench, request, run, step

SIZE = 8


class Life(NamedTuple):
    """What happened in each step, guesses aside; and totals."""

    steps: list[object]
    preemptions: int
    evictions: int
    num_drafts: int
    num_accepted: int


def cached(pool: BlockPool) -> dict[str, list[BlockHash | None]]:
    """Returns what waits to be evicted in each tier, in order; None for tails."""
    contents = {tier: map(pool.content, pool.tier(tier)) for tier in TIERS}
    return {
        tier: [content and content.block_hash for content in known]
        for tier, known in contents.items()
    }


def life(seed: int, num_drafts: int, queue_order: QueueOrder) -> Life:
    """Plays a random life."""
    rng = random.Random(seed)
    words = rng.sample(PRINTABLE_ASCII, k=len(PRINTABLE_ASCII))
    bench = Bench(
        rng.randint(26, 40),
        block_size=SIZE,
        num_drafts=num_drafts,
        draft_min_match=1,
        max_num_seqs=4,
        budget=rng.choice([60, 400]),
        queue_order=queue_order,
        ageing=0.5,
    )
    for index in range(3):  # hit again and again
        bench.finish(request(f"hot {index}", [7] * SIZE + [index], block_size=SIZE))
    pinned = request("pinned", [8] * SIZE * 2, block_size=SIZE)
    bench.pool.pin("pin", pinned.chain.hashes, expires_s=1e9)
    bench.finish(pinned)
    requests = iter([_request(rng, index, words) for index in range(7)])
    happened: list[object] = []
    running: list[Sequence] = []
    for more in _pauses(rng):
        for _ in range(more):
            if (seq := next(requests, None)) is not None:
                running.append(seq)
                bench.add(seq)
        if rng.random() < 0.02 and running:
            bench.scheduler.abort(running[-1].request_id)
        happened.append(_step(bench))
    for plan, _ in run(bench.scheduler, bench.engine):
        happened.append([(row.seq.request_id, row.end - row.num_drafts) for row in plan.rows])
    counters = bench.scheduler.counters
    return Life(
        happened,
        counters.preemptions,
        bench.pool.num_evictions,
        counters.num_drafts,
        counters.num_accepted,
    )


def _request(rng: random.Random, index: int, words: list[int]) -> Sequence:
    """Makes a request in which each word that it may say is followed by another one."""
    start = rng.choice([[], [7] * SIZE, [8] * SIZE])
    prompt = [*start, *words, *[index] * rng.randint(1, 9)]
    stop = frozenset(words[:8])
    return request(str(index), prompt, block_size=SIZE, max_tokens=20, stop_token_ids=stop)


def _pauses(rng: random.Random) -> Iterator[int]:
    return (rng.choice([0, 0, 1, 2]) for _ in range(30))


def _step(bench: Bench) -> object:
    plan, outputs = step(bench.scheduler, bench.engine)
    rows = [(row.seq.request_id, row.end - row.num_drafts) for row in plan.rows]
    said = [(out.seq.request_id, out.token_id) for out in outputs]
    return rows, said, bench.scheduler.counters.preemptions, cached(bench.pool)


@pytest.mark.parametrize("queue_order", ["shortest", "arrival"])
def test_wrong_drafts_cost_nobody_anything(queue_order: QueueOrder) -> None:
    """Hot, pinned and other cached content, preemptions, everyone's place and first token."""
    num_lives = num_preempted = num_evicting = 0
    for seed in range(30):
        drafted = life(seed, 8, queue_order)
        if drafted.num_accepted:
            continue  # whoever is further on needs its next block sooner
        assert drafted.num_drafts > 0
        plain = life(seed, 0, queue_order)
        assert drafted.steps == plain.steps, f"seed {seed}"
        assert drafted[1:3] == plain[1:3], f"seed {seed}"
        num_lives += 1
        num_preempted += plain.preemptions > 0
        num_evicting += plain.evictions > 0
    assert min(num_lives, num_preempted, num_evicting) > 2
