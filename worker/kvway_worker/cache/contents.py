"""What each block of a pool holds, and how it is found. Pure.

    published ──> pending ──commit──> committed ──> forgotten
                     └──> forgotten

Content is *ephemeral* while only requests have it that want nothing kept; all other content is
normal. A *tail* is a partly filled block without a hash: it is only found by its tokens.

A hash only finds a block. A hit also needs the same parent block and the same tokens, up to a
first block of the same namespace, so a collision costs a miss and never an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvway_core.blocks import BlockHash, Namespace
from kvway_core.errors import InvariantViolated
from kvway_worker.cache.block_content import BlockContent, Match, Tail, TailContent, Tokens
from kvway_worker.cache.children import Children


class Contents:
    """The contents of a fixed number of blocks.

    Args:
        num_blocks: Blocks there are, ids 0 to num_blocks - 1.
        block_size: Tokens per block.

    Invariants:
        1. The map holds exactly the blocks with content; no two blocks have the same hash.
        2. A block has content, or is a tail, or neither.
        3. The parent of a block has content, committed if the block's is, normal if the block's
           is; the parent of a tail has committed, normal content.
        4. `children` has exactly the blocks whose content is committed and normal, and the tails.
        5. No tail holds the beginning of another child of its parent.

    Complexity:
        O(1) per block and O(log n) for the n children of a parent.
    """

    __slots__ = (
        "_block_size",
        "_children",
        "_contents",
        "_ephemeral",
        "_map",
        "_pending",
        "tails",
    )

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._contents: list[BlockContent | None] = [None] * num_blocks
        self._map: dict[BlockHash, int] = {}
        self.tails: dict[int, TailContent] = {}
        self._children = Children()
        self._pending: dict[int, None] = {}
        self._ephemeral: set[int] = set()

    def __iter__(self) -> Iterator[tuple[int, BlockContent]]:
        """Yields each block with content."""
        return ((block, self.of(block)) for block in self._map.values())

    @property
    def pending(self) -> list[int]:
        """Blocks with pending content, in the order in which they were published."""
        return list(self._pending)

    def find(self, block_hash: BlockHash) -> int | None:
        """Returns the block with content of a hash."""
        return self._map.get(block_hash)

    def get(self, block: int) -> BlockContent | None:
        """Returns the content of a block, None if it has none."""
        return self._contents[block]

    def of(self, block: int) -> BlockContent:
        """Returns the content of a block that has content.

        Raises:
            InvariantViolated: If it has none.
        """
        content = self._contents[block]
        if content is None:
            raise InvariantViolated(f"block {block} has no content")
        return content

    def is_empty(self, block: int) -> bool:
        """Says whether a block has no content and is no tail."""
        return self._contents[block] is None and block not in self.tails

    def is_pending(self, block: int) -> bool:
        """Says whether a block's content is published and not committed."""
        return block in self._pending

    def is_ephemeral(self, block: int) -> bool:
        """Says whether a block's content is to go when nobody holds the block."""
        return block in self._ephemeral

    def is_settled(self, block: int) -> bool:
        """Says whether a block has content that is committed and normal."""
        has_content = self._contents[block] is not None
        return has_content and block not in self._pending and block not in self._ephemeral

    def match(
        self,
        hashes: Sequence[BlockHash],
        token_ids: Sequence[int],
        namespace: Namespace,
        known: Sequence[int] = (),
    ) -> Match:
        """Returns what holds the longest known prefix of `token_ids`; pending content too.

        Args:
            hashes: Block hashes of `token_ids`, one per full block.
            token_ids: The tokens.
            namespace: What else their KV depends on.
            known: The first blocks of the result, as far as the caller knows it.
        """
        blocks = list(known)
        parent: int | Namespace = known[-1] if known else namespace
        size = self._block_size
        start = len(known) * size
        for index in range(len(known), len(hashes)):
            block_hash = hashes[index]
            found = self._map.get(block_hash)
            if found is None:
                break
            tokens = tuple(token_ids[start : start + size])
            if self._contents[found] != (block_hash, parent, tokens):
                break
            blocks.append(found)
            parent = found
            start += size
        most = len(token_ids) - start - 1
        tail = None
        if most > 0:
            near = self._children.nearest(parent, tuple(token_ids[start : start + size]))
            if near is not None:
                tail = Tail(near[0], min(near[1], most))
        return Match(tuple(blocks), tail)

    def publish(self, block: int, content: BlockContent, *, ephemeral: bool) -> bool:
        """Gives an empty block pending content, unless its hash is taken; says whether it did."""
        if self._map.setdefault(content.block_hash, block) != block:
            return False
        self._contents[block] = content
        self._pending[block] = None
        if ephemeral:
            self._ephemeral.add(block)
        return True

    def commit(self, block: int) -> int | None:
        """Commits pending content.

        Returns:
            The tail that is gone because the block holds it too, None if there is none.
        """
        del self._pending[block]
        return None if block in self._ephemeral else self._settle(block)

    def make_normal(self, block: int) -> int | None:
        """Makes the content of a block, if it has any, normal; its parent's is.

        Returns:
            As `commit`.
        """
        if block not in self._ephemeral:
            return None
        self._ephemeral.remove(block)
        return None if block in self._pending else self._settle(block)

    def keep_tail(self, block: int, content: TailContent) -> int | None:
        """Makes an empty block a tail.

        Not if a child of the same parent begins with the same tokens, or if the parent's content
        is not committed and normal.

        Returns:
            The tail that is gone because it is the beginning of this one, None if there is none.
        """
        parent, tokens = content
        if isinstance(parent, int) and not self.is_settled(parent):
            return None
        if self._children.extends(parent, tokens):
            return None
        gone = self._drop_beginning(parent, tokens)
        self.tails[block] = content
        self._children.add(parent, tokens, block)
        return gone

    def forget(self, block: int) -> BlockContent | None:
        """Empties a block that no other content has as its parent; returns what was in it.

        Returns:
            Its content, None for a tail.
        """
        tail = self.tails.pop(block, None)
        if tail is not None:
            self._children.remove(tail.parent, tail.token_ids, block)
            return None
        content = self.of(block)
        if self.is_settled(block):
            self._children.remove(content.parent, content.token_ids, block)
        self._pending.pop(block, None)
        self._ephemeral.discard(block)
        self._contents[block] = None
        del self._map[content.block_hash]
        return content

    def clear(self) -> None:
        """Empties every block."""
        for block in self._map.values():
            self._contents[block] = None
        self._map.clear()
        self.tails.clear()
        self._children.clear()
        self._pending.clear()
        self._ephemeral.clear()

    def problem(self) -> str | None:
        """Returns which invariant is broken, None when all hold.

        Complexity:
            O(n log n) for n blocks.
        """
        known = [(block, c) for block, c in enumerate(self._contents) if c is not None]
        if {c.block_hash: b for b, c in known} != self._map or len(known) != len(self._map):
            return "the map holds exactly the blocks with content"
        if any(self._contents[block] is not None for block in self.tails):
            return "a tail has no other content"
        marked = {*self._pending, *self._ephemeral}
        if any(self._contents[block] is None for block in marked):
            return "what is pending or ephemeral has content"
        return self._problem_of_parents() or self._problem_of_children()

    def _problem_of_parents(self) -> str | None:
        for block, content in self:
            parent = content.parent
            if isinstance(parent, int) and not (
                self._contents[parent] is not None
                and (block in self._pending or parent not in self._pending)
                and (block in self._ephemeral or parent not in self._ephemeral)
            ):
                return f"the parent {parent} of block {block} has such content too"
        for block, tail in self.tails.items():
            if isinstance(tail.parent, int) and not self.is_settled(tail.parent):
                return f"the parent {tail.parent} of tail {block} is committed"
        return None

    def _problem_of_children(self) -> str | None:
        settled = {(c.parent, c.token_ids, b) for b, c in self if self.is_settled(b)}
        expected = settled | {(t.parent, t.token_ids, b) for b, t in self.tails.items()}
        found = list(self._children)
        if len(found) != len(expected) or set(found) != expected:
            return "the children are what is committed, and the tails"
        tails = {tuple(tail) for tail in self.tails.values()}
        parents = {parent for parent, _ in tails}
        begun = [
            (parent, tokens[:length])
            for parent, tokens, _ in expected
            if parent in parents
            for length in range(1, len(tokens) + 1)
        ]
        if sum(beginning in tails for beginning in begun) != len(self.tails):
            return "no tail is the beginning of another child"
        if any(not 0 < len(tail.token_ids) < self._block_size for tail in self.tails.values()):
            return "a tail is partly filled"
        return None

    def _settle(self, block: int) -> int | None:
        """Makes content a child of its parent, now that it is committed and normal."""
        _, parent, tokens = self.of(block)
        gone = self._drop_beginning(parent, tokens)
        self._children.add(parent, tokens, block)
        return gone

    def _drop_beginning(self, parent: int | Namespace, tokens: Tokens) -> int | None:
        """Forgets the tail that holds nothing but a beginning of `tokens`, and returns it."""
        tail = self._children.beginning(parent, tokens)
        if tail is not None:
            self.forget(tail)
        return tail
