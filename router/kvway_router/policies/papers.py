"""Baselines from papers: Preble and LMetric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from kvway_router.policies.base import ANY_POLICY, Baseline, Pick
from kvway_router.policies.reasons import Reason

if TYPE_CHECKING:
    from kvway_router.policies.base import View
    from kvway_router.policy import Candidate


@dataclass(frozen=True, slots=True)
class PrebleE2(Baseline):
    """Exploit a match that is longer than what is missing, explore otherwise.

    Exploiting takes the candidate with the longest match, of equal ones the one that was sent the
    least work in the window; if that is more than `rebalance_ratio` times the least work of all,
    the candidate with the least work is taken instead. Exploring takes the least sum of the work
    sent in the window, the prefill of this prompt, and what the blocks that have to go for it
    would cost to compute again. Work that was sent is its prefill and its expected answer.

    Source: E2 of Preble (ICLR 2025, arXiv 2407.00023). There a block that has to go counts by the
    share of the window's requests that use it. A router does not know which blocks an engine will
    evict; the least used ones go first, so we count each as used by one request of the window.
    Preble moves single prefixes from the most to the least loaded; here the request goes there,
    and the prefix with it.

    Attributes:
        rebalance_ratio: How many times the least work a holder's may be, as in Preble's code.
        num_warm_up: Choices per candidate before the ratio is looked at, as in Preble's code.
    """

    name: ClassVar[str] = "preble_e2"
    reasons: ClassVar[tuple[Reason, ...]] = (
        Reason.EXPLOIT,
        Reason.EXPLORE,
        Reason.REBALANCE,
        *ANY_POLICY,
    )
    remember_s: ClassVar[float] = 180.0

    rebalance_ratio: float = 1.5
    num_warm_up: int = 50

    @override
    def pick(self, view: View) -> Pick:
        sent = view.sent()
        work_s = {replica_id: found.work_s for replica_id, found in sent.items()}
        longest = max(c.matched_blocks for c in view.candidates)
        holders = [c for c in view.candidates if c.matched_blocks == longest]
        if holders[0].cached_tokens > holders[0].uncached_tokens:
            return self._exploit(view, holders, work_s)

        def cost_s(candidate: Candidate) -> float:
            num_requests = max(1, sent[candidate.replica_id].num_requests)
            evicted_s = self._evicted_s(candidate, view) / num_requests
            return work_s[candidate.replica_id] + candidate.own_s + evicted_s

        chosen = view.least(cost_s)
        why = (
            f"nobody holds more than {longest} blocks, less than is missing; "
            f"{chosen.replica_id} costs {cost_s(chosen):.3f} s with the work of late"
        )
        return Pick(chosen.replica_id, Reason.EXPLORE, why)

    def _exploit(self, view: View, holders: list[Candidate], work_s: dict[str, float]) -> Pick:
        holder = view.least(lambda c: work_s[c.replica_id], holders)
        idlest = view.least(lambda c: work_s[c.replica_id])
        had_s, least_s = work_s[holder.replica_id], work_s[idlest.replica_id]
        is_warm = view.state.num_choices >= self.num_warm_up * len(view.candidates)
        if is_warm and had_s > self.rebalance_ratio * least_s:
            why = (
                f"{holder.replica_id} holds {holder.matched_blocks} blocks but was sent "
                f"{had_s:.3f} s of work of late, {idlest.replica_id} {least_s:.3f} s"
            )
            return Pick(idlest.replica_id, Reason.REBALANCE, why)
        why = f"{holder.replica_id} holds {holder.matched_blocks} blocks, more than is missing"
        return Pick(holder.replica_id, Reason.EXPLOIT, why)

    @staticmethod
    def _evicted_s(candidate: Candidate, view: View) -> float:
        """Returns the time to compute again what has to go to make room, seconds."""
        load = view.loads[candidate.replica_id]
        if not load.blocks_total:
            return 0.0
        # What the index lists is what is cached, in use or not.
        num_over = candidate.blocks_held + candidate.own_blocks - load.blocks_total
        num_evicted = min(candidate.blocks_held, max(0, num_over))
        own_blocks = max(1.0, candidate.uncached_tokens / view.prompt.block_size)
        return num_evicted * candidate.own_s / own_blocks


@dataclass(frozen=True, slots=True)
class Lmetric(Baseline):
    """The fewest tokens to compute times requests there; of equal ones a drawn one.

    Tokens are those that are queued and this prompt's own; requests are those in flight and this
    one, so that idle candidates differ by their tokens. A product needs no weights: a factor of
    either cancels out when two candidates are compared.

    Source: LMetric (arXiv 2603.15202); Dynamo's `lmetric` also counts what is queued.
    """

    name: ClassVar[str] = "lmetric"
    reasons: ClassVar[tuple[Reason, ...]] = (Reason.PRODUCT, *ANY_POLICY)

    @override
    def pick(self, view: View) -> Pick:
        def tokens(candidate: Candidate) -> float:
            return view.loads[candidate.replica_id].queued_tokens + candidate.uncached_tokens

        chosen = view.least(lambda c: tokens(c) * (c.in_flight + 1))
        why = (
            f"{chosen.replica_id} would have {tokens(chosen):.0f} tokens to compute and "
            f"{chosen.in_flight + 1} requests, the least product"
        )
        return Pick(chosen.replica_id, Reason.PRODUCT, why)
