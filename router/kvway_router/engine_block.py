"""One block of another engine, in terms of the blocks of the index that it has a part in.

    engine, 24 tokens a block     A ............ B ............ C ............
    index, 16 tokens a block      h0 ..... h1 ..... h2 ..... h3 .....

A makes h0 and lends 8 tokens to h1; B makes h1, for which it borrows 8 tokens, and h2.
"""

from __future__ import annotations

from kvway_core.blocks import BlockHash, event_hash


class EngineBlock:
    """One block of the engine.

    Attributes:
        parent: What the engine calls the block before it; None behind nothing.
        end: Hash of the last whole block of the index that ends in it or before it; None for a
            block that depends on more than tokens.
        rest: Tokens behind that, packed; fewer than a block of the index.
        size: Its tokens.
        inner: Hashes of the blocks of the index that end in it, without `end`.
        makes: Whether `end` ends in it.
        borrowed: Tokens of the first of them that are of blocks before it.
        lent: Blocks of the index that end behind it and take a part of it.
        tiers: A bit for each tier that it is on.
    """

    __slots__ = ("borrowed", "end", "inner", "lent", "makes", "parent", "rest", "size", "tiers")

    def __init__(self, parent: int | None, end: BlockHash | None, rest: bytes, size: int) -> None:
        self.parent = parent
        self.end = end
        self.rest = rest
        self.size = size
        self.inner: tuple[int, ...] = ()
        self.makes = False
        self.borrowed = 0
        self.lent: tuple[int, ...] = ()
        self.tiers = 0

    def made(self) -> tuple[int, ...]:
        """Returns the blocks of the index that end in it."""
        if not self.makes or self.end is None:
            return ()
        return (*self.inner, event_hash(self.end))

    def shared(self) -> tuple[int, ...]:
        """Returns those of them that end before it does: its siblings may begin alike."""
        return self.made() if self.rest else self.inner
