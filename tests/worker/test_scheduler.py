"""The scheduler on a real pool: limits, order, ends, and the protocol of a step."""

from __future__ import annotations

import pytest

from kvway_core.errors import ContextLengthExceeded, InvalidRequest, InvariantViolated
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.scheduling.scheduler import Scheduler
from kvway_worker.scheduling.step import Sampled, StepResult
from tests.worker.batching import (
    COMMON,
    AuditedSim,
    Bench,
    answer,
    request,
    run,
)

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
    ("stop", "said", "reason"),
    [
        ([], [FIRST, SECOND, THIRD], "length"),
        ([SECOND], [FIRST, SECOND], "stop"),
        ([SECOND, FIRST], [FIRST], "stop"),
        ([THIRD], [FIRST, SECOND, THIRD], "stop"),
    ],
)
def test_how_an_answer_ends(stop: list[int], said: list[int], reason: str) -> None:
    bench = Bench(10)
    bench.add(request("0", range(20), max_tokens=3, stop_token_ids=frozenset(stop)))
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


def test_p35_a_reset_can_preempt_who_runs() -> None:
    """Replays vLLM's test_scheduler_reset_prefix_cache with running requests, and its e2e test."""
    bench = Bench(40, max_num_seqs=3)
    seqs = [request(str(index), range(index, index + 40), max_tokens=20) for index in range(4)]
    bench.add(*seqs)
    for _ in range(10):
        bench.step()
    assert bench.scheduler.reset_prefix_cache(reset_running=True)
    bench.scheduler.check_invariants()
    assert (bench.scheduler.num_running, bench.scheduler.counters.preemptions) == (0, 3)
    assert (bench.pool.num_referenced, bench.pool.num_cached) == (0, 0)
    assert list(bench.step()) == ["0", "1", "2"], "in their order"
    for _ in run(bench.scheduler, bench.engine):
        pass
    for index, seq in enumerate(seqs):
        assert seq.output_token_ids == answer(range(index, index + 40), 20)


def test_p39_a_step_under_way_at_a_reset_is_computed_again() -> None:
    """Where vLLM delivers what that step sampled; here it is sampled again, and the same."""
    bench = Bench(40)
    seq = request("0", range(40), max_tokens=3)
    bench.add(seq)
    plan = bench.scheduler.plan()
    assert bench.scheduler.reset_prefix_cache(reset_running=True)
    assert bench.scheduler.commit(plan, bench.engine.execute(plan)) == []
    bench.scheduler.check_invariants()
    for _ in run(bench.scheduler, bench.engine):
        pass
    assert seq.output_token_ids == answer(range(40), 3)


def test_after_a_reset_nothing_counts_as_cached() -> None:
    bench = Bench(40, max_num_seqs=1)
    bench.finish(request("seed", COMMON))
    bench.add(request("0", [*COMMON, 5]))
    assert bench.scheduler.waiting_uncached_tokens() == 1
    assert bench.scheduler.reset_prefix_cache()
    assert bench.scheduler.waiting_uncached_tokens() == 49


def test_a_reset_that_finds_blocks_held_by_nobody_is_an_error() -> None:
    bench = Bench(4)
    bench.pool.allocate(1)
    with pytest.raises(InvariantViolated, match="nobody runs; 1 blocks held"):
        bench.scheduler.reset_prefix_cache()


# --- the protocol of a step -------------------------------------------------------------------


def test_a_step_must_end_before_the_next_is_planned() -> None:
    bench = Bench(10)
    bench.add(request("0", range(20)))
    plan = bench.scheduler.plan()
    with pytest.raises(InvariantViolated, match="step 1 has not ended"):
        bench.scheduler.plan()
    with pytest.raises(InvariantViolated, match=r"no token for \['0'\]"):
        bench.scheduler.commit(plan, StepResult({}))
    bench.scheduler.commit(plan, StepResult({"0": Sampled((5,))}))
    with pytest.raises(InvariantViolated, match="not the one in flight"):
        bench.scheduler.commit(plan, StepResult({"0": Sampled((5,))}))
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


def test_check_invariants_looks_at_how_far_each_request_is() -> None:
    """Invariant 3: each has something to compute, and at most one more than a token."""
    bench = Bench(20)
    seqs = [
        request(str(index), range(20 * index, 20 * index + 9), max_tokens=9) for index in (0, 1)
    ]
    bench.add(*seqs)
    bench.step()
    seqs[0].num_computed_tokens += 1
    with pytest.raises(InvariantViolated, match=r"3: requests are \[0, 1\] tokens behind"):
        bench.scheduler.check_invariants()
    seqs[0].num_computed_tokens -= 3
    bench.scheduler.check_invariants()
    seqs[1].num_computed_tokens -= 1
    with pytest.raises(InvariantViolated, match=r"3: requests are \[3, 2\] tokens behind"):
        bench.scheduler.check_invariants()
