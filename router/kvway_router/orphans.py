"""Blocks of an engine whose parent is not known yet: they wait for it, within bounds."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Self

from kvway_core.errors import InvariantViolated
from kvway_core.events import BlockStored
from kvway_router.block_events import low_64_bits
from kvway_router.holding import Tier

MAX_BLOCK_TOKENS = 16_384
"""Events with larger blocks are of no use: no engine has them, and one is entered in one step."""


class Run:
    """Blocks that an engine stored, one behind the other.

    Attributes:
        parent: What the engine calls the block before the first; None behind nothing.
        keys: What it calls them.
        tokens: Theirs, packed.
        size: Tokens per block.
        num_plain: How many of the first depend on nothing but tokens.
        tier: Where they are.
    """

    __slots__ = ("keys", "num_plain", "parent", "size", "tier", "tokens")

    def __init__(
        self,
        parent: int | None,
        keys: list[int],
        tokens: array[int],
        *,
        size: int,
        num_plain: int,
        tier: Tier,
    ) -> None:
        """Takes what it is of."""
        self.parent = parent
        self.keys = keys
        self.tokens = tokens
        self.size = size
        self.num_plain = num_plain
        self.tier = tier

    @classmethod
    def each(
        cls, event: BlockStored, tier: Tier, *, max_blocks: int, max_tokens: int
    ) -> Iterator[Self]:
        """Yields what an event says, in runs of so many blocks and tokens; one block at least.

        Nothing where the event does not have the tokens of its blocks.

        Raises:
            OverflowError: A token does not fit 32 unsigned bits. The runs before it are sound.
        """
        size = _tokens_per_block(event)
        if size is None or size > MAX_BLOCK_TOKENS:
            return
        num_blocks, num_plain = min(max_blocks, max(1, max_tokens // size)), event.num_plain()
        before = event.parent_block_hash
        parent = None if before is None else low_64_bits(before)
        for start in range(0, len(event.block_hashes), num_blocks):
            end = start + num_blocks
            keys = [low_64_bits(block_hash) for block_hash in event.block_hashes[start:end]]
            tokens = array("I", event.token_ids[start * size : end * size])
            plain = max(0, num_plain - start)
            yield cls(parent, keys, tokens, size=size, num_plain=plain, tier=tier)
            parent = keys[-1]


class Orphans:
    """Runs whose parent is not known; the oldest go first where they are too many.

    Invariants:
        1. A block waits once on each tier: what is told again takes the place of what was told,
           and what was told behind that goes with it, as it does with a block that is removed.
        2. At most so many blocks and so many tokens wait. No run is empty.

    Args:
        max_blocks: Bound of the blocks.
        max_tokens: Bound of the tokens in them.

    Attributes:
        num_blocks: Blocks that wait.
        num_tokens: Tokens in them.
    """

    def __init__(self, *, max_blocks: int, max_tokens: int) -> None:
        """Nobody waits."""
        self.num_blocks = 0
        self.num_tokens = 0
        self._max_blocks = max_blocks
        self._max_tokens = max_tokens
        # In the order in which they came; a dict because one may leave from the middle.
        self._runs: dict[Run, None] = {}
        self._behind: dict[int, dict[Run, None]] = {}
        self._at: dict[tuple[Tier, int], tuple[Run, int]] = {}

    def wait(self, run: Run) -> None:
        """Has a run wait for its parent."""
        if run.parent is None or len(run.keys) > self._max_blocks:
            return
        if len(run.tokens) > self._max_tokens:
            return
        for key in run.keys:
            self.cut(key, run.tier)
        for place, key in enumerate(run.keys):
            self._at.setdefault((run.tier, key), (run, place))
        self._runs[run] = None
        self._behind.setdefault(run.parent, {})[run] = None
        self.num_blocks += len(run.keys)
        self.num_tokens += len(run.tokens)
        while self.num_blocks > self._max_blocks or self.num_tokens > self._max_tokens:
            self._drop(next(iter(self._runs)), 0)

    def take(self, keys: Iterable[int]) -> list[Run]:
        """Returns the runs that waited for one of these; they wait no more."""
        if not self._runs:
            return []
        taken = [run for key in dict.fromkeys(keys) for run in self._behind.get(key, ())]
        for run in taken:
            self._forget(run, 0)
            self._leave(run)
        return taken

    def cut(self, key: int, tier: Tier) -> None:
        """Drops a block that waits on a tier, and those behind it in its run."""
        run, place = self._at.get((tier, key), (None, 0))
        if run is not None:
            self._drop(run, place)

    def clear(self) -> None:
        """Nobody waits any more."""
        self.num_blocks = self.num_tokens = 0
        self._runs.clear()
        self._behind.clear()
        self._at.clear()

    def check(self) -> None:
        """Compares the books with one another. For tests.

        Raises:
            InvariantViolated: A numbered invariant of the class does not hold.
        """
        runs = list(self._runs)
        places = self._at.items()
        if any(run.keys[place] != key for (_, key), (run, place) in places):
            raise InvariantViolated("1: a block is not where it should be")
        if set(self._at) != {(run.tier, key) for run in runs for key in run.keys}:
            raise InvariantViolated("1: other blocks can be cut than those that wait")
        if sum(map(len, self._behind.values())) != len(runs) or not all(self._behind.values()):
            raise InvariantViolated("2: other runs wait for a parent than those that wait")
        if self.num_blocks != sum(len(run.keys) for run in runs) or not all(r.keys for r in runs):
            raise InvariantViolated("2: the blocks are not counted, or a run is empty")
        if self.num_tokens != sum(len(run.tokens) for run in runs):
            raise InvariantViolated("2: the tokens are not counted")
        if self.num_blocks > self._max_blocks or self.num_tokens > self._max_tokens:
            raise InvariantViolated("2: more waits than may")

    def _drop(self, run: Run, place: int) -> None:
        """Drops the blocks of a run from a place on."""
        self._forget(run, place)
        del run.keys[place:], run.tokens[place * run.size :]
        if not run.keys:
            self._leave(run)

    def _forget(self, run: Run, place: int) -> None:
        """Counts the blocks from a place on no more."""
        for at, key in enumerate(run.keys[place:], place):
            # A run may name a block twice: its first place counts.
            if self._at.get((run.tier, key)) == (run, at):
                del self._at[run.tier, key]
        self.num_blocks -= len(run.keys) - place
        self.num_tokens -= len(run.tokens) - place * run.size

    def _leave(self, run: Run) -> None:
        del self._runs[run]
        assert run.parent is not None  # noqa: S101  else it would not wait
        behind = self._behind[run.parent]
        del behind[run]
        if not behind:
            del self._behind[run.parent]


def _tokens_per_block(event: BlockStored) -> int | None:
    """Returns how many tokens each block has; None where the event does not tell.

    The last page of SGLang may be short, and then it comes alone.
    """
    num_tokens, num_blocks = len(event.token_ids), len(event.block_hashes)
    if num_blocks and 0 < num_tokens == num_blocks * event.block_size:
        return event.block_size
    return num_tokens if num_blocks == 1 and 0 < num_tokens < event.block_size else None
