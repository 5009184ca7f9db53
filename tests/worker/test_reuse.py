"""Reuse distances against real least-recently-used pools of other sizes."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvway_core.blocks import BlockHash
from kvway_worker.cache.reuse import DISTANCE_BUCKETS, MAX_TRACKED, ReuseDistances


def key(name: object) -> BlockHash:
    return BlockHash(xxhash.xxh3_128_digest(repr(name).encode()))


def lru_hit_rate(prompts: Iterable[Sequence[BlockHash]], num_blocks: int) -> float:
    """Simulates a pool that gives up the least recently used block, tails first."""
    pool: OrderedDict[BlockHash, None] = OrderedDict()
    num_hits = num_lookups = 0
    for prompt in prompts:
        num_lookups += len(prompt)
        for block in prompt:
            if block not in pool:
                break
            num_hits += 1
        for block in reversed(prompt):
            pool[block] = None
            pool.move_to_end(block)
        while len(pool) > num_blocks:
            pool.popitem(last=False)
    return num_hits / num_lookups


def expected(
    prompts: Iterable[Sequence[BlockHash]], num_blocks: int, max_tracked: int = MAX_TRACKED
) -> dict[float, float]:
    reuse = ReuseDistances(num_blocks, max_tracked=max_tracked)
    for prompt in prompts:
        reuse.look_up(prompt)
    read = reuse.read()
    return {factor: read.hit_rate_at(factor) for factor in DISTANCE_BUCKETS}


def chat_prompts(seed: int, num_prompts: int) -> list[list[BlockHash]]:
    """One system prompt, sessions that grow and are forgotten, popular ones more often."""
    rng = random.Random(seed)
    system = [key(("system", index)) for index in range(20)]
    sessions: list[list[BlockHash]] = []
    prompts = []
    for number in range(num_prompts):
        if not sessions or rng.random() < 0.3:
            sessions.append(list(system))
        session = sessions[-1 - min(int(rng.expovariate(0.02)), len(sessions) - 1)]
        session += [key((number, index)) for index in range(rng.randrange(1, 12))]
        prompts.append(list(session))
    return prompts


@pytest.mark.property
@given(
    st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=8), min_size=1, max_size=40),
    st.sampled_from([8, 16]),
)
def test_without_sampling_it_is_exactly_what_pools_of_other_sizes_hit(
    texts: list[list[str]], num_blocks: int
) -> None:
    prompts = [[key(text[: end + 1]) for end in range(len(text))] for text in texts]
    for factor, rate in expected(prompts, num_blocks).items():
        assert rate == pytest.approx(lru_hit_rate(prompts, int(factor * num_blocks)))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_sample_of_blocks_predicts_what_pools_of_other_sizes_hit(seed: int) -> None:
    """One block in 8 is tracked; the pools are simulated whole."""
    prompts = chat_prompts(seed, 2000)
    num_blocks = 1024
    rates = expected(prompts, num_blocks, max_tracked=1024)
    real = {factor: lru_hit_rate(prompts, factor * num_blocks) for factor in (1, 2)}
    assert real[2] - real[1] > 0.05, "the pools differ"
    for factor, rate in real.items():
        assert rates[factor] == pytest.approx(rate, abs=0.03)


@pytest.mark.parametrize("sampled", [True, False])
def test_one_hot_block_more_or_less_in_the_sample_changes_little(*, sampled: bool) -> None:
    """The correction: a block that every prompt has, in the sample or not."""
    hot = next(name for name in map(key, range(10_000)) if (name[0] < 16) == sampled)
    prompts = [[hot, key(("tail", number % 3000))] for number in range(6000)]
    rates = expected(prompts, 1000, max_tracked=500)
    assert rates[1.0] == pytest.approx(0.5, abs=0.05)
    assert rates[4.0] == pytest.approx(0.75, abs=0.06)


def test_a_lookup_of_all_its_blocks_at_once_finds_them_in_a_pool_that_just_holds_them() -> None:
    prompt = [key(index) for index in range(8)]
    rates = expected([prompt, prompt], 8)
    assert (rates[0.5], rates[1.0]) == (0.25, 0.5)


def test_blocks_of_answers_take_up_room_and_can_be_hit() -> None:
    reuse = ReuseDistances(8)
    first, second = ([key((name, index)) for index in range(4)] for name in "ab")
    reuse.look_up(first)
    for block in second:
        reuse.store(block)
    reuse.look_up(first)
    assert reuse.read().hit_rate_at(0.5) == 0.0
    assert reuse.read().hit_rate_at(1.0) == 0.5
    reuse.look_up(second)
    assert reuse.read().hit_rate_at(1.0) == pytest.approx(8 / 12)


def test_what_is_tracked_is_bounded() -> None:
    reuse = ReuseDistances(10_000, max_tracked=100)
    for number in range(2000):
        reuse.look_up([key((number, index)) for index in range(100)])
    assert len(reuse._used) == len(reuse._order) == 100
    reuse.clear()
    assert len(reuse._used) == len(reuse._order) == 0


def test_a_reset_forgets_the_blocks_and_keeps_what_was_measured() -> None:
    reuse = ReuseDistances(8)
    prompt = [key(index) for index in range(4)]
    reuse.look_up(prompt)
    reuse.clear()
    reuse.look_up(prompt)
    assert reuse.read().hit_rate_at(8.0) == 0.0
    assert reuse.read().distances.num_observed == 8
    reuse.look_up(prompt)
    assert reuse.read().hit_rate_at(0.5) == pytest.approx(4 / 12), "no older block is in between"


def test_storing_what_was_looked_up_changes_no_order() -> None:
    reuse = ReuseDistances(8)
    prompt = [key(index) for index in range(4)]
    reuse.look_up(prompt)
    for block in prompt:
        reuse.store(block)
    reuse.look_up(prompt[:1])
    assert reuse.read().hit_rate_at(0.125) == pytest.approx(1 / 5), "the head is the most recent"


def test_nothing_is_expected_of_nothing() -> None:
    assert ReuseDistances(8).read().hit_rate_at(1.0) == 0.0
