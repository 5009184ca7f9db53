"""What can be asked of a block pool without changing it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvway_core.blocks import BlockHash, Namespace
from kvway_core.errors import InvariantViolated
from kvway_worker.cache.block_content import BlockContent, Match, TailContent
from kvway_worker.cache.cache_stats import CacheStats
from kvway_worker.cache.contents import Contents
from kvway_worker.cache.eviction import HITS_TO_PROTECT, TIERS, FreeBlocks, Tier
from kvway_worker.cache.pins import PinInfo, Pins
from kvway_worker.cache.pool_checks import PoolState
from kvway_worker.cache.pool_events import PoolEvents


class PoolView:
    """The blocks of a pool, who holds them and what is in them, for those who only look.

    `BlockPool` is what changes them.

    Args:
        num_blocks: Blocks there are, ids 0 to num_blocks - 1.
        block_size: Tokens per block.
        prefix_caching: False makes every lookup a miss and publishes nothing.
        force_miss: Every lookup is a miss although all is published: for comparing cold with warm.
        pin_quota: Share of the blocks that pins may keep, 0 to 1.
        kv_dtype: What keys and values are kept as, for the events; None for unknown.

    Attributes:
        stats: Told of every block that is stored, hit and gone.
        evictions: Blocks whose content was given up for other content, by tier.
    """

    __slots__ = (
        "_contents",
        "_events",
        "_force_miss",
        "_free",
        "_hits",
        "_pins",
        "_refs",
        "block_size",
        "evictions",
        "num_blocks",
        "prefix_caching",
        "stats",
    )

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        force_miss: bool = False,
        pin_quota: float = 0.25,
        kv_dtype: str | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a pool needs blocks and tokens in them, got {num_blocks} of {block_size}"
            )
        if not 0 <= pin_quota <= 1:
            raise ValueError(f"pin_quota is a share of the pool, 0 to 1, got {pin_quota}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.stats = CacheStats(num_blocks=num_blocks, block_size=block_size)
        self.evictions: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        self._force_miss = force_miss
        self._refs = [0] * num_blocks
        self._hits = [0] * num_blocks
        self._contents = Contents(num_blocks, block_size)
        self._free = FreeBlocks(num_blocks)
        self._pins = Pins(int(pin_quota * num_blocks))
        self._events = PoolEvents(block_size, kv_dtype)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: blank and cached."""
        return len(self._free)

    @property
    def num_blank(self) -> int:
        """Blocks that can be allocated and take nothing from the cache; part of `num_free`."""
        return self._free.num_blank

    @property
    def num_cached(self) -> int:
        """Blocks that nobody references and whose content can still be hit; part of `num_free`."""
        return self._free.num_cached

    @property
    def num_referenced(self) -> int:
        """Blocks that someone holds."""
        return self.num_blocks - self.num_free

    @property
    def num_pinned(self) -> int:
        """Blocks that a pin holds, free or referenced."""
        return len(self._pins)

    @property
    def num_pending(self) -> int:
        """Blocks published in the current step and not yet committed."""
        return len(self._contents.pending)

    @property
    def num_evictions(self) -> int:
        """Blocks whose content was given up for other content."""
        return sum(self.evictions.values())

    @property
    def reads_cache(self) -> bool:
        """Whether a lookup can find anything."""
        return self.prefix_caching and not self._force_miss

    def is_pending(self, block_id: int) -> bool:
        """Says whether the block's content is published but not yet computed."""
        return self._contents.is_pending(block_id)

    def num_references(self, block_id: int) -> int:
        """Returns how many references are held on a block."""
        return self._refs[block_id]

    def free_order(self) -> list[int]:
        """Returns the free blocks in the order in which they would be allocated."""
        return [*self._free.blank, *self._free.cached()]

    def tier(self, tier: Tier) -> list[int]:
        """Returns the free blocks of a tier, the next to be evicted first."""
        return self._free.tier(tier)

    def content(self, block_id: int) -> BlockContent | None:
        """Returns what is known of a full block's content, None when nothing is published."""
        return self._contents.get(block_id)

    def tail(self, block_id: int) -> TailContent | None:
        """Returns what a tail holds, None for any other block."""
        return self._contents.tails.get(block_id)

    def committed(self) -> dict[BlockHash, int]:
        """Returns the findable, computed blocks: hash -> block id."""
        return {
            content.block_hash: block
            for block, content in self._contents
            if not self._contents.is_pending(block)
        }

    def match(
        self,
        hashes: Sequence[BlockHash],
        token_ids: Sequence[int],
        *,
        namespace: Namespace,
        known: Sequence[int] = (),
    ) -> Match:
        """Returns what holds the longest known prefix of `token_ids`.

        Pure: neither references nor the order of eviction change. Blocks published in the step
        being planned are included, but nothing is to be copied from them.

        Args:
            hashes: Block hashes of `token_ids`, one per full block.
            token_ids: The tokens.
            namespace: What else their KV depends on.
            known: The first blocks of an earlier result whose content is the same still; only
                what follows them is looked up.
        """
        if self._force_miss:
            return Match()
        return self._contents.match(hashes, token_ids, namespace, known)

    def can_allocate(self, num_new: int, *, hits: Iterable[int] = ()) -> bool:
        """Says whether `allocate` with the same arguments would succeed.

        A block that is only to be kept meanwhile, `source`, counts as one more of the hits.
        """
        num_left = len(self._free) - num_new
        return num_left >= 0 and [self._refs[block] for block in hits].count(0) <= num_left

    def pins(self) -> list[PinInfo]:
        """Returns the pins, the oldest first."""
        return self._pins.infos()

    def check_invariants(self) -> None:
        """Checks every invariant of `BlockPool`.

        Raises:
            InvariantViolated: If one does not hold; the message names it and shows the pool.

        Complexity:
            O(n log n) for n blocks.
        """
        state = self.state()
        if problem := state.problem():
            raise InvariantViolated(f"{problem}; {state}")

    def state(self) -> PoolState:
        """Returns the parts of the pool, to be checked and shown."""
        return PoolState(
            refs=self._refs,
            hits=self._hits,
            min_hits=HITS_TO_PROTECT,
            contents=self._contents,
            free=self._free,
            pins=self._pins,
        )
