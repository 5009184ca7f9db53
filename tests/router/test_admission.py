"""The line before the replicas: fair, bounded, honest, and empty once all have left."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvway_core.errors import NoReplicaAvailable, Overloaded, QueueTimeout
from kvway_core.testing.fake_clock import FakeClock
from kvway_router.admission import Admission, FairQueue, Waiter


def waiter(tenant: str, cost: float = 1.0, *, since_s: float = 0.0) -> Waiter:
    return Waiter(tenant, cost, since_s, since_s + 10.0)


def popped(queue: FairQueue, number: int, now_s: float = 0.0) -> str:
    return "".join(queue.pop(now_s).tenant for _ in range(number))


def test_tenants_take_turns_however_many_one_has() -> None:
    queue = FairQueue()
    for tenant in "aaaaaabb":
        queue.push(waiter(tenant))
    assert popped(queue, 8) == "ababaaaa"


def test_turns_are_by_the_work_that_is_asked_for() -> None:
    queue = FairQueue()
    for _ in range(3):
        queue.push(waiter("a", 300.0))
    for _ in range(6):
        queue.push(waiter("b", 100.0))
    assert popped(queue, 8) == "abbbabbb"


def test_who_did_not_wait_has_no_claim_to_that_time() -> None:
    queue = FairQueue()
    for _ in range(9):
        queue.push(waiter("a"))
    popped(queue, 5)
    for _ in range(4):
        queue.push(waiter("b"))
    assert sorted(popped(queue, 4)) == ["a", "a", "b", "b"]


def test_first_come_first_served_until_the_oldest_is_late() -> None:
    queue = FairQueue()
    first, second, third = (waiter("a", since_s=float(number)) for number in range(3))
    for each in (first, second, third):
        queue.push(each)
    assert queue.pop(5.0) is first
    assert queue.pop(6.5) is third, "the oldest has waited for more than half of its time"
    assert queue.pop(6.5) is second


def test_the_one_with_the_most_makes_room_but_not_for_himself() -> None:
    queue = FairQueue()
    many = [waiter("a") for _ in range(4)]
    for each in many:
        queue.push(each)
    assert queue.make_room("a") is None
    assert queue.make_room("b") is many[-1]
    queue.push(waiter("b"))
    assert queue.make_room("b") is many[-2]
    queue.push(waiter("b"))
    assert queue.make_room("b") is None
    assert (queue.num_of("a"), queue.num_of("b"), len(queue)) == (2, 2, 4)


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 9)), max_size=200))
def test_nobody_is_lost_and_nothing_is_kept(story: list[tuple[str, int]]) -> None:
    queue, inside = FairQueue(), list[Waiter]()
    for tenant, what in story:
        if what < 6 or not inside:
            inside.append(waiter(tenant, float(what)))
            queue.push(inside[-1])
        elif what < 8:
            inside.remove(queue.pop(0.0))
        else:
            leaver = inside.pop()
            assert queue.remove(leaver)
            assert not queue.remove(leaver)
        assert len(queue) == len(inside)
    while len(queue):
        inside.remove(queue.pop(0.0))
    assert not inside
    assert not queue._given


class Gate:
    """Replicas as the line sees them."""

    def __init__(self, *, room: int | None, slots: int = 4, timeout_s: float = 30.0) -> None:
        self.room = room
        self.clock = FakeClock()
        self.admission = Admission(
            room=lambda: self.room,
            slots=lambda: slots,
            clock=self.clock,
            max_waiting=8,
            timeout_s=timeout_s,
        )
        self.gone: list[str] = []

    async def go(self, tenant: str = "", *, left_s: float = 100.0) -> None:
        await self.admission.turn(tenant=tenant, cost=1.0, left_s=left_s)
        assert self.room is None or self.room > 0, "there is room in the step in which it goes on"
        if self.room is not None:
            self.room -= 1
        self.gone.append(tenant)

    async def wait(self, tenant: str = "") -> asyncio.Task[None]:
        before = self.admission.num_waiting
        task = asyncio.create_task(self.go(tenant))
        await asyncio.sleep(0)
        assert self.admission.num_waiting == before + 1
        return task

    def free(self, number: int = 1) -> None:
        assert self.room is not None
        self.room += number
        self.admission.look()


async def test_while_there_is_room_nobody_waits() -> None:
    gate = Gate(room=2)
    await gate.go()
    await gate.go()
    assert gate.room == 0


async def test_who_waits_goes_when_there_is_room_and_newcomers_do_not_overtake() -> None:
    gate = Gate(room=0)
    first = await gate.wait("first")
    gate.free()
    second = await gate.wait("second")
    await first
    assert gate.gone == ["first"]
    gate.free()
    await second
    assert gate.room == 0


async def test_it_is_looked_again_also_when_nobody_says_that_there_is_room() -> None:
    gate = Gate(room=0)
    waiting = await gate.wait()
    gate.room = 1
    await waiting


async def test_who_leaves_the_line_is_never_called(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(room=0)
    leaver, stays = await gate.wait("leaver"), await gate.wait("stays")
    leaver.cancel()
    gate.free()
    await stays
    assert gate.gone == ["stays"]
    assert gate.admission.num_waiting == 0
    assert not caplog.records


async def test_who_is_called_and_leaves_gives_his_place_to_the_next() -> None:
    gate = Gate(room=0)
    leaver, stays = await gate.wait("leaver"), await gate.wait("stays")
    gate.free()
    leaver.cancel()
    await stays
    assert (gate.gone, gate.room) == (["stays"], 0)


async def test_no_longer_than_he_may() -> None:
    gate = Gate(room=0, timeout_s=0.02)
    with pytest.raises(QueueTimeout):
        await gate.go()
    assert gate.admission.num_shed == {"full": 0, "slow": 0, "timeout": 1}
    patient = Gate(room=0)
    with pytest.raises(QueueTimeout, match=r"0\.02 s"):
        await patient.go(left_s=0.02)
    assert patient.admission.num_waiting == 0


async def test_the_line_is_bounded_by_slots_and_by_the_option() -> None:
    for slots, most in ((1, 4), (100, 8), (0, 0)):
        gate = Gate(room=0, slots=slots)
        waiting = [await gate.wait() for _ in range(most)]
        with pytest.raises(Overloaded):
            await gate.go()
        if most:
            with pytest.raises(Overloaded):
                gate.admission.check("")
            gate.admission.check("another")
        gate.free(most)
        gate.admission.check("")
        await asyncio.gather(*waiting)


async def test_in_a_full_line_the_tenant_with_the_most_makes_room() -> None:
    gate = Gate(room=0)
    waiting = [await gate.wait("many") for _ in range(8)]
    few = asyncio.create_task(gate.go("few"))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await waiting[-1]
    gate.free(8)
    await asyncio.gather(few, *waiting[:-1])
    assert gate.gone.count("few") == 1


async def test_who_would_be_too_late_is_refused_at_once() -> None:
    gate = Gate(room=0, timeout_s=10.0)
    waiting = [await gate.wait() for _ in range(4)]
    gate.clock.advance(4.0)
    gate.free()
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="pace"):
        await gate.go()
    assert gate.admission.num_shed["slow"] == 1
    gate.free(3)
    await asyncio.gather(*waiting)


async def test_when_no_replica_is_left_all_are_told() -> None:
    gate = Gate(room=0)
    waiting = await gate.wait()
    gate.room = None
    gate.admission.look()
    with pytest.raises(NoReplicaAvailable):
        await waiting
    await gate.go()  # the choice says it
