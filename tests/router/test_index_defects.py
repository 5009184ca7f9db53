"""What went wrong in other routers' indexes, the whole kind of each: here it does not.

The names in the docstrings are those of defects that were reproduced in NVIDIA Dynamo 1.6.1
(D1 to D9), and of its and llm-d's public issues.
"""

from __future__ import annotations

import random

import pytest

from kvway_core.blocks import HashChain, Namespace, event_hash
from kvway_core.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEvent,
    decode_batch,
    encode_batch,
)
from kvway_router.block_events import OwnBlocks, apply
from kvway_router.holding import Tier
from kvway_router.index import MIN_BYTES, BlockIndex

CHAIN = [11, 12, 13, 14]
BLOCK_SIZE = 16


@pytest.fixture
def index() -> BlockIndex:
    return BlockIndex()


def feed(index: BlockIndex, replica: str, *events: KVEvent) -> None:
    """Has events take the whole way: encoded, decoded, entered."""
    batch = decode_batch(encode_batch(EventBatch(ts=0.0, events=events)))
    assert batch.num_skipped == 0
    assert apply(OwnBlocks(index, replica, block_size=BLOCK_SIZE), batch) == 0


def stored(
    *hashes: int | bytes, parent: int | bytes | None = None, medium: str = "GPU"
) -> BlockStored:
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=parent,
        token_ids=[],
        block_size=BLOCK_SIZE,
        medium=medium,
    )


def removed(*hashes: int | bytes, medium: str = "GPU") -> BlockRemoved:
    return BlockRemoved(block_hashes=list(hashes), medium=medium)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_d1_a_replica_goes_on_behind_what_others_stored_first(
    index: BlockIndex, step: int
) -> None:
    """D1: a continuation by its own parent was dropped where another worker had the content."""
    index.store("a:1", None, CHAIN)
    for start in range(0, 4, step):
        parent = CHAIN[start - 1] if start else None
        feed(index, "b:1", stored(*CHAIN[start : start + step], parent=parent))
    assert index.match(CHAIN) == {"a:1": 4, "b:1": 4}
    feed(index, "b:1", removed(14), removed(12))
    assert index.match(CHAIN) == {"a:1": 4, "b:1": 1}
    feed(index, "a:1", *(removed(block) for block in CHAIN))
    assert index.match(CHAIN) == {"b:1": 1}
    assert sorted(index.blocks("b:1")) == [11, 13]
    feed(index, "b:1", removed(13), removed(11))
    assert len(index) == 0


def test_d1_every_removal_is_honoured_wherever_the_block_went_meanwhile(
    index: BlockIndex,
) -> None:
    """D1, Dynamo 11785: a removal that found nothing left a block listed for ever."""
    rng = random.Random(3)
    chains = [[rng.getrandbits(64) for _ in range(12)] for _ in range(6)]
    chains += [
        [*chain[:cut], *(rng.getrandbits(64) for _ in range(12 - cut))]
        for chain in chains
        for cut in (2, 7)
    ]
    names = ("a:1", "b:1", "c:1")
    for name in names:
        for chain in rng.sample(chains, len(chains)):
            cut = rng.randrange(12)
            index.store(name, chain[cut - 1] if cut else None, chain[cut:])
    for name in names:
        held = list(index.blocks(name))
        rng.shuffle(held)
        for block in held:
            index.remove(name, [block])
        assert index.num_blocks(name) == 0
        index.check_invariants()
    assert len(index) == 0


def test_d3_a_salted_block_matches_its_own_salt_only(index: BlockIndex) -> None:
    """D3: a query without the salt matched, one with it did not."""

    def hashes(namespace: Namespace) -> list[int]:
        chain = HashChain(namespace.root(), BLOCK_SIZE)
        chain.extend(range(48))
        return [event_hash(block_hash) for block_hash in chain.hashes]

    salted = hashes(Namespace("m", cache_salt="tenant-a"))
    index.store("a:1", None, salted)
    assert index.match(salted) == {"a:1": 3}
    for other in (
        Namespace("m"),
        Namespace("m", cache_salt="tenant-b"),
        Namespace("m", adapter="x"),
    ):
        assert index.match(hashes(other)) == {}


def test_d4_nothing_of_a_replica_outlives_its_clearing(index: BlockIndex) -> None:
    """D4, llm-d 2853: after a restart the old blocks were kept and the new ones ignored."""
    feed(index, "a:1", stored(*CHAIN), stored(98, parent=97), stored(11, medium="CPU"))
    promise = index.speculate("a:1", [51, 52])
    index.store("b:1", None, CHAIN)
    feed(index, "a:1", AllBlocksCleared())
    assert index.match(CHAIN, slowest=Tier.DISK) == {"b:1": 4}
    index.store("a:1", None, [97])
    assert index.match([97, 98]) == {"a:1": 1}
    feed(index, "a:1", stored(*CHAIN))
    index.confirm(promise)
    assert index.match(CHAIN) == {"a:1": 4, "b:1": 4}
    assert index.match([51]) == {}


@pytest.mark.parametrize("low", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_d5_d7_every_hash_of_64_bits_in_every_form(index: BlockIndex, low: int) -> None:
    """D5: bytes lost the batch. D7: hashes of 2**63 and above were refused."""
    whole = b"\x07" * 24 + low.to_bytes(8, "big")
    signed = low - 2**64 if low >= 2**63 else low
    for form in (low, signed, whole):
        feed(index, "a:1", stored(form, 5), stored(6, parent=form))
        assert index.match([low, 5]) == {"a:1": 2}
        assert index.match([low, 6]) == {"a:1": 2}
        assert index.speculate("a:1", [low]).expected() == [low]
        feed(index, "a:1", removed(form))
        assert index.match([low]) == {}
        feed(index, "a:1", AllBlocksCleared())


def test_d9_a_burst_of_one_prompt_meets_before_any_event(index: BlockIndex) -> None:
    """D9: identical prompts spread at random until the first event came."""
    promises = [index.speculate("a:1", CHAIN)]
    for _ in range(20):
        assert index.match(CHAIN) == {"a:1": 4}
        promises.append(index.speculate("a:1", CHAIN))
    for promise in promises[:-1]:
        index.rollback(promise)
        assert index.match(CHAIN) == {"a:1": 4}
    index.rollback(promises[-1])
    assert index.match(CHAIN) == {}


TIERS = {"GPU": Tier.DEVICE, "CPU": Tier.HOST, "DISK": Tier.DISK}


@pytest.mark.parametrize("gone", TIERS)
def test_a_removal_on_one_tier_leaves_the_others(index: BlockIndex, gone: str) -> None:
    """Stored on the host, removed from the device: the host's copy still counts."""
    for medium in TIERS:
        feed(index, "a:1", stored(*CHAIN, medium=medium))
    feed(index, "a:1", removed(13, medium=gone))
    for medium, tier in TIERS.items():
        assert index.num_blocks("a:1", tier) == (3 if medium == gone else 4)
    assert index.match(CHAIN).get("a:1") == (2 if gone == "GPU" else 4)
    assert index.match(CHAIN, slowest=Tier.DISK) == {"a:1": 4}


def test_what_moves_from_tier_to_tier_is_matched_across_them(index: BlockIndex) -> None:
    feed(index, "a:1", stored(*CHAIN))
    for block, parent in ((14, 13), (13, 12)):
        feed(index, "a:1", stored(block, parent=parent, medium="CPU"), removed(block))
    feed(index, "a:1", stored(14, parent=13, medium="DISK"), removed(14, medium="CPU"))
    found = [index.match(CHAIN, slowest=tier) for tier in Tier]
    assert found == [{"a:1": 2}, {"a:1": 3}, {"a:1": 4}]
    index.check_invariants()


def test_no_gap_is_jumped_over(index: BlockIndex) -> None:
    """llm-d counted every block that a pod had, whether or not those before it were there."""
    index.store("a:1", None, CHAIN)
    for gap in range(4):
        name = f"gap{gap}:1"
        index.store(name, None, CHAIN)
        index.remove(name, [CHAIN[gap]])
        assert index.match(CHAIN).get(name, 0) == gap


def test_no_length_is_capped(index: BlockIndex) -> None:
    """SGLang 33370: a scan that stopped at 2,048 blocks made longer hits look small."""
    rng = random.Random(5)
    chain = [rng.getrandbits(64) for _ in range(20_000)]
    index.store("a:1", None, chain)
    for size in (1, 2047, 2049, 4096, 4097, 20_000):
        assert index.match(chain[:size]) == {"a:1": size}


def test_the_head_of_a_prompt_is_never_evicted_before_its_tail() -> None:
    """llm-d 2661: an LRU of blocks evicted beginnings and kept tails that match nothing."""
    rng = random.Random(6)
    index = BlockIndex(max_blocks_per_replica=64, max_bytes=4 * MIN_BYTES)
    chains = [[rng.getrandbits(64) for _ in range(20)] for _ in range(12)]
    for _ in range(300):
        chain = rng.choice(chains)
        index.confirm(index.speculate("a:1", chain[: rng.randrange(1, 21)]))
        found = sum(index.match(each).get("a:1", 0) for each in chains)
        assert found == index.num_blocks("a:1")


def test_stored_twice_is_held_once(index: BlockIndex) -> None:
    """Engines announce blocks again when they are reused: a store is no count."""
    for _ in range(3):
        feed(index, "a:1", stored(*CHAIN))
    feed(index, "a:1", stored(*CHAIN[2:], parent=12))
    assert index.num_blocks("a:1") == 4
    feed(index, "a:1", removed(*CHAIN))
    assert len(index) == 0
