"""The block pool: who holds a block, what is in it, and which one is given away next.

    allocate                             free (last block of a table first)
    ┌──────────────────────────────────────────────────────────────┐
    │            referenced: ref > 0                               │
    └──────────────────────────────────────────────────────────────┘
        ▲                ▲          │ no content       │ content
        │ 1. blank first │ 2. then  ▼                  ▼
    ┌───────────────┐    │      ┌───────┐   ┌─────────────────────────────────┐
    │               └────┼──────┤ blank │   │ cached, by tier: old ─────> new │
    │                    │      └───────┘   └─────────────────────────────────┘
    │                    └───────────────────── evicted ─┘        │
    └── touch: a hit takes it back from anywhere in `cached` ─────┘

A block's content is published in two steps. While the step that computes it is planned it is
*pending*: requests of the same step may share it. It is *committed* when the step's result is in.
Pending content goes with the last reference, so that a writer that fails or is aborted leaves
nothing to be found. *Ephemeral* content goes with the last reference too, unless a request that is
not ephemeral, or a pin, has claimed it.

A *tail* is a partly filled block that its request left behind. It has no hash and nobody holds it;
its first rows can be copied, as can those of any other block, when a prompt begins that way.

`contents` says what is in the blocks, `eviction` keeps the free ones in order, `pins` says which
are to stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvway_core.blocks import BlockHash, Namespace
from kvway_core.errors import InvariantViolated, OutOfBlocks
from kvway_core.events import KVEvent
from kvway_worker.cache.block_content import BlockContent, Match, TailContent
from kvway_worker.cache.cache_stats import CacheStats
from kvway_worker.cache.contents import Contents
from kvway_worker.cache.eviction import TIERS, FreeBlocks, Tier
from kvway_worker.cache.pins import PinInfo, Pins
from kvway_worker.cache.pool_checks import PoolState
from kvway_worker.cache.pool_events import PoolEvents

HITS_TO_PROTECT: Final = 2
"""Requests that hit a block, after the one that computed it, before it is protected."""


class BlockPool:
    """A fixed number of blocks, shared by content.

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

    Invariants:
        1. Every block is either free (blank or cached) or referenced; free + referenced = total.
        2. Blank blocks are empty, cached ones are tails or have committed content. Pending and
           ephemeral content is in referenced blocks only, tails are in free ones only.
        3. The contents, the free blocks and the pins keep their own invariants.
        4. A cached block is in `pinned` exactly if a pin holds it, and in `protected` only if it
           was hit HITS_TO_PROTECT times; pinned content is committed and not ephemeral.
        5. The parent of a block outlives it: it was hit at least as often, it is referenced if
           the block is, and evicted later. What stays is always a usable prefix.

    The parent is evicted later because every request that holds a block holds its parent, so that
    the parent comes back at the same time or later; and because it never goes into an earlier
    tier, as every hit of a block is one of its parent, and every pin of a block holds its parent.

    Complexity:
        Every operation is O(blocks it names); commit and tails add O(log n) for the n children of
        one parent.
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

    # --- what is there ------------------------------------------------------------------------

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

    # --- taking and giving back ---------------------------------------------------------------

    def can_allocate(self, num_new: int, *, hits: Iterable[int] = ()) -> bool:
        """Says whether `allocate` with the same arguments would succeed.

        A block that is only to be kept meanwhile, `source`, counts as one more of the hits.
        """
        num_left = len(self._free) - num_new
        return num_left >= 0 and [self._refs[block] for block in hits].count(0) <= num_left

    def allocate(
        self,
        num_new: int,
        *,
        hits: Sequence[int] = (),
        source: int | None = None,
        ephemeral: bool = False,
        again: bool = False,
    ) -> list[int]:
        """Takes a reference on every hit and hands out `num_new` other blocks, content gone.

        Hits nobody referenced use up free blocks too; they are taken first, so that no request
        evicts its own prefix.

        Args:
            num_new: Blocks to hand out.
            hits: Distinct blocks that `match` returned since the pool last changed.
            source: The block of the tail that `match` returned: it is not handed out, and is as
                good as new afterwards.
            ephemeral: The hits are those of an ephemeral request.
            again: They are those of a request that had them before, and prove nothing.

        Returns:
            The ids of the new blocks, each with one reference.

        Raises:
            OutOfBlocks: If there are not enough free blocks; nothing has changed then.
        """
        kept = () if source is None else (source,)
        if not self.can_allocate(num_new, hits=(*hits, *kept)):
            raise OutOfBlocks(
                f"{num_new} new blocks and {len(hits) + len(kept)} hits do not fit in "
                f"{self.num_free} free"
            )
        for block in hits:
            self.touch(block, ephemeral=ephemeral)
            self._hits[block] += not again
        self.stats.hit([self._contents.of(block).block_hash for block in hits])
        for block in kept:
            self._hold(block)
        new = [self._next() for _ in range(num_new)]
        for block in new:
            self._refs[block] = 1
        if kept:
            self.free(kept)
        return new

    def touch(self, block_id: int, *, ephemeral: bool = False) -> None:
        """Adds a reference to a block that has content or is held.

        Args:
            block_id: The block.
            ephemeral: The one who holds it now is an ephemeral request.
        """
        if not self._refs[block_id]:
            self._free.take(block_id)
        self._refs[block_id] += 1
        if not ephemeral and self._contents.is_ephemeral(block_id):
            self._make_blank(self._contents.make_normal(block_id))

    def free(self, block_ids: Sequence[int]) -> None:
        """Gives back one reference on each block of a table.

        The last block comes first, so that the deep end of a chain is evicted before its head.
        Of those nobody holds any more, blocks without committed content are the next to be
        allocated, the others are the last of their tier.

        Args:
            block_ids: Blocks in the order of their table.

        Raises:
            InvariantViolated: If a block has no reference to give back.
        """
        contents = self._contents
        for block in reversed(block_ids):
            if self._refs[block] < 1:
                raise InvariantViolated(f"block {block} is freed but nobody holds it")
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if contents.is_pending(block):
                contents.forget(block)
            elif contents.is_ephemeral(block):
                self._drop(block)
            if contents.is_empty(block):
                self._free.put_blank(block)
            else:
                self._free.put(block, self._tier(block))

    def keep_tail(self, block_id: int, content: TailContent) -> None:
        """Keeps the computed rows of a partly filled block that is about to be freed.

        Not if others hold the block, if a child of the same parent begins with the same tokens,
        or if the parent's content does not stay. A tail that is the beginning of this one goes.

        Args:
            block_id: A block that its holder frees next.
            content: What is in it.
        """
        if (
            self.prefix_caching
            and self._refs[block_id] == 1
            and self._contents.get(block_id) is None
        ):
            self._hits[block_id] = 0
            self._make_blank(self._contents.keep_tail(block_id, content))

    # --- content ------------------------------------------------------------------------------

    def publish(
        self, block_id: int, content: BlockContent, *, ephemeral: bool = False
    ) -> int | None:
        """Makes a block findable by what it will hold when the current step is done.

        Args:
            block_id: A referenced block without content.
            content: What the step writes into it; its parent was published before.
            ephemeral: Forget it when nobody holds it any more.

        Returns:
            The block to be found for this content: `block_id`, now pending, or another block that
            already has the same content. None when it cannot be published: caching is off, or the
            hash is taken by other content.
        """
        if not self.prefix_caching:
            return None
        known = self._contents.find(content.block_hash)
        if known is None:
            self._contents.publish(block_id, content, ephemeral=ephemeral)
            self._hits[block_id] = 0
            return block_id
        if self._contents.get(known) != content:
            return None
        if not ephemeral:
            self._make_blank(self._contents.make_normal(known))
        return known

    def commit(self) -> None:
        """Turns everything pending into committed content: the step's result is in."""
        run: list[BlockContent] = []
        before: BlockHash | None = None
        last: int | None = None
        for block in self._contents.pending:
            content = self._contents.of(block)
            if run and content.parent != last:
                self._events.stored(run, before)
                run = []
            parent = content.parent if isinstance(content.parent, int) else None
            if not run:
                before = None if parent is None else self._contents.of(parent).block_hash
            run.append(content)
            last = block
            self._make_blank(self._contents.commit(block))
            self.stats.stored(content.block_hash)
            if self._pins.stored(block, content.block_hash, parent):
                self._make_blank(self._contents.make_normal(block))
        if run:
            self._events.stored(run, before)

    def reset(self) -> bool:
        """Forgets all content, if nobody holds a block; says whether it did. Pins stay."""
        if self.num_referenced:
            return False
        self._contents.clear()
        self._free.clear()
        self._pins.cleared()
        self.stats.cleared()
        self._events.cleared()
        return True

    def take_events(self) -> list[KVEvent]:
        """Returns what happened to committed content since the last call, in order."""
        return self._events.take()

    # --- pins ---------------------------------------------------------------------------------

    def pin(self, pin_id: str, hashes: Sequence[BlockHash], *, expires_s: float) -> PinInfo:
        """Keeps a prefix: its blocks are evicted last. Replaces a pin of the same id.

        What is not cached yet is pinned when it is stored.

        Args:
            pin_id: Its name.
            hashes: Hashes of the blocks of the prefix, from the first on.
            expires_s: When `expire_pins` ends it, seconds on the caller's clock.

        Raises:
            PinQuotaExceeded: If the pins would keep more distinct blocks, cached or not, than
                their share of the pool, or there are too many; nothing has changed then.
        """
        self._pins.check_quota(pin_id, hashes)
        self.unpin(pin_id)
        info = self._pins.add(pin_id, hashes, expires_s)
        for block_hash in hashes:
            block = self._contents.find(block_hash)
            if block is None or self._contents.is_pending(block):
                break
            parent = self._contents.of(block).parent
            if not self._pins.stored(
                block, block_hash, parent if isinstance(parent, int) else None
            ):
                break
            self._make_blank(self._contents.make_normal(block))
        # All of them, the deepest first: the parent of a block has to stay behind it.
        held = self._pins.blocks(pin_id)
        self._put_again(reversed(held))
        return PinInfo(info.pin_id, info.num_blocks, len(held), info.expires_s)

    def unpin(self, pin_id: str) -> bool:
        """Ends a pin; says whether there was one."""
        let_go = self._pins.remove(pin_id)
        self._put_again(let_go or ())
        return let_go is not None

    def expire_pins(self, now_s: float) -> list[str]:
        """Ends the pins whose time is over and returns their ids."""
        expired = self._pins.expired(now_s)
        for pin_id in expired:
            self.unpin(pin_id)
        return expired

    def pins(self) -> list[PinInfo]:
        """Returns the pins, the oldest first."""
        return self._pins.infos()

    def check_invariants(self) -> None:
        """Checks every invariant of the class.

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

    # --- inside -------------------------------------------------------------------------------

    def _tier(self, block: int) -> Tier:
        """Says where a cached block waits to be evicted."""
        if block in self._pins:
            return "pinned"
        return "protected" if self._hits[block] >= HITS_TO_PROTECT else "probation"

    def _hold(self, block: int) -> None:
        if not self._refs[block]:
            self._free.take(block)
        self._refs[block] += 1

    def _put_again(self, blocks: Iterable[int]) -> None:
        """Puts those that nobody holds at the young end of the tier they now belong to."""
        for block in blocks:
            if not self._refs[block]:
                self._free.take(block)
                self._free.put(block, self._tier(block))

    def _make_blank(self, tail: int | None) -> None:
        """Frees what was a tail, if there was one, for the next to allocate."""
        if tail is not None:
            self._free.take(tail)
            self._free.put_blank(tail)

    def _next(self) -> int:
        """Takes the next free block; its content is gone."""
        block, tier = self._free.pop()
        if tier is not None:
            self.evictions[tier] += 1
            content = self._contents.forget(block)
            if content is not None:
                self._pins.evicted(block)
                self.stats.evicted(content.block_hash)
                self._events.removed(content.block_hash)
        return block

    def _drop(self, block: int) -> None:
        """Forgets committed content that nobody wants to be kept."""
        content = self._contents.forget(block)
        if content is not None:
            self.stats.dropped(content.block_hash)
            self._events.removed(content.block_hash)
