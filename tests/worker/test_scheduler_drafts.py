"""Drafts: computed where there is room, believed where the model agrees, and never hashed."""

from __future__ import annotations

import pytest

from kvway_core.errors import InvariantViolated
from kvway_worker.scheduling.sequence import Status
from kvway_worker.scheduling.step import Sampled, StepPlan, StepResult
from tests.worker.batching import (
    FEW_WORDS,
    Bench,
    answer,
    prompt_logprobs_of,
    request,
    run,
    scheduled,
    step,
)

ONE_WORD = (97,)
"""Answers that are all the same token: every draft is right."""


def num_drafts(plan: StepPlan) -> dict[str, int]:
    return {row.seq.request_id: row.num_drafts for row in plan.rows}


@pytest.mark.parametrize("drafts", [0, 1, 4])
@pytest.mark.parametrize("answer_ids", [FEW_WORDS, ONE_WORD])
def test_answers_are_the_same_with_and_without_drafts(
    drafts: int, answer_ids: tuple[int, ...]
) -> None:
    bench = Bench(60, num_drafts=drafts, answer_ids=answer_ids)
    seqs = [request(str(index), range(index, index + 20), max_tokens=60) for index in range(3)]
    bench.finish(*seqs)
    for index, seq in enumerate(seqs):
        expected = answer(range(index, index + 20), 60, answer_ids=answer_ids)
        assert seq.output_token_ids == expected
    counters = bench.scheduler.counters
    assert counters.generated_tokens == 180
    assert (counters.num_drafts > 0) == (drafts > 0)
    assert counters.num_accepted <= counters.num_drafts
    if answer_ids == ONE_WORD:
        assert counters.num_accepted == counters.num_drafts
        assert bench.engine.num_steps == (60 if not drafts else bench.engine.num_steps)
        assert bench.engine.num_steps <= 3 + 60 // (1 + drafts)


def test_a_step_gives_the_accepted_drafts_and_one_token_more() -> None:
    bench = Bench(20, num_drafts=3, answer_ids=ONE_WORD)
    seq = request("0", [5, 97, 97], max_tokens=20)
    bench.add(seq)
    plan, outputs = step(bench.scheduler, bench.engine)
    assert num_drafts(plan) == {"0": 0}, "none for a prompt"
    assert len(outputs) == 1
    plan, outputs = step(bench.scheduler, bench.engine)
    assert (num_drafts(plan), scheduled(plan)) == ({"0": 3}, {"0": 4})
    assert plan.rows[0].token_ids == (97, 97, 97, 97)
    assert [out.token_id for out in outputs] == [97] * 4
    assert seq.num_computed_tokens == seq.num_tokens - 1
    assert bench.scheduler.counters.num_draft_rows == 1


def test_drafts_that_are_wrong_are_computed_again_as_what_they_are() -> None:
    """Section 6 no 19: the rows of rejected drafts are written anew; the audit reads them."""
    bench = Bench(20, block_size=4, num_drafts=4)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2, 3]
    seq = request("0", prompt, max_tokens=12, block_size=4)
    bench.finish(seq)
    assert seq.output_token_ids == answer(prompt, 12)


def test_drafts_end_with_the_answer() -> None:
    bench = Bench(20, num_drafts=9, answer_ids=ONE_WORD)
    seq = request("0", [97, 97], max_tokens=5)
    bench.add(seq)
    assert [num_drafts(plan)["0"] for plan, _ in run(bench.scheduler, bench.engine)] == [0, 3]
    assert seq.num_output_tokens == 5


def test_nothing_comes_behind_a_token_that_stops() -> None:
    bench = Bench(20, num_drafts=4, answer_ids=ONE_WORD)
    seq = request("0", [97, 97], max_tokens=9)
    bench.add(seq)
    bench.step()
    plan = bench.scheduler.plan()
    assert num_drafts(plan) == {"0": 4}
    seq.params = request("", [1], max_tokens=9, stop_token_ids=frozenset([98])).params
    result = StepResult({"0": Sampled((97, 98, 97, 97, 97))})
    outputs = bench.scheduler.commit(plan, result)
    bench.scheduler.check_invariants()
    assert [(out.token_id, out.finish_reason) for out in outputs] == [(97, None), (98, "stop")]
    assert seq.status is Status.FINISHED
    assert seq.output_token_ids == [97, 97, 98]


def test_more_tokens_than_drafts_are_an_error() -> None:
    bench = Bench(20)
    bench.add(request("0", [1, 2], max_tokens=9))
    plan = bench.scheduler.plan()
    for sampled in (Sampled((5, 6)), Sampled(())):
        with pytest.raises(InvariantViolated, match="no token for"):
            bench.scheduler.commit(plan, StepResult({"0": sampled}))


def test_drafts_take_what_is_left_of_the_budget() -> None:
    bench = Bench(40, num_drafts=4, answer_ids=ONE_WORD, budget=20, max_num_seqs=3)
    bench.add(request("0", [97, 97], max_tokens=40), request("1", [3, 97, 97], max_tokens=40))
    bench.step()
    bench.add(request("2", range(100, 116), max_tokens=3))
    plan, _ = step(bench.scheduler, bench.engine)
    assert scheduled(plan) == {"0": 3, "1": 1, "2": 16}, "a prompt comes before drafts"


def test_drafts_take_no_blocks_from_others() -> None:
    """Never preempt for a draft; where blocks are short there are none."""
    bench = Bench(2, num_drafts=4, answer_ids=ONE_WORD, block_size=8, max_num_seqs=2)
    bench.add(
        request("0", [97] * 6, max_tokens=3, block_size=8),
        request("1", [1, *[97] * 5], max_tokens=3, block_size=8),
    )
    bench.step()
    plan, _ = step(bench.scheduler, bench.engine)
    assert num_drafts(plan) == {"0": 1, "1": 1}, "what fits into the block that each has"
    bench = Bench(2, num_drafts=4, answer_ids=ONE_WORD, block_size=8, max_num_seqs=2)
    bench.add(
        request("0", [97] * 7, max_tokens=9, block_size=8),
        request("1", [1, *[97] * 6], max_tokens=9, block_size=8),
    )
    bench.step()
    plan, _ = step(bench.scheduler, bench.engine)
    assert num_drafts(plan) == {"0": 0, "1": 0}
    assert bench.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("pinned", [False, True])
def test_drafts_take_blank_blocks_only(*, pinned: bool) -> None:
    """What is cached stays, and as many drafts are checked as there is room for."""
    bench = Bench(4, num_drafts=20, answer_ids=ONE_WORD, block_size=8)
    warm = request("warm", range(20, 28), block_size=8)
    if pinned:
        bench.pool.pin("pin", warm.chain.hashes, expires_s=9.0)
    bench.finish(warm)
    seq = request("0", [97] * 13, max_tokens=40 - 13 - 8, block_size=8)
    bench.add(seq)
    bench.step()
    assert bench.pool.num_blank == 1
    plan, _ = step(bench.scheduler, bench.engine)
    assert num_drafts(plan) == {"0": 10}, "two in its block and eight in the blank one"
    assert len(bench.pool.tier("pinned" if pinned else "probation")) == 1
    assert bench.pool.num_evictions == 0


def test_blocks_of_drafts_that_are_wrong_are_given_back() -> None:
    bench = Bench(9, num_drafts=20, answer_ids=ONE_WORD, block_size=4)
    seq = request("0", [97] * 5, max_tokens=30, block_size=4)
    bench.add(seq)
    bench.step()
    plan = bench.scheduler.plan()
    assert (num_drafts(plan), bench.pool.num_referenced) == ({"0": 20}, 7)
    bench.scheduler.commit(plan, StepResult({"0": Sampled((97, 97, 5))}))
    bench.scheduler.check_invariants()
    assert (seq.num_computed_tokens, bench.pool.num_referenced) == (8, 2)
    assert bench.pool.num_blank == 7


def test_p23_drafts_are_never_hashed_and_accepted_tokens_are_at_once() -> None:
    bench = Bench(20, block_size=4, num_drafts=4, answer_ids=ONE_WORD)
    seq = request("0", [97, 97, 97], max_tokens=30, block_size=4)
    bench.add(seq)
    bench.step()
    plan = bench.scheduler.plan()
    assert (plan.rows[0].start, plan.rows[0].num_tokens) == (3, 5)
    assert bench.pool.num_pending == 1, "the block that a known token fills, not the drafts'"
    bench.scheduler.commit(plan, StepResult({"0": Sampled((98,))}))
    bench.scheduler.check_invariants()
    assert len(bench.pool.committed()) == 1
    bench = Bench(20, block_size=4, num_drafts=4, answer_ids=ONE_WORD)
    seq = request("0", [97, 97, 97], max_tokens=30, block_size=4)
    bench.add(seq)
    bench.step()
    bench.step()
    assert seq.num_computed_tokens == 8
    assert len(bench.pool.committed()) == 2
    twin = request("1", [97] * 9, max_tokens=2, block_size=4)
    bench.add(twin)
    bench.step()
    assert twin.cached_tokens == 8


def test_an_abort_while_drafts_are_computed_leaves_nothing_of_them() -> None:
    """Section 6 no 19 and 20."""
    bench = Bench(20, block_size=4, num_drafts=4, answer_ids=ONE_WORD)
    seq = request("0", [97, 97, 97], max_tokens=30, block_size=4)
    bench.add(seq)
    bench.step()
    plan = bench.scheduler.plan()
    assert num_drafts(plan) == {"0": 4}
    result = bench.engine.execute(plan)
    bench.abort(seq)
    assert bench.scheduler.commit(plan, result) == []
    bench.scheduler.check_invariants()
    assert (bench.pool.num_referenced, bench.pool.committed()) == (0, {})
    bench.finish(again := request("0", [97, 97, 97], max_tokens=30, block_size=4))
    assert again.output_token_ids == [97] * 30


# --- log probabilities of prompts -------------------------------------------------------------


@pytest.mark.parametrize("budget", [3, 16, 17, 100])
@pytest.mark.parametrize("warm", [False, True])
def test_prompt_log_probabilities_are_whole_however_a_prompt_is_cut(
    budget: int, *, warm: bool
) -> None:
    """P28, section 6 no 15: as many as the prompt has tokens behind the first."""
    bench = Bench(20, budget=budget, max_num_seqs=2)
    if warm:
        bench.finish(request("seed", range(50)))
    seq = request("0", range(50), prompt_logprobs=3)
    bench.finish(seq)
    assert seq.prompt_logprobs == prompt_logprobs_of(range(50))
    assert seq.cached_tokens == 0


def test_prompt_log_probabilities_computed_again_are_there_once() -> None:
    bench = Bench(20, budget=16, max_num_seqs=2)
    seq = request("0", range(50), max_tokens=3, prompt_logprobs=3)
    bench.add(seq)
    for _ in range(3):
        bench.step()
        assert bench.scheduler.reset_prefix_cache(reset_running=True)
    for _ in run(bench.scheduler, bench.engine):
        pass
    assert seq.prompt_logprobs == prompt_logprobs_of(range(50))
    assert seq.output_token_ids == answer(range(50), 3)


def test_a_prompt_of_one_token_has_none() -> None:
    bench = Bench(4)
    seq = request("0", [7], prompt_logprobs=3)
    bench.finish(seq)
    assert seq.prompt_logprobs == []
