"""Requests, reports and loads for the tests of the ledger."""

from __future__ import annotations

from typing import Any

from kvway_core.answers import BlockCounts
from kvway_core.api import LoadReport
from kvway_router.ledger import Ledger
from kvway_router.policy import Candidate, PolicyParams, ReplicaLoad
from kvway_router.telemetry import Telemetry

# Without the term for long contexts, tokens of work are tokens.
PARAMS = PolicyParams(attention_tokens=1e18, default_prefill_tokens_per_s=100.0)
STALE_S = 5.0

IDLE = ReplicaLoad(
    replica_id="a:1",
    queued_prefill_s=0.0,
    queued_tokens=0,
    num_prefills=0,
    decode_step_s=0.0,
    prefill_tokens_per_s=None,
    blocks_pinned=0,
    blocks_total=None,
    in_flight=0,
    blocks_held=7,
)


def candidate(name: str = "a", *, tokens: int = 500, cached: int = 0) -> Candidate:
    return Candidate(
        replica_id=f"{name}:1",
        matched_blocks=cached // 16,
        slow_blocks=0,
        uncached_tokens=tokens,
        cached_tokens=cached,
        own_blocks=-(-tokens // 16),
        queued_s=0.0,
        step_s=0.0,
        own_s=tokens / 100.0,
        work_s=tokens / 100.0,
        price_s=0.0,
        kv_s=0.0,
        reload_s=0.0,
        in_flight=0,
        blocks_held=0,
        ttft_s=tokens / 100.0,
        cost_s=tokens / 100.0,
    )


def report(**changes: Any) -> LoadReport:
    fields: dict[str, Any] = {
        "boot_id": "boot-1",
        "model": "m",
        "block_size": 16,
        "hash_scheme": "kvway-1",
        "state": "ready",
        "num_running": 0,
        "num_waiting": 0,
        "waiting_uncached_tokens": 0,
        "blocks": BlockCounts(free=1000, cached=0, total=1000),
        "prefill_tokens_per_s": 0.0,
        "decode_step_s": 0.0,
        "max_model_len": 8192,
        "max_num_seqs": 8,
    }
    return LoadReport(**(fields | changes))


def hear(ledger: Ledger, replica_id: str, report: LoadReport) -> None:
    """A report that was asked for, given and received in one moment."""
    ledger.report(replica_id, Telemetry.of(report), asked_s=ledger.now())


def load(ledger: Ledger, name: str = "a") -> ReplicaLoad:
    (found,) = ledger.loads([(f"{name}:1", 7)])
    return found
