"""What --debug-invariants sees: each promise about tables and steps is broken once, by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvway_core.clock import SystemClock
from kvway_core.errors import InvariantViolated
from kvway_worker.scheduling.sequence import Sequence
from kvway_worker.scheduling.step import Row, StepPlan
from kvway_worker.stepper import Stepper
from kvway_worker.streams import Stream
from tests.worker.batching import Bench, OneHash, request

SEED = list(range(8))
"""Two blocks that are there, with nothing behind."""
TAILED = list(range(100, 110))
"""Two blocks and a tail that are there."""


@dataclass
class Scene:
    """A batch with everything that blocks are shared by, and its next step."""

    bench: Bench
    seqs: dict[str, Sequence]
    plan: StepPlan

    @property
    def pool(self) -> Any:
        return self.bench.pool

    def row(self, name: str) -> Row:
        return next(row for row in self.plan.rows if row.seq is self.seqs[name])

    def become(self, plan: StepPlan) -> None:
        """Puts another plan in flight."""
        self.plan = plan
        self.bench.scheduler._in_flight = plan

    def rewrite(self, name: str, **changes: Any) -> None:
        """Puts a plan in flight whose row of one request is another."""
        old = self.row(name)
        rows = [replace(row, **changes) if row is old else row for row in self.plan.rows]
        self.become(replace(self.plan, rows=tuple(rows)))

    def exchange(self, name: str, index: int, block: int) -> None:
        """Gives a request another block, with a reference, and its row too."""
        seq = self.seqs[name]
        self.pool.touch(block)
        self.pool.free([seq.block_table[index]])
        seq.block_table[index] = block
        self.rewrite(name, block_table=tuple(seq.block_table))

    def go_back(self, name: str, num_computed: int) -> None:
        """Lets a request compute tokens again that are computed."""
        seq, row = self.seqs[name], self.row(name)
        seq.num_computed_tokens = num_computed
        tokens = tuple(seq.token_ids[num_computed : row.end])
        self.rewrite(name, start=num_computed, num_tokens=len(tokens), token_ids=tokens)

    def make_pending(self, block: int) -> None:
        """Takes back that a block is committed; consistent, but for what says who writes it."""
        contents = self.pool._contents
        content = contents.of(block)
        contents._children.remove(content.parent, content.token_ids, block)
        contents._pending[block] = None


def scene(*, prefix_caching: bool = True) -> Scene:
    """Forks that write behind a shared block, twins of a new prompt, a hit, and a copied tail."""
    bench = Bench(40, block_size=4, prefix_caching=prefix_caching)
    bench.finish(request("seed", SEED, block_size=4), request("tailed", TAILED, block_size=4))
    fork = request("fork", range(50, 56), block_size=4, max_tokens=9)
    seqs = [
        request("leader", range(50, 56), block_size=4, max_tokens=9, forks=[fork]),
        fork,
        request("first", range(60, 71), block_size=4, max_tokens=9),
        request("second", range(60, 71), block_size=4, max_tokens=9),
        request("hit", [*SEED, 9, 9], block_size=4, max_tokens=9),
        request("copy", [*TAILED, 9, 9], block_size=4, max_tokens=9),
    ]
    bench.add(seqs[0])
    bench.step()
    bench.add(*seqs[2:])
    plan = bench.scheduler.plan()
    bench.scheduler.check_invariants()
    return Scene(bench, {seq.request_id: seq for seq in seqs}, plan)


def after_the_step() -> Scene:
    """The same when the result is in."""
    found = scene()
    found.bench.scheduler.commit(found.plan, found.bench.engine.execute(found.plan))
    found.bench.scheduler.check_invariants()
    return found


def seen(at: Scene, problem: str) -> None:
    """Checks that a problem is named, with all there is to see and no token."""
    with pytest.raises(InvariantViolated, match=problem) as raised:
        at.bench.scheduler.check_invariants()
    words = (
        "running [{",
        "'published'",
        "waiting [",
        "rows in flight [",
        "copies (",
        "pool: refs",
    )
    assert all(word in str(raised.value) for word in words)


# --- tables -----------------------------------------------------------------------------------


def _hold_twice(at: Scene) -> None:
    table = at.seqs["first"].block_table
    table.append(table[0])
    at.pool.touch(table[0])


def _too_few_blocks(at: Scene) -> None:
    at.pool.free([at.seqs["first"].block_table.pop()])


def _swap(at: Scene) -> None:
    table = at.seqs["first"].block_table
    table[0], table[1] = table[1], table[0]


def _other_tokens(at: Scene) -> None:
    at.seqs["first"].token_ids[0] += 1


def _other_hash(at: Scene) -> None:
    hashes = at.seqs["first"].chain.hashes
    hashes[1] = hashes[0]


def _publish_too_much(at: Scene) -> None:
    at.seqs["hit"].num_published_blocks += 1


def _write_behind_what_is_found(at: Scene) -> None:
    """A block that others find, where the request is to write its next tokens."""
    table = at.seqs["hit"].block_table
    at.pool.free([table[-1]])
    table[-1] = at.seqs["first"].block_table[1]
    at.pool.touch(table[-1])


def _not_told_how_much_was_cached(at: Scene) -> None:
    at.seqs["first"].cached_tokens = None


def _all_cached(at: Scene) -> None:
    at.seqs["first"].cached_tokens = 11


def _nothing_to_compute(at: Scene) -> None:
    at.seqs["first"].num_computed_tokens = at.seqs["first"].num_tokens


def _two_far_behind(at: Scene) -> None:
    for name in ("leader", "fork"):
        at.seqs[name].num_computed_tokens -= 1


def _pending_between_steps(at: Scene) -> None:
    at.make_pending(at.seqs["first"].block_table[1])


def _takes_between_steps(at: Scene) -> None:
    at.bench.scheduler._tables._taking.add(at.seqs["first"])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_hold_twice, "table 1: each block once"),
        (_too_few_blocks, "table 1: .* one for each computed token: 'first'"),
        (_swap, "table 2: block . has the content of the request: 'first'"),
        (_other_tokens, "table 2: block . has the content of the request: 'first'"),
        (_other_hash, "table 2: block . has the content of the request: 'first'"),
        (_publish_too_much, "table 2: what is published is computed: 'hit'"),
        (_write_behind_what_is_found, "table 3: block . has the content of the request: 'hit'"),
        (_not_told_how_much_was_cached, "table 4: None of 11 tokens"),
        (_all_cached, "table 4: 11 of 11 tokens"),
        (_nothing_to_compute, "3: requests are .* behind"),
        (_two_far_behind, "3: requests are .* behind"),
        (_pending_between_steps, "1 blocks pending between steps"),
        (_takes_between_steps, "requests take blocks of others between steps"),
    ],
)
def test_between_steps_tables_hold_what_their_requests_computed(
    damage: Callable[[Scene], None], problem: str
) -> None:
    at = after_the_step()
    damage(at)
    seen(at, problem)


def test_what_is_shared_without_content_is_the_same() -> None:
    """A fork and its request share the partly filled last block of their prompt."""
    bench = Bench(9, block_size=4)
    fork = request("fork", range(6), block_size=4, max_tokens=9)
    leader = request("leader", range(6), block_size=4, max_tokens=9, forks=[fork])
    bench.add(leader)
    bench.step()
    assert leader.block_table == fork.block_table
    fork.token_ids[5] = 99
    seen(Scene(bench, {}, StepPlan(0, ())), "table 3: 'leader' and 'fork' share block 1")


def test_what_one_fork_publishes_is_right_for_the_others() -> None:
    """The hash of their block was taken when they began; the room that one needs sets it free."""
    bench = Bench(3, block_size=4)
    bench.finish(request("taken", [7] * 4, block_size=4, chain=OneHash(4)))
    fork = request("fork", [8] * 4, block_size=4, chain=OneHash(4), max_tokens=4)
    leader = request("0", [8] * 4, block_size=4, chain=OneHash(4), max_tokens=4, forks=[fork])
    bench.add(leader)
    bench.step()
    plan = bench.scheduler.plan()
    assert [row.seq.num_published_blocks for row in plan.rows] == [0, 1]
    bench.scheduler.check_invariants()
    bench.scheduler.commit(plan, bench.engine.execute(plan))
    bench.scheduler.check_invariants()


# --- a step in flight -------------------------------------------------------------------------


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


def test_no_salt_and_no_token_is_shown() -> None:
    bench = Bench(9, block_size=4)
    seq = request("0", [7654] * 9, block_size=4, max_tokens=9, salt="secret")
    bench.add(seq)
    bench.step()
    seq.cached_tokens = None
    with pytest.raises(InvariantViolated) as raised:
        bench.scheduler.check_invariants()
    assert "secret" not in str(raised.value)
    assert "7654" not in str(raised.value)


def stepping(bench: Bench, *, debug_invariants: bool) -> tuple[Stepper, StepPlan]:
    """Begins a step of one request."""
    stepper = Stepper(
        bench.engine, bench.scheduler, clock=SystemClock(), debug_invariants=debug_invariants
    )
    seq = request("0", range(20), max_tokens=9)
    stepper.add((Stream(seq, asyncio.Queue(maxsize=9), 0.0),))
    return stepper, stepper.plan()


def test_with_debug_invariants_a_step_is_checked_when_it_is_planned_and_when_it_is_done() -> None:
    bench = Bench(9)
    stepper, plan = stepping(bench, debug_invariants=True)
    leaked = bench.pool.allocate(1)
    with pytest.raises(InvariantViolated, match="4: requests hold"):
        stepper.step(plan)
    bench.pool.free(leaked)
    bench.scheduler.check_invariants()
    bench.pool.allocate(1)
    with pytest.raises(InvariantViolated, match="4: requests hold"):
        stepper.plan()


def test_without_debug_invariants_nothing_is_checked() -> None:
    bench = Bench(9)
    stepper, plan = stepping(bench, debug_invariants=False)
    bench.pool.allocate(1)
    stepper.step(plan)
    assert stepper.plan().rows
