"""The blocks of a sequence: taken from the pool, filled, published, given back. Pure.

index            0      1      2      3
block_table    ┌────┐ ┌────┐ ┌────┐ ┌────┐
               │ 17 │ │  4 │ │  9 │ │ 30 │ (partly filled)
               └────┘ └────┘ └────┘ └────┘
shared_blocks                  2: 6        block 6 holds what 9 will hold after this step: when
                                           the step is done, 6 takes its place and 9 is free

[0, num_published_blocks) the pool knows what these hold

A block is shared in three ways: its content is found (all of it), its first rows are copied (the
beginning of it), or it is forked (both have it until one writes, and that one copies it first).
"""

from __future__ import annotations

from kvway_core.blocks import Namespace
from kvway_core.errors import InvariantViolated
from kvway_worker.cache.block_content import BlockContent, Tail, TailContent
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.scheduling.lookup import PrefixLookup
from kvway_worker.scheduling.sequence import Sequence
from kvway_worker.scheduling.step import Copy


class BlockTables:
    """Keeps the block tables of sequences in step with a pool.

    Args:
        pool: Where the blocks are from.

    Invariants:
        1. A sequence only ever writes blocks that nobody else holds and that have no content.
    """

    __slots__ = ("_lookup", "_pool", "_taking")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._lookup = PrefixLookup(pool)
        self._taking: set[Sequence] = set()

    def num_uncached(self, seq: Sequence, *, is_next: bool = False) -> int:
        """Returns how many tokens would have to be computed if the sequence began now.

        `open` can copy less than what is counted here: where there is no room for the block that
        is copied, up to block_size - 1 tokens more are computed.

        Args:
            seq: A sequence without blocks.
            is_next: It is opened next, or counted again: what is found is remembered.
        """
        found = self._lookup.again(seq) if is_next else self._lookup.once(seq)
        num_copied = found.tail.num_tokens if found.tail else 0
        num_cached = len(found.blocks) * self._pool.block_size + num_copied
        return max(1, seq.num_tokens - num_cached)

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
        found = self._lookup.again(seq)
        hits, tail, shared = found.blocks, found.tail, None
        if len(hits) * size == seq.num_tokens:
            # Fully cached: one token is still computed to know the next one, on a copy of the
            # last block, because a shared block is never written. What is pending cannot be
            # copied yet.
            *rest, shared = hits
            hits = tuple(rest)
            tail = None if size == 1 or pool.is_pending(shared) else Tail(shared, size - 1)
        num_new = self._num_blocks(seq.num_tokens) - len(hits)
        if tail is not None and not pool.can_allocate(num_new, hits=(*hits, tail.block_id)):
            tail = None  # where there is no room for the source there may be to compute it
        if tail is None and not pool.can_allocate(num_new, hits=hits):
            return None
        num_cached = len(hits) * size + (tail.num_tokens if tail else 0)
        end = min(seq.num_tokens, num_cached + budget)
        is_whole = tail is not None and tail.block_id == shared
        new = pool.allocate(
            self._num_blocks(end) - len(hits),
            hits=found.blocks if is_whole else hits,
            source=tail.block_id if tail and not is_whole else None,
            ephemeral=seq.ephemeral,
            again=seq.cached_tokens is not None,
        )
        seq.block_table = [*hits, *sorted(new)]  # in order: what lies together is read in place
        seq.num_published_blocks = len(hits)
        seq.num_computed_tokens = num_cached
        self._taking.add(seq)
        if tail is None:
            return ()
        if is_whole:
            seq.shared_blocks = {len(hits): tail.block_id}
        return ((tail.block_id, seq.block_table[len(hits)], tail.num_tokens),)

    def extend(self, seq: Sequence, end: int) -> tuple[Copy, ...] | None:
        """Makes room for the tokens [0, end), of which those not computed are to be written.

        A block that others hold or may find is copied first.

        Returns:
            The copies to make before the step. None, and nothing has changed, when the pool does
            not have the blocks.
        """
        pool, size = self._pool, self._pool.block_size
        first, num_rows = divmod(seq.num_computed_tokens, size)
        copies = bool(num_rows) and not self._is_own(seq.block_table[first])
        num_new = max(0, self._num_blocks(end) - len(seq.block_table))
        if not num_new and not copies:
            return ()  # nearly every token: the last block has room and is its own
        if not pool.can_allocate(num_new + copies):
            return None
        new = sorted(pool.allocate(num_new + copies))
        if not copies:
            seq.block_table += new
            return ()
        source, own = seq.block_table[first], new[0]
        seq.block_table[first] = own
        seq.block_table += new[1:]
        pool.free((source,))
        self._taking.add(seq)
        return ((source, own, num_rows),)

    def reserve(self, seq: Sequence, end: int) -> int:
        """Makes room for drafts up to `end`, behind what `extend` or `open` gave in this step.

        Only blank blocks are taken: nothing that is cached is given up for a guess. Nothing is
        copied: these rows begin behind others that are written in the same step.

        Returns:
            The position up to which there is room, at most `end`.
        """
        num_new = min(self._num_blocks(end) - len(seq.block_table), self._pool.num_blank)
        if num_new > 0:
            seq.block_table += self._pool.allocate(num_new)
        return min(end, len(seq.block_table) * self._pool.block_size)

    def give_back(self, seq: Sequence) -> None:
        """Frees the blocks behind the computed tokens: those of drafts that were not accepted."""
        num_blocks = self._num_blocks(seq.num_computed_tokens)
        self._pool.free(seq.block_table[num_blocks:])
        del seq.block_table[num_blocks:]

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives a sequence the blocks of another one that has computed the same prompt.

        The last block may be partly filled; who writes it while others hold it copies it first.

        Args:
            parent: A sequence between two steps.
            child: One without blocks, of the same prompt and namespace.

        Raises:
            InvariantViolated: If the parent has not computed the prompt, or the child holds
                blocks; nothing has changed then.
        """
        num_tokens = child.num_prompt_tokens
        if parent.num_computed_tokens < num_tokens or child.block_table or parent.shared_blocks:
            raise InvariantViolated(
                f"{child.request_id!r} cannot fork from {parent.request_id!r}: "
                f"{parent.num_computed_tokens} of {num_tokens} tokens are computed, and it holds "
                f"{len(child.block_table)} blocks"
            )
        child.block_table = parent.block_table[: self._num_blocks(num_tokens)]
        for block in child.block_table:
            self._pool.touch(block, ephemeral=child.ephemeral)
        child.num_computed_tokens = num_tokens
        num_full = num_tokens // self._pool.block_size
        child.num_published_blocks = min(parent.num_published_blocks, num_full)

    def takes_rows(self, seq: Sequence) -> bool:
        """Says whether the rows in front of its next token come from others with this step."""
        return seq in self._taking

    def publish(self, seq: Sequence, end: int) -> None:
        """Publishes the full blocks of [0, end) that are not yet.

        A block whose content the pool already has will give way to that block when the step is
        done; until then the sequence holds both.
        """
        size = self._pool.block_size
        num_full = end // size if self._pool.prefix_caching else 0
        for index in range(seq.num_published_blocks, num_full):
            if index not in seq.shared_blocks:
                own = seq.block_table[index]
                found = self._pool.publish(
                    own,
                    BlockContent(
                        block_hash=seq.chain.hashes[index],
                        parent=self._parent(seq, index),
                        token_ids=tuple(seq.token_ids[index * size : (index + 1) * size]),
                    ),
                    ephemeral=seq.ephemeral,
                )
                if found is None:
                    return
                if found != own:
                    self._pool.touch(found, ephemeral=seq.ephemeral)
                    seq.shared_blocks[index] = found
            seq.num_published_blocks = index + 1

    def take_shared(self, seq: Sequence) -> None:
        """Ends a step that was computed: copies are made, duplicates give way to what is found."""
        self._taking.discard(seq)
        for index, shared in seq.shared_blocks.items():
            self._pool.free((seq.block_table[index],))
            seq.block_table[index] = shared
        seq.shared_blocks = {}

    def close(self, seq: Sequence) -> None:
        """Frees a request's blocks, each shared one just before the block that it replaces.

        What is computed of its last block stays in the pool, unless the request is ephemeral or
        the rows that it begins with are still to be copied.
        """
        if seq not in self._taking and not seq.ephemeral:
            self._keep_tail(seq)
        self._taking.discard(seq)
        self._lookup.forget(seq)
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

    def _keep_tail(self, seq: Sequence) -> None:
        size = self._pool.block_size
        index, num_rows = divmod(seq.num_computed_tokens, size)
        if num_rows:
            tokens = tuple(seq.token_ids[index * size : seq.num_computed_tokens])
            content = TailContent(self._parent(seq, index), tokens)
            self._pool.keep_tail(seq.block_table[index], content)

    def _parent(self, seq: Sequence, index: int) -> int | Namespace:
        """Returns the block before block `index`, as it is when the step is done."""
        return seq.shared_or_own(index - 1) if index else seq.namespace

    def _is_own(self, block: int) -> bool:
        """Says whether nobody else holds a block or can find it."""
        return self._pool.num_references(block) == 1 and self._pool.content(block) is None

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)
