"""Who gets in next: the queue of requests that wait for a place. Pure, no clock.

    priority ──> preempted ones ──> rank = uncached tokens + ageing * work done before it came
    (lower first)  (by arrival)     (or the order of arrival alone)

Work is counted in tokens that the scheduler planned, guesses aside, so the order depends on
nothing but what was asked and computed. Ageing never changes a rank: it makes whoever comes later
start further back.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as Hashes
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal, NamedTuple

from sortedcontainers import SortedDict

from kvway_core.blocks import BlockHash
from kvway_core.errors import InvariantViolated
from kvway_worker.scheduling.sequence import Sequence

QueueOrder = Literal["shortest", "arrival"]

AGEING: Final = 0.03
"""Uncached tokens that a request gains on later ones per token of work: with 0.03 a prompt of
3,000 uncached tokens is overtaken for 100,000 tokens of work at most."""

MAX_DENOMINATOR: Final = 10**6
"""Ageing is a fraction of this precision, so that ranks are whole numbers and compare exactly."""


class Rank(NamedTuple):
    """A place in the queue; lower ones are first.

    Attributes:
        priority: Of the request.
        is_new: 0 for a request that had begun before and comes back, 1 for all others.
        key: Uncached tokens plus aged work, times the denominator of the ageing; 0 where only the
            arrival counts.
        arrival_index: Of the request, so that no two ranks are equal.
    """

    priority: int
    is_new: int
    key: int
    arrival_index: int


@dataclass(slots=True)
class _Place:
    """Where a request waits.

    Attributes:
        rank: Its place.
        work: Tokens of work done before it came.
        next_hash: Hash of its first uncached block, under which it is found when that is computed.
    """

    rank: Rank
    work: int
    next_hash: BlockHash | None


class WaitingQueue:
    """Requests that wait, in the order in which they get in.

    With the order "shortest", within a priority, request S that comes after R gets in before R
    only if `uncached(S) + ageing * work(S) < uncached(R) + ageing * work(R)`. From this follows
    the bound on R's wait, with U the most uncached tokens that R had while it waited:

    * whoever overtakes R is counted with less than U, and came before U / ageing tokens of work
      were planned after R had come;
    * it computes less than U + block_size - 1: where it gets in and finds no room for a block to
      copy rows from, it computes these rows, which were counted as cached;
    * from then on only those are ahead of R that wait already, at most as many as the queue
      holds, and nobody joins them but running requests that are preempted.

    A request keeps its `work` when its uncached tokens are counted anew: it can only move by as
    much as the cache changed for it. All of this holds for who is counted when it gets in; behind
    as many look-ups as a plan makes at most (`planning`) one is taken with its last count.

    Args:
        order: "shortest" uncached work first, or the order of "arrival".
        ageing: What a token of work done before a request came weighs against one of its own
            uncached tokens; 0 lets short ones overtake for ever.

    Raises:
        ValueError: If ageing is negative or no number.

    Invariants:
        1. Requests and ranks are one to one, each with the rank of its request's counts.
        2. Each request is found under the hash of its first uncached block, if it has one.

    Complexity:
        O(log n) for each operation on one request.
    """

    __slots__ = ("_by_hash", "_places", "_ranked", "_step", "_unit", "order")

    def __init__(self, *, order: QueueOrder = "shortest", ageing: float = AGEING) -> None:
        if not (math.isfinite(ageing) and ageing >= 0):
            raise ValueError(f"ageing is {ageing}; it must be a number of at least 0")
        self.order = order
        fraction = Fraction(ageing).limit_denominator(MAX_DENOMINATOR)
        self._step, self._unit = fraction.numerator, fraction.denominator
        self._ranked: dict[Rank, Sequence] = SortedDict()
        self._places: dict[str, _Place] = {}
        self._by_hash: dict[BlockHash, dict[str, Sequence]] = {}

    def __len__(self) -> int:
        return len(self._ranked)

    def __iter__(self) -> Iterator[Sequence]:
        """Yields the requests in order."""
        return iter(self._ranked.values())

    @property
    def head(self) -> Sequence | None:
        """Who is next; None when nobody waits."""
        return next(iter(self), None)

    def rank(self, seq: Sequence) -> Rank:
        """Returns the place of a request that waits."""
        return self._places[seq.request_id].rank

    def push(self, seq: Sequence, *, work: int) -> None:
        """Adds a request that comes when `work` tokens have been planned in all."""
        self._put(seq, work, is_new=1)

    def push_front(self, seq: Sequence) -> None:
        """Adds a request that had begun: before all of its priority that have not."""
        self._put(seq, 0, is_new=0)

    def replace(self, seq: Sequence, by: Sequence) -> None:
        """Gives a request's place to another one of the same prompt."""
        place = self._places[seq.request_id]
        self.remove(seq)
        self._put(by, place.work, is_new=place.rank.is_new)

    def remove(self, seq: Sequence) -> None:
        """Takes a request out."""
        place = self._places.pop(seq.request_id)
        del self._ranked[place.rank]
        self._forget_hash(seq, place)

    def recount(self, seq: Sequence, num_uncached_tokens: int) -> None:
        """Moves a request to where it belongs with so many uncached tokens."""
        place = self._places[seq.request_id]
        seq.num_uncached_tokens = num_uncached_tokens
        self.remove(seq)
        self._put(seq, place.work, is_new=place.rank.is_new)

    def computed(self, hashes: Hashes[BlockHash], first: int) -> None:
        """Moves up who begins with blocks that were just computed.

        Args:
            hashes: Of the blocks of the request that computed them, from its first block on.
            first: How many of them were there before.

        Complexity:
            O(len(hashes) - first), and O(log n + log blocks) for each request that moves.
        """
        if not self._by_hash:
            return
        for index in range(first, len(hashes)):
            # A copy: whoever moves is found under another hash afterwards.
            for seq in tuple(self._by_hash.get(hashes[index], {}).values()):
                num_blocks = _num_shared(hashes, seq.chain.hashes, start=index)
                num_cached = num_blocks * seq.namespace.block_size
                self.recount(seq, max(1, seq.num_tokens - num_cached))

    def check_invariants(self) -> None:
        """Checks the invariants of the class.

        Raises:
            InvariantViolated: If one does not hold.
        """
        ranked = list(self._ranked.items())
        if ranked != sorted(ranked, key=lambda item: item[0]):
            raise InvariantViolated("queue: requests are out of order")
        expected = {seq.request_id: self._place(seq, *self._kept(seq)) for _, seq in ranked}
        if self._places != expected or any(
            self._places[seq.request_id].rank != rank for rank, seq in ranked
        ):
            raise InvariantViolated(f"queue 1: {self._places}, and the requests say {expected}")
        found = {
            (request_id, block_hash)
            for block_hash, seqs in self._by_hash.items()
            for request_id in seqs
        }
        wanted = {(key, place.next_hash) for key, place in expected.items() if place.next_hash}
        if found != wanted:
            raise InvariantViolated("queue 2: requests are found under the wrong hashes")

    def _kept(self, seq: Sequence) -> tuple[int, int]:
        place = self._places[seq.request_id]
        return place.work, place.rank.is_new

    def _place(self, seq: Sequence, work: int, is_new: int) -> _Place:
        key = 0
        if is_new and self.order == "shortest":
            key = seq.num_uncached_tokens * self._unit + work * self._step
        rank = Rank(seq.priority, is_new, key, seq.arrival_index)
        return _Place(rank, work, _first_uncached(seq))

    def _put(self, seq: Sequence, work: int, *, is_new: int) -> None:
        place = self._place(seq, work, is_new)
        self._places[seq.request_id] = place
        self._ranked[place.rank] = seq
        if place.next_hash is not None:
            self._by_hash.setdefault(place.next_hash, {})[seq.request_id] = seq

    def _forget_hash(self, seq: Sequence, place: _Place) -> None:
        if place.next_hash is None:
            return
        found = self._by_hash[place.next_hash]
        del found[seq.request_id]
        if not found:
            del self._by_hash[place.next_hash]


def _first_uncached(seq: Sequence) -> BlockHash | None:
    """Returns the hash of the first block that the cache lacks, None where none would be used."""
    if seq.params.prompt_logprobs is not None:
        return None  # it computes all of its prompt, whatever is cached
    index = (seq.num_tokens - seq.num_uncached_tokens) // seq.namespace.block_size
    return seq.chain.hashes[index] if index < len(seq.chain.hashes) else None


def _num_shared(left: Hashes[BlockHash], right: Hashes[BlockHash], *, start: int) -> int:
    """Returns how many leading blocks two chains share, which agree up to `start` blocks.

    Hashes are chained: where two agree, all before them do.
    """
    end = min(len(left), len(right))
    return bisect_left(range(end), x=True, lo=min(start, end), key=lambda i: left[i] != right[i])
