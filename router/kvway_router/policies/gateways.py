"""Baselines that weigh cache against load as other routers do: SGLang, Dynamo, llm-d.

Each is the rule with the defaults of its project, over our index and our count of load, so that
what is compared is the rule. Where that differs from what the project itself can see, the
docstring says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from kvway_router.policies.base import ANY_POLICY, Baseline, Pick
from kvway_router.policies.reasons import Reason

if TYPE_CHECKING:
    from kvway_router.policies.base import View
    from kvway_router.policy import Candidate


@dataclass(frozen=True, slots=True)
class SglangCacheAware(Baseline):
    """The longest match if it is a large enough share, unless the fleet is out of balance.

    Out of balance means that the busiest candidate has more than `balance_abs` requests more than
    the idlest, and more than `balance_rel` times as many. Then, and for a prompt of which nobody
    holds more than `cache_threshold`, it is the candidate with the fewest requests, of equal ones
    that which was sent the fewest of late.

    Source: `cache_aware` of SGLang's gateway, with the defaults of its command line. It knows its
    own history as text and remembers one holder per prefix; our index knows all holders, of which
    we take the one with the fewest requests, as its mode with KV events does. It counts the
    requests it ever sent, we those of three minutes, so that a new replica is not flooded.

    Attributes:
        cache_threshold: Share of the prompt that a match must exceed.
        balance_abs: Difference of requests that must be exceeded.
        balance_rel: Ratio of requests that must be exceeded as well.
    """

    name: ClassVar[str] = "sglang_cache_aware"
    reasons: ClassVar[tuple[Reason, ...]] = (
        Reason.IMBALANCE,
        Reason.MATCH,
        Reason.MISS,
        *ANY_POLICY,
    )
    remember_s: ClassVar[float] = 180.0

    cache_threshold: float = 0.3
    balance_abs: int = 64
    balance_rel: float = 1.5

    @override
    def pick(self, view: View) -> Pick:
        sent = view.sent()
        idlest = min(view.candidates, key=lambda c: (c.in_flight, sent[c.replica_id].num_requests))
        busiest = max(c.in_flight for c in view.candidates)
        beyond = busiest - idlest.in_flight > self.balance_abs
        if beyond and busiest > self.balance_rel * idlest.in_flight:
            why = (
                f"{busiest} requests at one replica are too many more than the "
                f"{idlest.in_flight} at {idlest.replica_id}"
            )
            return Pick(idlest.replica_id, Reason.IMBALANCE, why)
        holder = min(
            view.candidates, key=lambda c: (-c.matched_blocks, c.in_flight, c.blocks_held)
        )
        share = view.matched_share(holder)
        if share > self.cache_threshold:
            why = f"{holder.replica_id} holds {share:.0%} of the prompt"
            return Pick(holder.replica_id, Reason.MATCH, why)
        why = (
            f"nobody holds more than {share:.0%} of the prompt; "
            f"{idlest.replica_id} has {idlest.in_flight} requests"
        )
        return Pick(idlest.replica_id, Reason.MISS, why)


@dataclass(frozen=True, slots=True)
class Dynamo(Baseline):
    """The fewest blocks: those to compute, times a weight, and those in use.

        cost = prefill_load_scale * max(0, queued + prompt - overlap_credit * match) + decode

    All in blocks: `queued` is the prefill work before this request, `decode` the blocks that
    active requests hold and this one would add. Of equal ones a drawn one; with a temperature one
    is drawn by the softmax of the costs, scaled to the range between the least and the largest.

    Source: the KV router of NVIDIA Dynamo with its defaults. Its credits for blocks on host and
    disk are left out: only matched blocks on the device count. Which of them active requests
    hold we do not know; for memory no more are taken for shared than such requests hold.

    Attributes:
        prefill_load_scale: Weight of blocks to compute against blocks in use.
        overlap_credit: Share of a matched block that counts as computed.
        temperature: 0 takes the least; the larger, the more even the draw.
    """

    name: ClassVar[str] = "dynamo"
    reasons: ClassVar[tuple[Reason, ...]] = (Reason.BLOCK_COST, *ANY_POLICY)

    prefill_load_scale: float = 1.0
    overlap_credit: float = 1.0
    temperature: float = 0.0

    @override
    def pick(self, view: View) -> Pick:
        costs = {c.replica_id: self._cost(c, view) for c in view.candidates}
        least = min(costs.values())
        spread = (max(costs.values()) - least) * self.temperature
        if spread > 0:
            weights = [math.exp((least - cost) / spread) for cost in costs.values()]
            chosen = view.drawn(weights)
        else:
            chosen = view.least(lambda c: costs[c.replica_id])
        why = (
            f"{chosen.replica_id} costs {costs[chosen.replica_id]:.1f} blocks to compute and in "
            f"use, the least is {least:.1f}"
        )
        return Pick(chosen.replica_id, Reason.BLOCK_COST, why)

    def _cost(self, candidate: Candidate, view: View) -> float:
        load = view.loads[candidate.replica_id]
        size = view.prompt.block_size
        prompt_blocks = math.ceil(view.prompt.num_tokens / size)
        to_compute = load.queued_tokens / size + prompt_blocks
        on_device = candidate.matched_blocks - candidate.slow_blocks
        to_compute -= self.overlap_credit * on_device
        in_use = load.blocks_pinned + prompt_blocks - min(on_device, load.blocks_pinned)
        return self.prefill_load_scale * max(0.0, to_compute) + in_use


@dataclass(frozen=True, slots=True)
class LlmdWeighted(Baseline):
    """The highest weighted sum of three scores from 0 to 1; of equal ones a drawn one.

    The scores are the share of the prompt that is held, how short the queue is between the
    longest and the shortest (1 for all if they are equal), and the share of KV memory that is
    free (1 if it is not known).

    Source: the llm-d router (EPP): `prefix-cache-scorer`, `queue-scorer` and
    `kv-cache-utilization-scorer` with the weights that it falls back to, and the `max-score`
    picker. Its queue is scraped from the engine; ours counts prefills queued or running, without
    the delay of a scrape.

    Attributes:
        prefix_weight: Weight of the share held.
        queue_weight: Weight of the short queue.
        memory_weight: Weight of free memory.
    """

    name: ClassVar[str] = "llmd"
    reasons: ClassVar[tuple[Reason, ...]] = (Reason.WEIGHTED_SCORES, *ANY_POLICY)

    prefix_weight: float = 3.0
    queue_weight: float = 2.0
    memory_weight: float = 2.0

    @override
    def pick(self, view: View) -> Pick:
        queues = [load.num_prefills for load in view.loads.values()]
        shortest, longest = min(queues), max(queues)

        def scores(candidate: Candidate) -> tuple[float, float, float]:
            load = view.loads[candidate.replica_id]
            queue = 1.0
            if longest > shortest:
                queue = (longest - load.num_prefills) / (longest - shortest)
            used = min(1.0, load.blocks_pinned / load.blocks_total) if load.blocks_total else 0.0
            return view.matched_share(candidate), queue, 1.0 - used

        def total(candidate: Candidate) -> float:
            prefix, queue, memory = scores(candidate)
            return (
                self.prefix_weight * prefix
                + self.queue_weight * queue
                + self.memory_weight * memory
            )

        chosen = view.least(lambda c: -total(c))
        prefix, queue, memory = scores(chosen)
        why = (
            f"{chosen.replica_id} scores {total(chosen):.2f}: prefix {prefix:.2f}, "
            f"queue {queue:.2f}, memory {memory:.2f}"
        )
        return Pick(chosen.replica_id, Reason.WEIGHTED_SCORES, why)


@dataclass(frozen=True, slots=True)
class LlmdSticky(Baseline):
    """Who holds nearly all of the prompt, until their queues are too long; then the least tokens.

    Candidates that hold `sticky_share` of the prompt or more are the only ones looked at, unless
    the shortest queue among them is more than `max_wait_s` longer than the shortest among the
    others. Of those looked at the one with the fewest tokens to compute is chosen, this prompt's
    included; of equal ones a drawn one. Beyond `most_tokens` all are as bad.

    Source: the llm-d router since August 2026: `prefix-cache-affinity-filter` with its load gate,
    then `token-load-scorer`, with their defaults.

    Attributes:
        sticky_share: Share of the prompt to hold.
        peak_tokens_per_s: Prefill rate by which queued tokens are a time.
        max_wait_s: Longest additional wait that holding the prompt is worth.
        most_tokens: Tokens from which on more make no difference.
    """

    name: ClassVar[str] = "llmd_sticky"
    reasons: ClassVar[tuple[Reason, ...]] = (
        Reason.STICKY,
        Reason.STICKY_SATURATED,
        Reason.NOT_STICKY,
        *ANY_POLICY,
    )

    sticky_share: float = 0.8
    peak_tokens_per_s: float = 15_928.0
    max_wait_s: float = 18.0
    most_tokens: float = 4_194_304.0

    @override
    def pick(self, view: View) -> Pick:
        sticky = [c for c in view.candidates if view.matched_share(c) >= self.sticky_share]
        others = [c for c in view.candidates if view.matched_share(c) < self.sticky_share]
        reason, among = Reason.STICKY, sticky
        if not sticky:
            reason, among = Reason.NOT_STICKY, others
        elif others and self._wait_s(sticky, view) - self._wait_s(others, view) > self.max_wait_s:
            reason, among = Reason.STICKY_SATURATED, list(view.candidates)

        def tokens(candidate: Candidate) -> float:
            queued = view.loads[candidate.replica_id].queued_tokens
            return min(self.most_tokens, queued + candidate.uncached_tokens)

        chosen = view.least(tokens, among)
        why = (
            f"{len(sticky)} of {len(view.candidates)} hold {self.sticky_share:.0%} of the prompt; "
            f"{chosen.replica_id} would have {tokens(chosen):.0f} tokens to compute"
        )
        return Pick(chosen.replica_id, reason, why)

    def _wait_s(self, among: list[Candidate], view: View) -> float:
        """Returns the shortest queue among some, seconds."""
        queued = min(view.loads[c.replica_id].queued_tokens for c in among)
        return queued / self.peak_tokens_per_s
