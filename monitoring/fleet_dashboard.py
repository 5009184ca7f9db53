"""The replicas side by side, as the router sees them and as kvway's workers see themselves."""

from __future__ import annotations

from typing import Final

from monitoring.panels import Chart, Dashboard, Query, Row
from monitoring.promql import picked, rate, ratio, total

R: Final = "kvway_router_"
W: Final = "kvway_worker_"
_EACH: Final = "{{replica}}"
_WORKER: Final = 'job="kvway-worker"'


def _workers(metric: str) -> Query:
    """Returns a gauge of every worker: `$instance` picks routers here."""
    return Query(f"{metric}{{{_WORKER}}}", "{{instance}}")


AS_SEEN: Final = Row(
    "As the router sees them",
    [
        Chart(
            "Prompt tokens sent",
            "Per second",
            [Query(rate(f"{R}prompt_tokens_total", "replica"), _EACH)],
            stacked=True,
        ),
        Chart(
            "Hit rate",
            "Cached by prompt tokens",
            [Query(ratio(f"{R}cached_tokens_total", f"{R}prompt_tokens_total", "replica"), _EACH)],
            "percentunit",
        ),
        Chart(
            "Index against engine",
            "Tokens that the index said the replica holds and that it had not cached, by prompt "
            "tokens: above 0 the index is wrong",
            [
                Query(
                    f"({rate(f'{R}matched_tokens_total', 'replica')} - "
                    f"{rate(f'{R}cached_tokens_total', 'replica')}) / "
                    f"{rate(f'{R}prompt_tokens_total', 'replica')}",
                    _EACH,
                )
            ],
            "percentunit",
        ),
        Chart(
            "Requests in flight",
            "Sent and not ended",
            [Query(total(f"{R}in_flight_requests", "replica"), _EACH)],
            stacked=True,
        ),
        Chart(
            "Prefill queue",
            "Work sent and not done, seconds: what a cold prompt would wait",
            [Query(total(f"{R}queued_prefill_seconds", "replica"), _EACH)],
            "s",
        ),
        Chart(
            "First token, real",
            "Means of streams",
            [
                Query(
                    ratio(f"{R}real_ttft_seconds_total", f"{R}predicted_streams_total", "replica"),
                    _EACH,
                )
            ],
            "s",
        ),
        Chart(
            "First token, error of the prediction",
            "Mean of how far it was off, either way",
            [
                Query(
                    ratio(
                        f"{R}ttft_error_seconds_total", f"{R}predicted_streams_total", "replica"
                    ),
                    _EACH,
                )
            ],
            "s",
        ),
        Chart(
            "Blocks in the index",
            "Listed for each replica",
            [Query(total(f"{R}index_blocks", "replica"), _EACH)],
        ),
        Chart(
            "KV events",
            "1 while they keep the index true",
            [Query(picked(f"{R}kv_feed_up"), _EACH)],
        ),
    ],
)

AS_THEY_ARE: Final = Row(
    "As kvway's workers see themselves",
    [
        Chart("Running", "Requests in the batch", [_workers("vllm:num_requests_running")]),
        Chart("Waiting", "Requests without a place", [_workers("vllm:num_requests_waiting")]),
        Chart(
            "KV in use",
            "Share of the blocks that requests hold; cached ones count as free",
            [_workers("vllm:kv_cache_usage_perc")],
            "percentunit",
        ),
        Chart(
            "Busy",
            "Share of the time in which a step is computed",
            [Query(f"rate({W}step_seconds_total{{{_WORKER}}}[$__rate_interval])", "{{instance}}")],
            "percentunit",
        ),
        Chart(
            "What twice the blocks would add",
            "To the hit rate, since the start of the worker",
            [
                Query(
                    f'{W}expected_hit_rate{{{_WORKER}, pool="2x"}} - ignoring (pool) '
                    f'{W}expected_hit_rate{{{_WORKER}, pool="1x"}}',
                    "{{instance}}",
                )
            ],
            "percentunit",
        ),
        Chart(
            "Tokens generated",
            "Per second",
            [
                Query(
                    f"rate(vllm:generation_tokens_total{{{_WORKER}}}[$__rate_interval])",
                    "{{instance}}",
                )
            ],
            stacked=True,
        ),
    ],
)

FLEET: Final = Dashboard(
    uid="kvway-fleet",
    title="kvway fleet",
    job="kvway-router",
    rows=(AS_SEEN, AS_THEY_ARE),
)
