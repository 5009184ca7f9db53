"""Breakers, panic, slow start and pauses, on a clock that only the test moves."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from kvway_core.testing.fake_clock import FakeClock
from kvway_router import rotation
from kvway_router.rotation import FIRST_OPEN_S, MAX_OPEN_S, RAMP_S, START_S, Outcome, Rotation

FOUR = ["a", "b", "c", "d"]
OK, BAD, NEUTRAL = Outcome.SUCCESS, Outcome.FAILURE, Outcome.NEUTRAL


class Latest(random.Random):
    """Leaves nothing to chance: each time out is as long as it may be."""

    @override
    def random(self) -> float:
        return 1.0


class World:
    """A rotation of replicas that are all ready and past their ramps."""

    def __init__(self, names: list[str]) -> None:
        self.clock = FakeClock()
        self.names = names
        self.rotation = Rotation(self.clock, Latest())
        for name in names:
            self.rotation.returned(name)
        self.clock.advance(START_S + 1)

    def record(self, name: str, *outcomes: Outcome) -> None:
        for outcome in outcomes:
            self.rotation.record(name, outcome, ready=self.names)

    def admitted(self, num_replicas: int | None = None) -> str:
        num_replicas = len(self.names) if num_replicas is None else num_replicas
        return "".join(self.rotation.admitted(self.names, num_replicas=num_replicas))

    def room(self, slots: int = 4, in_flight: Mapping[str, int] | None = None) -> dict[str, int]:
        has = in_flight or {}
        return self.rotation.room(
            self.names, slots=lambda _: slots, in_flight=lambda name: has.get(name, 0)
        )


@pytest.mark.parametrize(
    ("outcomes", "is_out"),
    [
        ([BAD] * 4, False),
        ([BAD] * 5, True),
        ([BAD, BAD, BAD, BAD, OK, BAD, BAD, BAD, BAD], False),
        ([BAD, BAD, BAD, BAD, NEUTRAL, BAD], True),
        ([OK, OK, OK, BAD] * 4, False),
        ([OK, OK, OK, BAD] * 5, True),
        ([OK, OK, OK, OK, BAD] * 20, False),
        ([NEUTRAL] * 100, False),
    ],
    ids=["four", "five", "broken run", "neutral in it", "few", "rate", "good rate", "neutral"],
)
def test_a_breaker_opens_for_a_run_or_a_rate(outcomes: list[Outcome], *, is_out: bool) -> None:
    world = World(FOUR)
    world.record("a", *outcomes)
    assert world.admitted() == ("bcd" if is_out else "abcd")
    assert world.rotation.num_ejections == is_out


def test_a_rate_is_of_the_last_half_minute() -> None:
    world = World(FOUR)
    world.record("a", *[OK, OK, BAD] * 6)
    world.clock.advance(rotation.WINDOW_S + 1)
    world.record("a", OK, BAD)
    assert world.admitted() == "abcd"


def test_one_request_tries_it_and_its_success_brings_it_back() -> None:
    world = World(FOUR)
    world.record("a", *[BAD] * 5)
    world.clock.advance(FIRST_OPEN_S - 0.1)
    assert world.admitted() == "bcd"
    world.clock.advance(0.1)
    assert world.admitted() == "abcd"
    with world.rotation.at("a"):
        assert world.admitted() == "bcd", "one at a time"
        world.record("a", NEUTRAL)
    assert world.rotation.is_ejected("a"), "what is neutral does not close it"
    assert world.admitted() == "abcd"
    with world.rotation.at("a"):
        world.record("a", OK)
    assert not world.rotation.is_ejected("a")
    assert world.room()["a"] == 1, "and it starts slowly"


def test_a_request_from_before_is_not_the_one_that_tries_it() -> None:
    world = World(FOUR)
    with world.rotation.at("a"):
        world.record("a", *[BAD] * 5)
        world.clock.advance(FIRST_OPEN_S)
        assert world.admitted() == "abcd"


def test_each_time_out_is_twice_as_long_up_to_five_minutes() -> None:
    world, times = World(FOUR), []
    world.record("a", *[BAD] * 5)
    for _ in range(9):
        start_s = world.clock.monotonic()
        while world.admitted() == "bcd":
            world.clock.advance(2.5)
        times.append(world.clock.monotonic() - start_s)
        with world.rotation.at("a"):
            world.record("a", BAD)
    assert times == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, *[MAX_OPEN_S] * 3]


def test_who_served_for_a_minute_starts_with_the_shortest_time_again() -> None:
    world = World(FOUR)
    for _ in range(2):
        world.record("a", *[BAD] * 5)
        world.clock.advance(FIRST_OPEN_S)
        with world.rotation.at("a"):
            world.record("a", OK)
        world.clock.advance(rotation.FORGIVEN_S + 1)
    world.record("a", *[BAD] * 5)
    world.clock.advance(FIRST_OPEN_S)
    assert world.admitted() == "abcd"


def test_half_of_a_time_out_is_left_to_chance() -> None:
    times = {rotation.Breaker(random.Random(seed)).open(0.0) for seed in range(50)}
    assert min(times) >= FIRST_OPEN_S / 2
    assert max(times) <= FIRST_OPEN_S
    assert len(times) > 10


def test_the_only_one_is_never_taken_out_nor_more_than_half() -> None:
    alone = World(["a"])
    alone.record("a", *[BAD] * 50)
    assert alone.admitted() == "a"
    assert alone.rotation.num_ejections == 0
    world = World(FOUR)
    for name in "abc":
        world.record(name, *[BAD] * 9)
    assert world.rotation.num_ejections == 2
    assert world.admitted() == "cd"


def test_in_a_panic_the_sick_are_asked_too() -> None:
    world = World(FOUR)
    for name in "ab":
        world.record(name, *[BAD] * 5)
    assert world.admitted() == "cd"
    assert world.admitted(num_replicas=5) == "abcd", "two of five are left"


def test_one_that_crashes_again_and_again_stays_out_longer() -> None:
    world = World(FOUR)
    stayed = []
    for _ in range(4):
        world.rotation.lost("a")
        world.rotation.returned("a")
        start_s = world.clock.monotonic()
        while world.admitted() == "bcd":
            world.clock.advance(0.5)
        stayed.append(world.clock.monotonic() - start_s)
    assert stayed == [0.0, 5.0, 10.0, 20.0]
    with world.rotation.at("a"):
        world.record("a", OK)
    world.clock.advance(rotation.FORGIVEN_S + 1)
    world.rotation.lost("a")
    world.rotation.returned("a")
    assert world.admitted() == "abcd"


def test_who_comes_back_is_given_more_with_each_second() -> None:
    world = World(FOUR)
    world.rotation.lost("a")
    world.rotation.returned("a")
    rooms = [world.room()["a"]]
    for _ in range(3):
        world.clock.advance(RAMP_S / 4)
        rooms.append(world.room()["a"])
    world.clock.advance(RAMP_S / 4)
    assert rooms == [1, 2, 4, 6]
    assert world.room() == dict.fromkeys(FOUR, 8)
    world.rotation.restarted("b")
    assert world.room()["b"] == 1


def test_who_is_new_is_ramped_unless_the_router_starts() -> None:
    clock = FakeClock()
    fleet = Rotation(clock, Latest())
    fleet.returned("first")
    clock.advance(START_S + 1)
    fleet.returned("later")
    room = fleet.room(["first", "later"], slots=lambda _: 4, in_flight=lambda _: 0)
    assert room == {"first": 8, "later": 1}


def test_the_ramp_is_for_none_when_the_others_are_full() -> None:
    world = World(["a", "b"])
    world.rotation.restarted("a")
    assert world.room(in_flight={"a": 1}) == {"b": 8}
    assert world.room(in_flight={"a": 1, "b": 8}) == {"a": 7}
    assert world.room(in_flight={"a": 8, "b": 8}) == {}


def test_who_is_busy_is_left_alone_for_as_long_as_he_says_within_reason() -> None:
    world = World(["a", "b"])
    world.rotation.pause("a", 2.0)
    world.rotation.pause("b", 10_000.0)
    assert world.room() == {}
    world.clock.advance(2.0)
    assert list(world.room()) == ["a"]
    world.clock.advance(rotation.MAX_PAUSE_S)
    assert list(world.room()) == ["a", "b"]


def test_what_was_removed_is_forgotten() -> None:
    world = World(FOUR)
    world.record("a", *[BAD] * 5)
    world.rotation.forget("a")
    assert world.admitted() == "abcd"
    world.rotation.forget("a")
    world.rotation.record("a", BAD, ready=FOUR)


@given(
    st.lists(
        st.tuples(st.sampled_from(FOUR), st.sampled_from(list(Outcome)), st.floats(0.0, 20.0)),
        max_size=300,
    )
)
def test_whatever_fails_somebody_is_left(story: list[tuple[str, Outcome, float]]) -> None:
    world = World(FOUR)
    for name, outcome, gap_s in story:
        with world.rotation.at(name):
            world.record(name, outcome)
        world.clock.advance(gap_s)
        assert len(world.admitted()) >= 2
        assert sum(map(world.rotation.is_ejected, FOUR)) <= 2
        assert world.room()
