"""What was decided about each request, why, and what really happened: a bounded memory of both.

A record is a value. Each step of a request puts a newer one in the place of the older, so a reader
always sees a whole record, of a request that runs as well as of one that has ended.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Final

import msgspec

from kvway_router.policy import Candidate, Decision

MAX_CANDIDATES: Final = 32
"""Candidates kept per record: the chosen one and the cheapest others."""


class CandidateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as it was weighed. Times in seconds; the cost is the sum of seven terms.

    These are queued, step, own, reload, price, kv and failing.

    Attributes:
        replica_id: The replica.
        matched_blocks: Leading blocks of the prompt it held, by the router's index.
        slow_blocks: How many of them were not on its device.
        uncached_tokens: Prompt tokens it would have to compute.
        queued_s: Prefill work before this request.
        step_s: Steps shared with decodes.
        own_s: This request's own prefill, at least a step.
        work_s: The work alone.
        reload_s: Bringing blocks back from slower tiers.
        price_s: What own work costs beyond its time because all replicas queue.
        kv_s: KV memory that is getting scarce.
        failing_s: What failures there cost of late.
        predicted_ttft_s: queued + step + own + reload.
        cost_s: What was compared.
        in_flight: Requests there at that moment.
        blocks_held: Blocks listed for it at that moment.
    """

    replica_id: str
    matched_blocks: int
    slow_blocks: int
    uncached_tokens: int
    queued_s: float
    step_s: float
    own_s: float
    work_s: float
    reload_s: float
    price_s: float
    kv_s: float
    failing_s: float
    predicted_ttft_s: float
    cost_s: float
    in_flight: int
    blocks_held: int

    @classmethod
    def of(cls, candidate: Candidate) -> CandidateRecord:
        """Returns the record of a candidate."""
        return cls(
            replica_id=candidate.replica_id,
            matched_blocks=candidate.matched_blocks,
            slow_blocks=candidate.slow_blocks,
            uncached_tokens=candidate.uncached_tokens,
            queued_s=candidate.queued_s,
            step_s=candidate.step_s,
            own_s=candidate.own_s,
            work_s=candidate.work_s,
            reload_s=candidate.reload_s,
            price_s=candidate.price_s,
            kv_s=candidate.kv_s,
            failing_s=candidate.failing_s,
            predicted_ttft_s=candidate.ttft_s,
            cost_s=candidate.cost_s,
            in_flight=candidate.in_flight,
            blocks_held=candidate.blocks_held,
        )


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One try at one replica; `error` is the code of what went wrong, None while nothing did."""

    replica_id: str
    reason: str
    error: str | None = None


class UnusableRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that could not take the request, and why not, for a person."""

    replica_id: str
    why: str


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request: the last decision about it, all attempts, and its end. It holds no prompt text.

    Attributes:
        id: The request's id, also in ``x-kvway-request-id``.
        time: When it arrived, Unix seconds.
        route: Path it came in on.
        model: Served model name.
        stream: Whether an event stream was asked for.
        num_prompts: Prompts in the request.
        prompt_tokens: Tokens of all its prompts.
        prompt_blocks: Full blocks of its first prompt, as far as it was read.
        prompt_tokens_exact: Whether the tokens were counted; an estimate until all is read.
        block_size: Tokens per block.
        replica_id: The chosen replica, of the last attempt; empty if none was.
        reason: Why, as one word: of the policy, or the code of the error if none was chosen.
        detail: Why, as a sentence with the numbers.
        price_of_work: How much more than its time own work cost, because all replicas queued.
        mean_work_s: Running mean of own work that this was in relation to; None before the first.
        busy_share: Share of the replicas that had prefill work of late, which bounds it.
        matched_tokens: Prompt tokens that the chosen replica held, by the router's index.
        reachable_tokens: The same of the candidate that held the most: what routing could reach.
        sticky: Whether the client gave a key to keep requests together.
        predicted_ttft_s: Predicted time to first token at the chosen replica.
        num_candidates: Replicas that were weighed.
        candidates: The cheapest of them, `MAX_CANDIDATES` at most, the chosen one among them.
        unusable: If none was chosen: replicas that could not take it, as many at most.
        attempts: Every try, in order.
        status: HTTP status the client got; None before its answer begins.
        finish: How it ended: "done", "failed", "client_gone" or "shut_down"; "running" until then.
        end: How and where it ended, in the two letters of `ends.py`; empty until then.
        error: Code of the error that ended it, if one did.
        cached_tokens: Prompt tokens that the replica says it had cached; None if it does not say.
        ttft_s: From arrival to the first byte of the answer, at the router; there once it begins.
        duration_s: From arrival to the end.
    """

    id: str
    time: float
    route: str
    model: str
    stream: bool
    num_prompts: int
    prompt_tokens: int
    prompt_blocks: int
    prompt_tokens_exact: bool
    block_size: int
    replica_id: str
    reason: str
    price_of_work: float
    matched_tokens: int
    reachable_tokens: int
    sticky: bool
    predicted_ttft_s: float
    num_candidates: int
    attempts: tuple[AttemptRecord, ...]
    detail: str = ""
    candidates: tuple[CandidateRecord, ...] = ()
    unusable: tuple[UnusableRecord, ...] = ()
    mean_work_s: float | None = None
    busy_share: float = 0.0
    status: int | None = None
    finish: str = "running"
    end: str = ""
    error: str | None = None
    cached_tokens: int | None = None
    ttft_s: float | None = None
    duration_s: float | None = None


class DecisionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A record without its candidates and attempts, for lists."""

    id: str
    time: float
    route: str
    model: str
    stream: bool
    prompt_tokens: int
    replica_id: str
    reason: str
    matched_tokens: int
    predicted_ttft_s: float
    status: int | None
    finish: str
    cached_tokens: int | None
    ttft_s: float | None
    duration_s: float | None


_SUMMARY_FIELDS: Final = DecisionSummary.__struct_fields__


def summarize(record: DecisionRecord) -> DecisionSummary:
    """Returns what a list shows of a record."""
    return DecisionSummary(**{name: getattr(record, name) for name in _SUMMARY_FIELDS})


def shown_candidates(decision: Decision) -> tuple[CandidateRecord, ...]:
    """Returns the cheapest candidates, the chosen one always among them, bounded in number."""
    shown = decision.candidates[:MAX_CANDIDATES]
    if decision.chosen not in shown:
        shown = (*shown[:-1], decision.chosen)
    return tuple(CandidateRecord.of(candidate) for candidate in shown)


class DecisionStore:
    """The last records, by id and by age. What only a reader wants of a record is made for him.

    Invariants:
        1. It never holds more than `max_records`.
        2. Putting a record that is already there replaces it and keeps its place.
        3. A record that has been pushed out does not come back: its request's end is not lost in
           metrics and log, only here.
        4. What is kept of a request that has ended is of `MAX_CANDIDATES` candidates at most.
    """

    def __init__(self, *, max_records: int) -> None:
        """Makes an empty store; with `max_records` 0 it stays empty."""
        self._max_records = max_records
        self._records: OrderedDict[str, tuple[DecisionRecord, Decision | None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: DecisionRecord, decision: Decision | None) -> None:
        """Adds the record of a new request, and forgets the oldest one when it is full.

        Args:
            record: The record; its `detail` and `candidates` are left out.
            decision: Where these come from; None if no replica was chosen: nothing is left out.
        """
        self._records[record.id] = record, decision
        while len(self._records) > self._max_records:
            self._records.popitem(last=False)

    def update(self, record: DecisionRecord, decision: Decision | None = None) -> None:
        """Puts a newer record of the same request in place, unless it was forgotten meanwhile.

        Args:
            record: As in `add`.
            decision: A newer one, if there is.
        """
        known = self._records.get(record.id)
        if known is None:
            return
        decision = decision or known[1]
        has_ended = record.finish != "running"
        if has_ended and decision is not None and decision.num_candidates > MAX_CANDIDATES:
            record, decision = _whole(record, decision), None
        self._records[record.id] = record, decision

    def get(self, request_id: str) -> DecisionRecord | None:
        """Returns the whole record of a request, None when it was never there or is forgotten."""
        known = self._records.get(request_id)
        return _whole(*known) if known is not None else None

    def latest(self, limit: int) -> list[DecisionRecord]:
        """Returns up to `limit` whole records, the newest first."""
        return [_whole(*known) for known in islice(reversed(self._records.values()), limit)]

    def summaries(self, limit: int) -> list[DecisionSummary]:
        """Returns what a list shows of up to `limit` records, the newest first."""
        newest = islice(reversed(self._records.values()), limit)
        return [summarize(record) for record, _ in newest]


def _whole(record: DecisionRecord, decision: Decision | None) -> DecisionRecord:
    """Returns a record with what was left out, if anything was."""
    if decision is None:
        return record
    return msgspec.structs.replace(
        record, detail=decision.detail, candidates=shown_candidates(decision)
    )
