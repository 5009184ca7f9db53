"""Whole requests against a bare block pool, without a scheduler; for the tests of the pool."""

from __future__ import annotations

from collections.abc import Sequence

from kvway_core.blocks import BlockHash, Namespace, block_hashes
from kvway_worker.cache.block_content import BlockContent, TailContent
from kvway_worker.cache.block_pool import BlockPool

NAMESPACE = Namespace("m", block_size=4)
"""Blocks of four tokens."""


def hashes(tokens: Sequence[int], namespace: Namespace = NAMESPACE) -> list[BlockHash]:
    """Returns the hashes of the full blocks of a prompt."""
    return block_hashes(tokens, parent=namespace.root(), block_size=namespace.block_size)


def num_found(
    pool: BlockPool, tokens: Sequence[int], namespace: Namespace = NAMESPACE
) -> tuple[int, int]:
    """Returns how many blocks of a prompt are found, and how many tokens can be copied."""
    found = pool.match(hashes(tokens, namespace), tokens, namespace=namespace)
    return len(found.blocks), found.tail.num_tokens if found.tail else 0


def take(
    pool: BlockPool,
    tokens: Sequence[int],
    *,
    ephemeral: bool = False,
    namespace: Namespace = NAMESPACE,
) -> list[int]:
    """Lets a request take and compute all blocks of its prompt; returns its table."""
    size = pool.block_size
    keys = hashes(tokens, namespace)
    hits = pool.match(keys, tokens, namespace=namespace).blocks
    num_new = -(-len(tokens) // size) - len(hits)
    table = [*hits, *pool.allocate(num_new, hits=hits, ephemeral=ephemeral)]
    for index in range(len(hits), len(keys)):
        parent = table[index - 1] if index else namespace
        own = tuple(tokens[index * size : (index + 1) * size])
        found = pool.publish(
            table[index], BlockContent(keys[index], parent, own), ephemeral=ephemeral
        )
        assert found == table[index]
    pool.commit()
    return table


def give_back(
    pool: BlockPool,
    table: Sequence[int],
    tokens: Sequence[int],
    *,
    namespace: Namespace = NAMESPACE,
) -> None:
    """Ends a request; its partly filled last block is kept."""
    num_full, num_rows = divmod(len(tokens), pool.block_size)
    if num_rows:
        parent = table[num_full - 1] if num_full else namespace
        rest = tuple(tokens[num_full * pool.block_size :])
        pool.keep_tail(table[num_full], TailContent(parent, rest))
    pool.free(table)


def serve(
    pool: BlockPool,
    tokens: Sequence[int],
    *,
    ephemeral: bool = False,
    namespace: Namespace = NAMESPACE,
) -> int:
    """Takes a request from its beginning to its end; returns how many full blocks were hit."""
    num_hits, _ = num_found(pool, tokens, namespace)
    table = take(pool, tokens, ephemeral=ephemeral, namespace=namespace)
    if ephemeral:
        pool.free(table)
    else:
        give_back(pool, table, tokens, namespace=namespace)
    pool.check_invariants()
    return num_hits
