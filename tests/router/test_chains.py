"""Hashes that are looked up are those that are computed, however a prompt grows."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvway_core.blocks import (
    Image,
    Namespace,
    block_hashes,
    event_hash,
    packed_block_hashes,
    packed_tokens,
)
from kvway_router.chains import LONG_BLOCKS, MIN_REST_BLOCKS, SPAN_BLOCKS, ChainCache, EventChain

NAMESPACE = Namespace("m", block_size=4)


def tokens(number: int, *, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2**32) for _ in range(number)]


def expected(token_ids: list[int]) -> list[int]:
    chain = block_hashes(token_ids, parent=NAMESPACE.root(), block_size=NAMESPACE.block_size)
    return [event_hash(block) for block in chain]


def hashed(cache: ChainCache, *parts: list[int]) -> list[int]:
    chain = EventChain(cache)
    for part in parts:
        chain.extend(part)
    assert chain.num_tokens == sum(map(len, parts))
    return list(chain.hashes)


@pytest.mark.property
@settings(max_examples=40)
@given(st.data())
def test_whatever_is_known_and_however_it_grows_the_hashes_are_the_same(
    data: st.DataObject,
) -> None:
    """Prompts that share a beginning, cut anywhere, some of them hashed before."""
    cache = ChainCache(NAMESPACE, max_blocks=data.draw(st.sampled_from([0, 500, 10**6])))
    shared = tokens(5 * LONG_BLOCKS)
    for seed in range(2, 5):
        prompt = shared[: data.draw(st.integers(0, len(shared)))]
        prompt = prompt + tokens(data.draw(st.integers(0, 3 * SPAN_BLOCKS)), seed=seed)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(prompt)), max_size=5)))
        edges = [0, *cuts, len(prompt)]
        parts = [prompt[a:b] for a, b in pairwise(edges)]
        assert hashed(cache, *parts) == expected(prompt)


def test_a_known_beginning_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    num_hashed = 0

    def counting(packed: memoryview, **more: object) -> object:
        nonlocal num_hashed
        num_hashed += len(packed) // (4 * NAMESPACE.block_size)
        return packed_block_hashes(packed, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("kvway_router.chains.packed_block_hashes", counting)
    cache = ChainCache(NAMESPACE)
    prompt = tokens(4 * (2 * LONG_BLOCKS + 3 * SPAN_BLOCKS + 7))
    hashed(cache, prompt)
    assert num_hashed == len(prompt) // 4
    num_hashed = 0
    hashed(cache, prompt + tokens(4 * 10, seed=2))
    assert num_hashed == 7 + 10, "so short a rest is hashed again"
    num_hashed = 0
    hashed(cache, prompt + tokens(4 * 10, seed=2) + tokens(4 * 200, seed=3))
    assert num_hashed == 200, "the rest was kept, too, and is now part of a span"
    num_hashed = 0
    hashed(cache, prompt + tokens(4 * 10, seed=2) + tokens(4 * 150, seed=3))
    assert num_hashed == 0


@pytest.mark.parametrize("num_shared", [0, 1, 40, MIN_REST_BLOCKS, 99, 100])
def test_of_the_last_rest_what_is_shared_is_not_hashed_again(
    monkeypatch: pytest.MonkeyPatch, num_shared: int
) -> None:
    num_hashed = 0

    def counting(packed: memoryview, **more: object) -> object:
        nonlocal num_hashed
        num_hashed += len(packed) // (4 * NAMESPACE.block_size)
        return packed_block_hashes(packed, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("kvway_router.chains.packed_block_hashes", counting)
    cache = ChainCache(NAMESPACE)
    prompt = tokens(4 * (SPAN_BLOCKS + 100))
    hashed(cache, prompt)
    num_hashed = 0
    sibling = prompt[: 4 * (SPAN_BLOCKS + num_shared)] + tokens(4 * 20, seed=2)
    assert hashed(cache, sibling) == expected(sibling)
    assert num_hashed == 20


def test_a_prompt_that_nobody_has_had_is_hashed_some_spans_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No other thread runs while the hashes of a piece are put together."""
    lengths: list[int] = []

    def watched(packed: memoryview, **more: object) -> object:
        lengths.append(len(packed) // (4 * NAMESPACE.block_size))
        return packed_block_hashes(packed, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("kvway_router.chains.packed_block_hashes", watched)
    prompt = tokens(4 * (5 * LONG_BLOCKS + SPAN_BLOCKS + 9))
    assert hashed(ChainCache(NAMESPACE), prompt) == expected(prompt)
    assert (sum(lengths), max(lengths)) == (len(prompt) // 4, LONG_BLOCKS)


@pytest.mark.property
@given(
    lengths=st.lists(st.integers(0, 900), min_size=1, max_size=5),
    images=st.lists(
        st.builds(Image, st.integers(0, 3000), st.sampled_from([b"cat", b"dog"])), max_size=4
    ),
)
@example(lengths=[9, 1, 1, 9], images=[Image(8, b"cat"), Image(10, b"dog")])
@settings(max_examples=60)
def test_images_are_hashed_however_the_prompt_grows(
    lengths: list[int], images: list[Image]
) -> None:
    """And what is kept of one prompt is never another one's with other images."""
    images.sort(key=lambda image: image.place)
    prompt = tokens(sum(lengths))
    cache = ChainCache(NAMESPACE)
    for shown in (images, [], [image._replace(content=b"cow") for image in images]):
        chain, start = EventChain(cache), 0
        for length in lengths:
            end = start + length
            chain.extend(
                prompt[start:end], images=[each for each in shown if start <= each.place < end]
            )
            start = end
        whole = packed_block_hashes(
            packed_tokens(prompt), parent=NAMESPACE.root(), block_size=4, images=shown
        )
        assert list(chain.hashes) == list(map(event_hash, whole))


def test_namespaces_do_not_share_hashes() -> None:
    prompt = tokens(4 * SPAN_BLOCKS)
    one = hashed(ChainCache(NAMESPACE), prompt)
    other = hashed(ChainCache(Namespace("another", block_size=4)), prompt)
    assert set(one).isdisjoint(other)


def test_no_more_is_kept_than_allowed_and_the_last_used_stays() -> None:
    cache = ChainCache(NAMESPACE, max_blocks=4 * SPAN_BLOCKS)
    kept = tokens(4 * SPAN_BLOCKS)
    for seed in range(2, 30):
        hashed(cache, kept)
        hashed(cache, tokens(4 * SPAN_BLOCKS, seed=seed))
        assert cache.num_blocks <= 4 * SPAN_BLOCKS
    assert cache.num_blocks == 4 * SPAN_BLOCKS


def test_rests_count_and_take_each_others_place() -> None:
    cache = ChainCache(NAMESPACE, max_blocks=1000)
    for seed in range(1, 30):
        hashed(cache, tokens(4 * 100, seed=seed))
        assert cache.num_blocks == 100, "all are behind the same: nothing"
    for seed in range(1, 30):
        hashed(cache, tokens(4 * (SPAN_BLOCKS + 100), seed=seed))
        assert cache.num_blocks <= 1000


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_a_token_that_does_not_fit_is_refused_and_changes_nothing(bad: int) -> None:
    chain = EventChain(ChainCache(NAMESPACE))
    chain.extend([1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="32 unsigned bits"):
        chain.extend([6, bad])
    chain.extend([6, 7, 8])
    assert list(chain.hashes) == expected([1, 2, 3, 4, 5, 6, 7, 8])
