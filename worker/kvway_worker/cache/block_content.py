"""What is in a block, and what is found for a prompt. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kvway_core.blocks import BlockHash, Namespace

Parent: TypeAlias = int | Namespace
"""Id of the block before a block; the namespace for a first block."""

Tokens: TypeAlias = tuple[int, ...]


class BlockContent(NamedTuple):
    """What a full block holds.

    Attributes:
        block_hash: Its place in the chain.
        parent: Id of the block before it; the namespace for a first block.
        token_ids: Its tokens.
    """

    block_hash: BlockHash
    parent: Parent
    token_ids: Tokens


class TailContent(NamedTuple):
    """What a partly filled block holds that its request left behind.

    Attributes:
        parent: Id of the block before it; the namespace for a first block.
        token_ids: Its tokens, at least one and fewer than a block has.
    """

    parent: Parent
    token_ids: Tokens


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
