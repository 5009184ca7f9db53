"""What to do with each batch of KV events, from its number, time and boot id alone. Pure.

    live batch       in order: applied
                     behind a missing number: kept, and the gap is replayed first
                     of another life: the replica is cleared, and all is replayed
                     seen before: ignored
    replayed batch   next in order: applied
                     behind a missing number: what is between is gone; cleared, then applied
    end of replay    what was kept is next, as far as it goes
                     nothing came: the worker is younger than it should be, so it restarted

A replay is asked for from the last batch that was applied, so that a worker that did not restart
always has an answer.

Our workers name their lives (boot ids). Of an engine that does not, another life shows in a live
number that is not above the one before, which a connection never does of itself; in a worker that
no longer has the last batch; and in a last batch that was sent at another time than ours.

An engine without a socket for replays is followed from where it is. Behind a missing number
everything is cleared, for what is lost may have been removals.

What cannot be replayed any more may have held removals, so the replica is cleared: a missed block
costs less than one that is not there.

An answer that ends at the same batch again and again has one that is too large: ZMQ ends the
connection over it. What is behind it comes by no replay, so the feed joins anew with what is live.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from kvway_core.events import AllBlocksCleared, EventBatch

_MAX_PAST_BOOTS: Final = 8
_MAX_CUTS: Final = 3
"""Answers that end at one batch before it is given up."""


@dataclass(frozen=True, slots=True)
class FeedOptions:
    """How KV events are read.

    Attributes:
        verify_s: After so long without a message the worker is asked whether one was missed; also
            how a feed that died is noticed.
        replay_timeout_s: Longest silence in the middle of a replay.
        retry_s: Pause before a replay that failed is asked for again.
        stale_after_s: While the feed is down, entries unused for this long are dropped, twice this
            at most.
        max_pending_batches: Live batches kept while a replay runs.
        max_pending_blocks: Blocks named by them.
        turn_s: How long all feeds together keep the event loop for at a time.
    """

    verify_s: float = 10.0
    replay_timeout_s: float = 2.0
    retry_s: float = 1.0
    stale_after_s: float = 30.0
    max_pending_batches: int = 4096
    max_pending_blocks: int = 1_000_000
    turn_s: float = 0.005


@dataclass(slots=True)
class FeedStats:
    """What became of one replica's events; all only grow.

    Attributes:
        num_batches: Batches applied.
        num_events: Events in them.
        num_bad: Events and batches that could not be read, skipped.
        num_duplicates: Live batches seen before, or of a past life of the worker.
        num_gaps: Times that a number was missing.
        num_replays: Replays asked for: at the start, for a gap, or to see whether one was missed.
        num_lost: Times that the worker could no longer replay and the replica was cleared.
        num_restarts: Times that another life of the worker answered.
        num_outages: Times that the feed went down.
        num_unreplayable: Times that a batch was too large to be replayed, and was passed over.
    """

    num_batches: int = 0
    num_events: int = 0
    num_bad: int = 0
    num_duplicates: int = 0
    num_gaps: int = 0
    num_replays: int = 0
    num_lost: int = 0
    num_restarts: int = 0
    num_outages: int = 0
    num_unreplayable: int = 0


@dataclass(frozen=True, slots=True)
class FeedPosition:
    """What an index is true to: all batches of one life of a worker before a number."""

    boot_id: str
    next_seq: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Enter the events of this batch into the index."""

    batch: EventBatch


class ClearReason(StrEnum):
    """Why a replica's entries are dropped."""

    START = "start"
    """A new feed knows nothing; all is replayed."""
    RESTART = "restart"
    """Another life of the worker answers: its cache is another one."""
    LOST = "lost"
    """Batches are gone for good, and removals may have been among them."""
    UNREPLAYABLE = "unreplayable"
    """The same, since one is too large to be replayed."""


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget what the index lists for the replica."""

    reason: ClearReason


@dataclass(frozen=True, slots=True)
class Replay:
    """Ask for all batches from this number on; an earlier replay is of no interest any more."""

    start_seq: int


Action: TypeAlias = Apply | Clear | Replay


class FeedState:
    """What to do with each batch, from its number, time and boot id alone. Pure.

    Each method returns what has to be done, in order. At most one replay is outstanding; its end
    or failure must be told.

    Args:
        options: Limits.
        stats: Counted up.
        can_replay: Whether the worker can be asked for batches again.

    Invariants:
        1. Batches of one boot are applied in order of their numbers, each once.
        2. None is applied behind one that is missing, unless everything was cleared in between.
        3. At most the given number of batches and blocks wait, and only while a replay runs.
    """

    __slots__ = (
        "_can_replay",
        "_cut_seq",
        "_is_answered",
        "_known_from",
        "_last_live",
        "_last_ts",
        "_num_cuts",
        "_num_pending_blocks",
        "_options",
        "_past_boots",
        "_pending",
        "boot_id",
        "joining",
        "next_seq",
        "replaying",
        "stats",
    )

    def __init__(self, *, options: FeedOptions, stats: FeedStats, can_replay: bool = True) -> None:
        """Start knowing nothing; `start` or `resume` is to be called first."""
        self.boot_id: str | None = None
        self.next_seq = 0
        self.replaying = False
        # Whether the next live batch is taken whatever its number is.
        self.joining = False
        self.stats = stats
        self._options = options
        self._past_boots: deque[str] = deque(maxlen=_MAX_PAST_BOOTS)
        self._pending: dict[int, EventBatch] = {}
        self._num_pending_blocks = 0
        # The lowest live number that was already here when the replay was asked for: all before it
        # existed by then, so a replay that ends without them means that they are gone.
        self._known_from: int | None = None
        self._is_answered = False
        self._can_replay = can_replay
        self._cut_seq = 0
        self._num_cuts = 0
        self._last_live: int | None = None
        self._last_ts: float | None = None

    def start(self) -> list[Action]:
        """Clears, and asks for everything from the first batch on."""
        self._forget()
        return [Clear(ClearReason.START), *self._ask()]

    def resume(self, boot_id: str, next_seq: int) -> list[Action]:
        """Takes what is listed for true up to a number of one life, and asks for what comes next.

        If the worker lives another life, or no longer has what comes next, all is cleared.
        """
        self._forget()
        self.boot_id, self.next_seq = boot_id, next_seq
        return self._ask()

    def on_batch(self, seq: int, batch: EventBatch) -> list[Action]:
        """Takes a live batch."""
        if batch.boot_id != self.boot_id:
            if batch.boot_id in self._past_boots:
                self.stats.num_duplicates += 1
                return []
            if self.boot_id is not None:
                return self._begin_again(seq, batch)
            self.boot_id = batch.boot_id
        elif batch.boot_id is None and self._last_live is not None and seq <= self._last_live:
            return self._begin_again(seq, batch)
        is_first, self._last_live = self._last_live is None, seq
        return self._go_on(seq, batch, is_first=is_first)

    def _go_on(self, seq: int, batch: EventBatch, *, is_first: bool) -> list[Action]:
        """Takes a live batch of the life that is followed."""
        if self.joining and seq >= self.next_seq:
            self.joining = False
            return [self._apply(seq, batch)]
        if not self._can_replay and seq != self.next_seq:
            # Whoever joins in the middle has missed nothing: nothing is listed yet.
            self.stats.num_gaps += not is_first
            return [*([] if is_first else [self._lose()]), self._apply(seq, batch)]
        if seq < self.next_seq:
            self.stats.num_duplicates += 1
            # What a replay told already, or another life that has not come so far yet.
            is_doubtful = is_first and batch.boot_id is None and not self.replaying
            return self._ask() if is_doubtful else []
        if not self.replaying and seq == self.next_seq:
            return [self._apply(seq, batch)]
        self._keep(seq, batch)
        is_gap = not self.replaying
        self.stats.num_gaps += is_gap
        return [self._replay()] if is_gap else []

    def on_replayed(self, seq: int, batch: EventBatch) -> list[Action]:
        """Takes a replayed batch."""
        if not self.replaying:
            return []
        self._is_answered = True
        actions: list[Action] = []
        if batch.boot_id != self.boot_id:
            # Whoever answers is alive, so this is the present boot.
            if self.boot_id is not None:
                asked_from_start = self.next_seq == 0
                actions += self._restart(batch.boot_id)
                if not asked_from_start:
                    return [*actions, self._replay()]
            self.boot_id = batch.boot_id
        elif (
            batch.boot_id is None
            and seq == self.next_seq - 1
            and self._last_ts not in (None, batch.ts)
        ):
            return [*self._restart(None), self._replay()]
        if seq < self.next_seq:
            return actions
        if seq > self.next_seq:
            actions.append(self._lose())
        return [*actions, self._apply(seq, batch)]

    def on_replay_end(self) -> list[Action]:
        """Takes the end of a replay: the live batches that waited for it come next."""
        if not self.replaying:
            return []
        self.replaying = False
        if self.next_seq and not self._is_answered:
            return [*self._restart(None), self._replay()]
        known_from, self._known_from = self._known_from, None
        actions: list[Action] = [*self._catch_up()]
        if known_from is not None and self.next_seq < known_from:
            actions.append(self._lose())
            self.next_seq = known_from
            actions += self._catch_up()
        self._drop_pending(lambda seq, _: seq < self.next_seq)
        if self._pending:
            actions.append(self._replay())
        return actions

    def on_replay_cut(self) -> list[Action]:
        """Takes the end of a connection in the middle of an answer; `resync` is to follow."""
        if not self.replaying:
            return []
        self._num_cuts = self._num_cuts + 1 if self._cut_seq == self.next_seq else 1
        self._cut_seq = self.next_seq
        if self._num_cuts < _MAX_CUTS:
            return []
        self._num_cuts = 0
        self.stats.num_unreplayable += 1
        self.replaying = False
        self._known_from = None
        self._drop_pending(lambda seq, _: seq < self.next_seq)
        if self._pending:
            self.next_seq = min(self._pending)
        self.joining = not self._pending
        actions: list[Action] = [Clear(ClearReason.UNREPLAYABLE), *self._catch_up()]
        self._drop_pending(lambda seq, _: seq < self.next_seq)
        return [*actions, self._replay()] if self._pending else actions

    def resync(self) -> list[Action]:
        """Asks again for what comes next: after a failed replay, or to learn of a silent loss."""
        return [] if self.joining else self._ask()

    def _begin_again(self, seq: int, batch: EventBatch) -> list[Action]:
        """Goes over to the life of the worker that a live batch comes from."""
        actions: list[Action] = self._restart(batch.boot_id)
        self._last_live = seq
        if not self._can_replay:
            return [*actions, self._apply(seq, batch)]
        self._keep(seq, batch)
        return [*actions, self._replay()]

    def _ask(self) -> list[Action]:
        return [self._replay()] if self._can_replay else []

    def _replay(self) -> Replay:
        self.replaying = True
        self.joining = False
        self._is_answered = False
        self._known_from = min(self._pending, default=None)
        return Replay(max(0, self.next_seq - 1))

    def _restart(self, boot_id: str | None) -> list[Action]:
        self.stats.num_restarts += 1
        if self.boot_id is not None:
            self._past_boots.append(self.boot_id)
        if boot_id is not None and boot_id in self._past_boots:
            self._past_boots.remove(boot_id)
        self._forget()
        self.boot_id = boot_id
        return [Clear(ClearReason.RESTART)]

    def _forget(self) -> None:
        self.next_seq = self._num_cuts = 0
        self.joining = False
        self._last_live = self._last_ts = None
        self._known_from = None
        self._drop_pending(lambda _seq, _batch: True)

    def _lose(self) -> Clear:
        self.stats.num_lost += 1
        return Clear(ClearReason.LOST)

    def _catch_up(self) -> Iterator[Apply]:
        while self.next_seq in self._pending:
            yield self._apply(self.next_seq, self._pending[self.next_seq])

    def _apply(self, seq: int, batch: EventBatch) -> Apply:
        self.next_seq = seq + 1
        self._last_ts = batch.ts
        self.stats.num_batches += 1
        self.stats.num_events += len(batch.events)
        self.stats.num_bad += batch.num_skipped
        return Apply(batch)

    def _keep(self, seq: int, batch: EventBatch) -> None:
        num_blocks = _num_blocks(batch)
        options = self._options
        if seq in self._pending:
            self.stats.num_duplicates += 1
        elif (
            len(self._pending) < options.max_pending_batches
            and self._num_pending_blocks + num_blocks <= options.max_pending_blocks
        ):
            self._pending[seq] = batch
            self._num_pending_blocks += num_blocks
        # What does not fit is dropped, and is a gap when this replay is done.

    def _drop_pending(self, unwanted: Callable[[int, EventBatch], bool]) -> None:
        self._pending = {
            seq: batch for seq, batch in self._pending.items() if not unwanted(seq, batch)
        }
        self._num_pending_blocks = sum(map(_num_blocks, self._pending.values()))


def _num_blocks(batch: EventBatch) -> int:
    return sum(
        0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
        for event in batch.events
    )
