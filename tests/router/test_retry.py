"""What is tried again, and how often: each rule as a table; no time passes but the test's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvway_core.errors import (
    ConnectFailed,
    FirstTokenTimeout,
    KvwayError,
    ProtocolError,
    ReplicaFailed,
    ReplicaLost,
    ReplicaRejected,
    RequestCrashedReplica,
    StreamBroken,
)
from kvway_router.retry import UNSENT_S, Quarantine, Refusal, Retries, RetryBudget, is_neutral

FAILURES: dict[str, KvwayError] = {
    "refused": ConnectFailed("refused"),
    "broke": StreamBroken("reset"),
    "froze": ReplicaLost("silent"),
    "junk": ProtocolError("not HTTP"),
    "busy": ReplicaRejected("503", status=503),
    "500": ReplicaFailed("500", status=500),
    "late": FirstTokenTimeout("silent"),
}
AGAIN, ATTEMPTS, BUDGET, NEVER = Refusal.AGAIN, Refusal.ATTEMPTS, Refusal.BUDGET, Refusal.NEVER


def empty_budget() -> RetryBudget:
    budget = RetryBudget(0.0)
    while budget.withdraw(0.0):
        pass
    return budget


# What happens one after the other, each at another replica; "!" when it is gone after that.
@pytest.mark.parametrize(
    ("story", "with_budget", "without"),
    [
        ("refused", None, None),
        ("refused refused refused refused refused", None, None),
        ("broke!", None, None),
        ("froze!", None, None),
        ("broke", None, BUDGET),
        ("broke! broke!", AGAIN, AGAIN),
        ("broke! froze!", AGAIN, AGAIN),
        ("broke! broke", None, BUDGET),
        ("broke broke", None, BUDGET),
        ("broke broke broke", ATTEMPTS, ATTEMPTS),
        ("junk", None, BUDGET),
        ("busy", None, BUDGET),
        ("busy busy", None, BUDGET),
        ("busy busy busy", ATTEMPTS, ATTEMPTS),
        ("refused busy refused busy", None, BUDGET),
        ("500", None, BUDGET),
        ("500 500", AGAIN, AGAIN),
        ("500 busy", None, BUDGET),
        ("late", NEVER, NEVER),
        ("broke! late", NEVER, NEVER),
    ],
)
def test_what_is_tried_again(
    story: str, with_budget: Refusal | None, without: Refusal | None
) -> None:
    for budget, expected in ((RetryBudget(0.0), with_budget), (empty_budget(), without)):
        retries = Retries(budget, max_attempts=3)
        refusal = None
        for number, what in enumerate(story.split()):
            failure = FAILURES[what.rstrip("!")]
            name = f"r{number}:1"
            refusal = retries.refuse(name, failure, is_gone=what.endswith("!"), now_s=0.0)
            assert name in retries.tried
        assert refusal is expected, story


def test_only_replicas_that_are_gone_count_as_crashed() -> None:
    retries = Retries(RetryBudget(0.0), max_attempts=3)
    retries.refuse("a:1", FAILURES["broke"], is_gone=False, now_s=0.0)
    assert retries.num_crashed == 0
    retries.refuse("b:1", FAILURES["broke"], is_gone=True, now_s=0.0)
    retries.refuse("c:1", FAILURES["500"], is_gone=True, now_s=0.0)
    assert retries.num_crashed == 1


def test_connections_that_fail_are_not_free_for_ever() -> None:
    retries = Retries(empty_budget(), max_attempts=3)
    assert retries.refuse("a:1", FAILURES["refused"], is_gone=True, now_s=5.0) is None
    late_s = 5.0 + UNSENT_S - 0.5
    assert retries.refuse("b:1", FAILURES["refused"], is_gone=True, now_s=late_s) is None
    late_s += 0.5
    assert retries.refuse("c:1", FAILURES["refused"], is_gone=True, now_s=late_s) is BUDGET


@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans()), max_size=400),
    st.integers(0, 200),
)
def test_retries_are_a_tenth_of_the_requests_and_what_was_stored(
    steps: list[tuple[float, bool]], num_running: int
) -> None:
    budget, now, num_requests, num_retries = RetryBudget(0.0), 0.0, 0, 0
    for gap_s, is_request in steps:
        now += gap_s
        if is_request:
            num_requests += 1
            budget.deposit(now, num_running=num_running)
        else:
            num_retries += budget.withdraw(now)
    bound = budget.LEAST + budget.SHARE * num_requests + budget.PER_S * now
    assert num_retries <= bound + 1e-6
    assert budget.tokens <= max(budget.LEAST, num_running) + 1e-6


def test_where_all_fail_ten_per_cent_are_tried_again() -> None:
    budget, num_retries = RetryBudget(0.0), 0
    for number in range(3000):
        now_s = number / 100
        budget.deposit(now_s, num_running=1)
        num_retries += budget.withdraw(now_s)
    assert 300 <= num_retries <= 300 + 10 + 3


def test_many_that_run_may_be_tried_again_together() -> None:
    """The end of one replica breaks off all that it had."""
    budget = RetryBudget(0.0)
    for _ in range(1000):
        budget.deposit(0.0, num_running=80)
    assert sum(budget.withdraw(0.0) for _ in range(200)) == 80


def test_a_quiet_router_earns_a_retry_in_time() -> None:
    budget = empty_budget()
    assert not budget.withdraw(9.0)
    assert budget.withdraw(10.5)


def test_the_quarantine_ends_and_is_bounded() -> None:
    quarantine = Quarantine(for_s=60.0, max_entries=2)
    quarantine.check(b"poison", 0.0)
    quarantine.put(b"poison", 0.0)
    with pytest.raises(RequestCrashedReplica):
        quarantine.check(b"poison", 59.0)
    quarantine.check(b"another", 59.0)
    quarantine.check(b"poison", 60.0)
    assert len(quarantine) == 0
    for body in (b"1", b"2", b"3"):
        quarantine.put(body, 100.0)
    assert len(quarantine) == 2
    quarantine.check(b"1", 100.0)


def test_who_is_only_busy_is_not_at_fault() -> None:
    assert {name for name, failure in FAILURES.items() if is_neutral(failure)} == {"busy"}
    assert is_neutral(ReplicaRejected("429", status=429))
    assert not is_neutral(ReplicaRejected("502", status=502))
