"""The scheduler on a real pool, rule by rule, and vLLM's own cases replayed.

Where a case is vLLM's, its name is in the docstring. There is no null block here: a pool of theirs
with N blocks is one of N - 1, and their block k is our k - 1.
"""

from __future__ import annotations

import pytest

from kvway_core.errors import ContextLengthExceeded, InvalidRequest, InvariantViolated
from kvway_worker.block_pool import BlockPool
from kvway_worker.scheduler import Scheduler
from kvway_worker.sequence import Sequence, Status
from tests.worker.batching import (
    AuditedSim,
    OneHash,
    Replay,
    answer,
    request,
    run,
    scheduled,
    step,
)

COMMON = [token for token in (0, 1, 2) for _ in range(16)]
"""48 tokens, three full blocks."""


class Bench:
    """A scheduler, its pool and an engine that audits every step."""

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int = 16,
        max_num_seqs: int = 16,
        budget: int = 8192,
        prefix_caching: bool = True,
        eos: frozenset[int] = frozenset(),
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=100_000,
            eos_token_ids=eos,
        )
        self.engine = AuditedSim(self.pool)

    def add(self, *seqs: Sequence) -> None:
        for seq in seqs:
            self.scheduler.add(seq)

    def step(self) -> dict[str, int]:
        """Runs a step and returns how many tokens of each request it computed."""
        return scheduled(step(self.scheduler, self.engine)[0])

    def finish(self, *seqs: Sequence) -> None:
        """Adds requests and runs until nothing is left."""
        self.add(*seqs)
        for _ in run(self.scheduler, self.engine):
            pass
        assert all(seq.status is Status.FINISHED for seq in seqs)

    def abort(self, seq: Sequence) -> None:
        assert self.scheduler.abort(seq.request_id)
        self.scheduler.check_invariants()


def first_step_table(bench: Bench, seq: Sequence) -> list[int]:
    """Adds a request that has more to say and returns its blocks after its first step."""
    bench.add(seq)
    bench.step()
    return list(seq.block_table)


# --- vLLM's cases -----------------------------------------------------------------------------


def test_prefill_shares_what_is_common_and_reuses_in_order() -> None:
    """Replays vLLM's test_prefill."""
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
    assert bench.pool.free_order() == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]
    third = request("2", COMMON + [3] * 6, max_tokens=9)
    assert first_step_table(bench, third) == [0, 1, 2, 4]
    assert bench.pool.num_free == 6
    bench.abort(third)
    last = request("3", [99] * 160)
    bench.add(last)
    plan = bench.scheduler.plan()
    assert plan.rows[0].block_table == (4, 3, 5, 6, 7, 8, 9, 2, 1, 0)
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
    """Replays vLLM's test_evict."""
    bench = Bench(10)
    first = request("0", range(87), max_tokens=9)
    assert len(first_step_table(bench, first)) == 6
    second = request("1", range(87, 135), max_tokens=2)
    assert len(first_step_table(bench, second)) == 3
    assert bench.pool.num_free == 1
    bench.abort(first)
    assert bench.pool.free_order() == [5, 9, 4, 3, 2, 1, 0]
    bench.abort(second)
    assert bench.pool.free_order() == [5, 9, 4, 3, 2, 1, 0, 8, 7, 6]
    third = request("2", range(35), max_tokens=9)
    assert first_step_table(bench, third) == [0, 1, 5]
    assert bench.pool.num_free == 7


def test_a_block_that_is_reused_loses_its_content() -> None:
    """Replays vLLM's test_hash_block_correct_reuse."""
    bench = Bench(1)
    bench.finish(request("0", range(16)))
    assert bench.pool.num_cached == 1
    second = request("1", range(15), max_tokens=1)
    bench.finish(second)
    assert second.cached_tokens == 0
    assert bench.pool.num_cached == 0


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
    assert bench.scheduler.counters.prefix_cache_hits == 0


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
    """Replays vLLM's test_prefix_caching_for_multi_turn: 300 mod 16 tokens are computed."""
    bench = Bench(40)
    first = request("0", range(100), max_tokens=200)
    bench.finish(first)
    bench.add(request("1", first.token_ids))
    assert bench.step() == {"1": 12}


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
    counters = bench.scheduler.counters
    queries, hits = counters.prefix_cache_queries, counters.prefix_cache_hits
    bench.add(request("retried", [*range(32), *range(50, 82)]))
    for _ in range(3):
        bench.step()
    assert counters.prefix_cache_queries == queries
    bench.abort(holder)
    bench.step()
    assert counters.prefix_cache_queries - queries == 64
    assert counters.prefix_cache_hits - hits == 32


def test_p10_the_worked_example_loses_no_cached_block() -> None:
    """Ten blocks of four: today's order of vLLM frees 6-4-7-8-9-3-2-5-1-0, and so does this."""
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
    assert bench.pool.free_order() == [6, 4, 7, 8, 9, 3, 2, 5, 1, 0]
    third = request("2", [*prompt[:12], *range(80, 97)], block_size=4, max_tokens=1)
    bench.add(third)
    assert bench.scheduler.plan().rows[0].block_table == (0, 1, 2, 6, 4, 7, 8, 9)
    assert bench.pool.num_evictions == 0


# --- fully cached prompts ---------------------------------------------------------------------


@pytest.mark.parametrize("held", [False, True])
def test_a_fully_cached_prompt_computes_one_token_on_a_copy(*, held: bool) -> None:
    bench = Bench(10)
    first = request("0", COMMON, max_tokens=9)
    first_step_table(bench, first)
    if not held:
        bench.abort(first)
    second = request("1", COMMON, max_tokens=3)
    bench.add(second)
    plan, outputs = step(bench.scheduler, bench.engine)
    row = next(row for row in plan.rows if row.seq is second)
    assert (row.start, row.num_tokens, row.samples) == (47, 1, True)
    assert plan.copies == ((2, row.block_table[2], 15),)
    assert second.cached_tokens == 47
    assert outputs[-1].token_id == answer(COMMON, 1)[0]
    assert second.block_table == [0, 1, 2], "the copy is given back"
    assert bench.pool.num_free == 7 - held


def test_a_fully_cached_prompt_fits_where_it_fitted_before() -> None:
    bench = Bench(3)
    bench.finish(request("0", COMMON))
    second = request("1", COMMON)
    bench.add(second)
    plan, _ = step(bench.scheduler, bench.engine)
    assert plan.copies == ()
    assert scheduled(plan) == {"1": 16}, "no block is left for a copy: the last one is computed"
    assert second.cached_tokens == 32


def test_what_is_pending_is_not_copied() -> None:
    bench = Bench(10)
    first, second = request("0", COMMON, max_tokens=2), request("1", COMMON, max_tokens=2)
    bench.add(first, second)
    plan, outputs = step(bench.scheduler, bench.engine)
    assert plan.copies == ()
    assert scheduled(plan) == {"0": 48, "1": 16}
    assert [out.token_id for out in outputs] == answer(COMMON, 1) * 2
    assert first.block_table == second.block_table, "the block that was computed twice is one"


def test_blocks_of_one_token_need_no_copy() -> None:
    bench = Bench(4, block_size=1)
    bench.finish(request("0", [5, 6, 7], block_size=1))
    second = request("1", [5, 6, 7], block_size=1)
    bench.finish(second)
    assert second.cached_tokens == 2


def test_twins_share_what_they_say() -> None:
    """Two greedy requests that say the same hold one block for it, not two."""
    bench = Bench(20)
    first, second = request("0", range(40), max_tokens=60), request("1", range(40), max_tokens=60)
    bench.add(first, second)
    for _ in range(30):
        bench.step()
    assert first.block_table[:4] == second.block_table[:4]
    assert bench.pool.num_referenced == 6
    for _ in run(bench.scheduler, bench.engine):
        pass
    assert first.output_token_ids == second.output_token_ids == answer(range(40), 60)


# --- publishing: what fails, is aborted or preempted leaves nothing ---------------------------


def test_a_failed_step_leaves_nothing_to_find() -> None:
    bench = Bench(20)
    first, twin = request("0", COMMON, max_tokens=4), request("1", [*COMMON, 5], max_tokens=4)
    bench.add(first, twin)
    plan = bench.scheduler.plan()
    assert bench.scheduler.fail(plan) == [first, twin]
    bench.scheduler.check_invariants()
    assert (first.status, twin.status) == (Status.FAILED, Status.FAILED)
    assert (bench.pool.num_free, bench.pool.num_cached) == (20, 0)
    assert bench.pool.take_events() == []
    again = request("2", COMMON)
    bench.finish(again)
    assert again.cached_tokens == 0
    assert again.output_token_ids == answer(COMMON, 1)


def test_a_failed_step_keeps_what_was_committed_before() -> None:
    bench = Bench(20, budget=32)
    seq = request("0", range(96), max_tokens=4)
    bench.add(seq)
    bench.step()
    bench.scheduler.fail(bench.scheduler.plan())
    bench.scheduler.check_invariants()
    assert bench.pool.num_cached == 2


def test_only_the_requests_of_the_step_fail() -> None:
    bench = Bench(20, budget=32, max_num_seqs=2)
    seqs = [request(str(index), range(index, index + 32), max_tokens=2) for index in range(3)]
    bench.add(*seqs)
    assert bench.scheduler.fail(bench.scheduler.plan()) == seqs[:1]
    for _ in run(bench.scheduler, bench.engine):
        pass
    assert [seq.status for seq in seqs] == [Status.FAILED, Status.FINISHED, Status.FINISHED]


def test_a_writer_that_is_aborted_in_its_step_leaves_nothing_to_find() -> None:
    bench = Bench(20)
    writer = request("0", COMMON, max_tokens=4)
    bench.add(writer)
    plan = bench.scheduler.plan()
    sampled = bench.engine.execute(plan)
    bench.abort(writer)
    assert bench.scheduler.commit(plan, sampled) == []
    bench.scheduler.check_invariants()
    assert (bench.pool.num_free, bench.pool.num_cached) == (20, 0)
    assert bench.pool.take_events() == []


def test_a_writer_that_is_aborted_leaves_its_follower_what_the_step_computed() -> None:
    bench = Bench(20)
    writer = request("0", [*COMMON, *range(50, 70)], max_tokens=4)
    follower = request("1", [*COMMON, 9], max_tokens=4)
    bench.add(writer, follower)
    plan = bench.scheduler.plan()
    assert scheduled(plan) == {"0": 68, "1": 1}
    sampled = bench.engine.execute(plan)
    bench.abort(writer)
    bench.scheduler.commit(plan, sampled)
    bench.scheduler.check_invariants()
    assert len(bench.pool.committed()) == 3, "the shared blocks, not the fourth one"
    for _ in run(bench.scheduler, bench.engine):
        pass
    assert follower.output_token_ids == answer([*COMMON, 9], 4)


def test_an_id_can_be_used_again_while_the_step_of_the_aborted_request_runs() -> None:
    bench = Bench(20)
    bench.add(request("0", range(20), max_tokens=4))
    plan = bench.scheduler.plan()
    sampled = bench.engine.execute(plan)
    bench.scheduler.abort("0")
    again = request("0", range(100, 120), max_tokens=4)
    bench.add(again)
    assert bench.scheduler.commit(plan, sampled) == []
    for _ in run(bench.scheduler, bench.engine):
        pass
    assert again.output_token_ids == answer(range(100, 120), 4)


def test_p36_a_preempted_request_finds_its_blocks_again() -> None:
    bench = Bench(11)
    first = request("0", range(80), max_tokens=12)
    second = request("1", range(100, 180), max_tokens=12)
    bench.add(first, second)
    assert bench.step() == {"0": 80, "1": 80}
    assert bench.step() == {"0": 1}
    assert bench.scheduler.counters.preemptions == 1
    bench.abort(first)
    assert bench.step() == {"1": 1}, "its prompt is still there"
    assert second.cached_tokens == 0, "fixed at first admission"
    assert bench.scheduler.counters.prefix_cache_queries == 160, "counted once"
    for _ in run(bench.scheduler, bench.engine):
        pass
    assert second.output_token_ids == answer(range(100, 180), 12)


def test_p37_p38_victims_are_the_newest_and_keep_their_place_in_the_queue() -> None:
    bench = Bench(12, max_num_seqs=3)
    seqs = [request(str(i), range(100 * i, 100 * i + 62), max_tokens=40) for i in range(3)]
    late = request("late", range(500, 520), max_tokens=2)
    bench.add(*seqs)
    assert bench.step() == {"0": 62, "1": 62, "2": 62}
    bench.add(late)
    bench.step()
    bench.step()
    assert bench.step() == {"0": 1, "1": 1}, "the newest gives way, and nobody is admitted"
    order: list[str] = []
    for plan, _ in run(bench.scheduler, bench.engine):
        order += [request_id for request_id in scheduled(plan) if request_id not in order]
    assert order == ["0", "1", "2", "late"]
    assert bench.scheduler.counters.preemptions > 1
    for index, seq in enumerate(seqs):
        assert seq.output_token_ids == answer(range(100 * index, 100 * index + 62), 40)


def test_hits_are_looked_up_at_admission_and_not_at_arrival() -> None:
    """What was cached when a request came may be gone when it runs, or the other way round."""
    bench = Bench(8, max_num_seqs=1)
    bench.finish(request("seed", range(48)))
    waits = request("waits", range(48), max_tokens=3)
    late = request("late", range(300, 348), max_tokens=3)
    bench.add(
        request("0", range(100, 225), max_tokens=4),  # all eight blocks
        waits,
        request("1", range(300, 340), max_tokens=2),
        late,
    )
    for _ in run(bench.scheduler, bench.engine):
        pass
    assert (waits.cached_tokens, late.cached_tokens) == (0, 32)
    assert waits.output_token_ids == answer(range(48), 3)


def test_events_replay_to_what_the_pool_holds() -> None:
    bench, replay = Bench(12), Replay()
    for index in range(8):
        bench.finish(request(str(index), range(index % 3, index % 3 + 60), max_tokens=30))
        replay.apply(bench.pool.take_events())
        assert len(replay.parents) == len(bench.pool.committed())
    assert bench.pool.num_evictions > 0


# --- collisions -------------------------------------------------------------------------------


def test_colliding_hashes_cost_hits_and_never_an_answer() -> None:
    bench = Bench(40)
    prompts = [range(start, start + 40) for start in (0, 100, 200, 0)]
    seqs = [
        request(str(index), prompt, max_tokens=20, chain=OneHash())
        for index, prompt in enumerate(prompts)
    ]
    for seq in seqs:
        bench.finish(seq)
    assert [seq.cached_tokens for seq in seqs] == [0, 0, 0, 16]
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert seq.output_token_ids == answer(prompt, 20)


# --- refusals, limits, ends -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "message"),
    [
        (100, 1, None),
        (97, 4, None),  # the last token needs no place
        (98, 4, "together 102; the KV cache of this worker holds 100"),
        (1, 150, "together 151; the context has 150"),
    ],
)
def test_what_can_never_fit_is_refused_at_arrival(
    num_prompt: int, max_tokens: int, message: str | None
) -> None:
    pool = BlockPool(25, 4)
    scheduler = Scheduler(pool, max_num_seqs=1, max_num_batched_tokens=7, max_model_len=150)
    seq = request("0", range(num_prompt), max_tokens=max_tokens, block_size=4)
    if message is None:
        scheduler.add(seq)
        for _ in run(scheduler, AuditedSim(pool)):
            pass
        assert seq.num_output_tokens == max_tokens
        return
    with pytest.raises(ContextLengthExceeded, match=message):
        scheduler.add(seq)
    assert not scheduler.has_work


def test_requests_that_make_no_sense_are_refused() -> None:
    bench = Bench(10)
    with pytest.raises(InvalidRequest, match="max_tokens must be at least 1"):
        bench.add(request("0", [1], max_tokens=0))
    bench.add(request("0", [1]))
    with pytest.raises(InvalidRequest, match="use another id"):
        bench.add(request("0", [1]))
    with pytest.raises(ValueError, match="block size 4 in a pool of 16"):
        bench.add(request("1", [1], block_size=4))


@pytest.mark.parametrize(("num_seqs", "budget"), [(0, 5), (6, 5)])
def test_limits_that_would_starve_requests_are_refused(num_seqs: int, budget: int) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        Scheduler(
            BlockPool(1, 1),
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=9,
        )


def test_p17_a_prompt_is_admitted_when_all_of_it_fits_and_not_only_its_first_chunk() -> None:
    bench = Bench(10, budget=32)
    holder = request("0", range(96), max_tokens=2)
    bench.add(holder, request("1", range(200, 280), max_tokens=2))
    assert [bench.step() for _ in range(3)] == [{"0": 32}] * 3
    assert bench.step() == {"0": 1}, "three blocks are free; a chunk needs two, the prompt five"
    assert bench.step() == {"1": 32}


def test_max_num_seqs_is_the_size_of_the_batch() -> None:
    bench = Bench(50, max_num_seqs=2)
    seqs = [request(str(index), range(index, index + 5), max_tokens=3) for index in range(5)]
    bench.add(*seqs)
    assert bench.step() == {"0": 5, "1": 5}
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 3)


def test_a_running_request_always_gets_its_token() -> None:
    """A prompt of many chunks takes only what the running requests leave of the budget."""
    bench = Bench(50, budget=16)
    bench.add(request("0", range(10), max_tokens=20))
    bench.step()
    bench.add(request("1", range(100, 180), max_tokens=2))
    assert [bench.step() for _ in range(3)] == [{"0": 1, "1": 15}] * 3


FIRST, SECOND, THIRD = answer(range(20), 3)


@pytest.mark.parametrize(
    ("eos", "ignore_eos", "stop", "said", "reason"),
    [
        ([], False, [], [FIRST, SECOND, THIRD], "length"),
        ([SECOND], False, [], [FIRST, SECOND], "stop"),
        ([SECOND], True, [], [FIRST, SECOND, THIRD], "length"),
        ([], False, [SECOND], [FIRST, SECOND], "stop"),
        ([SECOND], True, [FIRST], [FIRST], "stop"),
        ([], False, [THIRD], [FIRST, SECOND, THIRD], "stop"),
    ],
)
def test_how_an_answer_ends(
    *, eos: list[int], ignore_eos: bool, stop: list[int], said: list[int], reason: str
) -> None:
    bench = Bench(10, eos=frozenset(eos))
    bench.add(
        request(
            "0",
            range(20),
            max_tokens=3,
            ignore_eos=ignore_eos,
            stop_token_ids=frozenset(stop),
        )
    )
    outputs = [out for _, outs in run(bench.scheduler, bench.engine) for out in outs]
    assert [out.token_id for out in outputs] == said
    assert [out.finish_reason for out in outputs] == [None] * (len(said) - 1) + [reason]
    assert bench.pool.num_referenced == 0


def test_waiting_tokens_are_those_that_are_neither_cached_nor_computed() -> None:
    bench = Bench(50, budget=32)
    bench.finish(request("seed", COMMON))
    bench.add(request("0", range(100, 180), max_tokens=2), request("1", [*COMMON, 5, 6]))
    assert bench.scheduler.waiting_uncached_tokens() == 80 + 2
    bench.step()
    assert bench.scheduler.waiting_uncached_tokens() == 48 + 2
    bench.step()
    bench.step()
    assert bench.scheduler.waiting_uncached_tokens() == 0


def test_reset_needs_an_idle_pool() -> None:
    """Replays vLLM's test_scheduler_reset_prefix_cache."""
    bench = Bench(20)
    seq = request("0", COMMON, max_tokens=9)
    bench.add(seq)
    bench.step()
    assert not bench.scheduler.reset_prefix_cache()
    bench.abort(seq)
    assert bench.scheduler.reset_prefix_cache()
    again = request("1", COMMON)
    bench.finish(again)
    assert again.cached_tokens == 0


# --- the protocol of a step -------------------------------------------------------------------


def test_a_step_must_end_before_the_next_is_planned() -> None:
    bench = Bench(10)
    bench.add(request("0", range(20)))
    plan = bench.scheduler.plan()
    with pytest.raises(InvariantViolated, match="step 1 has not ended"):
        bench.scheduler.plan()
    with pytest.raises(InvariantViolated, match=r"no token for \['0'\]"):
        bench.scheduler.commit(plan, {})
    bench.scheduler.commit(plan, {"0": 5})
    with pytest.raises(InvariantViolated, match="not the one in flight"):
        bench.scheduler.commit(plan, {"0": 5})
    with pytest.raises(InvariantViolated, match="not the one in flight"):
        bench.scheduler.fail(plan)


def test_nothing_to_do_is_an_empty_step() -> None:
    bench = Bench(10)
    assert bench.scheduler.plan().rows == ()
    assert bench.scheduler.plan().step_id == 2
    assert not bench.scheduler.abort("nobody")


def test_a_leak_is_an_error_and_not_a_hang() -> None:
    bench = Bench(2)
    bench.pool.allocate(1)
    bench.add(request("0", range(20)))
    with pytest.raises(InvariantViolated, match="1 requests wait and none can run; 1 of 2 blocks"):
        bench.scheduler.plan()


def test_check_invariants_compares_references_with_the_requests() -> None:
    bench = Bench(10)
    seq = request("0", range(40), max_tokens=5)
    bench.add(seq)
    bench.step()
    bench.pool.allocate(1)
    with pytest.raises(InvariantViolated, match="4: requests hold"):
        bench.scheduler.check_invariants()
