"""The queue of waiting requests: its order, the bound on a wait, and what the cache changes."""

from __future__ import annotations

from fractions import Fraction
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvway_worker.scheduling.sequence import Sequence
from kvway_worker.scheduling.waiting import WaitingQueue
from tests.worker.batching import request


def waits(index: int, num_uncached: int, *, priority: int = 0) -> Sequence:
    """Makes a request that lacks so many of its tokens."""
    seq = request(str(index), range(1000 * index, 1000 * index + num_uncached), priority=priority)
    seq.arrival_index = index
    return seq


def order(queue: WaitingQueue) -> list[int]:
    queue.check_invariants()
    return [seq.arrival_index for seq in queue]


def test_the_shortest_uncached_work_is_first_and_arrival_decides_ties() -> None:
    queue = WaitingQueue()
    for index, num_uncached in enumerate([30, 10, 20, 10]):
        queue.push(waits(index, num_uncached), work=0)
    assert order(queue) == [1, 3, 2, 0]
    assert queue.head is next(iter(queue))


def test_arrival_order_overtakes_nobody() -> None:
    queue = WaitingQueue(order="arrival")
    for index, num_uncached in enumerate([30, 10, 20]):
        queue.push(waits(index, num_uncached), work=100 * index)
    assert order(queue) == [0, 1, 2]


def test_lower_priority_numbers_are_first_whatever_their_work() -> None:
    queue = WaitingQueue()
    for index, (num_uncached, priority) in enumerate([(10, 3), (500, 0), (5, 1), (20, 0)]):
        queue.push(waits(index, num_uncached, priority=priority), work=0)
    assert order(queue) == [3, 1, 2, 0]


@pytest.mark.parametrize("queue_order", ["shortest", "arrival"])
def test_a_preempted_request_is_first_of_its_priority(queue_order: str) -> None:
    """P36: to the front, and of several the one that came first."""
    queue = WaitingQueue(order="shortest" if queue_order == "shortest" else "arrival")
    queue.push(waits(3, 5), work=0)
    queue.push(waits(4, 5, priority=-1), work=0)
    queue.push_front(waits(2, 90))
    queue.push_front(waits(1, 500))
    assert order(queue) == [4, 1, 2, 3]


def test_work_done_before_a_request_came_counts_against_it() -> None:
    queue = WaitingQueue(ageing=0.5)
    queue.push(waits(0, 100), work=0)
    queue.push(waits(1, 51), work=97)  # 51 + 48.5 < 100
    queue.push(waits(2, 51), work=98)  # 51 + 49 = 100: no sooner than who was there
    assert order(queue) == [1, 0, 2]


@pytest.mark.parametrize("ageing", [-0.1, inf, nan])
def test_ageing_that_is_none_is_refused(ageing: float) -> None:
    with pytest.raises(ValueError, match="it must be a number of at least 0"):
        WaitingQueue(ageing=ageing)


def test_whoever_takes_over_gets_the_place() -> None:
    queue = WaitingQueue(ageing=0.5)
    leader, other = waits(0, 40), waits(2, 40)
    queue.push(leader, work=10)
    queue.push(other, work=11)
    fork = waits(1, 40)
    queue.replace(leader, fork)
    assert order(queue) == [1, 2]
    assert queue.rank(fork).key == queue.rank(other).key - 1
    queue.remove(fork)
    queue.push_front(waits(3, 5))
    queue.replace(next(iter(queue)), waits(4, 900))
    assert order(queue) == [4, 2], "a front place stays one"


def test_who_begins_with_what_was_computed_moves_up() -> None:
    """A request's rank follows the cache as far as the blocks just computed are its next ones."""
    queue = WaitingQueue()
    writer = request("writer", range(64))
    same = request("same", [*range(48), 999, *range(200)])
    forked = request("forked", [*range(16), *range(500, 600)])
    other = request("other", range(700, 760))
    for index, seq in enumerate((same, forked, other)):
        seq.arrival_index = index
        queue.push(seq, work=0)
    assert order(queue) == [2, 1, 0]
    queue.computed(writer.chain.hashes[:2], 0)
    assert order(queue) == [2, 1, 0]
    assert [seq.num_uncached_tokens for seq in (same, forked, other)] == [249 - 32, 100, 60]
    queue.computed(writer.chain.hashes[:4], 2)
    assert [seq.num_uncached_tokens for seq in (same, forked, other)] == [249 - 48, 100, 60]
    queue.computed(writer.chain.hashes[:4], 0)
    assert same.num_uncached_tokens == 249 - 48, "found again, and nothing is counted twice"


def test_a_prompt_that_was_computed_whole_leaves_one_token() -> None:
    queue = WaitingQueue()
    twin = request("twin", range(32))
    queue.push(twin, work=0)
    queue.computed(request("writer", range(40)).chain.hashes, 0)
    assert twin.num_uncached_tokens == 1
    queue.check_invariants()


def test_who_reads_no_cache_does_not_move() -> None:
    """P28: a request for the prompt's log probabilities computes all of it."""
    queue = WaitingQueue()
    twin = request("twin", range(32), prompt_logprobs=0)
    queue.push(twin, work=0)
    queue.computed(request("writer", range(40)).chain.hashes, 0)
    assert twin.num_uncached_tokens == 32


def test_counting_anew_keeps_the_age() -> None:
    queue = WaitingQueue(ageing=0.5)
    old, young = waits(0, 100), waits(1, 80)
    queue.push(old, work=0)
    queue.push(young, work=20)
    assert order(queue) == [1, 0]
    queue.recount(old, 89)
    assert order(queue) == [0, 1]
    queue.recount(old, 91)
    assert order(queue) == [1, 0]


ARRIVALS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 40), st.booleans()), min_size=1, max_size=40
)


@given(arrivals=ARRIVALS, ageing=st.sampled_from([0.03, 0.25, 1 / 3, 1.0]))
def test_a_wait_is_bounded(arrivals: list[tuple[int, int, bool]], ageing: float) -> None:
    """Section 6 no 25: who overtakes is shorter, and came before U / ageing tokens of work.

    Each step of the play: a request comes, and, if told so, the first one gets in, which is work.
    """
    queue = WaitingQueue(ageing=ageing)
    exact = Fraction(ageing).limit_denominator(10**6)
    work = 0
    came: dict[str, tuple[int, int]] = {}
    for index, (num_uncached, more_work, one_gets_in) in enumerate(arrivals):
        seq = waits(index, num_uncached)
        came[seq.request_id] = (num_uncached, work)
        queue.push(seq, work=work)
        work += more_work
        num_admitted = len(queue) if index == len(arrivals) - 1 else int(one_gets_in)
        for first in list(queue)[:num_admitted]:
            queue.remove(first)
            own_uncached, own_work = came[first.request_id]
            for left in queue:
                uncached, at_work = came[left.request_id]
                if left.arrival_index < first.arrival_index:  # it was overtaken
                    assert own_uncached < uncached
                    assert (own_work - at_work) * exact < uncached
            work += own_uncached
            queue.check_invariants()
    assert len(queue) == 0
