"""What --debug-invariants sees in a step in flight: each promise is broken once, by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.worker.scenes import Scene, scene, seen


def _lose_a_row(at: Scene) -> None:
    at.become(replace(at.plan, rows=at.plan.rows[1:]))


def _same_row_again(at: Scene) -> None:
    at.become(replace(at.plan, rows=(*at.plan.rows, at.plan.rows[-1])))


def _start_late(at: Scene) -> None:
    row = at.row("first")
    at.rewrite("first", start=1, num_tokens=row.num_tokens - 1, token_ids=row.token_ids[1:])


def _compute_other_tokens(at: Scene) -> None:
    at.rewrite("first", token_ids=at.row("first").token_ids[::-1])


def _read_another_table(at: Scene) -> None:
    at.rewrite("second", block_table=at.row("first").block_table)


def _sample_nobody(at: Scene) -> None:
    at.rewrite("first", sampling=())


def _too_many_requests(at: Scene) -> None:
    at.bench.scheduler.limits = replace(at.bench.scheduler.limits, max_num_seqs=5)


def _too_many_tokens(at: Scene) -> None:
    limits = at.bench.scheduler.limits
    at.bench.scheduler.limits = replace(
        limits, max_num_batched_tokens=at.plan.num_tokens - 1, max_num_seqs=6
    )


def _write_in_place(at: Scene) -> None:
    """Nobody copies before it writes."""
    at.exchange("leader", 1, at.seqs["fork"].block_table[1])
    copies = at.plan.copies[1:]
    at.become(replace(at.plan, copies=copies))


def _write_what_can_be_found(at: Scene) -> None:
    at.go_back("fork", 3)


def _pending_of_nobody(at: Scene) -> None:
    at.make_pending(at.seqs["hit"].block_table[1])


def _read_before_it_is_written(at: Scene) -> None:
    at.become(replace(at.plan, rows=at.plan.rows[::-1]))


def _copy_nothing(at: Scene) -> None:
    at.become(replace(at.plan, copies=()))


def _copy_too_few(at: Scene) -> None:
    source, target, num_rows = at.plan.copies[-1]
    at.become(replace(at.plan, copies=(*at.plan.copies[:-1], (source, target, num_rows - 1))))


def _copy_for_who_has_it(at: Scene) -> None:
    target = at.row("fork").block_table[1]
    at.become(replace(at.plan, copies=(*at.plan.copies, (at.plan.copies[0][0], target, 2))))


def _copy_to_nobody(at: Scene) -> None:
    at.become(replace(at.plan, copies=(*at.plan.copies, (0, at.pool.free_order()[0], 2))))


def _copy_twice(at: Scene) -> None:
    at.become(replace(at.plan, copies=(*at.plan.copies, at.plan.copies[-1])))


def _copy_from(at: Scene, number: int, source: int) -> None:
    copies = list(at.plan.copies)
    copies[number] = (source, *copies[number][1:])
    at.become(replace(at.plan, copies=tuple(copies)))


def _copy_other_content(at: Scene) -> None:
    _copy_from(at, -1, at.seqs["hit"].block_table[1])


def _copy_content_of_another_place(at: Scene) -> None:
    _copy_from(at, -1, at.seqs["copy"].block_table[1])


def _copy_what_a_holder_says_otherwise(at: Scene) -> None:
    """The last block of the prompt, that nothing but the fork's table tells of."""
    at.seqs["fork"].token_ids[5] = 99


def _copy_what_an_earlier_row_writes(at: Scene) -> None:
    _copy_from(at, -1, at.seqs["fork"].block_table[1])


def _copy_what_is_not_written_yet(at: Scene) -> None:
    _copy_from(at, -1, at.seqs["first"].block_table[2])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_lose_a_row, "step 5: each running request has one row"),
        (_same_row_again, "step 5: each running request has one row"),
        (_start_late, "step 5: the row of 'first'"),
        (_compute_other_tokens, "step 5: the row of 'first'"),
        (_read_another_table, "step 5: the row of 'second'"),
        (_sample_nobody, "step 5: the row of 'first'"),
        (_too_many_requests, "1: .* tokens of 6 requests are too many"),
        (_too_many_tokens, "1: .* tokens of 6 requests are too many"),
        (_write_in_place, "step 6: two rows write one block"),
        (_write_what_can_be_found, "step 6: block . is written and can be found"),
        (_pending_of_nobody, "step 7: what is pending is written"),
        (_read_before_it_is_written, "step 7: block .* is written before it is read"),
        (_copy_nothing, "step 8: 2 rows are copied for 'leader'"),
        (_copy_too_few, "step 8: 1 rows are copied for 'copy'"),
        (_copy_for_who_has_it, "step 8: 2 rows are copied for 'fork'"),
        (_copy_to_nobody, "step 8: each copy goes to a block"),
        (_copy_twice, "step 8: each copy goes to a block"),
        (_copy_other_content, "step 8: block .* has what 'copy' copies"),
        (_copy_content_of_another_place, "step 8: block .* has what 'copy' copies"),
        (_copy_what_a_holder_says_otherwise, "step 8: block .* has what 'leader' copies"),
        (_copy_what_an_earlier_row_writes, "step 8: block .* is copied before it is written"),
        (_copy_what_is_not_written_yet, "step 8: block .* is copied before it is written"),
    ],
)
def test_a_step_in_flight_writes_and_copies_what_is_its_own(
    damage: Callable[[Scene], None], problem: str
) -> None:
    at = scene()
    damage(at)
    seen(at, problem)


def test_what_others_hold_is_not_written() -> None:
    """Without a cache nothing has content, and forks share whole blocks all the same."""
    at = scene(prefix_caching=False)
    at.go_back("fork", 3)
    seen(at, "step 6: block . is written and others hold it")


def test_rows_whose_request_was_aborted_are_of_no_concern() -> None:
    """In whatever order: what they write is still nobody else's."""
    for names in (("leader", "first", "copy"), ("fork", "second", "hit")):
        at = scene()
        for name in names:
            at.bench.abort(at.seqs[name])
        at.bench.scheduler.commit(at.plan, at.bench.engine.execute(at.plan))
        at.bench.scheduler.check_invariants()
