"""Baselines that look at requests, work or chance, and at the cache little or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from kvway_router.policies.base import ANY_POLICY, Baseline, Pick
from kvway_router.policies.reasons import Reason

if TYPE_CHECKING:
    from kvway_router.policies.base import View


@dataclass(frozen=True, slots=True)
class RoundRobin(Baseline):
    """Each in its turn, in the order of their ids.

    Source: the default of nearly every proxy, such as nginx and Kubernetes Services.
    """

    name: ClassVar[str] = "round_robin"
    reasons: ClassVar[tuple[Reason, ...]] = (Reason.ROUND_ROBIN, *ANY_POLICY)

    @override
    def pick(self, view: View) -> Pick:
        turn = view.state.num_choices % len(view.candidates)
        chosen = view.candidates[turn]
        why = f"turn {turn + 1} of {len(view.candidates)} is {chosen.replica_id}'s"
        return Pick(chosen.replica_id, Reason.ROUND_ROBIN, why)


@dataclass(frozen=True, slots=True)
class Random(Baseline):
    """Any of them, each as likely.

    Source: the `random` policies of SGLang's gateway and of Dynamo.
    """

    name: ClassVar[str] = "random"
    reasons: ClassVar[tuple[Reason, ...]] = (Reason.RANDOM, *ANY_POLICY)

    @override
    def pick(self, view: View) -> Pick:
        chosen = view.candidates[view.state.draw(len(view.candidates))]
        why = f"{chosen.replica_id} was drawn from {len(view.candidates)}"
        return Pick(chosen.replica_id, Reason.RANDOM, why)


@dataclass(frozen=True, slots=True)
class LeastRequests(Baseline):
    """The fewest requests in flight; of equal ones a drawn one.

    Source: nginx's `least_conn` and Dynamo's `least-loaded`.
    """

    name: ClassVar[str] = "least_requests"
    reasons: ClassVar[tuple[Reason, ...]] = (Reason.LEAST_REQUESTS, *ANY_POLICY)

    @override
    def pick(self, view: View) -> Pick:
        chosen = view.least(lambda c: c.in_flight)
        why = f"no candidate has fewer requests than {chosen.replica_id} with {chosen.in_flight}"
        return Pick(chosen.replica_id, Reason.LEAST_REQUESTS, why)


@dataclass(frozen=True, slots=True)
class PowerOfTwo(Baseline):
    """Of two drawn candidates the one with fewer requests; the first drawn one if they are equal.

    Source: M. Mitzenmacher, The Power of Two Choices in Randomized Load Balancing (2001);
    `power_of_two` of SGLang's gateway, which counts its own requests where token usage is unknown.
    """

    name: ClassVar[str] = "power_of_two"
    reasons: ClassVar[tuple[Reason, ...]] = (Reason.POWER_OF_TWO, *ANY_POLICY)

    @override
    def pick(self, view: View) -> Pick:
        num_candidates = len(view.candidates)
        first = view.state.draw(num_candidates)
        one = other = view.candidates[first]
        if num_candidates > 1:
            # A step of 1 to n - 1 from the first: two different ones, each pair as likely.
            step = 1 + view.state.draw(num_candidates - 1, number=1)
            other = view.candidates[(first + step) % num_candidates]
        chosen, passed = (other, one) if other.in_flight < one.in_flight else (one, other)
        why = (
            f"{chosen.replica_id} with {chosen.in_flight} requests and {passed.replica_id} with "
            f"{passed.in_flight} were drawn"
        )
        return Pick(chosen.replica_id, Reason.POWER_OF_TWO, why)


@dataclass(frozen=True, slots=True)
class LeastUncachedWork(Baseline):
    """The least work before this request and of its own that no cache saves, in seconds.

    That is the time to first token of a replica that only prefills. Source: the scheduler of
    Mooncake (FAST'25) without transfers, and GORGO (arXiv 2602.11688) with weights of one and no
    network.
    """

    name: ClassVar[str] = "least_uncached_work"
    reasons: ClassVar[tuple[Reason, ...]] = (Reason.LEAST_UNCACHED_WORK, *ANY_POLICY)

    @override
    def pick(self, view: View) -> Pick:
        chosen = view.least(lambda c: c.queued_s + c.own_s)
        why = (
            f"{chosen.replica_id} has {chosen.queued_s:.3f} s of work before it and "
            f"{chosen.own_s:.3f} s of its own, the least sum"
        )
        return Pick(chosen.replica_id, Reason.LEAST_UNCACHED_WORK, why)


@dataclass(frozen=True, slots=True)
class ConsistentHash(Baseline):
    """Who the hash of the prompt's beginning points at, passing by those that have too much.

    A candidate takes the request if it has at most `load_factor` times its even share of all
    requests, this one counted; the next one of the hash's order is asked otherwise. The candidate
    with the fewest requests is always within its share. The order is a rendezvous hash's and not
    a ring's: as with a ring, a replica that comes or goes moves only its own prompts, and no ring
    has to be built. Prompts shorter than a block share one beginning.

    Source: V. Mirrokni, M. Thorup and M. Zadimoghaddam, Consistent Hashing with Bounded Loads
    (2018); the rule for the share is KubeAI's PrefixHash.

    Attributes:
        load_factor: Even shares that a replica may have; KubeAI's default.
    """

    name: ClassVar[str] = "consistent_hash"
    reasons: ClassVar[tuple[Reason, ...]] = (Reason.HASH, Reason.HASH_OVERFLOW, *ANY_POLICY)

    load_factor: float = 1.25

    @override
    def pick(self, view: View) -> Pick:
        total = sum(c.in_flight for c in view.candidates)
        limit = self.load_factor * (total + 1) / len(view.candidates)
        order = view.by_hash()
        chosen = next(c for c in order if c.in_flight <= limit)
        if chosen is order[0]:
            why = f"the prompt's beginning belongs to {chosen.replica_id}"
            return Pick(chosen.replica_id, Reason.HASH, why)
        why = (
            f"the prompt's beginning belongs to {order[0].replica_id}, whose "
            f"{order[0].in_flight} requests are more than the {limit:.1f} it may have"
        )
        return Pick(chosen.replica_id, Reason.HASH_OVERFLOW, why)
