"""Misses by reason, and the lives of blocks, told by hand; then through a real pool."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvway_core.blocks import BlockHash, HashChain, Namespace
from kvway_worker.cache.cache_stats import MISS_REASONS, CacheStats, MissReason
from kvway_worker.cache.histogram import Histogram

SIZE = 4


def stats(num_blocks: int = 10) -> CacheStats:
    return CacheStats(num_blocks=num_blocks, block_size=SIZE)


def hashes(token_ids: Sequence[int], salt: str = "") -> list[BlockHash]:
    chain = HashChain(namespace(salt).root(), SIZE)
    chain.extend(token_ids)
    return chain.hashes


def namespace(salt: str = "") -> Namespace:
    return Namespace("m", block_size=SIZE, cache_salt=salt)


def admit(
    told: CacheStats,
    token_ids: Sequence[int],
    *,
    num_cached: int = 0,
    salt: str = "",
    bypassed: bool = False,
) -> dict[MissReason, int]:
    """Counts a request and returns what it added, zeros left out."""
    before = told.read().misses
    told.admitted(
        hashes=hashes(token_ids, salt),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        num_cached_tokens=num_cached,
        namespace=namespace(salt),
        bypassed=bypassed,
    )
    after = told.read().misses
    return {key: after[key] - before[key] for key in after if after[key] != before[key]}


def store(told: CacheStats, token_ids: Sequence[int], salt: str = "") -> list[BlockHash]:
    keys = hashes(token_ids, salt)
    for key in keys:
        told.stored(key)
    return keys


def test_what_was_never_seen_is_cold_and_the_tail_is_partial() -> None:
    assert admit(stats(), range(10)) == {"cold": 8, "partial": 2}


def test_what_was_given_up_is_evicted_until_it_is_stored_again() -> None:
    told = stats()
    keys = store(told, range(12))
    told.evicted(keys[2])
    assert admit(told, range(12), num_cached=8) == {"evicted": 4}
    told.stored(keys[2])
    assert admit(told, [*range(12), 99], num_cached=12) == {"partial": 1}
    told.dropped(keys[2])
    assert admit(told, range(12), num_cached=8) == {"cold": 4}, "its eviction is history"


def test_a_prompt_that_fills_no_block_is_too_short() -> None:
    """Section 6 no 16: a hit rate of 0 has a name."""
    assert admit(stats(), range(3)) == {"too_short": 3}
    assert admit(stats(), range(3), num_cached=2) == {"too_short": 1}


def test_the_one_token_that_a_fully_cached_prompt_computes_is_partial() -> None:
    told = stats()
    store(told, range(8))
    assert admit(told, range(8), num_cached=7) == {"partial": 1}
    assert admit(told, range(8), num_cached=4) == {"partial": 4}, "no room for the copy"


def test_a_collision_of_hashes_is_a_cold_miss() -> None:
    told = stats()
    store(told, range(8))
    assert admit(told, range(8), num_cached=0) == {"cold": 4, "partial": 4}


def test_the_rest_of_a_block_whose_beginning_was_copied_has_the_blocks_reason() -> None:
    assert admit(stats(), range(8), num_cached=6) == {"cold": 2}
    assert admit(stats(), range(8), num_cached=2) == {"cold": 6}
    assert admit(stats(), range(10), num_cached=9) == {"partial": 1}


def test_a_cache_that_is_not_read_is_bypassed() -> None:
    told = stats()
    store(told, range(8))
    assert admit(told, range(8), bypassed=True) == {"bypassed": 8}
    assert admit(told, range(2), bypassed=True) == {"bypassed": 2}


def test_tokens_seen_under_another_salt_are_salted_and_no_more_than_these() -> None:
    told = stats()
    assert admit(told, range(12), salt="a") == {"cold": 12}
    assert admit(told, [*range(8), 9, 9, 9, 9], salt="b") == {"salted": 8, "cold": 4}
    assert admit(told, range(8), salt="b") == {"cold": 8}, "its own blocks may come late"
    assert admit(told, range(8), salt="") == {"salted": 8}


def test_what_was_evicted_in_its_own_namespace_is_evicted_whatever_others_saw() -> None:
    told = stats()
    for key in store(told, range(4), salt="b"):
        told.evicted(key)
    admit(told, range(4), salt="a")
    assert admit(told, range(4), salt="b") == {"evicted": 4}


def test_tokens_asked_for_again_and_again_are_known_under_other_salts() -> None:
    """What is forgotten first is what was asked for last the longest ago."""
    told = CacheStats(num_blocks=2, block_size=SIZE)
    for first in (100, 200):
        admit(told, range(SIZE), salt="a")
        for other in range(first, first + 5):
            admit(told, [other] * SIZE, salt="a")
    assert admit(told, range(SIZE), salt="b") == {"salted": SIZE}


def test_the_same_tokens_behind_others_are_not_salted() -> None:
    told = stats()
    admit(told, range(8), salt="a")
    assert admit(told, [7, 7, 7, 7, 4, 5, 6, 7], salt="b") == {"cold": 8}


def test_without_salts_nothing_is_noted() -> None:
    told = stats()
    admit(told, range(8))
    assert not told._salts


def test_what_is_remembered_is_bounded() -> None:
    told = stats(num_blocks=2)
    keys = [store(told, [index] * SIZE)[0] for index in range(9)]
    for key in keys:
        told.evicted(key)
    assert admit(told, [0] * SIZE) == {"cold": 4}, "forgotten: 8 are remembered"
    assert admit(told, [1] * SIZE) == {"evicted": 4}
    for index in range(100):
        admit(told, [index] * SIZE, salt="a")
    assert len(told._salts) == 8
    assert len(told._ghosts) == 8


def test_a_reset_forgets_what_was_evicted_too() -> None:
    told = stats()
    keys = store(told, range(8))
    told.evicted(keys[1])
    admit(told, range(8), salt="a")
    told.cleared()
    assert admit(told, range(8)) == {"cold": 8}
    admit(told, range(8))
    read = told.read().reuse
    assert read.hit_rate_at(1.0) == 2 / 6, "two of the blocks looked up had been since the reset"


def test_reuse_is_of_full_blocks_of_prompts_that_read_the_cache_and_of_what_is_stored() -> None:
    told = stats()
    admit(told, range(8), bypassed=True)
    assert told.read().reuse.num_expected == 0
    store(told, [*range(8), 9, 9, 9, 9])
    admit(told, [*range(8), 9, 9])
    read = told.read().reuse
    assert (read.num_expected, read.hit_rate_at(1.0)) == (2, 1.0)
    told.admitted(
        hashes=hashes(range(12)),
        token_ids=range(12),
        num_prompt_tokens=8,
        num_cached_tokens=0,
        namespace=namespace(),
        bypassed=False,
    )
    assert told.read().reuse.num_expected == 4, "generated tokens are not looked up"


def test_lives_of_blocks_are_measured_from_stored_to_evicted() -> None:
    told = stats()
    told.now_s = 100.0
    (key,) = store(told, range(4))
    told.now_s = 103.0
    told.hit([key])
    told.now_s = 110.0
    told.evicted(key)
    read = told.read()
    assert (read.lifetime_s.total, read.idle_s.total, read.reuse_gap_s.total) == (10.0, 7.0, 3.0)
    assert read.lifetime_s.num_observed == 1


def test_a_block_that_is_only_pending_has_no_life_yet() -> None:
    told = stats()
    told.hit(hashes(range(4)))
    assert told.read().reuse_gap_s.num_observed == 0


def test_a_block_that_is_dropped_was_not_evicted() -> None:
    told = stats()
    (key,) = store(told, range(4))
    told.dropped(key)
    assert told.read().lifetime_s.num_observed == 0
    assert admit(told, range(4)) == {"cold": 4}


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=20),
            st.integers(0, 19),
            st.sampled_from(["", "a", "b"]),
            st.booleans(),
        )
    )
)
def test_hits_and_misses_are_queries(
    asked: list[tuple[list[int], int, str, bool]],
) -> None:
    told = stats()
    num_hit = 0
    for token_ids, cached, salt, bypassed in asked:
        num_cached = 0 if bypassed else min(cached, len(token_ids) - 1)
        num_hit += num_cached
        admit(told, token_ids, num_cached=num_cached, salt=salt, bypassed=bypassed)
        told.cleared() if cached == 19 else store(told, token_ids, salt)
    read = told.read()
    assert set(read.misses) == set(MISS_REASONS)
    assert min(read.misses.values()) >= 0
    assert read.hits == num_hit
    assert read.queries == sum(len(token_ids) for token_ids, *_ in asked)
    assert read.queries == read.hits + sum(read.misses.values())


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    read = histogram.read()
    assert (read.counts, read.total, read.num_observed) == ((2, 2, 1), 7.5, 5)


def test_a_reading_stays_as_it_was_and_the_next_has_what_came_since() -> None:
    histogram = Histogram((1.0,))
    first = histogram.read()
    histogram.observe(0.5)
    second = histogram.read()
    assert histogram.read() is second
    histogram.observe_unmeasured()
    assert (first.counts, second.counts, histogram.read().counts) == ((0, 0), (1, 0), (1, 1))
    assert histogram.read().total == 0.5
