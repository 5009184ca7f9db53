"""The cases of vLLM's own tests that apply to one pool of full attention, replayed.

Each docstring names the test that the case is from. There is no null block here: a pool of theirs
with N blocks is one of N - 1, and their block k is our k - 1.
"""

from __future__ import annotations

import pytest

from tests.worker.batching import (
    COMMON,
    Bench,
    answer,
    first_step_table,
    request,
    run,
    scheduled,
)


def test_prefill_shares_what_is_common_and_reuses_in_order() -> None:
    """Replays vLLM's test_prefill; the longest partial tail stays too, as new as its prefix.

    What is taken at once comes in the order of ids.
    """
    bench = Bench(10)
    first = request("0", COMMON + [3] * 7, max_tokens=9)
    assert first_step_table(bench, first) == [0, 1, 2, 3]
    assert first.cached_tokens == 0
    assert [bench.pool.content(block) is not None for block in range(4)] == [True] * 3 + [False]
    second = request("1", COMMON + [3] * 5, max_tokens=9)
    assert first_step_table(bench, second) == [0, 1, 2, 4]
    assert second.cached_tokens == 48
    assert [bench.pool.num_references(block) for block in range(3)] == [2, 2, 2]
    assert bench.pool.num_free == 5
    bench.abort(first)
    bench.abort(second)
    assert bench.pool.free_order() == [4, 5, 6, 7, 8, 9, 3, 2, 1, 0]
    third = request("2", COMMON + [3] * 6, max_tokens=9)
    assert first_step_table(bench, third) == [0, 1, 2, 4]
    assert third.cached_tokens == 53
    assert bench.pool.num_free == 6
    bench.abort(third)
    last = request("3", [99] * 160)
    bench.add(last)
    plan = bench.scheduler.plan()
    assert plan.rows[0].block_table == tuple(range(10))
    assert last.cached_tokens == 0
    assert bench.pool.num_free == 0


def test_decode_takes_a_block_only_when_the_last_is_full() -> None:
    """Replays vLLM's test_decode: 55 tokens, 4 more fit, 19 more take one block."""
    bench = Bench(10)
    seq = request("0", COMMON + [3] * 7, max_tokens=40)
    bench.add(seq)
    for _ in range(5):
        bench.step()
    assert seq.num_computed_tokens == 59
    assert seq.block_table == [0, 1, 2, 3]
    assert bench.pool.content(3) is None
    for _ in range(19):
        bench.step()
    assert seq.block_table == [0, 1, 2, 3, 4]
    assert bench.pool.content(3) is not None
    assert bench.pool.content(4) is None


def test_evict_takes_the_tail_of_the_oldest_first() -> None:
    """Replays vLLM's test_evict; the partial tail, block 5, counts as content."""
    bench = Bench(10)
    first = request("0", range(87), max_tokens=9)
    assert len(first_step_table(bench, first)) == 6
    second = request("1", range(87, 135), max_tokens=2)
    assert len(first_step_table(bench, second)) == 3
    assert bench.pool.num_free == 1
    bench.abort(first)
    assert bench.pool.free_order() == [9, 5, 4, 3, 2, 1, 0]
    bench.abort(second)
    assert bench.pool.free_order() == [9, 5, 4, 3, 2, 1, 0, 8, 7, 6]
    third = request("2", range(35), max_tokens=9)
    assert first_step_table(bench, third) == [0, 1, 9]
    assert bench.pool.num_free == 7


def test_a_block_that_is_reused_loses_its_content() -> None:
    """Replays vLLM's test_hash_block_correct_reuse."""
    bench = Bench(1)
    bench.finish(request("0", range(16)))
    assert bench.pool.num_cached == 1
    second = request("1", range(15), max_tokens=1)
    bench.finish(second)
    assert second.cached_tokens == 0
    assert bench.pool.committed() == {}


def test_a_request_that_hits_evicts_another_block_than_the_hit() -> None:
    """Replays vLLM's test_computed_blocks_not_evicted."""
    bench = Bench(2)
    bench.finish(request("0", range(16)))
    bench.finish(request("1", range(16, 32)))
    third = request("2", range(32))
    bench.add(third)
    assert bench.scheduler.plan().rows[0].block_table == (0, 1)
    assert third.cached_tokens == 16


def test_without_prefix_caching_nothing_is_shared_and_nothing_counted() -> None:
    """Replays vLLM's test_basic_prefix_caching_disabled."""
    bench = Bench(4, block_size=4, prefix_caching=False)
    bench.finish(request("0", range(10), block_size=4))
    second = request("1", range(16), block_size=4, max_tokens=1)
    bench.add(second)
    third = request("2", range(4), block_size=4)
    bench.add(third)
    plan = bench.scheduler.plan()
    assert scheduled(plan) == {"1": 16}, "four blocks for the first, none for the second"
    assert (second.cached_tokens, third.cached_tokens) == (0, None)
    assert bench.pool.stats.read().hits == 0


def test_a_salt_keeps_blocks_apart() -> None:
    """Replays vLLM's test_cache_key_salting."""
    bench = Bench(20)
    bench.finish(request("0", COMMON + [3] * 11, salt="one"))
    same = request("1", COMMON + [4] * 11, salt="one")
    other = request("2", COMMON + [4] * 11, salt="two")
    none = request("3", COMMON + [4] * 11)
    bench.finish(same, other, none)
    assert [seq.cached_tokens for seq in (same, other, none)] == [48, 0, 0]


def test_p13_p14_a_request_that_does_not_fit_changes_nothing() -> None:
    """Replays vLLM's test_prefill_not_enough_free_blocks_with_computed_blocks."""
    bench = Bench(10)
    first = request("0", COMMON, max_tokens=9)
    first_step_table(bench, first)
    second = request("1", [*COMMON, *range(100, 148)], max_tokens=9)
    first_step_table(bench, second)
    bench.abort(second)
    third = request("2", range(200, 232), max_tokens=9)
    first_step_table(bench, third)
    order = bench.pool.free_order()
    # Six hits of which three are held, three more blocks: 6 of the 5 free ones.
    waiting = request("3", [*COMMON, *range(100, 148), *range(300, 348)], max_tokens=9)
    bench.add(waiting)
    plan = bench.scheduler.plan()
    assert "3" not in scheduled(plan)
    assert bench.pool.free_order() == order[len(order) - bench.pool.num_free :]
    assert waiting.cached_tokens is None
    assert waiting.block_table == []


def test_twins_in_one_step_compute_what_they_share_once() -> None:
    """Replays vLLM's test_prefix_caching_for_prefill_dedup."""
    bench = Bench(40)
    bench.add(request("0", range(100), max_tokens=2), request("1", range(100), max_tokens=2))
    assert bench.step() == {"0": 100, "1": 4}
    bench.add(request("2", range(100)))
    assert bench.step() == {"0": 1, "1": 1, "2": 4}


def test_p23_an_answer_is_cached_for_the_next_turn() -> None:
    """As vLLM's test_prefix_caching_for_multi_turn, where 300 mod 16 tokens are computed.

    Here the partial tail is copied, and only the last token of the answer, which was never fed
    back, is left.
    """
    bench = Bench(40)
    first = request("0", range(100), max_tokens=200)
    bench.finish(first)
    bench.add(request("1", first.token_ids))
    assert bench.step() == {"1": 1}


@pytest.mark.parametrize(("budget", "expected"), [(1024, [800, 224]), (820, [800, 20])])
def test_prompts_are_taken_in_order_and_the_last_is_cut(budget: int, expected: list[int]) -> None:
    """Replays the chunked half of vLLM's test_schedule_order."""
    bench = Bench(200, budget=budget)
    for index, length in enumerate((800, 800, 10, 10)):
        start = 1000 * index
        bench.add(request(str(index), range(start, start + length), max_tokens=2))
    assert bench.step() == {str(index): count for index, count in enumerate(expected)}
    assert bench.scheduler.num_waiting == 2


def test_p37_the_newest_is_preempted_and_comes_back() -> None:
    """Replays vLLM's test_preempt_during_execution: 10 blocks, two prompts of 5."""
    bench = Bench(10, prefix_caching=False)
    first = request("0", range(80), max_tokens=12)
    second = request("1", range(100, 180), max_tokens=12)
    bench.add(first, second)
    assert bench.step() == {"0": 80, "1": 80}
    assert bench.step() == {"0": 1}, "the first needs a block; the second gives all of its own"
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (1, 1)
    assert bench.scheduler.counters.preemptions == 1
    assert second.num_output_tokens == 1, "what it had said stays"
    for _ in run(bench.scheduler, bench.engine):
        pass
    assert first.output_token_ids == answer(range(80), 12)
    assert second.output_token_ids == answer(range(100, 180), 12)


def test_nothing_is_left_behind() -> None:
    """Replays vLLM's test_memory_leak."""
    bench = Bench(100)
    bench.finish(*(request(str(index), range(index, index + 50)) for index in range(5)))
    assert bench.pool.num_free == 100
    assert not bench.scheduler.has_work


def test_one_is_aborted_per_step() -> None:
    """Replays vLLM's test_abort: who is aborted in step n has n tokens."""
    bench = Bench(100)
    seqs = [request(str(index), range(index, index + 20), max_tokens=50) for index in range(10)]
    bench.add(*seqs)
    order = [0, 8, 3, 1, 6, 4, 2, 5, 7, 9]
    for index in order:
        bench.step()
        bench.abort(seqs[index])
    assert [seqs[index].num_output_tokens for index in order] == list(range(1, 11))
    assert bench.pool.num_free == 100


def test_p40_statistics_count_a_request_once_however_often_it_is_tried() -> None:
    """Replays vLLM's test_prefix_cache_stats_counted_once_for_retried_then_scheduled_request."""
    bench = Bench(5)
    bench.finish(request("seed", range(32)))
    holder = request("holder", range(100, 132), max_tokens=20)
    bench.add(holder)
    bench.step()
    before = bench.pool.stats.read()
    bench.add(request("retried", [*range(32), *range(50, 82)]))
    for _ in range(3):
        bench.step()
    assert bench.pool.stats.read().queries == before.queries
    bench.abort(holder)
    bench.step()
    after = bench.pool.stats.read()
    assert (after.queries - before.queries, after.hits - before.hits) == (64, 32)


def test_p10_the_worked_example_gives_away_the_oldest() -> None:
    """Ten blocks of four: vLLM frees 6-4-7-8-9-3-2-5-1-0; here tails 4 and 6 stay as content."""
    bench = Bench(10, block_size=4)
    prompt = list(range(15))
    first = request("0", prompt, block_size=4, max_tokens=6)
    first_step_table(bench, first)  # blocks 0 to 3
    bench.step()  # 16 tokens
    bench.step()  # block 4
    second = request("1", [*prompt[:10], 70, 71, 72, 73], block_size=4, max_tokens=9)
    bench.add(second)
    bench.step()
    assert second.block_table == [0, 1, 5, 6]
    bench.abort(first)
    bench.abort(second)
    assert bench.pool.free_order() == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]
    third = request("2", [*prompt[:12], *range(80, 97)], block_size=4, max_tokens=1)
    bench.add(third)
    assert bench.scheduler.plan().rows[0].block_table == (0, 1, 2, 3, 4, 7, 8, 9)
    assert bench.pool.num_evictions == 2
