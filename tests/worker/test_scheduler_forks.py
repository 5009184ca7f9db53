"""Several answers to one prompt: forks begin when it is computed, on the same blocks."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvway_core.errors import InvalidRequest, InvariantViolated
from kvway_worker.scheduling.sequence import Sequence, Status
from kvway_worker.scheduling.step import Sampled, StepResult
from tests.worker.batching import Bench, answer, prompt_logprobs_of, request, run, scheduled, step

PROMPT = list(range(40))


def family(
    num_forks: int, prompt: Iterable[int] = PROMPT, *, name: str = "", max_tokens: int = 5
) -> tuple[Sequence, ...]:
    """Makes a request and its forks."""
    leader = request(f"{name}leader", list(prompt), max_tokens=max_tokens)
    forks = [leader.fork(f"{name}fork {index + 1}", leader.params) for index in range(num_forks)]
    return (leader, *forks)


def finish(bench: Bench) -> None:
    for _ in run(bench.scheduler, bench.engine):
        pass


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_forks_share_the_prompts_blocks_and_get_a_token_each(*, prefix_caching: bool) -> None:
    bench = Bench(20, prefix_caching=prefix_caching)
    leader, *forks = family(2)
    bench.add(leader)
    assert (bench.scheduler.num_waiting, bench.scheduler.num_running) == (3, 0)
    plan, outputs = step(bench.scheduler, bench.engine)
    assert scheduled(plan) == {"leader": 40}
    assert plan.rows[0].sampling == (leader, *forks)
    assert [out.seq for out in outputs] == [leader, *forks]
    assert (bench.scheduler.num_waiting, bench.scheduler.num_running) == (0, 3)
    assert leader.forks == []
    assert leader.block_table == forks[0].block_table == forks[1].block_table
    assert bench.pool.num_referenced == 3, "nothing is held twice"
    plan, _ = step(bench.scheduler, bench.engine)
    assert scheduled(plan) == {"leader": 1, "fork 1": 1, "fork 2": 1}
    assert len(plan.copies) == 2, "the last one to write need not copy"
    assert leader.block_table[:2] == forks[0].block_table[:2] == forks[1].block_table[:2]
    finish(bench)
    for seq in (leader, *forks):
        assert seq.output_token_ids == answer(PROMPT, 5)
    assert bench.pool.num_referenced == 0


def test_forks_wait_for_the_whole_prompt() -> None:
    bench = Bench(20, budget=16, max_num_seqs=3)
    leader, *forks = family(2)
    bench.add(leader)
    for _ in range(2):
        plan, outputs = step(bench.scheduler, bench.engine)
        assert (plan.rows[0].sampling, outputs) == ((), [])
        assert all(fork.block_table == [] for fork in forks)
    _, outputs = step(bench.scheduler, bench.engine)
    assert [out.seq for out in outputs] == [leader, *forks]


def test_forks_have_a_place_before_their_request_gets_in() -> None:
    bench = Bench(50, max_num_seqs=4, budget=2048)
    first, second = family(2, name="a "), family(1, range(500, 540), name="b ")
    bench.add(first[0], second[0], request("small", [1, 2, 3]))
    assert bench.step() == {"a leader": 40}, "two places are wanted and one is left; no overtaking"
    finish(bench)
    assert all(seq.status is Status.FINISHED for seq in (*first, *second))


def test_more_answers_than_places_are_refused() -> None:
    bench = Bench(50, max_num_seqs=3)
    with pytest.raises(InvalidRequest, match=r"n is 4; this worker runs 3 answers at once") as hit:
        bench.add(family(3)[0])
    assert hit.value.param == "n"
    bench.finish(family(2)[0])


def test_forks_that_are_none_are_refused() -> None:
    bench = Bench(50)
    nested = family(1)[0]
    for fork in (
        request("1", range(41)),
        request("1", PROMPT, salt="other"),
        request("1", PROMPT, prompt_logprobs=0),
        request("1", PROMPT, priority=1),
        request("1", PROMPT, ephemeral=True),
        nested,
    ):
        with pytest.raises(ValueError, match="a fork has the prompt of its request"):
            bench.add(request("0", PROMPT, forks=[fork]))
    with pytest.raises(InvalidRequest, match="max_tokens must be at least 1"):
        bench.add(request("0", PROMPT, forks=[request("1", PROMPT, max_tokens=0)]))
    assert not bench.scheduler.has_work


def test_each_fork_needs_an_id_of_its_own() -> None:
    bench = Bench(50)
    bench.add(family(1)[0])
    for seq in (
        request("fork 1", [1]),
        request("0", PROMPT, forks=[request("leader", PROMPT)]),
        request("0", PROMPT, forks=[request("0", PROMPT)]),
    ):
        with pytest.raises(InvalidRequest, match="use another id"):
            bench.add(seq)
    bench.scheduler.check_invariants()


def test_forks_are_cached_as_their_leader_and_counted_with_it() -> None:
    """P40: the prompt is looked up once."""
    bench = Bench(50)
    bench.finish(request("seed", PROMPT))
    before = bench.pool.stats.read().queries
    leader, *forks = family(2, [*PROMPT, 7, 8])
    bench.finish(leader)
    assert leader.cached_tokens is not None
    assert leader.cached_tokens >= 32
    assert [fork.cached_tokens for fork in forks] == [leader.cached_tokens] * 2
    assert bench.pool.stats.read().queries - before == 42


def test_one_answer_can_end_at_once() -> None:
    bench = Bench(20)
    (first,) = answer(PROMPT, 1)
    short = request("short", PROMPT, max_tokens=5, stop_token_ids=frozenset([first]))
    long = request("long", PROMPT, max_tokens=5)
    leader = request("leader", PROMPT, max_tokens=1, forks=[short, long])
    bench.add(leader)
    _, outputs = step(bench.scheduler, bench.engine)
    assert [out.finish_reason for out in outputs] == ["length", "stop", None]
    finish(bench)
    assert long.output_token_ids == answer(PROMPT, 5)


def test_forks_get_the_prompts_log_probabilities() -> None:
    bench = Bench(20)
    fork = request("1", PROMPT, prompt_logprobs=0)
    leader = request("0", PROMPT, prompt_logprobs=0, forks=[fork])
    bench.finish(leader)
    assert fork.prompt_logprobs == leader.prompt_logprobs == prompt_logprobs_of(PROMPT)


# --- ends in every state ----------------------------------------------------------------------


def test_a_leader_aborted_in_the_queue_leaves_its_place_to_a_fork() -> None:
    bench = Bench(20, max_num_seqs=3)
    leader, first, second = family(2)
    bench.add(leader, request("later", [1, 2]))
    bench.abort(leader)
    assert (first.forks, second.status) == ([second], Status.WAITING)
    assert bench.step() == {"fork 1": 40, "later": 2}
    finish(bench)
    assert first.output_token_ids == second.output_token_ids == answer(PROMPT, 5)
    assert leader.status is Status.ABORTED


def test_an_heir_in_the_queue_has_waited_as_long_as_its_leader() -> None:
    bench = Bench(20, budget=20, max_num_seqs=3, queue_order="shortest", ageing=1.0)
    bench.add(request("busy", range(500, 520)), request("other", range(100, 145)))
    assert bench.step() == {"busy": 20}
    leader, fork = family(1)
    bench.add(leader)  # it ranks 40 + 20, behind the other's 45
    bench.abort(leader)
    assert bench.step() == {"other": 20}
    assert fork.status is Status.WAITING


def test_an_heir_in_the_queue_lacks_what_its_leader_lacked() -> None:
    bench = Bench(20, max_num_seqs=3, queue_order="shortest")
    bench.finish(request("seed", range(32)))
    leader, fork = family(1)
    bench.add(leader, request("other", range(100, 120)))
    assert bench.scheduler.waiting_uncached_tokens() == 8 + 20
    bench.abort(leader)
    assert bench.scheduler.waiting_uncached_tokens() == 8 + 20
    assert fork.num_uncached_tokens == 8
    assert list(bench.step().items()) == [("fork 1", 8), ("other", 20)]


def test_a_leader_aborted_between_chunks_leaves_what_it_computed() -> None:
    bench = Bench(20, budget=16, max_num_seqs=4, queue_order="shortest")
    leader, first, second = family(2)
    bench.add(leader)
    bench.step()
    bench.step()
    bench.add(request("later", [1, 2, 3]))
    bench.abort(leader)
    assert first.num_uncached_tokens == 8
    row = list(bench.step().items())
    assert row == [("fork 1", 8), ("later", 3)], "it is first in line and finds the blocks"
    finish(bench)
    assert first.output_token_ids == second.output_token_ids == answer(PROMPT, 5)


def test_a_leader_aborted_while_its_step_runs_leaves_its_forks_to_wait() -> None:
    bench = Bench(20)
    leader, first, second = family(2)
    bench.add(leader)
    plan = bench.scheduler.plan()
    result = bench.engine.execute(plan)
    bench.abort(leader)
    assert bench.scheduler.commit(plan, result) == []
    bench.scheduler.check_invariants()
    assert first.output_token_ids == []
    finish(bench)
    assert first.output_token_ids == second.output_token_ids == answer(PROMPT, 5)
    assert bench.pool.num_referenced == 0


def test_a_fork_aborted_before_it_began_leaves_the_others() -> None:
    bench = Bench(20)
    leader, first, second = family(2)
    bench.add(leader)
    bench.abort(first)
    finish(bench)
    assert (first.status, first.output_token_ids) == (Status.ABORTED, [])
    assert leader.output_token_ids == second.output_token_ids == answer(PROMPT, 5)


def test_a_fork_aborted_while_its_prompt_is_computed_gets_no_token() -> None:
    bench = Bench(20)
    leader, first, second = family(2)
    bench.add(leader)
    plan = bench.scheduler.plan()
    result = bench.engine.execute(plan)
    bench.abort(first)
    outputs = bench.scheduler.commit(plan, result)
    bench.scheduler.check_invariants()
    assert [out.seq for out in outputs] == [leader, second]
    finish(bench)
    assert (first.status, first.output_token_ids) == (Status.ABORTED, [])
    assert bench.pool.num_referenced == 0


def test_a_failed_step_fails_the_forks_that_wait_for_it() -> None:
    bench = Bench(20)
    leader, *forks = family(2)
    other = request("other", range(100, 110))
    bench.add(leader)
    plan = bench.scheduler.plan()
    bench.add(other)
    assert bench.scheduler.fail(plan) == [leader, *forks]
    bench.scheduler.check_invariants()
    assert all(seq.status is Status.FAILED for seq in (leader, *forks))
    bench.finish(request("again", PROMPT))
    assert other.status is Status.FINISHED


def test_a_preempted_leader_brings_its_forks_back() -> None:
    bench = Bench(6, budget=20, max_num_seqs=4)
    holder = request("holder", range(100, 146), max_tokens=20, priority=-1)
    leader, *forks = family(2)
    bench.add(holder)
    for _ in range(3):
        bench.step()  # 46 tokens in chunks of 20
    bench.add(leader)
    bench.step()
    assert leader.status is Status.RUNNING
    assert bench.scheduler.reset_prefix_cache(reset_running=True)
    assert (leader.status, leader.forks) == (Status.WAITING, forks)
    finish(bench)
    for seq in (leader, *forks):
        assert seq.output_token_ids == answer(PROMPT, 5)


def test_every_fork_must_get_a_token() -> None:
    bench = Bench(20)
    bench.add(family(1)[0])
    plan = bench.scheduler.plan()
    with pytest.raises(InvariantViolated, match=r"no token for \['fork 1'\]"):
        bench.scheduler.commit(plan, StepResult({"leader": Sampled((5,))}))
