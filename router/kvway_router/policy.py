"""The choice of a replica: pure, in seconds, with every term of every candidate left visible.

    cost = queued + step + (1 + price) * own + kv                          choose the least

    queued  Q                          prefill work sent to the replica and not yet done
    step    (n + ceil(u / chunk)) tau  each prefill before ours, and each chunk of ours, shares a
                                       step with what the replica is decoding
    own     W = u / R (1 + (c + u/2) / A)   our own uncached tokens u behind c cached ones
    price   lambda = mean(Q) / EMA(W)  what saved work is worth: the more all queue, the more
    kv      km max(0, P / C - theta)   memory of the replica that is or will be taken

queued + step + own is the predicted time to first token. There is no switch for the fleet: each
request weighs each candidate, so a hot prefix comes to a second replica exactly when waiting for
the first costs more than computing it again.

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

import math
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec
import xxhash

from kvway_core.errors import NoReplicaAvailable
from kvway_router.policies.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class PolicyParams:
    """The constants of the cost.

    Attributes:
        chunk_tokens: Prompt tokens that a replica prefills in one step.
        attention_tokens: A: context length at which attention doubles the cost of a token.
        kv_weight_s: km: seconds that a replica costs more per whole cache over the threshold.
        kv_threshold: theta: share of the KV blocks that may be taken at no cost.
        default_prefill_tokens_per_s: R while no replica's rate is known.
        spread_share: A match that saves at most this share of the own work is no reason to follow
            it: otherwise all prompts would go where the first one went, as many templates begin
            with the same few words.
        tie_share: Candidates that cost at most this share of the best one's own work more than it,
            and hold as much of the prompt, are tied with it.
    """

    chunk_tokens: int = 2048
    attention_tokens: float = 60_000.0
    kv_weight_s: float = 3.0
    kv_threshold: float = 0.8
    default_prefill_tokens_per_s: float = 2_000.0
    tie_share: float = 0.1
    spread_share: float = 0.05


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the choice needs to know of a request.

    Attributes:
        num_tokens: Tokens of the prompt.
        block_size: Tokens per block.
        prefix_key: Names the beginning of the prompt, such as the hash of its first block: several
            routers put equal beginnings at the same one of equal replicas.
        num_output_tokens: Output to reckon with, for the memory term.
    """

    num_tokens: int
    block_size: int
    prefix_key: bytes = b""
    num_output_tokens: int = 0


class ReplicaLoad(msgspec.Struct, frozen=True, gc=False):
    """How busy one usable replica is, as the router knows it now.

    A struct, as it is made for each replica and request: ten times faster than a dataclass.

    Attributes:
        replica_id: Its id.
        queued_prefill_s: Q: prefill work sent to it and not yet done, seconds.
        queued_tokens: The same work as plain prompt tokens, without the term for attention.
        num_prefills: n: prefills that are queued or running there.
        decode_step_s: tau: how long one of its decode steps takes now, seconds.
        prefill_tokens_per_s: R; None while unknown: then it borrows the fleet's.
        blocks_pinned: P: KV blocks in use or wanted by its queue.
        blocks_total: C; None when unknown: then memory does not count.
        in_flight: Requests sent to it and not finished.
        blocks_held: Blocks that the index lists for it.
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


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """What sending the request to one replica would cost; all times in seconds.

    Attributes:
        replica_id: The replica.
        matched_blocks: Leading blocks of the prompt that it holds.
        uncached_tokens: Prompt tokens it would have to compute, at least one.
        cached_tokens: Prompt tokens before them that it holds.
        own_blocks: KV blocks it would have to find for prompt and expected output.
        queued_s: Work before ours.
        step_s: Steps shared with decodes.
        own_s: Our own work.
        price_s: What our own work costs beyond its time because all queue: lambda * own_s.
        kv_s: Memory that is getting scarce.
        in_flight: Requests there now.
        blocks_held: Blocks listed for it now.
    """

    replica_id: str
    matched_blocks: int
    uncached_tokens: int
    cached_tokens: int
    own_blocks: int
    queued_s: float
    step_s: float
    own_s: float
    price_s: float
    kv_s: float
    in_flight: int
    blocks_held: int

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token, seconds."""
        return self.queued_s + self.step_s + self.own_s

    @property
    def cost_s(self) -> float:
        """What is compared, seconds."""
        return self.ttft_s + self.price_s + self.kv_s


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice and all that it was made from.

    Attributes:
        replica_id: The chosen replica.
        reason: Why, as one word.
        detail: Why, as a sentence with the numbers.
        candidates: All candidates, the cheapest first; the chosen one is `chosen`.
        price_of_work: lambda, without unit.
    """

    replica_id: str
    reason: Reason
    detail: str
    candidates: tuple[Candidate, ...]
    price_of_work: float

    @property
    def chosen(self) -> Candidate:
        """The candidate that was chosen."""
        return next(c for c in self.candidates if c.replica_id == self.replica_id)


def choose(
    prompt: Prompt,
    matches: Mapping[str, int],
    loads: Sequence[ReplicaLoad],
    *,
    params: PolicyParams,
    mean_own_s: float | None = None,
    retry: bool = False,
) -> Decision:
    """Chooses the candidate of least cost.

    Candidates that cost about the same and hold as much of the prompt are tied: the one with fewer
    blocks held and requests running wins, then a rendezvous hash of the prefix.

    Args:
        prompt: The request.
        matches: Leading blocks held per replica; those not named hold none.
        loads: The candidates: usable replicas, without those already tried.
        params: Constants of the cost.
        mean_own_s: Running mean of the own work of chosen candidates (`running_mean`), kept by the
            caller; None before the first choice.
        retry: True when an earlier attempt at another replica failed.

    Raises:
        NoReplicaAvailable: There is no candidate.
    """
    candidates, price = weigh(prompt, matches, loads, params=params, mean_own_s=mean_own_s)
    best = candidates[0]
    tied = [
        c
        for c in candidates
        if c.cost_s - best.cost_s <= _tie_limit(c, best, params=params) * best.own_s
    ]
    chosen = min(tied, key=lambda c: (_placement(c), -rendezvous(prompt.prefix_key, c.replica_id)))
    reason = _reason(chosen, candidates, retry=retry)
    return Decision(
        replica_id=chosen.replica_id,
        reason=reason,
        detail=_detail(reason, chosen, candidates=candidates, prompt=prompt),
        candidates=candidates,
        price_of_work=price,
    )


def weigh(
    prompt: Prompt,
    matches: Mapping[str, int],
    loads: Sequence[ReplicaLoad],
    *,
    params: PolicyParams,
    mean_own_s: float | None = None,
) -> tuple[tuple[Candidate, ...], float]:
    """Weighs every candidate without choosing one.

    The arguments are those of `choose`.

    Returns:
        All candidates, the cheapest first, and the price of work.

    Raises:
        NoReplicaAvailable: There is no candidate.
    """
    if not loads:
        msg = "No replica can take the request now; try again in a few seconds."
        raise NoReplicaAvailable(msg)
    price = _price_of_work(loads, mean_own_s)
    fleet_rate = _fleet_rate(loads, params)
    candidates = sorted(
        (
            _candidate(
                prompt,
                load,
                matched_blocks=matches.get(load.replica_id, 0),
                rate=load.prefill_tokens_per_s or fleet_rate,
                price=price,
                params=params,
            )
            for load in loads
        ),
        key=lambda c: (c.cost_s, c.replica_id),
    )
    return tuple(candidates), price


def own_work_tokens(num_uncached: int, num_cached: int, *, attention_tokens: float) -> float:
    """Measures prefill work in tokens at an empty context: u (1 + (c + u/2) / A).

    Args:
        num_uncached: u: tokens to compute.
        num_cached: c: tokens before them.
        attention_tokens: A: see `PolicyParams`.
    """
    return num_uncached * (1.0 + (num_cached + num_uncached / 2.0) / attention_tokens)


def rendezvous(prefix_key: bytes, replica_id: str) -> int:
    """Returns the weight of a replica for a prefix: who leaves or comes moves only its own."""
    return xxhash.xxh3_64_intdigest(prefix_key + b"\0" + replica_id.encode())


def running_mean(mean: float | None, value: float, *, weight: float = 0.05) -> float:
    """Moves an exponential running mean towards a new value; the first value is the mean."""
    return value if mean is None else mean + weight * (value - mean)


def _price_of_work(loads: Sequence[ReplicaLoad], mean_own_s: float | None) -> float:
    """lambda; 0 while nothing queues or nothing was chosen yet."""
    if not mean_own_s:
        return 0.0
    return fmean(load.queued_prefill_s for load in loads) / mean_own_s


def _fleet_rate(loads: Sequence[ReplicaLoad], params: PolicyParams) -> float:
    """The rate that a replica of unknown rate borrows: the mean of the known ones."""
    known = [load.prefill_tokens_per_s for load in loads if load.prefill_tokens_per_s]
    return fmean(known) if known else params.default_prefill_tokens_per_s


def _candidate(
    prompt: Prompt,
    load: ReplicaLoad,
    *,
    matched_blocks: int,
    rate: float,
    price: float,
    params: PolicyParams,
) -> Candidate:
    # A replica that holds the whole prompt still computes its last token.
    num_uncached = max(1, prompt.num_tokens - matched_blocks * prompt.block_size)
    num_cached = max(0, prompt.num_tokens - num_uncached)
    work = own_work_tokens(num_uncached, num_cached, attention_tokens=params.attention_tokens)
    own_s = work / rate
    num_steps = load.num_prefills + math.ceil(num_uncached / params.chunk_tokens)
    own_blocks = math.ceil((num_uncached + prompt.num_output_tokens) / prompt.block_size)
    kv_s = 0.0
    if load.blocks_total:
        taken = (load.blocks_pinned + own_blocks) / load.blocks_total
        kv_s = params.kv_weight_s * max(0.0, taken - params.kv_threshold)
    return Candidate(
        replica_id=load.replica_id,
        matched_blocks=matched_blocks,
        uncached_tokens=num_uncached,
        cached_tokens=num_cached,
        own_blocks=own_blocks,
        queued_s=load.queued_prefill_s,
        step_s=num_steps * load.decode_step_s,
        own_s=own_s,
        price_s=price * own_s,
        kv_s=kv_s,
        in_flight=load.in_flight,
        blocks_held=load.blocks_held,
    )


def _tie_limit(candidate: Candidate, best: Candidate, *, params: PolicyParams) -> float:
    """How much dearer than the best a candidate may be, as a share of the best one's own work."""
    if candidate.matched_blocks >= best.matched_blocks:
        return params.tie_share
    return params.spread_share


def _placement(candidate: Candidate) -> int:
    """Orders tied candidates: a running request weighs as much as 50 blocks held."""
    return candidate.blocks_held + 50 * candidate.in_flight


def _reason(chosen: Candidate, candidates: Sequence[Candidate], *, retry: bool) -> Reason:
    if retry:
        return Reason.RETRY
    if len(candidates) == 1:
        return Reason.ONLY_REPLICA
    longest = max(candidates, key=lambda c: c.matched_blocks)
    if chosen.matched_blocks == longest.matched_blocks > 0:
        return Reason.PREFIX
    return Reason.SPILL if longest.cost_s > chosen.cost_s else Reason.LEAST_LOADED


def _detail(
    reason: Reason, chosen: Candidate, *, candidates: Sequence[Candidate], prompt: Prompt
) -> str:
    holds = (
        f"{chosen.replica_id} holds {chosen.cached_tokens} of {prompt.num_tokens} prompt tokens"
    )
    predicted = f"first token predicted in {_time(chosen.ttft_s)}"
    others = [c for c in candidates if c is not chosen]
    if reason is Reason.ONLY_REPLICA or not others:
        return f"{holds} and is the only replica to choose from; {predicted}."
    if reason is Reason.SPILL:
        longest = max(others, key=lambda c: (c.matched_blocks, -c.cost_s))
        return (
            f"{holds}; {longest.replica_id} holds {longest.cached_tokens}, "
            f"but with {_time(longest.queued_s)} of work before it would cost "
            f"{_time(longest.cost_s)} against {_time(chosen.cost_s)}; {predicted}."
        )
    runner_up = f"next best {others[0].replica_id} in {_time(others[0].ttft_s)}"
    if reason is Reason.RETRY:
        return f"An earlier attempt at another replica failed; {holds}; {predicted}, {runner_up}."
    if reason is Reason.LEAST_LOADED:
        longest = max(candidates, key=lambda c: c.matched_blocks)
        nobody = (
            f"{longest.replica_id} holds {longest.cached_tokens} of {prompt.num_tokens} prompt "
            "tokens, too few to matter"
            if longest.matched_blocks
            else "No replica holds the beginning of this prompt"
        )
        return (
            f"{nobody}; {chosen.replica_id} has "
            f"{_time(chosen.queued_s)} of work before it; {predicted}, {runner_up}."
        )
    return f"{holds}; {predicted}, {runner_up}."


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{seconds * 1e3:.1f} ms"
