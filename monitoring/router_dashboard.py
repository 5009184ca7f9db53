"""The router: what it is asked, what it chose and what came of it, and what it takes itself."""

from __future__ import annotations

from typing import Final

from monitoring.panels import Chart, Dashboard, Number, Query, Row
from monitoring.promql import picked, quantile, rate, ratio, total

R: Final = "kvway_router_"
TTFT: Final = f"{R}time_to_first_token_seconds"
_QUANTILES: Final = (0.5, 0.9, 0.99)


def _quantiles(histogram: str) -> list[Query]:
    return [Query(quantile(q, histogram), f"p{q * 100:g}") for q in _QUANTILES]


NOW: Final = Row(
    "Now",
    [
        Number("Requests", "Answered per second", Query(rate(f"{R}requests_total")), "reqps"),
        Number(
            "Hit rate",
            "Cached prompt tokens by prompt tokens, as the replicas report them",
            Query(ratio(f"{R}cached_tokens_total", f"{R}prompt_tokens_total")),
            "percentunit",
        ),
        Number("First token, p90", "At the router, of streams", Query(quantile(0.9, TTFT)), "s"),
        Number(
            "Failed",
            "Share of answers with a status of 500 or more",
            Query(
                f"""{rate(f"{R}requests_total", where='code=~"5.."')} / """
                f"""{rate(f"{R}requests_total")} or vector(0)"""
            ),
            "percentunit",
        ),
        Number(
            "Replicas ready",
            "Those that take requests",
            Query(total(f"{R}replicas", where='state="ready"')),
        ),
        Number(
            "Prefix killers",
            "What varies near the front of prompts and cost something in the last hour",
            Query(total(f"{R}prefix_killers")),
        ),
    ],
)

REQUESTS: Final = Row(
    "Requests",
    [
        Chart(
            "Answers by status",
            "What clients got",
            [Query(rate(f"{R}requests_total", "code"), "{{code}}")],
            "reqps",
            stacked=True,
        ),
        Chart(
            "Time to first token",
            "From arrival to the first byte of a streamed answer, at the router",
            _quantiles(TTFT),
            "s",
        ),
        Chart(
            "Inside the router",
            "Running: all that are not answered. Waiting: for a thread to read the prompt. "
            "Queued: for a replica with room",
            [
                Query(total(f"{R}running_requests"), "running"),
                Query(total(f"{R}waiting_prompts"), "waiting to be read"),
                Query(total(f"{R}queued_requests"), "queued"),
            ],
        ),
        Chart(
            "Refused, and clients that left",
            "Refused for want of room, by why; clients that left before the end, by when",
            [
                Query(rate(f"{R}shed_requests_total", "why"), "refused: {{why}}"),
                Query(rate(f"{R}client_disconnects_total", "phase"), "left: {{phase}}"),
            ],
            "reqps",
        ),
        Chart(
            "Failed attempts",
            "By error; retried, and refused a retry by why",
            [
                Query(rate(f"{R}failed_attempts_total", "error"), "{{error}}"),
                Query(rate(f"{R}retries_total"), "retried"),
                Query(rate(f"{R}retries_refused_total", "why"), "not retried: {{why}}"),
            ],
            "reqps",
        ),
        Chart(
            "Waited for a replica with room",
            "None waits while a replica has room",
            _quantiles(f"{R}queue_wait_seconds"),
            "s",
        ),
    ],
)

CHOICE: Final = Row(
    "Cache and choice",
    [
        Chart(
            "Cache funnel",
            "Prompt tokens per second: all; sent before to whichever replica; held by the replica "
            "that held most; held by the chosen one; cached, as it said. Each step down is "
            "something else: evicted, left for load, wrong in the index",
            [
                Query(rate(f"{R}{name}_tokens_total"), name)
                for name in ("prompt", "ceiling", "reachable", "matched", "cached")
            ],
            "short",
            width=12,
        ),
        Chart(
            "Reasons",
            "Why the replica was chosen",
            [Query(rate(f"{R}decisions_total", "reason"), "{{reason}}")],
            "reqps",
            stacked=True,
            width=12,
        ),
        Chart(
            "Avoidable prefill",
            "Prompt tokens per second that are computed again because something before them "
            "varies: /admin/prefixes says what",
            [Query(rate(f"{R}avoidable_prefill_tokens_total", "kind"), "{{kind}}")],
            stacked=True,
        ),
        Chart(
            "First token, predicted and real",
            "Means of streams",
            [
                Query(
                    ratio(f"{R}predicted_ttft_seconds_total", f"{R}predicted_streams_total"),
                    "predicted",
                ),
                Query(ratio(f"{R}real_ttft_seconds_total", f"{R}predicted_streams_total"), "real"),
                Query(
                    ratio(f"{R}ttft_error_seconds_total", f"{R}predicted_streams_total"),
                    "off by, either way",
                ),
            ],
            "s",
        ),
        Chart(
            "Replicas by state",
            "And those that a breaker holds out",
            [
                Query(total(f"{R}replicas", "state"), "{{state}}"),
                Query(total(f"{R}ejected_replicas"), "held out"),
            ],
        ),
    ],
)

ITSELF: Final = Row(
    "Index and router",
    [
        Chart(
            "KV events",
            "Age: since the index was last known to be true to a replica",
            [Query(picked(f"{R}kv_feed_age_seconds"), "{{replica}}")],
            "s",
        ),
        Chart(
            "Trouble with KV events",
            "Gaps are replayed; lost cost the replica's entries; bad could not be read",
            [
                Query(rate(f"{R}kv_feed_{what}_total"), what)
                for what in ("gaps", "lost", "bad", "outages", "restarts")
            ],
        ),
        Chart(
            "Blocks in the index",
            "Listed for each replica",
            [Query(total(f"{R}index_blocks", "replica"), "{{replica}}")],
        ),
        Chart(
            "Reading prompts",
            "Decode, tokenize and hash, with the wait for a thread",
            _quantiles(f"{R}prompt_read_seconds"),
            "s",
        ),
        Chart(
            "CPU",
            "Cores in use; of them what the search for prefix killers takes",
            [
                Query(rate("process_cpu_seconds_total", where='job="kvway-router"'), "router"),
                Query(rate(f"{R}prefix_cpu_seconds_total"), "prefix killers"),
            ],
        ),
        Chart(
            "Memory",
            "Of the process; of it the pieces of text whose tokens are known",
            [
                Query(
                    picked("process_resident_memory_bytes", 'job="kvway-router"'), "{{instance}}"
                ),
                Query(total(f"{R}tokenizer_cache_bytes"), "tokenizer's cache"),
            ],
            "bytes",
        ),
    ],
)

ROUTER: Final = Dashboard(
    uid="kvway-router",
    title="kvway router",
    job="kvway-router",
    rows=(NOW, REQUESTS, CHOICE, ITSELF),
)
