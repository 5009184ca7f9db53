"""Where each request is: in the queue, running, or waiting for its prompt as a fork. Pure.

             add                 admit
(a request) ─────> waiting ──────────────────> running ──> ended
                      ▲   ▲                      │  ▲
                      │   └────── preempt ───────┘  │
                      │ abort of its leader         │ begin_fork: the prompt is computed
(its forks) ───────> pending ───────────────────────┘
"""

from __future__ import annotations

from bisect import insort

from kvway_core.errors import InvalidRequest, InvariantViolated
from kvway_worker.scheduling.block_tables import BlockTables
from kvway_worker.scheduling.counters import Counters
from kvway_worker.scheduling.sequence import Sequence, Status
from kvway_worker.scheduling.waiting import WaitingQueue


class Requests:
    """All requests that have not ended, each in one place.

    A request with forks that have not begun is their leader.

    Args:
        tables: Give the blocks back when a request leaves the batch.
        waiting: The queue, empty.
        counters: Where preemptions are counted.
        max_num_seqs: Places in the batch.

    Attributes:
        waiting: Requests that wait for a place, in order.
        running: Requests that have blocks, by priority and arrival.

    Invariants:
        1. Every request is waiting, running, or among the forks of one that is.
        2. `running` is in order.
        3. Whoever does not run holds no blocks.
        4. Forks wait only while their leader's prompt is not computed.
        5. The batch has a place for each running request and each of its forks.
    """

    __slots__ = (
        "_by_id",
        "_counters",
        "_leaders",
        "_max_num_seqs",
        "_num_arrivals",
        "_tables",
        "running",
        "waiting",
    )

    def __init__(
        self,
        tables: BlockTables,
        waiting: WaitingQueue,
        counters: Counters,
        *,
        max_num_seqs: int,
    ) -> None:
        self.waiting = waiting
        self.running: list[Sequence] = []
        self._tables = tables
        self._counters = counters
        self._max_num_seqs = max_num_seqs
        self._by_id: dict[str, Sequence] = {}
        self._leaders: dict[str, Sequence] = {}
        self._num_arrivals = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place, or as forks for the prompt to be computed."""
        return len(self.waiting) + len(self._leaders)

    @property
    def num_places(self) -> int:
        """Places that the running requests take, with those for their forks."""
        return len(self.running) + sum(len(seq.forks) for seq in self.running)

    def has_place(self, seq: Sequence) -> bool:
        """Says whether a request can join the batch with its forks."""
        return self.num_places + 1 + len(seq.forks) <= self._max_num_seqs

    def find(self, request_id: str) -> Sequence | None:
        """Returns the request of this id."""
        return self._by_id.get(request_id)

    def add(self, seq: Sequence, *, work: int) -> None:
        """Queues a request that comes when `work` tokens have been planned, and its forks.

        Raises:
            InvalidRequest: If a request of one of these ids has not ended.
        """
        new = (seq, *seq.forks)
        ids = {one.request_id: one for one in new}
        taken = next((key for key in ids if key in self._by_id), None)
        if taken is not None or len(ids) < len(new):
            raise InvalidRequest(
                f"A request with the id {taken or seq.request_id!r} is running; use another id.",
                param="request_id",
            )
        for one in new:
            self._num_arrivals += 1
            one.arrival_index = self._num_arrivals
        self._by_id |= ids
        self._leaders |= {fork.request_id: seq for fork in seq.forks}
        seq.num_uncached_tokens = self._tables.num_uncached(seq)
        self.waiting.push(seq, work=work)

    def admit(self, seq: Sequence) -> None:
        """Moves a waiting request that got blocks into the batch."""
        self.waiting.remove(seq)
        seq.status = Status.RUNNING
        insort(self.running, seq, key=_order)

    def preempt(self, seq: Sequence) -> None:
        """Frees a request's blocks, hashes kept, and puts it at the front of the queue."""
        self.running.remove(seq)
        self._tables.close(seq)
        seq.status = Status.WAITING
        self._wait_in_front(seq)
        self._counters.preemptions += 1

    def begin_fork(self, seq: Sequence, fork: Sequence) -> None:
        """Lets a fork run on the blocks of the prompt that its leader has just computed."""
        seq.forks.remove(fork)
        del self._leaders[fork.request_id]
        self._tables.fork(seq, fork)
        fork.status = Status.RUNNING
        fork.cached_tokens = seq.cached_tokens
        fork.prompt_logprobs = list(seq.prompt_logprobs)
        insort(self.running, fork, key=_order)

    def abort(self, seq: Sequence) -> None:
        """Ends a request; the first of its forks that have not begun leads the others.

        It takes the place in the queue, or one at the front if the request ran.
        """
        if not seq.forks:
            self.end(seq, Status.ABORTED)
            return
        heir, *rest = seq.forks
        seq.forks, heir.forks = [], rest
        del self._leaders[heir.request_id]
        self._leaders |= {fork.request_id: heir for fork in rest}
        if seq.status is Status.WAITING:
            heir.num_uncached_tokens = seq.num_uncached_tokens
            self.waiting.replace(seq, heir)
            self._close(seq, Status.ABORTED)
        else:
            self.end(seq, Status.ABORTED)
            self._wait_in_front(heir)

    def end(self, seq: Sequence, status: Status) -> None:
        """Takes a request without forks out, wherever it is, and frees its blocks."""
        leader = self._leaders.pop(seq.request_id, None)
        if leader is not None:
            leader.forks.remove(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        else:
            self.running.remove(seq)
        self._close(seq, status)

    def check_invariants(self) -> None:
        """Checks the invariants of the class and of the queue.

        Raises:
            InvariantViolated: If one does not hold.
        """
        self.waiting.check_invariants()
        led = [*self.waiting, *self.running]
        leaders = {fork.request_id: seq for seq in led for fork in seq.forks}
        ids = [seq.request_id for seq in led]
        _require(
            sorted([*ids, *leaders]) == sorted(self._by_id) and leaders == self._leaders,
            f"1: {ids} and forks {sorted(leaders)} are found, {sorted(self._by_id)} are known",
        )
        _require(self.running == sorted(self.running, key=_order), f"2: {ids} are not in order")
        resting = [*self.waiting, *(fork for seq in led for fork in seq.forks)]
        _require(
            not any(seq.block_table or seq.shared_blocks for seq in resting)
            and all(seq.status is Status.WAITING for seq in resting)
            and all(seq.status is Status.RUNNING for seq in self.running),
            f"3: {[seq.request_id for seq in resting]} wait and hold blocks",
        )
        _require(
            all(seq.num_computed_tokens < seq.num_prompt_tokens for seq in leaders.values()),
            f"4: {sorted(leaders)} wait for a prompt that is computed",
        )
        _require(
            self.num_places <= self._max_num_seqs,
            f"5: {self.num_places} places are taken of {self._max_num_seqs}",
        )

    def _wait_in_front(self, seq: Sequence) -> None:
        seq.num_uncached_tokens = self._tables.num_uncached(seq)
        self.waiting.push_front(seq)

    def _close(self, seq: Sequence, status: Status) -> None:
        del self._by_id[seq.request_id]
        self._tables.close(seq)
        seq.status = status


def _order(seq: Sequence) -> tuple[int, int]:
    """Sorts by priority, then by arrival."""
    return seq.priority, seq.arrival_index


def _require(holds: bool, what: str) -> None:  # noqa: FBT001 - private, reads as a sentence
    if not holds:
        raise InvariantViolated(f"requests {what}")
