"""How large a pool the traffic wants: reuse distances of blocks, on a sample of them. Pure.

The reuse distance of a lookup is the number of different blocks that were used since the last use
of this one, itself included. A pool of so many blocks that gives up the least recently used one
first still has it; a smaller one does not. So the share of lookups with a distance of at most N
pools is the hit rate of a pool N times as large.

    most recent                                        least recent
    ┌───┬───┬───┬───┬───┬───┬───┐
    │ f │ a │ d │ b │ c │ e │ g │                      a lookup of b has distance 4
    └───┴───┴───┴───┴───┴───┴───┘

Exact distances need all blocks of a large pool in an ordered structure. Here only the blocks whose
hash is below a limit are looked at, and a distance among them is divided by their share
("Efficient MRC Construction with SHARDS", Waldspurger, Park, Garthwaite and Ahmad, FAST 2015, with
its correction for hot blocks that the sample misses or has). What lies deeper than the last bound
counts as never seen, so the number of blocks that are tracked is fixed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sortedcontainers import SortedList

from kvway_core.blocks import HASH_BYTES, BlockHash
from kvway_worker.cache.histogram import Histogram, HistogramReading

DISTANCE_BUCKETS: Final = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Upper bounds of distances, in pools."""
MAX_TRACKED: Final = 4096


@dataclass(frozen=True, slots=True)
class ReuseReading:
    """What was seen up to one moment.

    Attributes:
        distances: Reuse distances of the sampled lookups, in pools; those never seen before, or
            deeper than the last bound, have none and are in the last bucket.
        num_expected: How many lookups a sample of exactly its share would have had.
    """

    distances: HistogramReading
    num_expected: float

    def hit_rate_at(self, factor: float) -> float:
        """Returns the share of blocks looked up that a pool `factor` times as large would have.

        Hot blocks make the sample larger or smaller than its share: these lookups have small
        distances, so the difference belongs to the first bucket.

        Args:
            factor: One of `DISTANCE_BUCKETS`.

        Returns:
            0 to 1; 0 when nothing was looked up.
        """
        if not self.num_expected:
            return 0.0
        index = DISTANCE_BUCKETS.index(factor)
        num_missing = self.num_expected - self.distances.num_observed
        num_hit = sum(self.distances.counts[: index + 1]) + num_missing
        return min(1.0, max(0.0, num_hit / self.num_expected))


class ReuseDistances:
    """Measures reuse distances of the blocks that prompts look up.

    Args:
        num_blocks: Blocks of the pool.
        max_tracked: Blocks tracked at most.

    Invariants:
        1. At most `max_tracked` blocks are tracked, and a pool of up to an eighth of it exactly.
        2. `_used` and `_order` have the same times.

    Complexity:
        O(log max_tracked) per sampled block, a comparison of bytes for the others.
    """

    __slots__ = (
        "_capacity",
        "_distances",
        "_limit",
        "_num_lookups",
        "_order",
        "_scale",
        "_share",
        "_time",
        "_used",
    )

    def __init__(self, num_blocks: int, *, max_tracked: int = MAX_TRACKED) -> None:
        deepest = int(DISTANCE_BUCKETS[-1]) * num_blocks
        self._capacity = min(deepest, max_tracked)
        self._share = self._capacity / deepest
        last_hash = 2 ** (8 * HASH_BYTES) - 1
        self._limit = (last_hash * self._capacity // deepest).to_bytes(HASH_BYTES, "big")
        self._scale = 1 / (self._share * num_blocks)
        self._distances = Histogram(DISTANCE_BUCKETS)
        self._num_lookups = 0
        self._time = 0
        self._used: OrderedDict[BlockHash, int] = OrderedDict()
        self._order: SortedList[int] = SortedList()

    def look_up(self, hashes: Sequence[BlockHash]) -> None:
        """Takes note of a prompt that looks up its blocks.

        All distances are those before any block of this prompt is used. Its last block counts as
        used first, because that is the order in which a request gives its blocks back.

        Args:
            hashes: Of its full blocks, first block first.
        """
        self._num_lookups += len(hashes)
        sampled = [key for key in hashes if key <= self._limit]
        for key in sampled:
            self._measure(key)
        for key in reversed(sampled):
            self._use(key)

    def store(self, block_hash: BlockHash) -> None:
        """Takes note of a block that takes up room and that nobody looked up: of an answer."""
        if block_hash <= self._limit and block_hash not in self._used:
            self._use(block_hash)

    def clear(self) -> None:
        """Forgets all blocks, as the pool has; what was measured stays."""
        self._used.clear()
        self._order.clear()

    def read(self) -> ReuseReading:
        """Returns what was measured up to now."""
        return ReuseReading(self._distances.read(), self._num_lookups * self._share)

    def _measure(self, key: BlockHash) -> None:
        """Counts the distance of a block that is looked up."""
        used = self._used.get(key)
        if used is None:
            self._distances.observe_unmeasured()
            return
        self._distances.observe((len(self._order) - self._order.index(used)) * self._scale)

    def _use(self, key: BlockHash) -> None:
        """Makes a block the most recent one."""
        used = self._used.pop(key, None)
        if used is not None:
            self._order.remove(used)
        self._time += 1
        self._used[key] = self._time
        self._order.add(self._time)
        if len(self._used) > self._capacity:
            _, oldest = self._used.popitem(last=False)
            self._order.remove(oldest)
