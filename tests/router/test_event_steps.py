"""However much one event names, what is done of it at once is little: the loop has other work."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvway_core.blocks import Namespace, block_hashes
from kvway_core.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvway_router import rehash
from kvway_router.block_events import BlockEvents, OwnBlocks, apply
from kvway_router.evicting import STEP_RUNS
from kvway_router.index import BlockIndex
from kvway_router.rehash import EngineBlocks

NAMESPACE = Namespace("a-model")
NUM_TOKENS = 131_072
NAMES: list[int | bytes] = list(range(1, NUM_TOKENS // 16 + 1))
"""What blocks are called, of our own worker and of another engine."""


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of what is hashed, stored and removed, until the list is cleared."""
    lengths: list[int] = []

    def counted(call: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            lengths.extend(len(arg) for arg in args if isinstance(arg, Sequence | array))
            return call(*args, **kwargs)

        return count

    monkeypatch.setattr(rehash, "block_hashes", counted(block_hashes))
    for name in ("store", "remove"):
        monkeypatch.setattr(BlockIndex, name, counted(getattr(BlockIndex, name)))
    return lengths


def own(index: BlockIndex) -> BlockEvents:
    return OwnBlocks(index, "a:1", block_size=16)


def of_an_engine(index: BlockIndex) -> BlockEvents:
    return EngineBlocks(index, "a:1", root=NAMESPACE.root(), block_size=16)


@pytest.mark.parametrize(
    ("make", "most"),
    [(own, 1024), (of_an_engine, 4096 + 256)],
    ids=["own", "of an engine"],
)
@pytest.mark.parametrize("parent", [None, 10**9], ids=["known parent", "orphan"])
def test_no_step_hashes_stores_or_removes_more_than_a_few_blocks(
    at_once: list[int], make: Callable[[BlockIndex], BlockEvents], most: int, parent: int | None
) -> None:
    index = BlockIndex()
    blocks = make(index)
    told = BlockStored(NAMES, parent, array("I", range(NUM_TOKENS)), 16)
    total = 0
    for num_skipped in blocks.steps(EventBatch(1.0, (told,))):
        assert num_skipped == 0
        assert sum(at_once) <= most + len("a:1")
        total += sum(at_once)
        at_once.clear()
    # Of an engine's orphans only names and tokens are kept.
    assert total >= len(NAMES) or (make is of_an_engine and parent is not None)
    # From both ends, and with gaps: whatever the order, each may cost as much as a run.
    for names in (NAMES[::-4], NAMES[1::4], NAMES):
        for num_skipped in blocks.steps(EventBatch(1.0, (BlockRemoved(names),))):
            assert num_skipped == 0
            assert sum(at_once) <= 128 + len("a:1")
            at_once.clear()
    assert index.num_blocks("a:1") == 0
    index.check_invariants()


def test_an_orphan_that_comes_in_steps_is_held_once_its_parent_is_there() -> None:
    index = BlockIndex()
    blocks = of_an_engine(index)
    told = [
        BlockStored(NAMES[1:], NAMES[0], array("I", range(16, NUM_TOKENS)), 16),
        BlockStored(NAMES[:1], None, list(range(16)), 16),
    ]
    assert sum(blocks.steps(EventBatch(1.0, tuple(told)))) == 0
    assert index.num_blocks("a:1") == len(NAMES)


def test_the_blocks_before_a_token_that_is_none_are_held() -> None:
    index = BlockIndex()
    tokens = list(range(16 * 300))
    tokens[16 * 280] = 2**32
    event = BlockStored(NAMES[:300], None, tokens, 16)
    assert sum(of_an_engine(index).steps(EventBatch(1.0, (event,)))) == 1
    assert index.num_blocks("a:1") == 256


@pytest.mark.parametrize("make", [own, of_an_engine], ids=["own", "of an engine"])
def test_a_cache_is_forgotten_in_steps_and_what_comes_meanwhile_stays(
    make: Callable[[BlockIndex], BlockEvents],
) -> None:
    index = BlockIndex()
    blocks = make(index)
    num_runs = 3 * STEP_RUNS
    for run in range(num_runs):
        names: list[int | bytes] = [10 * run + place for place in range(8)]
        told = BlockStored(names, None, array("I", [run] * 128), 16)
        apply(blocks, EventBatch(1.0, (told,)))
    promise = index.speculate("a:1", [2**40])
    left = index.num_blocks("a:1")
    for num_steps, _ in enumerate(blocks.clearing()):
        gone, left = left - index.num_blocks("a:1"), index.num_blocks("a:1")
        assert gone <= 8 * STEP_RUNS
        if not num_steps:
            index.speculate("a:1", [2**41])
    index.confirm(promise)
    assert list(index.blocks("a:1")) == [2**41]
    apply(blocks, EventBatch(1.0, (BlockStored([1], None, [1] * 16, 16), AllBlocksCleared())))
    assert index.num_blocks("a:1") == 0
    index.check_invariants()
