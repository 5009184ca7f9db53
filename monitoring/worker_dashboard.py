"""A worker: its requests, its prefix cache, its engine and its attention."""

from __future__ import annotations

from typing import Final

from monitoring.panels import Chart, Dashboard, Query, Row
from monitoring.promql import picked, quantile, rate, ratio, total

W: Final = "kvway_worker_"
_JOB: Final = 'job="kvway-worker"'


def _quantiles(histogram: str, *shares: float) -> list[Query]:
    return [Query(quantile(share, histogram), f"p{share * 100:g}") for share in shares]


REQUESTS: Final = Row(
    "Requests",
    [
        Chart(
            "Ended, by why",
            "Per second",
            [Query(rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}")],
            "reqps",
            stacked=True,
        ),
        Chart(
            "Running and waiting",
            "In the batch, and without a place",
            [
                Query(total("vllm:num_requests_running"), "running"),
                Query(total("vllm:num_requests_waiting"), "waiting"),
            ],
        ),
        Chart(
            "Tokens",
            "Per second",
            [
                Query(rate("vllm:prompt_tokens_total"), "prompts"),
                Query(rate("vllm:prompt_tokens_cached_total"), "of them cached"),
                Query(rate("vllm:generation_tokens_total"), "generated"),
            ],
        ),
        Chart(
            "Time to first token",
            "From arrival, at the worker",
            _quantiles("vllm:time_to_first_token_seconds", 0.5, 0.9, 0.99),
            "s",
        ),
        Chart(
            "Inter-token latency",
            "Gaps between tokens of a request",
            _quantiles("vllm:inter_token_latency_seconds", 0.5, 0.9, 0.99),
            "s",
        ),
        Chart(
            "Where the time goes, p90",
            "To the first place in the batch, from there to the first token, to the end; in all",
            [
                Query(quantile(0.9, f"vllm:{name}_seconds"), legend)
                for name, legend in (
                    ("request_queue_time", "queue"),
                    ("request_prefill_time", "prefill"),
                    ("request_decode_time", "decode"),
                    ("e2e_request_latency", "in all"),
                )
            ],
            "s",
        ),
        Chart(
            "Refused and broken",
            "Error answers by status, streams that ended with an error by code",
            [
                Query(rate(f"{W}http_errors_total", "status"), "{{status}}"),
                Query(rate(f"{W}broken_streams_total", "code"), "stream: {{code}}"),
            ],
            "reqps",
        ),
        Chart(
            "Lengths of prompts",
            "Tokens",
            _quantiles("vllm:request_prompt_tokens", 0.5, 0.9, 0.99),
        ),
        Chart(
            "Lengths of answers",
            "Tokens",
            _quantiles("vllm:request_generation_tokens", 0.5, 0.9, 0.99),
        ),
    ],
)

CACHE: Final = Row(
    "Prefix cache",
    [
        Chart(
            "Hit rate",
            "Prompt tokens that were cached, by those looked up; and what a pool so many times as "
            "large would have had since the start",
            [
                Query(
                    ratio("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"), "now"
                ),
                Query(
                    f"avg by (pool) ({picked(f'{W}expected_hit_rate')})",
                    "{{pool}}, since the start",
                ),
            ],
            "percentunit",
        ),
        Chart(
            "Misses, by why",
            "Prompt tokens per second that were computed",
            [Query(rate(f"{W}prefix_cache_misses_total", "reason"), "{{reason}}")],
            stacked=True,
        ),
        Chart(
            "Blocks",
            "Live: a request holds them. Cached: can be hit, or reused. Pinned ones are of both",
            [
                Query(total(f"{W}blocks", "state"), "{{state}}"),
            ],
            stacked=True,
        ),
        Chart(
            "Pinned blocks",
            "Kept by pins",
            [Query(total(f"{W}pinned_blocks"), "pinned")],
        ),
        Chart(
            "Evicted, by tier",
            "Cached blocks per second that were given up; protected ones had been hit again and "
            "again",
            [Query(rate(f"{W}evictions_total", "tier"), "{{tier}}")],
            stacked=True,
        ),
        Chart(
            "Ages of blocks, median",
            "Life: stored to evicted. Idle: last used to evicted. Gap: between two uses. Gaps "
            "longer than lives are misses",
            [
                Query(quantile(0.5, f"vllm:kv_block_{name}_seconds"), legend)
                for name, legend in (
                    ("lifetime", "life"),
                    ("idle_before_evict", "idle"),
                    ("reuse_gap", "gap"),
                )
            ],
            "s",
        ),
    ],
)

ENGINE: Final = Row(
    "Engine",
    [
        Chart(
            "Busy",
            "Share of the time in which a step is computed",
            [Query(f"rate({picked(f'{W}step_seconds_total')}[$__rate_interval])", "{{instance}}")],
            "percentunit",
        ),
        Chart(
            "Tokens per step",
            "Of prompts and answers together",
            _quantiles("vllm:iteration_tokens_total", 0.5, 0.9),
        ),
        Chart(
            "Preempted and failed",
            "Requests that lost their blocks, and steps that raised, per second",
            [
                Query(rate("vllm:num_preemptions_total"), "preempted"),
                Query(rate(f"{W}failed_steps_total"), "failed steps"),
            ],
        ),
        Chart(
            "Guessed tokens that were right",
            "Accepted per time that guesses were checked",
            [
                Query(
                    ratio(
                        "vllm:spec_decode_num_accepted_tokens_total",
                        "vllm:spec_decode_num_drafts_total",
                    ),
                    "accepted",
                )
            ],
        ),
        Chart(
            "Cascade attention",
            "Tokens per second of shared prefixes that were read once, and that were not read "
            "again",
            [
                Query(rate("kvway_cascade_tokens_read_once_total"), "read once"),
                Query(rate("kvway_cascade_tokens_saved_total"), "saved"),
            ],
        ),
        Chart(
            "CPU and memory",
            "Cores in use, and memory of the process",
            [
                Query(rate("process_cpu_seconds_total", "instance", _JOB), "cores {{instance}}"),
                Query(
                    f"{picked('process_resident_memory_bytes', _JOB)} / 2 ^ 30", "GiB {{instance}}"
                ),
            ],
        ),
    ],
)

WORKER: Final = Dashboard(
    uid="kvway-worker",
    title="kvway worker",
    job="kvway-worker",
    rows=(REQUESTS, CACHE, ENGINE),
)
