"""What the cache has of a request's tokens, without looking twice at what has not changed. Pure.

A request that is first in line and does not fit is looked up in every step. From one step to the
next little of the cache changes, so what was found for it is remembered and only checked:

    blocks found before    ■ ■ ■ ■ ■ ■ □ □      ■ same content   □ given up since
                                     └── looked up from here on
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from kvway_worker.cache.block_content import BlockContent, Match
from kvway_worker.cache.pool_view import PoolView
from kvway_worker.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _Found:
    """What was found for a request: blocks, and what was in each."""

    seq: Sequence
    blocks: tuple[int, ...]
    contents: tuple[BlockContent | None, ...]


class PrefixLookup:
    """Looks requests up in a pool, and remembers the last one that may be looked up again.

    Args:
        pool: Where to look.

    Invariants:
        1. It returns what the pool's `match` returns; nothing for a request that reads no cache.
        2. It remembers one request at most.
    """

    __slots__ = ("_found", "_pool")

    def __init__(self, pool: PoolView) -> None:
        self._pool = pool
        self._found: _Found | None = None

    def once(self, seq: Sequence) -> Match:
        """Returns what holds the longest known prefix of a request; nothing is remembered.

        Complexity:
            O(blocks of the request).
        """
        return self._match(seq, ())

    def again(self, seq: Sequence) -> Match:
        """Does the same for a request that may be looked up again soon.

        Complexity:
            If it is the request of the last call, O(log blocks + blocks that came and went), and
            copying the ids of the others; else as `once`.
        """
        old = self._found
        if old is None or old.seq is not seq:
            old = _Found(seq, (), ())
        num_kept = self._num_kept(old)
        found = self._match(seq, old.blocks[:num_kept])
        if len(found.blocks) != len(old.blocks) or num_kept != len(old.blocks):
            new = map(self._pool.content, found.blocks[num_kept:])
            old = _Found(seq, found.blocks, (*old.contents[:num_kept], *new))
        self._found = old
        return found

    def forget(self, seq: Sequence) -> None:
        """Drops what is remembered of a request that has ended."""
        if self._found is not None and self._found.seq is seq:
            self._found = None

    def _match(self, seq: Sequence, known: tuple[int, ...]) -> Match:
        if seq.params.prompt_logprobs is not None:
            return Match()
        return self._pool.match(
            seq.chain.hashes, seq.token_ids, namespace=seq.namespace, known=known
        )

    def _num_kept(self, found: _Found) -> int:
        """Returns how many leading blocks still have the content that was found.

        A parent outlives its children: where a block is as it was, all before it are.
        """
        content, contents = self._pool.content, found.contents
        return bisect_left(
            range(len(contents)),
            x=True,
            key=lambda index: content(found.blocks[index]) is not contents[index],
        )
