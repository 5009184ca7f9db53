"""When a request has ended, nothing of it is left in the scheduler."""

from __future__ import annotations

import gc
from types import FunctionType, ModuleType

import pytest

from kvway_worker.scheduling.sequence import Sequence, Status
from tests.worker.batching import Bench, request, run

SIZE = 4
ONE_WORD = (97,)


def left_of_requests(root: object) -> list[object]:
    """Returns the requests, and the ids of requests, that an object leads to.

    All of its parts are followed, so that whatever keeps something per request is looked at.
    """
    seen = {id(root)}
    todo: list[object] = [root]
    found: list[object] = []
    while todo:
        one = todo.pop()
        if isinstance(one, Sequence) or (isinstance(one, str) and one.startswith("request ")):
            found.append(one)
        # Of a dictionary by strings, get_referents has the values only.
        keys = list(one) if isinstance(one, dict) else []
        for part in (*keys, *gc.get_referents(one)):
            if id(part) not in seen and not isinstance(part, type | ModuleType | FunctionType):
                seen.add(id(part))
                todo.append(part)
    return found


def asks(name: str, prompt: list[int], *, num_forks: int = 0, max_tokens: int = 9) -> Sequence:
    seq = request(f"request {name}", prompt, block_size=SIZE, max_tokens=max_tokens)
    for index in range(num_forks):
        seq.fork(f"request {name}, {index}", seq.params)
    return seq


def a_bench(num_blocks: int = 40) -> Bench:
    return Bench(
        num_blocks,
        block_size=SIZE,
        budget=24,
        max_num_seqs=6,
        num_drafts=3,
        answer_ids=ONE_WORD,
        queue_order="shortest",
    )


def check_nothing_is_left(bench: Bench) -> None:
    for _ in run(bench.scheduler, bench.engine):
        pass
    assert left_of_requests(bench.scheduler) == []
    assert bench.pool.num_referenced == 0


def test_nothing_is_left_of_requests_that_finished() -> None:
    bench = a_bench()
    seqs = [asks(str(index), [97] * (5 + index), num_forks=index) for index in range(3)]
    bench.add(*seqs)
    assert len(left_of_requests(bench.scheduler)) >= 6
    bench.step()
    bench.step()
    assert bench.scheduler.counters.num_drafts > 0
    check_nothing_is_left(bench)


@pytest.mark.parametrize("num_steps", range(5))
@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_of_requests_that_were_aborted_or_failed(
    num_steps: int, *, in_flight: bool, fails: bool
) -> None:
    """In the queue, between chunks, with forks, while rows are copied, with drafts."""
    bench = a_bench()
    bench.finish(asks("seed", [1, 2, 3, 4, 5, 6]))
    seqs = [
        asks("copies", [1, 2, 3, 4, 5, 7], num_forks=1),
        asks("drafts", [97] * 6),
        asks("long", list(range(100, 150)), num_forks=2),
        asks("longer", list(range(200, 260))),
    ]
    bench.add(*seqs)
    for _ in range(num_steps):
        bench.step()
    plan = bench.scheduler.plan() if in_flight else None
    if fails and plan is not None:
        bench.scheduler.fail(plan)
    for seq in seqs:
        bench.scheduler.abort(seq.request_id)
    if plan is not None and not fails:
        bench.scheduler.commit(plan, bench.engine.execute(plan))
    check_nothing_is_left(bench)


def test_nothing_is_left_of_who_waited_for_room_or_lost_its_blocks() -> None:
    bench = a_bench(num_blocks=10)
    first, second = asks("first", [97] * 15, max_tokens=20), asks("second", [5] * 15, max_tokens=9)
    waits = asks("waits", [6] * 15, max_tokens=9)
    bench.add(first, second)
    bench.step()
    bench.add(waits)
    while not bench.scheduler.counters.preemptions:
        bench.step()
    assert waits.status is Status.WAITING
    bench.abort(waits)
    assert waits not in left_of_requests(bench.scheduler)
    assert bench.scheduler.reset_prefix_cache(reset_running=True)
    bench.abort(second)
    check_nothing_is_left(bench)


def test_nothing_is_left_of_who_was_looked_up_last_and_never_got_in() -> None:
    bench = a_bench(num_blocks=10)
    bench.finish(asks("seed", list(range(20))))
    holder, waits = asks("holder", [5] * 24, max_tokens=9), asks("waits", list(range(24)))
    bench.add(holder)
    bench.step()
    bench.add(waits)
    bench.step()
    assert waits.status is Status.WAITING
    for seq in (waits, holder):
        bench.abort(seq)
    check_nothing_is_left(bench)
