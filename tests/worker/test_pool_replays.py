"""Tests of vLLM and SGLang as inputs and expected values, and what the pool's switches change.

Those of whole requests that need a scheduler are in test_scheduler_vllm.
"""

from __future__ import annotations

import pytest

from kvway_core.blocks import Namespace, event_hash
from kvway_core.events import BlockRemoved, BlockStored
from kvway_worker.cache.block_content import Match
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.cache.eviction import FreeBlocks
from kvway_worker.scheduling.block_tables import BlockTables
from tests.worker.batching import COMMON, Bench, answer, first_step_table, request, run
from tests.worker.pools import NAMESPACE, hashes, num_found, serve, take

# --- vLLM -------------------------------------------------------------------------------------


def test_free_blocks_are_a_queue_with_removal_from_the_middle() -> None:
    """P1, P5, P11; vLLM's test_free_kv_cache_block_queue_operations: 0, then 2 is taken out."""
    free = FreeBlocks(5)
    assert [free.pop()[0] for _ in range(5)] == [0, 1, 2, 3, 4]
    for block in (1, 2, 3, 4):
        free.put(block, "probation")
    free.take(2)
    free.put(2, "probation")
    assert [free.pop()[0] for _ in range(4)] == [1, 3, 4, 2]
    assert len(free) == 0


def test_blank_blocks_are_a_stack_in_front() -> None:
    """P8; vLLM's prepend: what is blank last is given away first, before all that is cached."""
    free = FreeBlocks(3)
    for _ in range(3):
        free.pop()
    free.put(0, "probation")
    free.put_blank(1)
    free.put_blank(2)
    assert [free.pop() for _ in range(3)] == [(2, None), (1, None), (0, "probation")]


def test_only_full_blocks_are_in_the_map() -> None:
    """P18; vLLM's test_cache_blocks: 14 tokens in blocks of four, then two more."""
    pool = BlockPool(9, 4)
    table = take(pool, list(range(14)))
    assert len(pool.committed()) == 3
    pool.free(table)
    take(pool, list(range(16)))
    assert len(pool.committed()) == 4


def test_without_caching_blocks_are_taken_and_given_back() -> None:
    """As vLLM's test_basic_prefix_caching_disabled: blocks of four, four of them."""
    bench = Bench(4, block_size=4, prefix_caching=False)
    first = request("1", range(10), block_size=4, max_tokens=2)
    assert len(first_step_table(bench, first)) == 3
    bench.abort(first)
    second = request("2", range(16), block_size=4, max_tokens=1)
    third = request("3", range(4), block_size=4, max_tokens=1)
    bench.add(second, third)
    assert bench.step() == {"2": 16}
    assert second.cached_tokens == 0
    assert bench.step() == {"3": 4}


@pytest.mark.parametrize("num_drafts", [2, 4])
def test_p16_drafts_take_the_room_they_need(num_drafts: int) -> None:
    """Replays vLLM's test_allocate_with_lookahead: blocks of four, 3 + 2 and 3 + 4 take two."""
    pool = BlockPool(9, 4)
    tables = BlockTables(pool)
    seq = request("0", range(3), block_size=4)
    assert tables.open(seq, 100) == ()
    assert tables.reserve(seq, 3 + num_drafts) == 3 + num_drafts
    assert len(seq.block_table) == 2
    assert tables.reserve(seq, 40) == 36, "there are no more"
    assert len(seq.block_table) == 9


def test_p21_a_salt_changes_every_hash() -> None:
    """Replays vLLM's test_cache_key_salting: 59 tokens, of which only the same salt finds 48."""
    salts = [Namespace("m", cache_salt=salt) for salt in ("salt1", "salt2")]
    pool = BlockPool(20, 16)
    prompt = COMMON + [3] * 11
    serve(pool, prompt, namespace=salts[0])
    assert num_found(pool, COMMON + [4] * 11, salts[0]) == (3, 0)
    assert num_found(pool, prompt, salts[1]) == (0, 0)
    both = [hashes(prompt, salt) for salt in salts]
    assert not set(both[0]) & set(both[1])


def test_p28_prompt_log_probabilities_compute_the_whole_prompt_and_publish_it() -> None:
    """P28; vLLM's test_prefill_plp, but that the blocks computed twice become one here."""
    bench = Bench(20)
    first = request("0", COMMON + [3] * 7, max_tokens=9, prompt_logprobs=1)
    table = first_step_table(bench, first)
    assert first.cached_tokens == 0
    second = request("1", COMMON + [3] * 5, max_tokens=9)
    first_step_table(bench, second)
    assert second.cached_tokens == 48, "others read what it wrote"
    third = request("2", COMMON + [3] * 6, max_tokens=3, prompt_logprobs=1)
    first_step_table(bench, third)
    assert third.cached_tokens == 0, "it does not read what others wrote"
    assert third.block_table[:3] == table[:3]
    for _ in run(bench.scheduler, bench.engine):
        pass
    assert third.output_token_ids == answer(COMMON + [3] * 6, 3)


def test_p34_a_reset_empties_the_pool() -> None:
    """P34; vLLM's test_reset_prefix_cache: refused while two requests live, then all is gone."""
    pool = BlockPool(20, 4)
    tables = [take(pool, list(range(16))), take(pool, [*range(8), 50, 51])]
    assert not pool.reset()
    assert len(pool.committed()) == 4
    for table in tables:
        assert not pool.reset()
        pool.free(table)
    assert pool.reset()
    assert pool.committed() == {}
    assert all(pool.content(block) is None for block in range(20))


# --- SGLang -----------------------------------------------------------------------------------


def test_s5_what_is_locked_and_what_can_be_evicted_add_up() -> None:
    """S5; SGLang's test_lock_ref_operations: a lock moves blocks over, its end moves them back."""
    pool = BlockPool(9, 4)
    serve(pool, list(range(12)))
    sizes = []
    for _ in range(2):
        sizes.append((pool.num_referenced, pool.num_cached))
        table = take(pool, list(range(12)))
        sizes.append((pool.num_referenced, pool.num_cached))
        pool.free(table)
    assert sizes == [(0, 3), (3, 0)] * 2


def test_s1_what_is_stored_twice_is_there_once() -> None:
    """S1, S3; SGLang's test_insert_and_match_basic and test_total_size, a page of one token."""
    namespace = Namespace("m", block_size=1)
    pool = BlockPool(9, 1)
    assert serve(pool, [1, 2, 3], namespace=namespace) == 0
    assert serve(pool, [1, 2, 3], namespace=namespace) == 3
    assert pool.num_cached == 3
    assert num_found(pool, [1, 2], namespace) == (2, 0)
    serve(pool, [4, 5], namespace=namespace)
    assert pool.num_cached == 5


@pytest.mark.parametrize(("block_size", "length"), [(1, 5), (2, 5), (4, 6)])
def test_what_is_found_is_all_but_the_last_token(block_size: int, length: int) -> None:
    """SGLang's test_page_alignment_boundary, where alignment costs nothing."""
    namespace = Namespace("m", block_size=block_size)
    pool = BlockPool(9, block_size)
    serve(pool, list(range(length)), namespace=namespace)
    num_blocks, num_copied = num_found(pool, list(range(length)), namespace)
    assert num_blocks == length // block_size
    assert num_copied == max(0, length % block_size - 1)


def test_p18_repeated_tokens_are_other_blocks_in_other_places() -> None:
    """SGLang's test_hash_value_repeating_tokens."""
    pool = BlockPool(9, 4)
    table = take(pool, [1, 2, 3, 4, 1, 2, 3, 4])
    contents = [pool.content(block) for block in table]
    assert contents[0] is not None
    assert contents[1] is not None
    assert contents[0].block_hash != contents[1].block_hash
    assert contents[1].parent == table[0]


def test_events_of_stored_and_evicted_blocks() -> None:
    """SGLang's test_kv_cache_events_with_eviction: two stored, one removed event with both."""
    namespace = Namespace("m", block_size=2)
    pool = BlockPool(2, 2)
    serve(pool, [1, 2, 3, 4], namespace=namespace)
    pool.allocate(2)
    keys: list[int | bytes] = [event_hash(h) for h in hashes([1, 2, 3, 4], namespace)]
    assert pool.take_events() == [
        BlockStored(keys, None, [1, 2, 3, 4], 2),
        BlockRemoved(keys[::-1]),
    ]


def test_what_is_returned_is_a_copy() -> None:
    """SGLang's test_get_prefix_hash_values_not_shared_across_calls, for all that is returned."""
    pool = BlockPool(9, 4)
    serve(pool, list(range(12)))
    pool.pin("p", hashes(list(range(4))), expires_s=1.0)
    pool.committed().clear()
    pool.free_order().clear()
    pool.tier("probation").clear()
    pool.pins().clear()
    pool.check_invariants()
    assert num_found(pool, [*range(12), 1]) == (3, 0)
    assert len(pool.pins()) == 1


def test_s10_forced_misses_find_nothing_while_everything_is_kept() -> None:
    """S10; SGLang's test_radix_force_miss: blocks, tails and twins; the cache itself works on."""
    pool = BlockPool(20, 4, force_miss=True)
    prompt = list(range(10))
    assert pool.match(hashes(prompt), prompt, namespace=NAMESPACE) == Match()
    table = take(pool, prompt)
    assert pool.match(hashes(prompt), prompt, namespace=NAMESPACE) == Match()
    assert len(pool.committed()) == 2
    assert not pool.reads_cache
    pool.free(table)
    assert pool.num_cached == 2


def test_s9_what_a_preempted_request_has_said_is_kept_too() -> None:
    """S9: SGLang drops the generated part of what it retracts; here it is found again."""
    bench = Bench(12)
    first = request("0", range(80), max_tokens=60)
    second = request("1", range(100, 140), max_tokens=60)
    bench.add(first, second)
    for _ in range(34):
        bench.step()
    assert bench.scheduler.counters.preemptions == 1
    assert second.num_tokens == 73
    bench.abort(first)
    assert bench.step() == {"1": 9}, "64 are found, although the prompt has but 40"
    for _ in run(bench.scheduler, bench.engine):
        pass
    assert second.output_token_ids == answer(range(100, 140), 60)


# --- what the statistics are told -------------------------------------------------------------


def test_statistics_know_exactly_what_is_stored() -> None:
    pool = BlockPool(6, 4)
    for prompt in ([1] * 8, [2] * 8, [3] * 8, [1] * 8):
        serve(pool, prompt)
        assert set(pool.stats._lives) == set(pool.committed())
    serve(pool, [4] * 8, ephemeral=True)
    assert set(pool.stats._lives) == set(pool.committed())
    assert set(pool.stats._ghosts).isdisjoint(hashes([4] * 8)), "dropped, not evicted"
    assert set(hashes([3] * 8)) <= {*pool.stats._ghosts, *pool.stats._lives}
    assert pool.reset()
    assert set(pool.stats._lives) == set()


def test_statistics_are_told_of_hits_and_evictions() -> None:
    pool = BlockPool(2, 4)
    serve(pool, [1] * 8)
    pool.stats.now_s = 5.0
    serve(pool, [1] * 8)
    pool.stats.now_s = 9.0
    serve(pool, [2] * 8)
    reading = pool.stats.read()
    assert reading.reuse_gap_s.num_observed == 2
    assert reading.lifetime_s.total == pytest.approx(18.0)
    assert reading.idle_s.total == pytest.approx(8.0)
