"""What a scheduler shares, when it is found, and that nothing is found that was not computed."""

from __future__ import annotations

import pytest

from kvway_worker.scheduling.sequence import Status
from tests.worker.batching import (
    COMMON,
    Bench,
    OneHash,
    Replay,
    answer,
    first_step_table,
    request,
    run,
    scheduled,
    step,
)

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
    assert (row.start, row.num_tokens, row.sampling) == (47, 1, (second,))
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


def test_a_fully_cached_prompt_that_waits_lacks_one_token() -> None:
    bench = Bench(10, max_num_seqs=1)
    bench.finish(request("0", COMMON))
    bench.add(request("holder", [7], max_tokens=3))
    bench.step()
    bench.add(request("1", COMMON))
    assert bench.scheduler.waiting_uncached_tokens() == 1


def test_a_block_that_rows_are_copied_from_is_not_given_away_for_the_copy() -> None:
    bench = Bench(6, block_size=4)
    bench.finish(request("0", [1, 2, 3, 4, 5, 6], block_size=4))
    bench.finish(request("others", range(100, 116), block_size=4))
    assert bench.pool.num_blank == 0
    assert bench.pool.tail(bench.pool.free_order()[0]) is not None, "the next one to be given away"
    forked = request("1", [1, 2, 3, 4, 5, 7], block_size=4)
    bench.finish(forked)
    assert forked.cached_tokens == 5
    again = request("2", [1, 2, 3, 4, 5, 6, 8], block_size=4)
    bench.finish(again)
    assert again.cached_tokens == 6


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
    assert bench.scheduler.waiting_uncached_tokens() == second.num_uncached_tokens == 1
    bench.abort(first)
    assert bench.step() == {"1": 1}, "its prompt is still there"
    assert second.cached_tokens == 0, "fixed at first admission"
    assert bench.pool.stats.read().queries == 160, "counted once"
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
    assert (waits.cached_tokens, late.cached_tokens) == (0, 40)
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
