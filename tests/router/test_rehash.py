"""Blocks of other engines: found by their tokens, known by their hashes, case by case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvway_core.blocks import Namespace, block_hashes, event_hash
from kvway_core.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEvent
from kvway_router.block_events import apply
from kvway_router.holding import Tier
from kvway_router.index import BlockIndex
from kvway_router.rehash import EngineBlocks, RehashOptions

SIZE = 4
NAMESPACE = Namespace("a-model", SIZE)
TOKENS = list(range(100, 148))


def prompt(tokens: Sequence[int]) -> list[int]:
    """What the router looks up for a prompt."""
    chain = block_hashes(tokens, parent=NAMESPACE.root(), block_size=SIZE)
    return [event_hash(block_hash) for block_hash in chain]


class Engine:
    """One replica with hashes of its own, and what the index made of them."""

    def __init__(
        self, index: BlockIndex | None = None, *, name: str = "a:1", **options: int
    ) -> None:
        self.index = BlockIndex() if index is None else index
        self.name = name
        self.blocks = EngineBlocks(
            self.index,
            name,
            root=NAMESPACE.root(),
            block_size=SIZE,
            options=RehashOptions(**options),
        )

    def say(self, *events: KVEvent) -> int:
        return apply(self.blocks, EventBatch(ts=0.0, events=events))

    def matched(self, tokens: Sequence[int] = TOKENS, *, tier: Tier = Tier.DEVICE) -> int:
        return self.index.match(prompt(tokens), slowest=tier).get(self.name, 0)


def stored(
    hashes: Sequence[int | bytes],
    tokens: Sequence[int],
    *,
    parent: int | bytes | None = None,
    size: int = SIZE,
    **fields: Any,
) -> BlockStored:
    return BlockStored(list(hashes), parent, list(tokens), size, **fields)


def removed(*hashes: int | bytes, **fields: Any) -> BlockRemoved:
    return BlockRemoved(list(hashes), **fields)


def test_a_prompt_finds_the_blocks_whatever_the_engine_calls_them() -> None:
    engine = Engine()
    assert engine.say(stored([7, 2**64 - 5], TOKENS[:8])) == 0
    assert engine.say(stored([b"\x01" * 32], TOKENS[8:12], parent=2**64 - 5)) == 0
    assert engine.matched() == 3
    engine.say(removed(b"\x01" * 32))
    assert engine.matched() == 2


def test_signs_and_bytes_are_ways_to_write_one_hash() -> None:
    engine = Engine()
    engine.say(stored([-5], TOKENS[:4]), stored([9], TOKENS[4:8], parent=2**64 - 5))
    assert engine.matched() == 2
    engine.say(removed(bytes(24) + b"\xff" * 7 + b"\xfb"))
    assert engine.matched() == 0


def test_replicas_that_call_the_same_blocks_by_other_names_share_them() -> None:
    """Hashes differ with a seed, a version, an algorithm: continuations and removals still hit."""
    one = Engine()
    other = Engine(one.index, name="b:1")
    one.say(stored([11, 12], TOKENS[:8]), stored([13, 14], TOKENS[8:16], parent=12))
    other.say(stored([21, 22], TOKENS[:8]))
    other.say(stored([23], TOKENS[8:12], parent=22), stored([24], TOKENS[12:16], parent=23))
    assert one.index.match(prompt(TOKENS)) == {"a:1": 4, "b:1": 4}
    other.say(removed(24), removed(23))
    assert one.index.match(prompt(TOKENS)) == {"a:1": 4, "b:1": 2}


# -- block sizes --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 12, 16, 24])
@pytest.mark.parametrize("at_once", [True, False])
def test_blocks_of_any_size_are_cut_anew(size: int, *, at_once: bool) -> None:
    engine = Engine()
    keys = list(range(1, len(TOKENS) // size + 1))
    if at_once:
        engine.say(stored(keys, TOKENS, size=size))
    else:
        for key in keys:
            tokens = TOKENS[(key - 1) * size : key * size]
            engine.say(stored([key], tokens, parent=key - 1 or None, size=size))
            assert engine.matched() == key * size // SIZE
    assert engine.matched() == len(TOKENS) // SIZE
    assert engine.blocks.engine_block_size == size
    for key in reversed(keys):
        engine.say(removed(key))
        assert engine.matched() == (key - 1) * size // SIZE
    assert (len(engine.index), engine.blocks.num_blocks) == (0, 0)


def test_a_short_page_is_taken_with_the_tokens_it_has() -> None:
    engine = Engine()
    engine.say(stored([1], TOKENS[:6], size=16), stored([2], TOKENS[6:12], parent=1, size=16))
    assert engine.matched() == 3


def test_a_block_goes_with_any_part_of_it() -> None:
    engine = Engine()
    engine.say(stored([1, 2], TOKENS[:4], size=2))
    engine.say(stored([3], TOKENS[4:6], parent=2, size=2))
    engine.say(stored([4], TOKENS[6:8], parent=3, size=2), stored([5], [1, 2], parent=3, size=2))
    one, other = prompt(TOKENS[:8]), prompt([*TOKENS[:6], 1, 2])
    assert set(engine.index.blocks("a:1")) == {*one, *other}
    engine.say(removed(3))
    assert set(engine.index.blocks("a:1")) == {one[0]}
    engine.say(removed(1))
    assert len(engine.index) == 0


def test_what_two_blocks_begin_with_goes_with_the_last_of_them() -> None:
    engine = Engine()
    engine.say(stored([1], TOKENS[:8], size=8), stored([2], [*TOKENS[:4], 1, 2, 3, 4], size=8))
    engine.say(removed(2))
    assert engine.matched() == 2
    engine.say(removed(1))
    assert len(engine.index) == 0


def test_branches_that_come_and_go_leave_nothing_behind() -> None:
    engine = Engine()
    engine.say(stored([1], TOKENS[:3], size=3))
    for number in range(50):
        engine.say(stored([2 + number], [number] * 3, parent=1, size=3))
        engine.say(removed(2 + number))
    assert engine.blocks.num_blocks == 1
    assert engine.blocks._blocks[1].lent == ()


# -- what is not entered ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_keys": [["tenant-a"]]},
        {"lora_name": "an-adapter"},
        {"lora_id": 3},
        {"metadata": {"cache_salt": "tenant-a"}},
        {"extra_keys": [[["image-hash", 0]]]},
        {"extra_keys": [None, None]},
    ],
    ids=["salt", "adapter", "adapter id", "sglang salt", "image", "not understood"],
)
def test_what_depends_on_more_than_tokens_is_no_match_for_a_plain_prompt(
    fields: dict[str, Any],
) -> None:
    """Nor is what follows it: vLLM names a salt with the first block alone."""
    engine = Engine()
    engine.say(stored([1], TOKENS[:4], **fields))
    engine.say(stored([2, 3], TOKENS[4:12], parent=1))
    assert engine.matched() == 0
    assert len(engine.index) == 0
    assert engine.blocks.num_waiting == 0
    engine.say(stored([11], TOKENS[:4]))
    assert engine.matched() == 1


def test_what_is_before_an_image_is_a_plain_prompt() -> None:
    engine = Engine()
    keys = [None, [["image-hash", 1]], None]
    engine.say(stored([1, 2, 3], TOKENS[:12], extra_keys=keys))
    assert engine.matched() == 1


def test_groups_of_layers_that_forget_are_not_listed_and_their_removals_are_not_ours() -> None:
    engine = Engine()
    engine.say(
        stored([1, 2], TOKENS[:8], group_idx=0, kv_cache_spec_kind="full_attention"),
        stored([1, 2], TOKENS[:8], group_idx=1, kv_cache_spec_kind="sliding_window"),
        stored([3], TOKENS[8:12], parent=2, group_idx=1, kv_cache_spec_kind="mamba"),
        removed(1, group_idx=1),
    )
    assert engine.matched() == 2
    engine.say(removed(2, group_idx=0))
    assert engine.matched() == 1


def test_what_is_at_a_peer_or_on_an_unknown_medium_is_not_the_replicas() -> None:
    engine = Engine()
    engine.say(
        stored([1], TOKENS[:4], locality="REMOTE"), stored([1], TOKENS[:4], medium="EXTERNAL")
    )
    assert engine.matched(tier=Tier.DISK) == 0
    engine.say(stored([1], TOKENS[:4]), removed(1, locality="REMOTE"))
    assert engine.matched() == 1


@pytest.mark.parametrize(
    "event",
    [
        stored([1, 2], TOKENS[:7]),
        stored([1], TOKENS[:5]),
        stored([], TOKENS[:4]),
        stored([1], [1, 2, 3, -1]),
        stored([1], [1, 2, 3, 2**32]),
        stored([1], [], parent=5),
        stored([1], TOKENS[:4], size=0),
    ],
)
def test_an_event_without_the_tokens_of_its_blocks_is_of_no_use(event: BlockStored) -> None:
    engine = Engine()
    assert engine.say(stored([9], TOKENS[:4]), event, removed(9)) == 1
    assert len(engine.index) == 0


# -- tiers --------------------------------------------------------------------------------------


def test_a_slower_tier_is_told_by_hash_alone() -> None:
    """So does vLLM with what it copied to the host: without tokens and without a parent."""
    engine = Engine()
    engine.say(stored([1, 2, 3], TOKENS[:12]))
    engine.say(stored([1, 2], [], medium="CPU"))
    engine.say(removed(3, 2, 1))
    assert (engine.matched(), engine.matched(tier=Tier.HOST)) == (0, 2)
    engine.say(stored([1, 2], TOKENS[:8]))
    assert engine.matched() == 2
    engine.say(removed(2, medium="CPU"), removed(2))
    assert (engine.matched(), engine.matched(tier=Tier.HOST)) == (1, 1)
    engine.say(removed(1, medium="CPU"), removed(1))
    assert engine.blocks.num_blocks == 0


@pytest.mark.parametrize(
    ("medium", "tier"),
    [("CPU_PINNED", Tier.HOST), ("DISK", Tier.DISK), ("STORAGE", Tier.DISK)],
)
def test_media_are_tiers(medium: str, tier: Tier) -> None:
    engine = Engine()
    engine.say(stored([1], TOKENS[:4], medium=medium))
    assert [engine.matched(tier=each) for each in Tier] == [each >= tier for each in Tier]


def test_a_part_on_a_slower_tier_makes_no_whole_there() -> None:
    engine = Engine()
    engine.say(stored([1, 2, 3, 4], TOKENS[:8], size=2), stored([1, 2, 4], [], medium="CPU"))
    engine.say(removed(4, 3, 2, 1))
    assert engine.matched(tier=Tier.HOST) == 1
    assert set(engine.index.blocks("a:1", Tier.HOST)) == {prompt(TOKENS)[0]}


# -- order, bounds ------------------------------------------------------------------------------


def test_orphans_wait_for_their_parent() -> None:
    engine = Engine()
    engine.say(stored([3], TOKENS[8:12], parent=2), stored([2], TOKENS[4:8], parent=1))
    assert (engine.matched(), engine.blocks.num_waiting) == (0, 2)
    engine.say(stored([1], TOKENS[:4]))
    assert (engine.matched(), engine.blocks.num_waiting) == (3, 0)


@pytest.mark.parametrize("is_removed", [False, True])
@pytest.mark.parametrize("parent", [999, 7, 8], ids=["unknown", "itself", "one another"])
def test_an_orphan_that_is_told_again_waits_once(parent: int, *, is_removed: bool) -> None:
    engine = Engine()
    for _ in range(100):
        engine.say(stored([7], TOKENS[:4], parent=parent), stored([8], TOKENS[:4], parent=7))
        if is_removed:
            engine.say(removed(7))
    assert engine.blocks.num_waiting == 2 - is_removed
    held = engine.blocks._orphans
    assert (len(held._runs), held.num_tokens) == (2 - is_removed, SIZE * (2 - is_removed))


def test_an_event_that_names_the_parent_twice_has_orphans_entered_once() -> None:
    engine = Engine()
    engine.say(stored([2], TOKENS[4:8], parent=1), stored([3], TOKENS[4:8], parent=1))
    engine.say(stored([1, 9, 1], TOKENS[:4] * 3))
    engine.blocks._orphans.check()
    assert engine.blocks.num_waiting == 0


def test_an_orphan_that_waits_on_two_tiers_is_removed_from_one() -> None:
    engine = Engine()
    engine.say(
        stored([2], TOKENS[4:8], parent=1),
        stored([2], TOKENS[4:8], parent=1, medium="CPU"),
        removed(2),
        stored([1], TOKENS[:4]),
        stored([1], [], medium="CPU"),
    )
    assert (engine.matched(), engine.matched(tier=Tier.HOST)) == (1, 2)


def test_an_orphan_that_is_known_on_another_tier_is_removed_too() -> None:
    engine = Engine(max_blocks=1)
    engine.say(stored([1], TOKENS[:4], medium="CPU"), stored([2], TOKENS[4:8], parent=1))
    engine.say(stored([2], TOKENS[4:8], parent=1, medium="CPU"), removed(2, medium="CPU"))
    engine.say(stored([1], TOKENS[:4], medium="CPU"))
    assert engine.matched(tier=Tier.HOST) == 1


def test_tokens_of_an_engines_blocks_are_bounded_too() -> None:
    """A few large blocks would take what many small ones may."""
    engine = Engine(max_tokens=100, max_waiting_tokens=100)
    for number in range(10):
        engine.say(stored([number], [number] * 40, size=40))
        engine.say(stored([100 + number], TOKENS[:40], parent=1000 + number, size=40))
        engine.say(stored([200, 201, 202], TOKENS[:36] * 3, parent=1000 + number, size=36))
    assert (engine.blocks.num_blocks, engine.blocks.num_waiting) == (2, 2)
    assert engine.blocks._orphans.num_tokens == 80
    assert len(engine.index) == 20


def test_a_block_that_no_engine_has_is_of_no_use() -> None:
    engine = Engine()
    assert engine.say(stored([1], [5] * 16_385, size=16_385)) == 1
    assert engine.say(stored([1], [5] * 16_384, size=16_384)) == 0


@pytest.mark.parametrize(("size", "num_blocks"), [(1, 3000), (4, 3000), (6, 1000), (4096, 3)])
def test_a_large_event_is_entered_in_steps(size: int, num_blocks: int) -> None:
    """In order, and as if at once; so are removals and what waited in between."""
    engine, tokens = Engine(), [n % 977 for n in range(size * num_blocks)]
    keys = list(range(1, num_blocks + 1))
    engine.say(stored([5000], TOKENS[:size], parent=keys[num_blocks // 2], size=min(size, 48)))
    batch = EventBatch(ts=0.0, events=(stored(keys, tokens, size=size),))
    matched = []
    for num_skipped in engine.blocks.steps(batch):
        assert num_skipped == 0
        matched.append(engine.matched(tokens))
    assert matched == sorted(matched)
    assert matched[-1] == len(tokens) // SIZE
    assert max(b - a for a, b in zip([0, *matched], matched, strict=False)) <= 4096 // SIZE
    batch = EventBatch(ts=0.0, events=(removed(*reversed(keys)),))
    assert sum(1 for _ in engine.blocks.steps(batch)) >= num_blocks / 256
    assert engine.matched(tokens) == 0


def test_an_orphan_that_is_removed_does_not_come_back_with_its_parent() -> None:
    engine = Engine()
    engine.say(stored([2, 3, 4], TOKENS[4:16], parent=1), removed(3))
    engine.say(stored([1], TOKENS[:4]))
    assert engine.matched() == 2


def test_what_is_told_twice_is_held_once() -> None:
    engine = Engine()
    for _ in range(3):
        engine.say(stored([1, 2], TOKENS[:4], size=2))
    assert engine.matched() == 1
    engine.say(removed(2))
    assert engine.matched() == 0


def test_a_cleared_cache_is_empty() -> None:
    engine = Engine()
    engine.say(stored([1, 2], TOKENS[:8]), stored([5], TOKENS[:4], parent=99))
    engine.say(AllBlocksCleared(), stored([2], TOKENS[4:8], parent=1))
    assert (engine.matched(), engine.blocks.num_blocks, engine.blocks.num_waiting) == (0, 0, 1)


def test_memory_of_an_engines_blocks_is_bounded() -> None:
    engine = Engine(max_blocks=3, max_waiting_blocks=2)
    for number in range(10):
        engine.say(stored([number], [number] * 4))
        engine.say(stored([100 + number], TOKENS[:4], parent=1000 + number))
    assert (engine.blocks.num_blocks, engine.blocks.num_waiting) == (3, 2)
    assert sorted(engine.index.blocks("a:1")) == sorted(
        prompt([number] * 4)[0] for number in (7, 8, 9)
    )


def test_what_blocks_lent_together_ends_with_the_first_of_them_to_go() -> None:
    """Also where a block in the middle goes before the one that it was lent to."""
    engine = Engine()
    engine.say(stored([1], TOKENS[:1], size=1))
    for number in range(50):
        middle, last = 10 + number, 100 + number
        engine.say(stored([2], TOKENS[1:2], parent=1, size=1))
        engine.say(stored([middle, last], [number, 7], parent=2, size=1))
        assert engine.matched([*TOKENS[:2], number, 7]) == 1
        engine.say(removed(middle))
        assert engine.matched([*TOKENS[:2], number, 7]) == 0
        engine.say(removed(last))
    held = engine.blocks._blocks
    assert set(held) == {1, 2}
    assert not any(block.lent for block in held.values())
