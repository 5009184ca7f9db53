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


def test_workers_that_do_not_name_their_boots_are_followed() -> None:
    state = FeedState(options=FeedOptions(), stats=FeedStats())
    state.start()
    anonymous = batch(None)
    state.on_replayed(0, anonymous)
    state.on_replay_end()
    assert state.on_batch(1, anonymous) == [Apply(anonymous)]
