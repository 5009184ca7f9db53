"""How many operations a block pool does per second of processor time, with nothing around it.

An operation is everything that happens to one block of one request: it is looked up, taken,
published, committed and freed. The prompts are so many that the pool is always full of content and
evicts for every new block; a share of their blocks is found. Run it:

    python -m loadtests.pool_ops
"""

from __future__ import annotations

import gc
import random
import time
from typing import Final

from kvway_core.blocks import DEFAULT_BLOCK_SIZE, BlockHash, HashChain, Namespace
from kvway_worker.cache.block_content import BlockContent
from kvway_worker.cache.block_pool import BlockPool

NUM_BLOCKS: Final = 4096
NUM_PROMPTS: Final = 400
"""Prompts per round; those of a group begin with the same document."""
NUM_GROUPS: Final = 20
BLOCKS_PER_PROMPT: Final = 64
SHARED_BLOCKS: Final = 16
ROUNDS: Final = 3

Prompt = tuple[list[int], list[BlockHash]]


def prompts(namespace: Namespace, seed: int = 0) -> list[Prompt]:
    """Returns prompts and their hashes; hashing is not part of what is measured."""
    rng = random.Random(seed)
    size = namespace.block_size
    heads = [_tokens(rng, SHARED_BLOCKS * size) for _ in range(NUM_GROUPS)]
    made: list[Prompt] = []
    for _ in range(NUM_PROMPTS):
        token_ids = rng.choice(heads) + _tokens(rng, (BLOCKS_PER_PROMPT - SHARED_BLOCKS) * size)
        chain = HashChain(namespace.root(), size)
        chain.extend(token_ids)
        made.append((token_ids, chain.hashes))
    return made


def run(
    pool: BlockPool, namespace: Namespace, token_ids: list[int], hashes: list[BlockHash]
) -> int:
    """Takes one prompt through the pool as the block tables do; returns the blocks found."""
    size = pool.block_size
    hits = pool.match(hashes, token_ids, namespace=namespace).blocks
    table = [*hits, *pool.allocate(len(hashes) - len(hits), hits=hits)]
    for index in range(len(hits), len(hashes)):
        parent = table[index - 1] if index else namespace
        tokens = tuple(token_ids[index * size : (index + 1) * size])
        pool.publish(table[index], BlockContent(hashes[index], parent, tokens))
    pool.commit()
    pool.free(table)
    pool.take_events()
    return len(hits)


def measure() -> float:
    """Returns operations per second: the best of some rounds, after one that fills the pool."""
    namespace = Namespace("m", block_size=DEFAULT_BLOCK_SIZE)
    pool = BlockPool(NUM_BLOCKS, DEFAULT_BLOCK_SIZE)
    best = 0.0
    for round_ in range(ROUNDS + 1):
        made = prompts(namespace, seed=round_)
        gc.collect()
        begin = time.process_time()
        for token_ids, hashes in made:
            run(pool, namespace, token_ids, hashes)
        elapsed_s = time.process_time() - begin
        if round_:
            best = max(best, NUM_PROMPTS * BLOCKS_PER_PROMPT / elapsed_s)
    if not pool.num_evictions:
        raise RuntimeError("the pool was never full: nothing was measured")
    return best


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(50_000) for _ in range(count)]


if __name__ == "__main__":
    print(f"{measure():,.0f} pool operations/s")
