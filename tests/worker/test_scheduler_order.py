"""Who runs first, who waits, who gives way: priorities, the queue's order, followers."""

from __future__ import annotations

import random

import pytest

from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.scheduling.planning import MAX_LOOKED_UP, MAX_SENT_BACK
from kvway_worker.scheduling.scheduler import Scheduler
from kvway_worker.scheduling.sequence import Status
from kvway_worker.scheduling.step import Sampled, StepResult
from kvway_worker.scheduling.waiting import QueueOrder
from tests.worker.batching import COMMON, Bench, Counted, answer, request, run, scheduled


def order_of_first_steps(bench: Bench) -> list[str]:
    """Runs to the end; returns the requests in the order in which they first computed."""
    order: list[str] = []
    for plan, _ in run(bench.scheduler, bench.engine):
        order += [request_id for request_id in scheduled(plan) if request_id not in order]
    return order


# --- priorities -------------------------------------------------------------------------------


def test_a_request_that_matters_more_takes_blocks_from_one_that_matters_less() -> None:
    """Replays vLLM's test_priority_scheduling_preemption: five blocks, twice 32 tokens."""
    bench = Bench(5)
    low = request("low", range(32), max_tokens=9, priority=5)
    high = request("high", range(100, 132), max_tokens=9, priority=0)
    bench.add(low)
    bench.step()
    bench.add(high)
    assert bench.step() == {"low": 1, "high": 32}
    assert bench.step() == {"high": 1}, "it needs a third block: the last one, so low goes"
    assert (low.status, bench.scheduler.counters.preemptions) == (Status.WAITING, 1)
    for _ in run(bench.scheduler, bench.engine):
        pass
    assert low.output_token_ids == answer(range(32), 9)
    assert high.output_token_ids == answer(range(100, 132), 9)


def test_p37_the_victim_is_the_least_important_and_of_equals_the_newest() -> None:
    """Replays vLLM's test_priority_scheduling_preemption_victim_selection."""
    bench = Bench(9, block_size=16)
    seqs = {
        name: request(name, range(start, start + 32), max_tokens=40, priority=priority)
        for name, start, priority in (("b", 0, 2), ("a", 100, 0), ("d", 200, 3), ("c", 300, 3))
    }
    bench.add(*seqs.values())
    bench.step()
    gone: list[str] = []
    while len(gone) < 3:
        bench.step()
        gone += [
            name for name, seq in seqs.items() if seq.status is Status.WAITING and name not in gone
        ]
    assert gone == ["c", "d", "b"]
    assert all(seq.cached_tokens == 0 for seq in seqs.values())


def test_a_place_goes_to_the_lowest_priority_number() -> None:
    """Replays vLLM's test_priority_scheduling_with_limited_slots."""
    bench = Bench(20, max_num_seqs=1)
    for index, priority in enumerate([3, 1, 2, 0]):
        bench.add(request(str(index), range(20), priority=priority))
    assert order_of_first_steps(bench) == ["3", "1", "2", "0"]


@pytest.mark.parametrize("queue_order", ["shortest", "arrival"])
def test_equal_priorities_are_served_in_order_of_arrival(queue_order: QueueOrder) -> None:
    """Replays vLLM's tests of equal priority and of the heap, for equal work."""
    bench = Bench(100, max_num_seqs=1, queue_order=queue_order)
    rng = random.Random(0)
    wanted = []
    for index in range(30):
        priority = rng.randint(-2, 2)
        start = 100 * index
        wanted.append((priority, index))
        bench.add(request(str(index), range(start, start + 20), priority=priority))
    assert order_of_first_steps(bench) == [str(index) for _, index in sorted(wanted)]


def test_a_prompt_that_matters_more_leaves_the_others_their_tokens() -> None:
    """A running request gets its token in each step, also behind a prompt of many chunks."""
    bench = Bench(50, budget=16)
    bench.add(request("low", range(10), max_tokens=20, priority=1))
    bench.step()
    bench.add(request("high", range(100, 180), max_tokens=2))
    bench.step()
    assert [bench.step() for _ in range(3)] == [{"high": 15, "low": 1}] * 3


def test_whoever_was_planned_keeps_its_blocks() -> None:
    """P33, section 6 no 1: a victim has not been planned, so nothing of it was published."""
    bench = Bench(12, block_size=4, max_num_seqs=4)
    seqs = [
        request(str(index), range(20 * index, 20 * index + 9), max_tokens=30, block_size=4,
                priority=index % 2)
        for index in range(4)
    ]  # fmt: skip
    bench.add(*seqs)
    while bench.scheduler.has_work:
        before = [seq for seq in seqs if seq.status is Status.RUNNING]
        plan = bench.scheduler.plan()
        rows = [row.seq for row in plan.rows]
        assert all(seq.status is Status.RUNNING for seq in rows)
        assert all(seq in rows for seq in before if seq.status is Status.RUNNING), "none skipped"
        bench.scheduler.commit(plan, bench.engine.execute(plan))
        bench.scheduler.check_invariants()
    assert bench.scheduler.counters.preemptions > 3
    for index, seq in enumerate(seqs):
        assert seq.output_token_ids == answer(range(20 * index, 20 * index + 9), 30)


def test_p38_after_a_preemption_nobody_gets_in() -> None:
    """Nor drafts: whoever lost its blocks is to find them."""
    bench = Bench(6, max_num_seqs=2, num_drafts=3, answer_ids=(97,))
    first = request("first", [97] * 48, max_tokens=20)
    bench.add(first, request("second", range(100, 140), max_tokens=30))
    bench.step()
    bench.add(request("urgent", [1, 2, 3], priority=-1))  # no place: two are running
    for plan, _ in run(bench.scheduler, bench.engine):
        if bench.scheduler.counters.preemptions:
            assert [(row.seq.request_id, row.num_drafts) for row in plan.rows] == [("first", 0)]
            break
    assert set(bench.step()) == {"urgent", "first"}


def test_a_preempted_request_keeps_its_arrival() -> None:
    """P36, section 6 no 22: it comes back before whoever came after it, and is not newer."""
    bench = Bench(7, max_num_seqs=2, queue_order="shortest")
    first = request("first", range(40), max_tokens=40)
    second = request("second", range(100, 160), max_tokens=30)
    bench.add(first, second)
    while second.status is not Status.WAITING or not second.num_output_tokens:
        bench.step()
    bench.add(request("short", [1, 2, 3], max_tokens=20))
    order = order_of_first_steps(bench)
    assert order.index("second") < order.index("short")


# --- the queue's order ------------------------------------------------------------------------


def test_the_shortest_uncached_prompt_gets_in_first() -> None:
    bench = Bench(100, max_num_seqs=1, queue_order="shortest")
    bench.finish(request("seed", COMMON))
    bench.add(
        request("cold", range(100, 140)),
        request("warm", [*COMMON, *range(20)]),
        request("tiny", [7, 8, 9]),
    )
    assert order_of_first_steps(bench) == ["tiny", "warm", "cold"]


def test_a_long_prompt_is_not_overtaken_for_ever() -> None:
    """Section 6 no 25: 200 uncached tokens at 0.5 wait for less than 400 of others."""
    bench = Bench(100, max_num_seqs=1, budget=512, queue_order="shortest", ageing=0.5)
    bench.add(request("long", range(1000, 1200)), request("0", range(40)))
    order: list[str] = []
    for index in range(1, 30):
        order += bench.step()
        start = 2000 + 100 * index
        bench.add(request(str(index), range(start, start + 40)))
    num_before = order.index("long")
    assert num_before == 320 // 40, "the next one ranks 40 + 0.5 * 320: no better than 200"


def test_generated_tokens_are_work_too() -> None:
    bench = Bench(100, max_num_seqs=1, queue_order="shortest", ageing=1.0)
    bench.add(request("holder", [7], max_tokens=30))
    bench.step()
    bench.add(request("long", range(100, 130)))
    for _ in range(25):
        assert bench.step() == {"holder": 1}
    bench.add(request("short", range(200, 210)))  # it ranks 10 + 25
    assert order_of_first_steps(bench) == ["holder", "long", "short"]


def test_rows_that_find_no_room_to_be_copied_from_are_less_than_a_block() -> None:
    """The bound on a wait: who overtakes may lack block_size - 1 tokens more than was counted."""
    bench = Bench(6, block_size=4, queue_order="shortest")
    bench.finish(request("seed", [1] * 8, block_size=4))
    bench.add(request("holder", [9] * 13, max_tokens=9, block_size=4))
    bench.step()
    first, second = request("0", [5] * 3, block_size=4), request("1", [1] * 8, block_size=4)
    bench.add(first, second)
    assert (first.num_uncached_tokens, second.num_uncached_tokens) == (3, 1)
    assert list(bench.step().items()) == [("holder", 1), ("1", 1 + 4 - 1)]


def test_everyone_who_lacks_more_than_was_counted_goes_back() -> None:
    bench = Bench(6, max_num_seqs=1, queue_order="shortest")
    bench.finish(request("seed", range(64)))
    warm = [request(str(index), [*range(64), *range(index, index + 6)]) for index in range(4)]
    bench.add(request("holder", range(1000, 1090), max_tokens=2, priority=-1), *warm)
    bench.step()  # the holder takes all six blocks: nothing is left of the seed
    bench.add(request("cold", range(500, 520)))
    assert order_of_first_steps(bench)[:2] == ["holder", "cold"]


def test_a_request_whose_cache_was_given_up_goes_back_in_the_queue() -> None:
    """Section 6 no 14: hits count as they are at admission, for the order as for the blocks."""
    bench = Bench(6, max_num_seqs=1, queue_order="shortest")
    bench.finish(request("seed", range(64)))
    was_warm = request("was warm", range(70))
    bench.add(request("holder", range(1000, 1090), max_tokens=2, priority=-1), was_warm)
    assert was_warm.num_uncached_tokens == 70 - 64
    bench.step()  # the holder takes all six blocks: nothing is left of the seed
    bench.add(request("cold", range(500, 520)))
    assert order_of_first_steps(bench) == ["holder", "cold", "was warm"]


def test_a_plan_looks_up_a_bounded_number_of_waiting_requests() -> None:
    bench = Bench(6, max_num_seqs=1, queue_order="shortest")
    bench.finish(request("seed", range(64)))
    waiting = [
        request(str(index), [*range(64), *range(6 * index, 6 * index + 6)])
        for index in range(MAX_SENT_BACK + 5)
    ]
    bench.add(request("holder", range(1000, 1090), max_tokens=2, priority=-1), *waiting)
    bench.step()  # the holder takes all six blocks: nothing is left of the seed
    bench.step()
    assert scheduled(bench.scheduler.plan()) == {str(MAX_SENT_BACK): 70}, "taken as it is"
    assert sum(seq.num_uncached_tokens == 70 for seq in waiting) == MAX_SENT_BACK


@pytest.mark.parametrize("queue_order", ["shortest", "arrival"])
def test_who_waits_for_room_is_not_looked_up_anew_in_every_step(queue_order: QueueOrder) -> None:
    bench = Bench(101, queue_order=queue_order, max_num_seqs=4)
    warm = list(range(800))
    bench.finish(request("seed", warm))
    bench.add(request("holder", range(1000, 1680), max_tokens=100))
    bench.step()
    waits = request("waits", [*warm, *range(200)])
    tokens = waits.token_ids = Counted(waits.token_ids)
    bench.add(waits)
    bench.step()
    assert tokens.num_read > 800
    for _ in range(40):  # the holder takes a block now and then
        before = tokens.num_read
        bench.step()
        assert tokens.num_read - before < 100, "what follows the known blocks, a few times"
    assert waits.status is Status.WAITING
    for _ in run(bench.scheduler, bench.engine):
        pass
    assert waits.output_token_ids == answer([*warm, *range(200)], 1)


def test_a_plan_looks_up_a_bounded_number_of_tokens() -> None:
    """Who gets in after that gets in with the next plan; the first one always does."""
    pool = BlockPool(200, 4096)
    scheduler = Scheduler(pool, max_num_seqs=9, max_num_batched_tokens=2**20, max_model_len=2**18)
    prompt = list(range(2**16))
    names = []
    for name in ("seed", *"abcde"):
        tail = [] if name == "seed" else [ord(name)]
        scheduler.add(request(name, prompt + tail, block_size=4096, max_tokens=9))
        if name == "seed":
            plan = scheduler.plan()
            scheduler.commit(plan, StepResult({"seed": Sampled((5,))}))
    assert 2 * len(prompt) == MAX_LOOKED_UP
    for _ in range(3):
        plan = scheduler.plan()
        names.append([row.seq.request_id for row in plan.rows])
        sampled = {seq.request_id: Sampled((5,)) for row in plan.rows for seq in row.sampling}
        scheduler.commit(plan, StepResult(sampled))
    assert names == [["seed", *"ab"], ["seed", *"abcd"], ["seed", *"abcde"]]


def test_a_follower_moves_up_when_its_prefix_was_computed() -> None:
    bench = Bench(100, max_num_seqs=1, queue_order="shortest")
    bench.add(
        request("leader", range(64)),
        request("other", range(500, 540)),
        request("follower", [*range(64), *range(900, 920)]),
    )
    bench.scheduler.check_invariants()
    assert order_of_first_steps(bench) == ["other", "leader", "follower"]
    bench.add(
        request("leader", range(2000, 2064), priority=-1),
        request("other", range(3000, 3040)),
        request("follower", [*range(2000, 2064), *range(900, 920)]),
    )
    assert order_of_first_steps(bench) == ["leader", "follower", "other"]


# --- followers --------------------------------------------------------------------------------


@pytest.mark.parametrize("queue_order", ["shortest", "arrival"])
@pytest.mark.parametrize("budget", [4, 5, 16, 17, 100, 199, 200, 201, 208, 1000])
def test_a_follower_computes_only_what_is_its_own(budget: int, queue_order: QueueOrder) -> None:
    """The leader's prompt takes all that is left of a step; behind it, its blocks are there."""
    bench = Bench(100, max_num_seqs=4, budget=budget, queue_order=queue_order)
    leader = list(range(200))
    bench.add(
        request("leader", leader, max_tokens=3),
        request("0", [*leader[:192], *range(1000, 1008)], max_tokens=3),
        request("1", [*leader[:96], *range(2000, 2108)], max_tokens=3),
        request("2", [*leader[:192], *range(3000, 3008)], max_tokens=3),
    )
    computed = dict.fromkeys(["leader", "0", "1", "2"], 0)
    for plan, _ in run(bench.scheduler, bench.engine):
        for row in plan.rows:
            computed[row.seq.request_id] += row.num_tokens if row.is_prefill else 0
    assert computed == {"leader": 200, "0": 8, "1": 108, "2": 8}


def test_a_resumed_request_finds_what_others_computed_meanwhile() -> None:
    bench = Bench(30, budget=32, max_num_seqs=2)
    seq = request("0", range(96), max_tokens=2)
    bench.add(seq)
    assert bench.step() == {"0": 32}
    assert bench.scheduler.reset_prefix_cache(reset_running=True)
    bench.add(request("twin", [*range(96), *range(500, 504)], priority=-1))
    assert [bench.step() for _ in range(3)] == [{"twin": 32}] * 3
    assert bench.step() == {"twin": 4, "0": 1}
    assert seq.cached_tokens == 0, "fixed at first admission"


# --- liveness ---------------------------------------------------------------------------------


@pytest.mark.parametrize("queue_order", ["shortest", "arrival"])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_pool_of_minimal_size_always_gets_on(queue_order: QueueOrder, num_drafts: int) -> None:
    """Section 6 no 21: each request needs all of the pool at its end."""
    bench = Bench(
        4, block_size=4, budget=6, max_num_seqs=6, queue_order=queue_order, num_drafts=num_drafts
    )
    seqs = [
        request(str(index), range(index, index + 5), max_tokens=12, block_size=4,
                priority=index % 2)
        for index in range(6)
    ]  # fmt: skip
    bench.add(*seqs)
    num_steps = sum(1 for _ in run(bench.scheduler, bench.engine))
    assert num_steps < 300
    for index, seq in enumerate(seqs):
        assert seq.output_token_ids == answer(range(index, index + 5), 12)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("prompt_logprobs", [None, 5])
def test_many_small_requests_are_one_step(
    prompt_logprobs: int | None, *, prefix_caching: bool
) -> None:
    """Replays vLLM's test_schedule."""
    bench = Bench(100, prefix_caching=prefix_caching)
    for index in range(10):
        prompt = range(100 * index, 100 * index + 10)
        bench.add(request(str(index), prompt, prompt_logprobs=prompt_logprobs))
    assert bench.step() == {str(index): 10 for index in range(10)}


def test_ageing_and_drafts_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="ageing"):
        Bench(4, ageing=-1)
    with pytest.raises(ValueError, match="num_drafts"):
        Bench(4, num_drafts=-1)
