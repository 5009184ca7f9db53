"""The blocks of a sequence: taken from the pool, filled, published, given back. Pure.

index            0      1      2      3
block_table    ┌────┐ ┌────┐ ┌────┐ ┌────┐
               │ 17 │ │  4 │ │  9 │ │ 30 │ (partly filled)
               └────┘ └────┘ └────┘ └────┘
shared_blocks                  2: 6        block 6 holds what 9 will hold after this step: when
                                           the step is done, 6 takes its place and 9 is free

[0, num_published_blocks) the pool knows what these hold
"""

from __future__ import annotations

from kvway_worker.block_pool import BlockContent, BlockPool
from kvway_worker.sequence import Sequence
from kvway_worker.step import Copy


class BlockTables:
    """Keeps the block tables of sequences in step with a pool.

    Args:
        pool: Where the blocks are from.
    """

    __slots__ = ("_pool",)

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def num_uncached(self, seq: Sequence) -> int:
        """Returns how many tokens would have to be computed if the sequence began now."""
        return max(1, seq.num_tokens - len(self._match(seq)) * self._pool.block_size)

    def open(self, seq: Sequence, budget: int) -> tuple[Copy, ...] | None:
        """Gives a sequence the cached blocks of its prefix, and room for its next tokens.

        The cache is looked up here, in one go with taking the blocks, and nowhere else.

        Args:
            seq: A sequence without blocks.
            budget: Tokens it may compute in this step, at least 1.

        Returns:
            The copies to make before the step. None, and nothing has changed, when not all of
            the known tokens fit now.
        """
        pool, size = self._pool, self._pool.block_size
        hits = self._match(seq)
        if len(hits) * size == seq.num_tokens:
            # Fully cached: one token is still computed to know the next one, on a copy of the
            # last block, because a shared block is never written. What is pending cannot be
            # copied yet, and where there is no room for a copy there is room to compute the block.
            last = hits[-1]
            if size > 1 and not pool.is_pending(last) and pool.can_allocate(1, hits=hits):
                (own,) = pool.allocate(1, hits=hits)
                seq.block_table = [*hits[:-1], own]
                seq.shared_blocks = {len(hits) - 1: last}
                seq.num_published_blocks = len(hits) - 1
                seq.num_computed_tokens = seq.num_tokens - 1
                return ((last, own, size - 1),)
            hits = hits[:-1]
        if not pool.can_allocate(self._num_blocks(seq.num_tokens) - len(hits), hits=hits):
            return None
        num_cached = len(hits) * size
        end = min(seq.num_tokens, num_cached + budget)
        seq.block_table = hits + pool.allocate(self._num_blocks(end) - len(hits), hits=hits)
        seq.num_published_blocks = len(hits)
        seq.num_computed_tokens = num_cached
        return ()

    def extend(self, seq: Sequence, end: int) -> tuple[Copy, ...] | None:
        """Makes room for the tokens [0, end).

        Returns:
            The copies to make before the step. None, and nothing has changed, when the pool does
            not have the blocks.
        """
        num_new = self._num_blocks(end) - len(seq.block_table)
        if not self._pool.can_allocate(num_new):
            return None
        seq.block_table += self._pool.allocate(num_new)
        return ()

    def publish(self, seq: Sequence, end: int) -> None:
        """Publishes the full blocks of [0, end) that are not yet.

        A block whose content the pool already has will give way to that block when the step is
        done; until then the sequence holds both.
        """
        size = self._pool.block_size
        for index in range(seq.num_published_blocks, end // size):
            if index not in seq.shared_blocks:
                own = seq.block_table[index]
                found = self._pool.publish(
                    own,
                    BlockContent(
                        block_hash=seq.chain.hashes[index],
                        parent=seq.shared_or_own(index - 1) if index else seq.namespace,
                        token_ids=tuple(seq.token_ids[index * size : (index + 1) * size]),
                    ),
                )
                if found is None:
                    return
                if found != own:
                    self._pool.touch(found)
                    seq.shared_blocks[index] = found
            seq.num_published_blocks = index + 1

    def take_shared(self, seq: Sequence) -> None:
        """Replaces blocks that duplicate content by the ones that are found for it."""
        for index, shared in seq.shared_blocks.items():
            self._pool.free((seq.block_table[index],))
            seq.block_table[index] = shared
        seq.shared_blocks = {}

    def close(self, seq: Sequence) -> None:
        """Frees a request's blocks, each shared one just before the block that it replaces."""
        held: list[int] = []
        for index, block in enumerate(seq.block_table):
            held.append(block)
            if index in seq.shared_blocks:
                held.append(seq.shared_blocks[index])
        self._pool.free(held)
        seq.block_table = []
        seq.shared_blocks = {}
        seq.num_computed_tokens = 0
        seq.num_published_blocks = 0

    def _match(self, seq: Sequence) -> list[int]:
        return self._pool.match(seq.chain.hashes, seq.token_ids, namespace=seq.namespace)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)
