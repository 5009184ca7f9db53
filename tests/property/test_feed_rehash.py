"""Blocks of an engine against a naive model: sets of blocks and all prompts spelt out.

An engine stores and removes blocks of its own size, in any order, on several tiers; some depend
on more than tokens. A block of the index may be listed on a tier only while every token in it is
in a block that is there; and while ends go before beginnings, all such blocks are listed.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from typing_extensions import override

from kvway_core.blocks import Namespace, block_hashes, event_hash
from kvway_core.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEvent
from kvway_router.block_events import apply
from kvway_router.holding import Tier
from kvway_router.index import BlockIndex
from kvway_router.rehash import EngineBlocks, RehashOptions

REPLICA = "a:1"
SIZE = 4
ROOT = Namespace("a-model", SIZE).root()
MEDIA = {"GPU": Tier.DEVICE, "CPU": Tier.HOST}

Path = tuple[tuple[int, ...], ...]
"""The tokens of a block and of all blocks before it, block by block: what an engine's hash is."""


class RehashMachine(RuleBasedStateMachine):
    tails_first = False

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex()
        self.blocks = EngineBlocks(self.index, REPLICA, root=ROOT, block_size=SIZE)
        self.held: dict[Tier, set[Path]] = {tier: set() for tier in MEDIA.values()}
        self.keys: dict[Path, int] = {}
        self.size = 1

    @initialize(size=st.sampled_from([1, 2, 3, 4, 6, 8]))
    def choose_size(self, size: int) -> None:
        self.size = size

    def key(self, path: Path) -> int:
        return self.keys.setdefault(path, 1000 + 7 * len(self.keys))

    def say(self, event: KVEvent) -> None:
        assert apply(self.blocks, EventBatch(ts=0.0, events=(event,))) == 0

    def is_plain(self, path: Path) -> bool:
        """Blocks whose first token is 9 have an image in them."""
        return all(block[0] != 9 for block in path)

    @rule(
        data=st.data(),
        medium=st.sampled_from(sorted(MEDIA)),
        length=st.integers(1, 4),
        seed=st.integers(0, 2),
        with_image=st.sampled_from([False, False, False, True]),
    )
    def store(
        self, data: st.DataObject, medium: str, length: int, seed: int, *, with_image: bool
    ) -> None:
        """Behind a block that is there, or behind nothing."""
        held = self.held[MEDIA[medium]]
        parents: list[Path] = [(), *sorted(held)]
        parent = data.draw(st.sampled_from(parents))
        run: list[Path] = []
        for number in range(length):
            last = with_image and number == length - 1
            block = (9 if last else seed, *([number + seed] * (self.size - 1)))
            run.append((*(run[-1] if run else parent), block))
        self.say(
            BlockStored(
                block_hashes=[self.key(path) for path in run],
                parent_block_hash=self.key(parent) if parent else None,
                token_ids=[token for path in run for token in path[-1]],
                block_size=self.size,
                medium=medium,
                extra_keys=[[["image", 0]] if path[-1][0] == 9 else None for path in run],
            )
        )
        held.update(run)

    @rule(data=st.data(), medium=st.sampled_from(sorted(MEDIA)))
    def remove(self, data: st.DataObject, medium: str) -> None:
        held = self.held[MEDIA[medium]]
        choices = sorted(held)
        if self.tails_first:
            choices = [path for path in choices if not any(p[:-1] == path for p in held)]
        if not choices:
            return
        path = data.draw(st.sampled_from(choices))
        held.remove(path)
        self.say(BlockRemoved([self.key(path)], medium))

    @rule()
    @precondition(lambda self: any(self.held.values()))
    def clear(self) -> None:
        for held in self.held.values():
            held.clear()
        self.say(AllBlocksCleared())

    def expected(self, tier: Tier) -> set[int]:
        hashes: set[int] = set()
        held = self.held[tier]
        for path in held:
            if not self.is_plain(path):
                continue
            tokens = [token for block in path for token in block]
            for place, block_hash in enumerate(block_hashes(tokens, parent=ROOT, block_size=SIZE)):
                first = place * SIZE // self.size
                last = ((place + 1) * SIZE - 1) // self.size
                if all(path[: number + 1] in held for number in range(first, last + 1)):
                    hashes.add(event_hash(block_hash))
        return hashes

    @invariant()
    def lists_what_is_whole(self) -> None:
        self.index.check_invariants()
        for tier in MEDIA.values():
            listed = set(self.index.blocks(REPLICA, tier))
            expected = self.expected(tier)
            assert listed <= expected
            if self.tails_first:
                assert listed == expected
        assert self.blocks.num_blocks == len(set().union(*self.held.values()))

    @invariant()
    def lends_nothing_to_nobody(self) -> None:
        known = self.blocks._blocks
        assert self.blocks._num_tokens == sum(block.size for block in known.values())
        made = {block_hash for block in known.values() for block_hash in block.made()}
        for block in known.values():
            assert set(block.lent) <= made


class TailsFirstMachine(RehashMachine):
    """As engines evict: then nothing that is there is missing."""

    tails_first = True


class OrphanMachine(RehashMachine):
    """Blocks whose parent is not there wait, each once however often it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.odd: set[tuple[Tier, int]] = set()

    @rule(
        data=st.data(),
        medium=st.sampled_from(sorted(MEDIA)),
        repeats=st.integers(1, 3),
        is_removed=st.booleans(),
    )
    @precondition(lambda self: self.keys)
    def store_orphans(
        self, data: st.DataObject, medium: str, repeats: int, *, is_removed: bool
    ) -> None:
        """Blocks that were named before, behind what may be gone by now."""
        last = data.draw(st.sampled_from(sorted(self.keys)))
        run = [last[: place + 1] for place in range(data.draw(st.integers(0, 2)), len(last))]
        if not run:
            return
        parent = run[0][:-1]
        for _ in range(repeats):
            self.say(
                BlockStored(
                    block_hashes=[self.key(path) for path in run],
                    parent_block_hash=self.key(parent) if parent else None,
                    token_ids=[token for path in run for token in path[-1]],
                    block_size=self.size,
                    medium=medium,
                    extra_keys=[[["image", 0]] if path[-1][0] == 9 else None for path in run],
                )
            )
            self.held[MEDIA[medium]].update(run)
            if is_removed:
                gone = data.draw(st.sampled_from(run))
                self.held[MEDIA[medium]].discard(gone)
                self.say(BlockRemoved([self.key(gone)], medium))

    @rule(
        medium=st.sampled_from(sorted(MEDIA)),
        keys=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        parent=st.integers(1, 4),
        repeats=st.integers(1, 3),
        is_removed=st.booleans(),
    )
    def store_nonsense(
        self, medium: str, keys: list[int], parent: int, repeats: int, *, is_removed: bool
    ) -> None:
        """Blocks behind themselves, behind one another, twice in an event, behind nobody."""
        tier = MEDIA[medium]
        for _ in range(repeats):
            self.say(
                BlockStored(
                    block_hashes=list(keys),
                    parent_block_hash=parent,
                    token_ids=[7] * (len(keys) * self.size),
                    block_size=self.size,
                    medium=medium,
                )
            )
            self.odd.update((tier, key) for key in keys)
            if is_removed:
                self.odd.discard((tier, keys[0]))
                self.say(BlockRemoved([keys[0]], medium))

    @override
    def clear(self) -> None:
        self.odd.clear()
        super().clear()

    @override
    @invariant()
    def lists_what_is_whole(self) -> None:
        self.index.check_invariants()
        for tier in MEDIA.values():
            assert set(self.index.blocks(REPLICA, tier)) <= self.expected(tier)
        assert self.blocks.num_blocks <= len(set().union(*self.held.values()))

    @invariant()
    def keeps_what_waits_once(self) -> None:
        """In blocks and in tokens: a run may name a block twice, and is kept as it is."""
        orphans = self.blocks._orphans
        orphans.check()
        num_named = 3 * len(self.odd) + sum(map(len, self.held.values()))
        assert orphans.num_blocks <= num_named
        assert orphans.num_tokens == orphans.num_blocks * self.size


class BoundedMachine(OrphanMachine):
    """With room for few blocks nothing is made up either."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = EngineBlocks(
            self.index,
            REPLICA,
            root=ROOT,
            block_size=SIZE,
            options=RehashOptions(
                max_blocks=5, max_tokens=30, max_waiting_blocks=5, max_waiting_tokens=20
            ),
        )

    @override
    @invariant()
    def lists_what_is_whole(self) -> None:
        self.index.check_invariants()
        assert self.blocks.num_blocks <= 5
        assert self.blocks.num_waiting <= 5
        assert self.blocks._orphans.num_tokens <= 20
        assert sum(block.size for block in self.blocks._blocks.values()) <= 30
        for tier in MEDIA.values():
            assert set(self.index.blocks(REPLICA, tier)) <= self.expected(tier)


_MORE = settings(max_examples=30, stateful_step_count=25, deadline=None)

TestRehash = RehashMachine.TestCase
TestTailsFirst = TailsFirstMachine.TestCase
TestOrphans = OrphanMachine.TestCase
TestBounded = BoundedMachine.TestCase
TestRehash.settings = _MORE
TestTailsFirst.settings = _MORE
TestOrphans.settings = _MORE
TestBounded.settings = _MORE
