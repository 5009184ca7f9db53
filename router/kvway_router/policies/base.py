"""The interface of all policies: a situation and a state go in, a decision comes out.

A policy is a value without anything that changes. What it may remember is a `PolicyState`, owned
by the router and handed in with each choice; `decide` returns the next one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, Protocol

import msgspec

from kvway_router.policies.reasons import Reason
from kvway_router.policies.state import Sent
from kvway_router.policies.weighing import Weighing
from kvway_router.policy import (
    Candidate,
    Decision,
    PolicyParams,
    Prompt,
    ReplicaLoad,
    rendezvous,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvway_router.policies.state import PolicyState

ANY_POLICY = (Reason.ONLY_REPLICA, Reason.RETRY)
"""Reasons that every policy may give."""


class Situation(msgspec.Struct, frozen=True):
    """What is known when a request comes.

    Attributes:
        prompt: The request.
        matches: Leading blocks held per replica; those not named hold none.
        loads: The candidates: usable replicas, without those already tried, in any order.
        params: Constants that turn tokens into seconds.
        mean_work_s: Running mean of the own work of chosen candidates; None before the first.
        retry: True when an earlier attempt at another replica failed.
        now_s: Time that only runs forward, from any start.
        slower: Blocks behind those of `matches` on the host, and behind these on a disk.
        busy_share: Share of the replicas that had prefill work of late, 0 to 1.
    """

    prompt: Prompt
    matches: Mapping[str, int]
    loads: Sequence[ReplicaLoad]
    params: PolicyParams
    mean_work_s: float | None = None
    retry: bool = False
    now_s: float = 0.0
    slower: Mapping[str, tuple[int, int]] | None = None
    busy_share: float = 1.0


class Policy(Protocol):
    """One way to choose.

    Attributes:
        name: What `--policy` calls it.
        reasons: All reasons it may give.
        remember_s: How much of what was sent it wants to be remembered, seconds.
    """

    name: ClassVar[str]
    reasons: ClassVar[tuple[Reason, ...]]
    remember_s: ClassVar[float]

    def choose(self, situation: Situation, state: PolicyState) -> Decision:
        """Chooses one of the candidates; the same arguments give the same choice.

        Raises:
            NoReplicaAvailable: There is no candidate.
        """
        ...


def decide(
    policy: Policy, situation: Situation, state: PolicyState
) -> tuple[Decision, PolicyState]:
    """Chooses, and returns the state for the next choice with the decision.

    Work that the state remembers is the request's prefill and, at the replica's present step, its
    expected answer.

    Raises:
        NoReplicaAvailable: There is no candidate; the state stays what it was.
    """
    decision = policy.choose(situation, state)
    work_s = 0.0
    if state.window.length_s > 0:
        load = next(load for load in situation.loads if load.replica_id == decision.replica_id)
        work_s = decision.chosen.own_s + situation.prompt.num_output_tokens * load.decode_step_s
    return decision, state.after(decision.replica_id, work_s, now_s=situation.now_s)


@dataclass(frozen=True, slots=True)
class Pick:
    """What a baseline answers.

    Attributes:
        replica_id: The chosen replica.
        reason: Why, as one word.
        why: Why, as the beginning of a sentence with the numbers, no full stop.
    """

    replica_id: str
    reason: Reason
    why: str


@dataclass(frozen=True, slots=True)
class View:
    """The candidates as a baseline sees them.

    Attributes:
        prompt: The request.
        candidates: At least one, in order of their ids.
        loads: The load of each, by id.
        state: What is remembered.
        now_s: Time that only runs forward.
    """

    prompt: Prompt
    candidates: tuple[Candidate, ...]
    loads: Mapping[str, ReplicaLoad]
    state: PolicyState
    now_s: float

    def matched_share(self, candidate: Candidate) -> float:
        """Returns the share of the prompt that a candidate holds, 0 to 1."""
        num_matched = candidate.matched_blocks * self.prompt.block_size
        return min(1.0, num_matched / max(1, self.prompt.num_tokens))

    def least(
        self, value: Callable[[Candidate], float], among: Iterable[Candidate] | None = None
    ) -> Candidate:
        """Returns the candidate of least value, a drawn one of those that are equal."""
        pool = self.candidates if among is None else tuple(among)
        values = [value(candidate) for candidate in pool]
        least = min(values)
        equal = [c for c, found in zip(pool, values, strict=True) if found == least]
        return equal[self.state.draw(len(equal))]

    def drawn(self, weights: Sequence[float]) -> Candidate:
        """Returns a drawn candidate, each as likely as its weight is large; one is positive."""
        reached = list(accumulate(weights))
        mark = self.state.draw_share() * reached[-1]
        # Rounding may put the mark at the very end.
        return self.candidates[min(bisect_right(reached, mark), len(reached) - 1)]

    def sent(self) -> dict[str, Sent]:
        """Returns what each candidate was sent of late."""
        totals = self.state.window.totals(now_s=self.now_s)
        return {c.replica_id: totals.get(c.replica_id, Sent()) for c in self.candidates}

    def by_hash(self) -> list[Candidate]:
        """Returns the candidates in the order that the hash of the prompt's beginning gives."""
        key = self.prompt.prefix_key
        return sorted(self.candidates, key=lambda c: -rendezvous(key, c.replica_id.encode()))


class Baseline(ABC):
    """A policy that is given the candidates, weighed as ours weighs them, and picks by its rule.

    Its decision lists the candidates in the order of our cost, so a record shows what `cost` would
    have thought of the choice.
    """

    __slots__ = ()

    name: ClassVar[str]
    reasons: ClassVar[tuple[Reason, ...]]
    remember_s: ClassVar[float] = 0.0

    @abstractmethod
    def pick(self, view: View) -> Pick:
        """Picks one of the candidates."""

    def choose(self, situation: Situation, state: PolicyState) -> Decision:
        """Weighs all candidates and picks by the rule.

        Raises:
            NoReplicaAvailable: There is no candidate.
        """
        weighing = Weighing(
            situation.prompt,
            situation.matches,
            situation.loads,
            params=situation.params,
            mean_work_s=situation.mean_work_s,
            slower=situation.slower,
            busy_share=situation.busy_share,
        )
        candidates = [weighing.candidate(place) for place in range(len(weighing.matched))]
        view = View(
            prompt=situation.prompt,
            candidates=tuple(sorted(candidates, key=lambda c: c.replica_id)),
            loads={load.replica_id: load for load in situation.loads},
            state=state,
            now_s=situation.now_s,
        )
        pick = self.pick(view)
        reason = pick.reason
        if situation.retry:
            reason = Reason.RETRY
        elif len(candidates) == 1:
            reason = Reason.ONLY_REPLICA
        return Decision(
            next(c for c in candidates if c.replica_id == pick.replica_id),
            weighing,
            reason=reason,
            detail=lambda _: f"{self.name}: {pick.why}.",
        )
