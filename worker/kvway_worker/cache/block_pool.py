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

`pool_view` is what can be asked of a pool, this what can be done to it. `contents` says what is in
the blocks, `eviction` keeps the free ones in order, `pins` says which are to stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvway_core.blocks import BlockHash
from kvway_core.errors import InvariantViolated, OutOfBlocks
from kvway_core.events import KVEvent
from kvway_worker.cache.block_content import BlockContent, TailContent
from kvway_worker.cache.eviction import HITS_TO_PROTECT, Tier
from kvway_worker.cache.pins import PinInfo
from kvway_worker.cache.pool_view import PoolView


class BlockPool(PoolView):
    """A fixed number of blocks, shared by content; made as `PoolView` says.

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

    __slots__ = ()

    # --- taking and giving back ---------------------------------------------------------------

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
