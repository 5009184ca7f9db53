"""What --debug-invariants sees in tables: each promise is broken once, by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvway_core.clock import SystemClock
from kvway_core.errors import InvariantViolated
from kvway_worker.scheduling.step import StepPlan
from kvway_worker.stepper import Stepper
from kvway_worker.streams import Stream
from tests.worker.batching import Bench, OneHash, request
from tests.worker.scenes import Scene, after_the_step, seen


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
