"""What answers say of a replica without KV events: how much of a prompt it had cached, after all.

The index lists what such a replica was sent, least recently used out first. Every answer tells how
much of its prompt was cached; much less than was listed means one of two things:

    it evicted it       and, as it evicts the least recently used first, all that was used before
                        that too: the index lets the same go, and so learns how much it holds
    it keeps nothing    as an engine with prefix caching off: seen when it happens again, to a
                        prompt listed since. From then on an entry shrinks to what was reported

A prompt is listed whole once its answer begins, for it was computed. So an answer that reports
more than was listed has nothing left to correct, but it shows that the replica does keep prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvway_router.index import BlockIndex

_MAX_REPLICAS: Final = 1024
_SLACK_BLOCKS: Final = 4
"""Engines count whole blocks of their own, which may be larger, and compute the last token."""
_MISSES: Final = 2
"""So many in a row mean that a replica does not keep what it computes."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What was listed of a prompt when it was sent.

    Attributes:
        replica_id: Where it was sent.
        hashes: Its blocks.
        uses: As `BlockIndex.last_uses`.
        tick: The mark in time of the index.
    """

    replica_id: str
    hashes: Sequence[int]
    uses: Sequence[tuple[int, int]]
    tick: int

    @property
    def num_blocks(self) -> int:
        """Blocks that were listed."""
        return self.uses[-1][0] if self.uses else 0

    def last_use(self, place: int) -> int:
        """Returns when the block at `place`, one that was listed, had been used last."""
        return next(tick for end, tick in self.uses if end > place)


@dataclass(slots=True)
class _Misses:
    """Answers in a row that reported much less than was listed."""

    num: int = 0
    since: int = 0


class Corrections:
    """Corrects the index by what answers report.

    Args:
        index: What is corrected.
        block_size: Tokens per block of the index.
    """

    def __init__(self, index: BlockIndex, *, block_size: int) -> None:
        """Know nothing of any replica."""
        self._index = index
        self._block_size = block_size
        self._misses: OrderedDict[str, _Misses] = OrderedDict()

    def expect(self, replica_id: str, hashes: Sequence[int]) -> Expectation:
        """Notes what is listed of a prompt, before it is listed as sent."""
        uses = self._index.last_uses(replica_id, hashes)
        return Expectation(replica_id, hashes, uses, self._index.tick)

    def learn(self, expected: Expectation, *, cached_tokens: int | None) -> None:
        """Takes in what the answer to a prompt reports; None when it reports nothing."""
        if cached_tokens is None:
            return
        num_cached = cached_tokens // self._block_size
        num_listed = expected.num_blocks
        if num_cached + max(_SLACK_BLOCKS, num_listed // 8) >= num_listed:
            if num_cached:
                self._misses.pop(expected.replica_id, None)
            return
        self._index.expire(expected.replica_id, before=expected.last_use(num_cached))
        if self._note_miss(expected) >= _MISSES:
            gone = expected.hashes[num_cached:]
            self._index.remove(expected.replica_id, gone[::-1])

    def _note_miss(self, expected: Expectation) -> int:
        """Counts a miss, unless the prompt was sent before the last one was known."""
        misses = self._misses.setdefault(expected.replica_id, _Misses())
        self._misses.move_to_end(expected.replica_id)
        if len(self._misses) > _MAX_REPLICAS:
            self._misses.popitem(last=False)
        if expected.tick >= misses.since:
            misses.num += 1
            misses.since = self._index.tick
        return misses.num
