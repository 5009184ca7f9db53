"""The values of a choice: what is asked, how busy each replica is, what each would cost.

How the cost is made of them is in `policies/weighing.py`, which candidate is taken in
`policies/cost.py`. All times are in seconds.

>>> from kvway_router.policies.cost import choose
>>> prompt = Prompt(num_tokens=1600, block_size=16, prefix_key=b"system prompt")
>>> loads = [
...     ReplicaLoad("a:1", queued_prefill_s=0.0, queued_tokens=0, num_prefills=0,
...                 decode_step_s=0.01, prefill_tokens_per_s=1000.0, blocks_pinned=0,
...                 blocks_total=4000, in_flight=0, blocks_held=90),
...     ReplicaLoad("b:1", queued_prefill_s=0.0, queued_tokens=0, num_prefills=0,
...                 decode_step_s=0.01, prefill_tokens_per_s=1000.0, blocks_pinned=0,
...                 blocks_total=4000, in_flight=0, blocks_held=0),
... ]
>>> decision = choose(prompt, {"a:1": 90}, loads, params=PolicyParams())
>>> decision.replica_id, decision.reason.value
('a:1', 'prefix')
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
import xxhash
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvway_router.policies.reasons import Reason


@dataclass(frozen=True, slots=True)
class PolicyParams:
    """The constants of the cost.

    Attributes:
        chunk_tokens: Prompt tokens that a replica prefills in one step.
        attention_tokens: A: context length at which attention doubles the cost of a token, while
            no replica's is known.
        max_price: Most that lambda, the price of work, may be while a replica idles, in a fleet
            that was all busy of late.
        idle_price: The same in a fleet that idled: siblings meet if that costs at most a tenth of
            what it saves.
        idlest_weight: How many times what the idlest replica has queued may be added to that.
        kv_weight_s: km: seconds that a replica costs more per whole cache over the threshold.
        kv_threshold: theta: share of the KV blocks that may be taken at no cost.
        default_prefill_tokens_per_s: R while no replica's rate is known.
        host_token_s: Seconds to bring a token's KV back from host memory.
        disk_token_s: Seconds to bring it back from a disk.
        spread_share: A match that saves at most this share of the own work is no reason to follow
            it: otherwise all prompts would go where the first one went, as many templates begin
            with the same few words.
        tie_share: Candidates that cost at most this share of the best one's own work more than it,
            and hold as much of the prompt, are tied with it.
        placement_factor: Of tied candidates those are passed by that have more than this many
            times what they have on average.
    """

    chunk_tokens: int = 2048
    attention_tokens: float = 60_000.0
    max_price: float = 1.0
    idle_price: float = 0.1
    idlest_weight: float = 4.0
    kv_weight_s: float = 3.0
    kv_threshold: float = 0.8
    default_prefill_tokens_per_s: float = 2_000.0
    host_token_s: float = 8e-6
    disk_token_s: float = 8e-5
    tie_share: float = 0.1
    spread_share: float = 0.05
    placement_factor: float = 1.25


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """What the choice needs to know of a request.

    Attributes:
        num_tokens: Tokens of the prompt.
        block_size: Tokens per block.
        prefix_key: Names the beginning of the prompt, such as a hash of its first blocks: several
            routers put equal beginnings at the same one of equal replicas.
        num_output_tokens: Output to reckon with, for the memory term.
        sticky_key: What the client wants kept together; takes the place of `prefix_key` where
            candidates are tied, and decides nothing else. Empty for nothing.
    """

    num_tokens: int
    block_size: int
    prefix_key: bytes = b""
    num_output_tokens: int = 0
    sticky_key: bytes = b""


class ReplicaLoad(msgspec.Struct, frozen=True, gc=False):
    """How busy one usable replica is, as the router knows it now.

    A struct, as it is made for each replica and request: ten times faster than a dataclass.

    Attributes:
        replica_id: Its id.
        queued_prefill_s: Q: prefill work sent to it and not yet done, seconds.
        queued_tokens: The same work as plain prompt tokens, without the term for attention.
        num_prefills: n: prefills that are queued or running there.
        decode_step_s: tau: how long one of its decode steps takes now, seconds; 0 while it
            generates nothing.
        prefill_tokens_per_s: R; None while unknown: then it borrows the fleet's.
        blocks_pinned: P: KV blocks in use or wanted by its queue.
        blocks_total: C; None when unknown: then memory does not count.
        in_flight: Requests sent to it and not finished.
        blocks_held: Blocks that the index lists for it.
        attention_tokens: A; None while unknown: then it borrows the fleet's.
        least_step_s: What a step takes that has next to nothing to do, seconds; 0 while unknown.
        failing_s: What its failures of late cost, seconds.
    """

    replica_id: str
    queued_prefill_s: float
    queued_tokens: float
    num_prefills: int
    decode_step_s: float
    prefill_tokens_per_s: float | None
    blocks_pinned: int
    blocks_total: int | None
    in_flight: int
    blocks_held: int
    attention_tokens: float | None = None
    least_step_s: float = 0.0
    failing_s: float = 0.0


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """What sending the request to one replica would cost; all times in seconds.

    Attributes:
        replica_id: The replica.
        matched_blocks: Leading blocks of the prompt that it holds, on any tier.
        slow_blocks: How many of them are on a tier slower than its device.
        uncached_tokens: Prompt tokens it would have to compute, at least one.
        cached_tokens: Prompt tokens before them that it holds.
        own_blocks: KV blocks it would have to find for prompt and expected output.
        queued_s: Work before ours.
        step_s: Steps shared with decodes.
        own_s: Our own prefill: the work, and at least a step for each chunk of it.
        work_s: The work alone.
        price_s: What our own work costs beyond its time because all queue: lambda * work_s.
        kv_s: Memory that is getting scarce.
        reload_s: Bringing blocks back from slower tiers.
        in_flight: Requests there now.
        blocks_held: Blocks listed for it now.
        ttft_s: Predicted time to first token: queued + step + own + reload.
        cost_s: What is compared: ttft + price + kv + failing.
        failing_s: What failures there cost of late.
    """

    replica_id: str
    matched_blocks: int
    slow_blocks: int
    uncached_tokens: int
    cached_tokens: int
    own_blocks: int
    queued_s: float
    step_s: float
    own_s: float
    work_s: float
    price_s: float
    kv_s: float
    reload_s: float
    in_flight: int
    blocks_held: int
    ttft_s: float
    cost_s: float
    failing_s: float = 0.0


class Weighed(Protocol):
    """What every candidate of a decision would cost.

    Attributes:
        matched: Leading blocks of the prompt that each holds.
        price: lambda, without unit.
        mean_work_s: What it is in relation to; None before the first choice.
        busy_share: What bounds it while a replica idles.
    """

    matched: list[int]
    price: float
    mean_work_s: float | None
    busy_share: float

    def candidates(self) -> tuple[Candidate, ...]:
        """Returns all candidates, the cheapest first."""
        ...


class Decision:
    """The choice and all that it was made from. What only a reader wants is made when it is read.

    Attributes:
        replica_id: The chosen replica.
        reason: Why, as one word.
        chosen: The candidate that was chosen.
        num_candidates: How many there were.
        reachable_blocks: Leading blocks of the prompt at the candidate that holds the most.
        price_of_work: lambda, without unit.
        mean_work_s: Running mean of own work, seconds; None before the first choice.
        busy_share: Share of the replicas that had prefill work of late.
    """

    __slots__ = (
        "_candidates",
        "_detail",
        "busy_share",
        "chosen",
        "mean_work_s",
        "num_candidates",
        "price_of_work",
        "reachable_blocks",
        "reason",
        "replica_id",
    )

    def __init__(
        self,
        chosen: Candidate,
        weighed: Weighed,
        *,
        reason: Reason,
        detail: Callable[[Decision], str],
    ) -> None:
        """Takes the choice.

        Args:
            chosen: The candidate that was chosen.
            weighed: Tells what each candidate would cost.
            reason: Why, as one word.
            detail: Makes the sentence; called once at most.
        """
        self.replica_id = chosen.replica_id
        self.reason = reason
        self.chosen = chosen
        self.num_candidates = len(weighed.matched)
        self.reachable_blocks = max(weighed.matched)
        self.price_of_work = weighed.price
        self.mean_work_s = weighed.mean_work_s
        self.busy_share = weighed.busy_share
        self._candidates: Weighed | tuple[Candidate, ...] = weighed
        self._detail: Callable[[Decision], str] | str = detail

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All candidates, the cheapest first."""
        if not isinstance(self._candidates, tuple):
            self._candidates = self._candidates.candidates()
        return self._candidates

    @property
    def detail(self) -> str:
        """Why, as a sentence with the numbers."""
        if not isinstance(self._detail, str):
            self._detail = self._detail(self)
        return self._detail

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Decision) and self._values() == other._values()

    @override
    def __hash__(self) -> int:
        return hash(self._values())

    def _values(self) -> tuple[object, ...]:
        return self.replica_id, self.reason, self.detail, self.candidates, self.price_of_work


def own_work_tokens(num_uncached: int, num_cached: int, *, attention_tokens: float) -> float:
    """Measures prefill work in tokens at an empty context: u (1 + (c + u/2) / A).

    Args:
        num_uncached: u: tokens to compute.
        num_cached: c: tokens before them.
        attention_tokens: A: see `PolicyParams`.
    """
    return num_uncached * (1.0 + (num_cached + num_uncached / 2.0) / attention_tokens)


def rendezvous(key: bytes, replica_id: bytes) -> int:
    """Returns the weight of a replica for a key: who leaves or comes moves only its own."""
    return xxhash.xxh3_64_intdigest(b"%b\0%b" % (key, replica_id))


def running_mean(mean: float | None, value: float, *, weight: float = 0.05) -> float:
    """Moves an exponential running mean towards a new value; the first value is the mean."""
    return value if mean is None else mean + weight * (value - mean)
