"""What a feed does with one batch more, case by case; the machine in tests/property mixes them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvway_core.events import EventBatch
from kvway_router.feed_state import (
    Action,
    Apply,
    Clear,
    ClearReason,
    FeedOptions,
    FeedState,
    FeedStats,
    Replay,
)


def batch(boot_id: str | None = "boot-1") -> EventBatch:
    return EventBatch(ts=0.0, events=(), boot_id=boot_id)


@pytest.fixture
def state() -> FeedState:
    """A feed that has applied batches 0, 1 and 2 and knows that it missed none."""
    state = FeedState(options=FeedOptions(), stats=FeedStats())
    assert state.start() == [Clear(ClearReason.START), Replay(0)]
    assert state.on_replay_end() == []
    for seq in range(3):
        assert state.on_batch(seq, batch()) == [Apply(batch())]
    return state


def replay(state: FeedState, *seqs: int, boot_id: str = "boot-1") -> Sequence[Action]:
    actions = [action for seq in seqs for action in state.on_replayed(seq, batch(boot_id))]
    return [*actions, *state.on_replay_end()]


def test_a_batch_seen_before_does_nothing(state: FeedState) -> None:
    assert state.on_batch(1, batch()) == []
    assert not state.replaying
    assert state.stats.num_duplicates == 1


def test_a_gap_is_replayed_once_and_before_what_came_behind_it(state: FeedState) -> None:
    assert state.on_batch(4, batch()) == [Replay(2)]
    assert state.on_batch(5, batch()) == []
    assert replay(state, 2, 3) == [Apply(batch())] * 3
    assert (state.next_seq, state.stats.num_gaps, state.stats.num_lost) == (6, 1, 0)


def test_a_gap_behind_a_gap_is_replayed_next(state: FeedState) -> None:
    state.on_batch(4, batch())
    assert state.on_batch(7, batch()) == []
    assert replay(state, 2, 3) == [Apply(batch()), Apply(batch()), Replay(4)]
    assert replay(state, 4, 5, 6) == [Apply(batch())] * 3
    assert state.next_seq == 8


def test_what_the_replay_no_longer_has_clears_the_replica(state: FeedState) -> None:
    state.on_batch(5, batch())
    assert replay(state, 4, 5) == [Clear(ClearReason.LOST), Apply(batch()), Apply(batch())]


def test_a_replay_that_does_not_reach_what_is_known_clears_the_replica(state: FeedState) -> None:
    state.on_batch(5, batch())
    assert replay(state, 2) == [Clear(ClearReason.LOST), Apply(batch())]
    assert state.next_seq == 6


def test_another_boot_clears_and_starts_from_the_first_batch(state: FeedState) -> None:
    new = batch("boot-2")
    assert state.on_batch(1, new) == [Clear(ClearReason.RESTART), Replay(0)]
    assert replay(state, 0, 1, boot_id="boot-2") == [Apply(new), Apply(new)]


def test_a_late_batch_of_a_past_life_does_nothing(state: FeedState) -> None:
    state.on_batch(0, batch("boot-2"))
    replay(state, 0, boot_id="boot-2")
    assert state.on_batch(3, batch("boot-1")) == []
    assert state.boot_id == "boot-2"


def test_a_replay_answered_by_another_boot_is_begun_again(state: FeedState) -> None:
    state.on_batch(5, batch())
    new = batch("boot-2")
    assert state.on_replayed(2, new) == [Clear(ClearReason.RESTART), Replay(0)]
    assert replay(state, 0, 1, 2, boot_id="boot-2") == [Apply(new)] * 3


def test_a_worker_without_the_last_batch_is_another_life(state: FeedState) -> None:
    """This is all there is to tell by when it does not name its boots."""
    assert state.resync() == [Replay(2)]
    assert state.on_replay_end() == [Clear(ClearReason.RESTART), Replay(0)]


def test_nothing_missed_is_nothing_to_do(state: FeedState) -> None:
    state.resync()
    assert replay(state, 2) == []
    assert not state.replaying


def test_a_late_answer_does_nothing(state: FeedState) -> None:
    assert state.on_replayed(3, batch()) == []
    assert state.on_replay_end() == []


def test_a_failed_replay_is_asked_for_again_with_what_is_known_now(state: FeedState) -> None:
    state.on_batch(4, batch())
    assert state.resync() == [Replay(2)]
    assert replay(state, 2, 3) == [Apply(batch())] * 2


def at(ts: float) -> EventBatch:
    """A batch of an engine that does not name its boots, sent at a time."""
    return EventBatch(ts=ts, events=())


@pytest.fixture
def anonymous() -> FeedState:
    """A feed that was told 0 and 1 by a replay and then saw 2, of an engine without boot ids."""
    state = FeedState(options=FeedOptions(), stats=FeedStats())
    state.start()
    assert state.on_replayed(0, at(0.0)) == [Apply(at(0.0))]
    assert state.on_replayed(1, at(1.0)) == [Apply(at(1.0))]
    assert state.on_replay_end() == []
    assert state.on_batch(2, at(2.0)) == [Apply(at(2.0))]
    return state


@pytest.mark.parametrize("seq", [0, 1, 2])
def test_a_live_number_that_goes_back_is_another_life(anonymous: FeedState, seq: int) -> None:
    assert anonymous.on_batch(seq, at(9.0)) == [Clear(ClearReason.RESTART), Replay(0)]
    for before in range(seq):
        anonymous.on_replayed(before, at(8.0))
    anonymous.on_replayed(seq, at(9.0))
    assert anonymous.on_replay_end() == []
    assert (anonymous.next_seq, anonymous.stats.num_restarts) == (seq + 1, 1)


def test_another_life_that_is_further_than_the_last_shows_in_the_time_of_a_batch(
    anonymous: FeedState,
) -> None:
    """It may have published more than we had seen, so that its numbers only go up."""
    assert anonymous.on_batch(7, at(17.0)) == [Replay(2)]
    assert anonymous.on_replayed(2, at(12.0)) == [Clear(ClearReason.RESTART), Replay(0)]


def test_the_same_life_is_known_by_the_time_of_its_last_batch(anonymous: FeedState) -> None:
    anonymous.on_batch(4, at(4.0))
    assert anonymous.on_replayed(2, at(2.0)) == []
    assert anonymous.on_replayed(3, at(3.0)) == [Apply(at(3.0))]
    assert anonymous.on_replay_end() == [Apply(at(4.0))]


def test_a_first_live_number_that_is_known_already_is_looked_into() -> None:
    """It came late, or from a life that has not come as far: only the worker can tell."""
    state = FeedState(options=FeedOptions(), stats=FeedStats())
    state.start()
    for seq in range(5):
        state.on_replayed(seq, at(seq))
    state.on_replay_end()
    assert state.on_batch(3, at(13.0)) == [Replay(4)]
    assert state.on_replay_end() == [Clear(ClearReason.RESTART), Replay(0)]


# -- engines without a socket for replays -------------------------------------------------------


@pytest.fixture
def deaf() -> FeedState:
    """A feed of an engine that cannot be asked, joined at its batch 7."""
    state = FeedState(options=FeedOptions(), stats=FeedStats(), can_replay=False)
    assert state.start() == [Clear(ClearReason.START)]
    assert state.on_batch(7, at(7.0)) == [Apply(at(7.0))]
    return state


def test_without_replay_it_is_followed_from_where_it_is(deaf: FeedState) -> None:
    assert deaf.on_batch(8, at(8.0)) == [Apply(at(8.0))]
    assert (deaf.stats.num_gaps, deaf.stats.num_lost, deaf.resync()) == (0, 0, [])


def test_without_replay_a_gap_clears(deaf: FeedState) -> None:
    assert deaf.on_batch(9, at(9.0)) == [Clear(ClearReason.LOST), Apply(at(9.0))]
    assert (deaf.stats.num_gaps, deaf.stats.num_lost) == (1, 1)


@pytest.mark.parametrize("seq", [0, 6, 7])
def test_without_replay_a_number_that_goes_back_clears_and_is_taken(
    deaf: FeedState, seq: int
) -> None:
    """Nothing is ignored for having a number that was seen in the life before."""
    assert deaf.on_batch(seq, at(9.0)) == [Clear(ClearReason.RESTART), Apply(at(9.0))]
    assert deaf.on_batch(seq + 1, at(9.1)) == [Apply(at(9.1))]
    assert deaf.stats.num_restarts == 1


# -- after a restart of the router --------------------------------------------------------------


@pytest.fixture
def resumed() -> FeedState:
    """A feed whose snapshot had batches 0 to 4 of the first life."""
    state = FeedState(options=FeedOptions(), stats=FeedStats())
    assert state.resume("boot-1", 5) == [Replay(4)]
    return state


def test_a_snapshot_is_gone_on_from(resumed: FeedState) -> None:
    assert replay(resumed, 4, 5, 6) == [Apply(batch())] * 2
    assert (resumed.next_seq, resumed.stats.num_restarts, resumed.stats.num_lost) == (7, 0, 0)


def test_a_snapshot_of_another_life_is_cleared(resumed: FeedState) -> None:
    assert replay(resumed, 4, boot_id="boot-2")[:2] == [Clear(ClearReason.RESTART), Replay(0)]


def test_a_snapshot_that_is_too_old_to_go_on_from_is_cleared(resumed: FeedState) -> None:
    assert replay(resumed, 9) == [Clear(ClearReason.LOST), Apply(batch())]


def test_a_snapshot_that_knows_more_than_the_worker_is_cleared(resumed: FeedState) -> None:
    assert resumed.on_replay_end() == [Clear(ClearReason.RESTART), Replay(0)]


def cut(state: FeedState) -> list[Action]:
    actions = state.on_replay_cut()
    return actions or state.resync()


SKIPPED = Clear(ClearReason.UNREPLAYABLE)


def test_an_answer_that_ends_three_times_at_one_batch_is_given_up(state: FeedState) -> None:
    assert state.resync() == [Replay(2)]
    assert [cut(state), cut(state)] == [[Replay(2)], [Replay(2)]]
    assert cut(state) == [SKIPPED]
    assert (state.replaying, state.joining, state.stats.num_unreplayable) == (False, True, 1)
    assert state.resync() == []
    assert state.on_batch(1, batch()) == []
    assert state.on_batch(7, batch()) == [Apply(batch())]
    assert (state.next_seq, state.joining) == (8, False)
    assert state.resync() == [Replay(7)]


def test_an_answer_that_gets_further_is_not_given_up(state: FeedState) -> None:
    state.resync()
    for seq in range(3, 9):
        assert cut(state) == [Replay(seq - 1)]
        assert state.on_replayed(seq, batch()) == [Apply(batch())]
    assert state.stats.num_unreplayable == 0


def test_behind_what_is_given_up_comes_what_waited(state: FeedState) -> None:
    assert state.on_batch(5, batch()) == [Replay(2)]
    state.on_batch(6, batch())
    state.on_batch(8, batch())
    cut(state)
    cut(state)
    assert cut(state) == [SKIPPED, Apply(batch()), Apply(batch()), Replay(6)]
    assert (state.next_seq, state.joining) == (7, False)
    assert replay(state, 6, 7) == [Apply(batch()), Apply(batch())]


def test_another_life_begins_anew_though_a_batch_was_given_up(state: FeedState) -> None:
    state.resync()
    for _ in range(3):
        cut(state)
    assert state.on_batch(0, batch("boot-2")) == [Clear(ClearReason.RESTART), Replay(0)]
    assert not state.joining


def test_a_connection_that_ends_without_a_question_is_nothing(state: FeedState) -> None:
    assert [state.on_replay_cut() for _ in range(5)] == [[]] * 5
    assert state.next_seq == 3
