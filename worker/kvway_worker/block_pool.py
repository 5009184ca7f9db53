"""The block pool: who holds a block, what is in it, and which one is given away next.

    allocate                             free (last block of a table first)
    ┌──────────────────────────────────────────────────────────────┐
    │            referenced: ref > 0                               │
    └──────────────────────────────────────────────────────────────┘
        ▲                ▲          │ no content       │ content
        │ 1. blank first │ 2. then  ▼                  ▼
    ┌───────────────┐    │      ┌───────┐   ┌─────────────────────────────────┐
    │               └────┼──────┤ blank │   │ cached: oldest ─────────> newest│
    │                    │      └───────┘   └─────────────────────────────────┘
    │                    └───────────────────── evicted ─┘        │
    └── touch: a hit takes it back from anywhere in `cached` ─────┘

A block's content is published in two steps. While the step that computes it is planned it is
*pending*: requests of the same step may share it. It is *committed* when the step's result is in.
Pending content goes with the last reference, so that a writer that fails or is aborted leaves
nothing to be found.

A hash only finds a block. A hit also needs the same parent block and the same tokens, up to a
first block of the same namespace, so a collision costs a miss and never an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvway_core.blocks import BlockHash, Namespace, event_hash
from kvway_core.errors import InvariantViolated, OutOfBlocks
from kvway_core.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a full block holds.

    Attributes:
        block_hash: Its place in the chain.
        parent: Id of the block before it; the namespace for a first block.
        token_ids: Its tokens.
    """

    block_hash: BlockHash
    parent: int | Namespace
    token_ids: tuple[int, ...]


class BlockPool:
    """A fixed number of blocks, shared by content.

    Args:
        num_blocks: Blocks there are, ids 0 to num_blocks - 1.
        block_size: Tokens per block.
        prefix_caching: False makes every lookup a miss and publishes nothing.

    Invariants:
        1. Every block is either free (blank or cached) or referenced; free + referenced = total.
        2. Blank blocks have no content, cached ones have committed content.
        3. The map holds exactly the blocks with content; no two blocks have the same hash.
        4. Pending content is in referenced blocks only.
        5. The parent of a block with content has content, committed if the block's is; it is
           referenced if the block is, and evicted later: what stays is always a usable prefix.

    Complexity:
        Every operation is O(blocks it names).
    """

    __slots__ = (
        "_blank",
        "_cached",
        "_contents",
        "_events",
        "_map",
        "_pending",
        "_refs",
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
        self._contents: list[BlockContent | None] = [None] * num_blocks
        self._map: dict[BlockHash, int] = {}
        self._pending: dict[int, None] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._events: list[KVEvent] = []

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: blank and cached."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody references and whose content can still be hit; part of `num_free`."""
        return len(self._cached)

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
        return [*reversed(self._blank), *self._cached]

    def content(self, block_id: int) -> BlockContent | None:
        """Returns what is known of a block's content, None when nothing is published."""
        return self._contents[block_id]

    def committed(self) -> dict[BlockHash, int]:
        """Returns a copy of the map of findable, computed blocks: hash -> block id."""
        return {key: block for key, block in self._map.items() if block not in self._pending}

    def match(
        self, hashes: Sequence[BlockHash], token_ids: Sequence[int], *, namespace: Namespace
    ) -> list[int]:
        """Returns the blocks that hold the longest known prefix of `token_ids`.

        Pure: neither references nor the order of eviction change. Blocks published in the step
        being planned are included.

        Args:
            hashes: Block hashes of `token_ids`, one per full block.
            token_ids: The tokens.
            namespace: What else their KV depends on.
        """
        blocks: list[int] = []
        parent: int | Namespace = namespace
        size = self.block_size
        for index, block_hash in enumerate(hashes):
            found = self._map.get(block_hash)
            if found is None:
                break
            content = self._contents[found]
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            if content is None or content.parent != parent or content.token_ids != tokens:
                break
            blocks.append(found)
            parent = found
        return blocks

    def can_allocate(self, num_new: int, *, hits: Iterable[int] = ()) -> bool:
        """Says whether `allocate` with the same arguments would succeed."""
        return num_new + sum(not self._refs[block] for block in hits) <= self.num_free

    def allocate(self, num_new: int, *, hits: Sequence[int] = ()) -> list[int]:
        """Takes a reference on every hit and hands out `num_new` other blocks, content gone.

        Hits nobody referenced use up free blocks too; they are taken first, so that no request
        evicts its own prefix.

        Args:
            num_new: Blocks to hand out.
            hits: Distinct blocks that `match` returned since the pool last changed.

        Returns:
            The ids of the new blocks, each with one reference.

        Raises:
            OutOfBlocks: If there are not enough free blocks; nothing has changed then.
        """
        if not self.can_allocate(num_new, hits=hits):
            raise OutOfBlocks(
                f"{num_new} new blocks and {len(hits)} hits do not fit in {self.num_free} free"
            )
        for block in hits:
            self.touch(block)
        new = [self._blank.pop() if self._blank else self._evict() for _ in range(num_new)]
        for block in new:
            self._refs[block] = 1
        return new

    def touch(self, block_id: int) -> None:
        """Adds a reference to a block with content."""
        if not self._refs[block_id]:
            del self._cached[block_id]
        self._refs[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Gives back one reference on each block of a table.

        The last block comes first, so that the deep end of a chain is evicted before its head.
        Of those nobody holds any more, blocks without committed content are the next to be
        allocated, the others are the last.

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
                del self._pending[block]
                self._forget(block)
            if self._contents[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None

    def publish(self, block_id: int, content: BlockContent) -> int | None:
        """Makes a block findable by what it will hold when the current step is done.

        Args:
            block_id: A referenced block without content.
            content: What the step writes into it; its parent was published before.

        Returns:
            The block to be found for this content: `block_id`, now pending, or another block that
            already has the same content. None when it cannot be published: caching is off, or the
            hash is taken by other content.
        """
        if not self.prefix_caching:
            return None
        known = self._map.get(content.block_hash)
        if known is not None:
            return known if self._contents[known] == content else None
        self._map[content.block_hash] = block_id
        self._contents[block_id] = content
        self._pending[block_id] = None
        return block_id

    def commit(self) -> None:
        """Turns everything pending into committed content: the step's result is in."""
        run: list[int] = []
        for block in self._pending:
            if run and self._content(block).parent != run[-1]:
                self._emit_stored(run)
                run = []
            run.append(block)
        if run:
            self._emit_stored(run)
        self._pending.clear()

    def reset(self) -> bool:
        """Forgets all content, if nobody holds a block; says whether it did."""
        if self.num_referenced:
            return False
        for block in self._cached:
            self._contents[block] = None
        self._blank += reversed(self._cached)
        self._cached.clear()
        self._map.clear()
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
            O(num_blocks).
        """
        held = [block for block, refs in enumerate(self._refs) if refs > 0]
        places = sorted([*self._blank, *self._cached, *held])
        self._require(
            places == list(range(self.num_blocks)) and min(self._refs) >= 0,
            "1: every block is in exactly one place",
        )
        self._require(
            all(self._contents[block] is None for block in self._blank)
            and all(self._contents[block] is not None for block in self._cached),
            "2: blank blocks have no content, cached ones have",
        )
        by_content = {c.block_hash: b for b, c in enumerate(self._contents) if c is not None}
        num_contents = sum(content is not None for content in self._contents)
        self._require(
            by_content == self._map and num_contents == len(self._map),
            "3: the map holds exactly the blocks with content",
        )
        self._require(
            all(self._refs[b] and self._contents[b] is not None for b in self._pending),
            "4: pending content is in referenced blocks",
        )
        place = {block: index for index, block in enumerate(self._cached)}
        for block in self._map.values():
            parent = self._content(block).parent
            if isinstance(parent, Namespace):
                continue
            self._require(
                self._contents[parent] is not None
                and (block in self._pending or parent not in self._pending)
                and (bool(self._refs[parent]) or place[parent] > place.get(block, len(place))),
                f"5: the parent {parent} of block {block} outlives it",
            )

    def _evict(self) -> int:
        """Takes the oldest cached block; its content is gone."""
        block, _ = self._cached.popitem(last=False)
        removed = event_hash(self._forget(block))
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(removed)
        else:
            self._events.append(BlockRemoved([removed]))
        self.num_evictions += 1
        return block

    def _forget(self, block: int) -> BlockHash:
        """Drops a block's content and returns its hash."""
        block_hash = self._content(block).block_hash
        self._contents[block] = None
        del self._map[block_hash]
        return block_hash

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

    def _content(self, block: int) -> BlockContent:
        content = self._contents[block]
        if content is None:
            raise InvariantViolated(f"block {block} is published without content")
        return content

    def _require(self, holds: bool, what: str) -> None:  # noqa: FBT001 - private, reads as a sentence
        if not holds:
            raise InvariantViolated(f"{what}; refs {self._refs}, free {self.free_order()}")
