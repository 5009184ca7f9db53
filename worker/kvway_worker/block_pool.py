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
not ephemeral has used it.

A *tail* is a partly filled block that its request left behind. It has no hash and nobody holds it;
its first rows can be copied, as can those of any other block, when a prompt begins that way.

A hash only finds a block. A hit also needs the same parent block and the same tokens, up to a
first block of the same namespace, so a collision costs a miss and never an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvway_core.blocks import BlockHash, Namespace, event_hash
from kvway_core.errors import InvariantViolated, OutOfBlocks
from kvway_core.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvway_worker.children import Children, Parent
from kvway_worker.eviction import FreeBlocks, Tier

HITS_TO_PROTECT = 2
"""Requests that hit a block, after the one that computed it, before it is protected."""


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a full block holds.

    Attributes:
        block_hash: Its place in the chain.
        parent: Id of the block before it; the namespace for a first block.
        token_ids: Its tokens.
    """

    block_hash: BlockHash
    parent: Parent
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TailContent:
    """What a partly filled block holds that its request left behind.

    Attributes:
        parent: Id of the block before it; the namespace for a first block.
        token_ids: Its tokens, at least one and fewer than a block has.
    """

    parent: Parent
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tail:
    """Rows that can be copied.

    Attributes:
        block_id: A committed block or a tail.
        num_tokens: So many of its first tokens are the next ones of the prompt.
    """

    block_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Match:
    """What the pool has of a prompt.

    Attributes:
        blocks: Blocks that hold its beginning, in order.
        tail: What can be copied of the block behind them. It always leaves a token to compute.
    """

    blocks: tuple[int, ...] = ()
    tail: Tail | None = None


class BlockPool:
    """A fixed number of blocks, shared by content.

    Args:
        num_blocks: Blocks there are, ids 0 to num_blocks - 1.
        block_size: Tokens per block.
        prefix_caching: False makes every lookup a miss and publishes nothing.

    Invariants:
        1. Every block is either free (blank or cached) or referenced; free + referenced = total.
        2. Blank blocks have no content, cached ones are tails or have committed content.
        3. The map holds exactly the blocks with content; no two blocks have the same hash.
        4. Pending and ephemeral content is in referenced blocks only.
        5. The parent of a block with content has content, committed if the block's is, not
           ephemeral unless the block's is; it was hit at least as often; it is referenced if the
           block is, and evicted later: what stays is always a usable prefix. The same is true for
           the parent of a tail.
        6. `children` has exactly the committed blocks that are not ephemeral, and the tails. No
           tail is the beginning of another child of its parent.

    The parent is evicted later because every request that holds a block holds its parent, so the
    parent comes back at the same time or later; and it never goes into an earlier tier, as every
    hit of a block is one of its parent.

    Complexity:
        Every operation is O(blocks it names); a tail and a commit add O(log n) for the n
        children of one parent.
    """

    __slots__ = (
        "_children",
        "_contents",
        "_ephemeral",
        "_events",
        "_free",
        "_hits",
        "_map",
        "_pending",
        "_refs",
        "_tails",
        "block_size",
        "num_blocks",
        "num_evictions",
        "prefix_caching",
    )

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a pool needs blocks and tokens in them, got {num_blocks} of {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.num_evictions = 0
        self._refs = [0] * num_blocks
        self._hits = [0] * num_blocks
        self._contents: list[BlockContent | None] = [None] * num_blocks
        self._map: dict[BlockHash, int] = {}
        self._tails: dict[int, TailContent] = {}
        self._children = Children()
        self._pending: dict[int, None] = {}
        self._ephemeral: set[int] = set()
        self._free = FreeBlocks(num_blocks)
        self._events: list[KVEvent] = []

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: blank and cached."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody references and whose content can still be hit; part of `num_free`."""
        return self._free.num_cached

    @property
    def num_referenced(self) -> int:
        """Blocks that someone holds."""
        return self.num_blocks - self.num_free

    @property
    def num_pending(self) -> int:
        """Blocks published in the current step and not yet committed."""
        return len(self._pending)

    def is_pending(self, block_id: int) -> bool:
        """Says whether the block's content is published but not yet computed."""
        return block_id in self._pending

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
        return self._contents[block_id]

    def tail(self, block_id: int) -> TailContent | None:
        """Returns what a tail holds, None for any other block."""
        return self._tails.get(block_id)

    def committed(self) -> dict[BlockHash, int]:
        """Returns a copy of the map of findable, computed blocks: hash -> block id."""
        return {key: block for key, block in self._map.items() if block not in self._pending}

    def match(
        self, hashes: Sequence[BlockHash], token_ids: Sequence[int], *, namespace: Namespace
    ) -> Match:
        """Returns what holds the longest known prefix of `token_ids`.

        Pure: neither references nor the order of eviction change. Blocks published in the step
        being planned are included, but nothing is to be copied from them.

        Args:
            hashes: Block hashes of `token_ids`, one per full block.
            token_ids: The tokens.
            namespace: What else their KV depends on.
        """
        blocks: list[int] = []
        parent: Parent = namespace
        size = self.block_size
        start = 0
        for block_hash in hashes:
            found = self._map.get(block_hash)
            if found is None:
                break
            content = self._contents[found]
            tokens = tuple(token_ids[start : start + size])
            if content is None or content.parent != parent or content.token_ids != tokens:
                break
            blocks.append(found)
            parent = found
            start += size
        most = len(token_ids) - start - 1
        near = self._children.nearest(parent, tuple(token_ids[start : start + size]))
        tail = Tail(near[0], min(near[1], most)) if near is not None and most > 0 else None
        return Match(tuple(blocks), tail)

    def can_allocate(self, num_new: int, *, hits: Iterable[int] = ()) -> bool:
        """Says whether `allocate` with the same arguments would succeed.

        A block that is only to be kept meanwhile, `source`, counts as one more of the hits.
        """
        return num_new + sum(not self._refs[block] for block in hits) <= self.num_free

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
        for block in kept:
            self._hold(block)
        new = [self._next() for _ in range(num_new)]
        for block in new:
            self._refs[block] = 1
        self.free(kept)
        return new

    def touch(self, block_id: int, *, ephemeral: bool = False) -> None:
        """Adds a reference to a block that has content or is held.

        Args:
            block_id: The block.
            ephemeral: The one who holds it now is an ephemeral request.
        """
        self._hold(block_id)
        if not ephemeral:
            self._make_normal(block_id)

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
        for block in reversed(block_ids):
            if self._refs[block] < 1:
                raise InvariantViolated(f"block {block} is freed but nobody holds it")
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if block in self._pending:
                self._forget(block)
            elif block in self._ephemeral:
                self._emit_removed(self._forget(block))
            if self._contents[block] is None and block not in self._tails:
                self._free.put_blank(block)
            else:
                self._free.put(block, self._tier(block))

    def keep_tail(self, block_id: int, content: TailContent) -> None:
        """Keeps the computed rows of a partly filled block that is about to be freed.

        Not if others hold the block, if a child of the same parent begins with the same tokens,
        or if the parent cannot be found. A tail that is the beginning of this one makes way.

        Args:
            block_id: A block without published content that its holder frees next.
            content: What is in it.
        """
        if (
            not self.prefix_caching
            or self._refs[block_id] != 1
            or self._contents[block_id] is not None
        ):
            return
        parent = content.parent
        if isinstance(parent, int) and not self._is_normal(parent):
            return
        if not self._children.extends(parent, content.token_ids):
            self._drop_beginning(parent, content.token_ids)
            self._tails[block_id] = content
            self._hits[block_id] = 0
            self._children.add(parent, content.token_ids, block_id)

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
        known = self._map.get(content.block_hash)
        if known is not None:
            if self._contents[known] != content:
                return None
            if not ephemeral:
                self._make_normal(known)
            return known
        self._map[content.block_hash] = block_id
        self._contents[block_id] = content
        self._hits[block_id] = 0
        self._pending[block_id] = None
        if ephemeral:
            self._ephemeral.add(block_id)
        return block_id

    def commit(self) -> None:
        """Turns everything pending into committed content: the step's result is in."""
        run: list[int] = []
        for block in self._pending:
            content = self._content(block)
            if run and content.parent != run[-1]:
                self._emit_stored(run)
                run = []
            run.append(block)
            if block not in self._ephemeral:
                self._add_child(block, content)
        if run:
            self._emit_stored(run)
        self._pending.clear()

    def reset(self) -> bool:
        """Forgets all content, if nobody holds a block; says whether it did."""
        if self.num_referenced:
            return False
        for block in self._map.values():
            self._contents[block] = None
        self._free.clear()
        self._map.clear()
        self._tails.clear()
        self._children.clear()
        self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[KVEvent]:
        """Returns what happened to committed content since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check_invariants(self) -> None:
        """Checks every invariant of the class.

        Raises:
            InvariantViolated: If one does not hold; the message names it and shows the pool.

        Complexity:
            O(n log n) for n blocks.
        """
        held = [block for block, refs in enumerate(self._refs) if refs > 0]
        cached = self._free.cached()
        self._require(
            sorted([*self._free.blank, *cached, *held]) == list(range(self.num_blocks))
            and min(self._refs) >= 0,
            "1: every block is in exactly one place",
        )
        problem = self._free.problem()
        self._require(problem is None, f"1: {problem}")
        self._require(
            all(self._contents[b] is None and b not in self._tails for b in self._free.blank)
            and all((self._contents[b] is None) == (b in self._tails) for b in cached)
            and self._tails.keys() <= set(cached),
            "2: blank blocks have no content, cached ones have",
        )
        by_content = {c.block_hash: b for b, c in enumerate(self._contents) if c is not None}
        num_contents = sum(content is not None for content in self._contents)
        self._require(
            by_content == self._map and num_contents == len(self._map),
            "3: the map holds exactly the blocks with content",
        )
        self._require(
            all(
                self._refs[b] and self._contents[b] is not None
                for b in (*self._pending, *self._ephemeral)
            ),
            "4: pending and ephemeral content is in referenced blocks",
        )
        place = {block: index for index, block in enumerate(cached)}
        for block in self._map.values():
            self._check_parent(block, self._content(block).parent, place)
        for block, tail in self._tails.items():
            self._require(0 < len(tail.token_ids) < self.block_size, f"6: tail {block} is partial")
            self._check_parent(block, tail.parent, place)
        self._check_children()

    def _check_parent(self, block: int, parent: Parent, place: dict[int, int]) -> None:
        if isinstance(parent, Namespace):
            return
        self._require(
            self._contents[parent] is not None
            and (block in self._pending or parent not in self._pending)
            and (block in self._ephemeral or parent not in self._ephemeral)
            and self._hits[parent] >= self._hits[block]
            and (bool(self._refs[parent]) or place[parent] > place.get(block, len(place))),
            f"5: the parent {parent} of block {block} outlives it",
        )

    def _check_children(self) -> None:
        expected = {
            (content.parent, content.token_ids, block)
            for block, content in enumerate(self._contents)
            if content is not None and self._is_normal(block)
        } | {(tail.parent, tail.token_ids, block) for block, tail in self._tails.items()}
        found = list(self._children)
        self._require(
            len(found) == len(expected) and set(found) == expected,
            "6: the children are what is committed, and the tails",
        )
        begun = [
            (parent, tokens[:length])
            for parent, tokens, _ in expected
            for length in range(1, len(tokens) + 1)
        ]
        tails = {(tail.parent, tail.token_ids) for tail in self._tails.values()}
        self._require(
            sum(beginning in tails for beginning in begun) == len(self._tails),
            "6: no tail is the beginning of another child",
        )

    def _tier(self, block: int) -> Tier:
        """Says where a cached block waits to be evicted."""
        return "protected" if self._hits[block] >= HITS_TO_PROTECT else "probation"

    def _is_normal(self, block: int) -> bool:
        """Says whether a block has content that stays: committed and not ephemeral."""
        return (
            self._contents[block] is not None
            and block not in self._pending
            and block not in self._ephemeral
        )

    def _hold(self, block: int) -> None:
        if not self._refs[block]:
            self._free.take(block)
        self._refs[block] += 1

    def _make_normal(self, block: int) -> None:
        """Lets a block's content stay, now that a request that is not ephemeral has it."""
        if block in self._ephemeral:
            self._ephemeral.remove(block)
            if block not in self._pending:
                self._add_child(block, self._content(block))

    def _add_child(self, block: int, content: BlockContent) -> None:
        self._drop_beginning(content.parent, content.token_ids)
        self._children.add(content.parent, content.token_ids, block)

    def _drop_beginning(self, parent: Parent, token_ids: tuple[int, ...]) -> None:
        """Gives up the tail that holds nothing but a beginning of `token_ids`."""
        tail = self._children.beginning(parent, token_ids)
        if tail is not None:
            self._forget_tail(tail)
            self._free.take(tail)
            self._free.put_blank(tail)

    def _next(self) -> int:
        """Takes the next free block; its content is gone."""
        block, tier = self._free.pop()
        if tier is None:
            return block
        self.num_evictions += 1
        if block in self._tails:
            self._forget_tail(block)
        else:
            self._emit_removed(self._forget(block))
        return block

    def _forget(self, block: int) -> BlockHash:
        """Drops a block's content and returns its hash."""
        content = self._content(block)
        if self._is_normal(block):
            self._children.remove(content.parent, content.token_ids, block)
        self._pending.pop(block, None)
        self._ephemeral.discard(block)
        self._contents[block] = None
        del self._map[content.block_hash]
        return content.block_hash

    def _forget_tail(self, block: int) -> None:
        content = self._tails.pop(block)
        self._children.remove(content.parent, content.token_ids, block)

    def _emit_stored(self, run: Sequence[int]) -> None:
        """Tells of consecutive blocks of one chain."""
        contents = [self._content(block) for block in run]
        parent = contents[0].parent
        before = None if isinstance(parent, Namespace) else self._content(parent).block_hash
        self._events.append(
            BlockStored(
                block_hashes=[event_hash(content.block_hash) for content in contents],
                parent_block_hash=None if before is None else event_hash(before),
                token_ids=[token for content in contents for token in content.token_ids],
                block_size=self.block_size,
            )
        )

    def _emit_removed(self, block_hash: BlockHash) -> None:
        """Tells of a block that is gone, in the same event as those just before."""
        removed = event_hash(block_hash)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(removed)
        else:
            self._events.append(BlockRemoved([removed]))

    def _content(self, block: int) -> BlockContent:
        content = self._contents[block]
        if content is None:
            raise InvariantViolated(f"block {block} is published without content")
        return content

    def _require(self, holds: bool, what: str) -> None:  # noqa: FBT001 - private, reads as a sentence
        if not holds:
            raise InvariantViolated(f"{what}; refs {self._refs}, free {self.free_order()}")
