"""What an engine counts, as Prometheus metrics made at the moment of the scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, chain
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from typing_extensions import override

from kvway_worker.cache.histogram import HistogramReading
from kvway_worker.load import AttentionReading, EngineLoad

_MODEL: Final = "model_name"
_POOLS: Final = {"1x": 1.0, "2x": 2.0, "4x": 4.0}
"""Sizes for which a hit rate is expected, in pools."""


class EngineCollector(Collector):
    """Turns one reading of the engine into metrics.

    Args:
        read: Gives the engine's numbers at this moment.
        model_name: The served model's name, a label of every series.
        block_size: Tokens per block.
    """

    def __init__(
        self, read: Callable[[], EngineLoad], *, model_name: str, block_size: int
    ) -> None:
        self._read = read
        self._model_name = model_name
        self._block_size = block_size

    def describe(self) -> list[Metric]:
        """Return nothing: the registry need not read the engine to learn the names."""
        return []

    @override
    def collect(self) -> Iterator[Metric]:
        """Read the engine once and yield what it says."""
        load = self._read()
        yield from chain(
            self._gauges(load), self._counters(load), self._histograms(load), self._labelled(load)
        )

    def _gauges(self, load: EngineLoad) -> Iterator[Metric]:
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in the batch.", load.num_running),
            ("vllm:num_requests_waiting", "Requests waiting for a place.", load.num_waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Share of the KV blocks that requests hold, 0 to 1; cached blocks count as free.",
                1 - load.num_free_blocks / load.num_blocks,
            ),
            (
                "kvway_worker_pinned_blocks",
                "KV blocks that a pin keeps; they are live or cached.",
                load.num_pinned_blocks,
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=(_MODEL,))
            gauge.add_metric((self._model_name,), value)
            yield gauge

    def _counters(self, load: EngineLoad) -> Iterator[Metric]:
        for name, text, value in (
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache; hits and misses together.",
                load.cache.queries,
            ),
            (
                "vllm:prefix_cache_hits",
                "Prompt tokens whose KV was in the prefix cache.",
                load.cache.hits,
            ),
            (
                "vllm:prompt_tokens_cached",
                "The same, under the name that dashboards put beside vllm:prompt_tokens.",
                load.cache.hits,
            ),
            ("vllm:generation_tokens", "Tokens generated.", load.generated_tokens),
            ("vllm:num_preemptions", "Times a request lost its blocks.", load.preemptions),
            (
                "vllm:spec_decode_num_drafts",
                "Times guesses for a request were checked.",
                load.num_draft_rows,
            ),
            ("vllm:spec_decode_num_draft_tokens", "Tokens guessed.", load.num_drafts),
            (
                "vllm:spec_decode_num_accepted_tokens",
                "Guessed tokens that the model agreed with.",
                load.num_accepted,
            ),
            ("kvway_worker_steps", "Steps the engine computed.", load.num_steps),
            ("kvway_worker_failed_steps", "Steps that raised.", load.num_failed_steps),
            ("kvway_worker_step_seconds", "Time of all computed steps.", load.step_time_s),
        ):
            counter = CounterMetricFamily(name, text, labels=(_MODEL,))
            counter.add_metric((self._model_name,), value)
            yield counter

    def _histograms(self, load: EngineLoad) -> Iterator[Metric]:
        spans, cache = load.spans, load.cache
        for name, text, reading in (
            (
                "vllm:request_queue_time_seconds",
                "Time that a request waited for its first place.",
                spans.queue_s,
            ),
            (
                "vllm:request_prefill_time_seconds",
                "Time from a request's first place to its first token.",
                spans.prefill_s,
            ),
            (
                "vllm:request_decode_time_seconds",
                "Time from a request's first token to its end.",
                spans.decode_s,
            ),
            (
                "vllm:request_prompt_tokens",
                "Prompt tokens of requests that were answered or aborted.",
                spans.prompt_tokens,
            ),
            (
                "vllm:request_generation_tokens",
                "Generated tokens of requests that were answered or aborted.",
                spans.generation_tokens,
            ),
            ("vllm:iteration_tokens_total", "Tokens computed per step.", spans.step_tokens),
            (
                "vllm:kv_block_lifetime_seconds",
                "Time from storing a block's content to evicting it.",
                cache.lifetime_s,
            ),
            (
                "vllm:kv_block_idle_before_evict_seconds",
                "Time from the last use of a block's content to evicting it.",
                cache.idle_s,
            ),
            (
                "vllm:kv_block_reuse_gap_seconds",
                "Time between two uses of a block's content.",
                cache.reuse_gap_s,
            ),
            (
                "kvway_worker_reuse_distance",
                "Blocks used between two uses of one, in pools: up to 2 hits with twice the pool.",
                cache.reuse.distances,
            ),
        ):
            histogram = HistogramMetricFamily(name, text, labels=(_MODEL,))
            histogram.add_metric((self._model_name,), _buckets(reading), reading.total)
            yield histogram

    def _labelled(self, load: EngineLoad) -> Iterator[Metric]:
        cached = load.num_cached_blocks
        blocks = {
            "live": load.num_blocks - load.num_free_blocks,
            "cached": cached,
            "free": load.num_free_blocks - cached,
        }
        yield self._by_label(
            GaugeMetricFamily(
                "kvway_worker_blocks",
                "KV blocks: live (a request holds them), cached (can be hit, or reused), free.",
                labels=(_MODEL, "state"),
            ),
            blocks.items(),
        )
        yield self._by_label(
            CounterMetricFamily(
                "kvway_worker_prefix_cache_misses",
                "Prompt tokens that were computed, by reason: cold (never seen), evicted (seen and"
                " given up), too_short (the prompt fills no block), salted (seen under another"
                " cache_salt), bypassed (the cache was not read), partial (behind the last full"
                " block, or the one token that is always computed).",
                labels=(_MODEL, "reason"),
            ),
            load.cache.misses.items(),
        )
        yield self._by_label(
            CounterMetricFamily(
                "kvway_worker_evictions",
                "Cached blocks given up for new content, by tier: probation, protected (were hit"
                " again and again), pinned.",
                labels=(_MODEL, "tier"),
            ),
            load.evictions.items(),
        )
        yield self._by_label(
            GaugeMetricFamily(
                "kvway_worker_expected_hit_rate",
                "Share of the blocks looked up that a pool so many times as large as this one"
                " would have had, if it gave up the least recently used first. 2x well above 1x:"
                " more memory pays. Since the start.",
                labels=(_MODEL, "pool"),
            ),
            [(name, load.cache.reuse.hit_rate_at(factor)) for name, factor in _POOLS.items()],
        )
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The KV cache as configured; always 1.",
            labels=(_MODEL, "block_size", "num_gpu_blocks"),
        )
        config.add_metric((self._model_name, str(self._block_size), str(load.num_blocks)), 1)
        yield config
        if load.attention is not None:
            yield from self._attention(load.attention)

    def _attention(self, attention: AttentionReading) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "kvway_attention_info",
            "What attends, why, and whether shared prefixes are read once; always 1.",
            labels=(_MODEL, "implementation", "reason", "cascade"),
        )
        labels = (attention.implementation, attention.reason, attention.cascade)
        info.add_metric((self._model_name, *labels), 1)
        yield info
        for name, text, value in (
            (
                "kvway_cascade_steps",
                "Steps in which a prefix that requests share was read once for all of them.",
                attention.num_shared_steps,
            ),
            (
                "kvway_cascade_passes",
                "Shared runs of blocks that were read once in a step.",
                attention.num_passes,
            ),
            (
                "kvway_cascade_tokens_read_once",
                "Tokens of these runs, once per step.",
                attention.num_tokens_once,
            ),
            (
                "kvway_cascade_tokens_saved",
                "Tokens of these runs that the other members did not read again.",
                attention.num_tokens_saved,
            ),
        ):
            counter = CounterMetricFamily(name, text, labels=(_MODEL,))
            counter.add_metric((self._model_name,), value)
            yield counter
        yield self._by_label(
            GaugeMetricFamily(
                "kvway_cascade_cost_seconds",
                "What attention costs on this machine in one layer, by term: paged_key (a key that"
                " one request reads), run (a shared run), run_key (a key of it), run_pair (a key"
                " of it for each member), merge (a member of it). None where nothing is shared.",
                labels=(_MODEL, "term"),
            ),
            attention.costs_s.items(),
        )

    def _by_label(
        self, family: GaugeMetricFamily | CounterMetricFamily, values: Iterable[tuple[str, float]]
    ) -> Metric:
        for label, value in values:
            family.add_metric((self._model_name, label), value)
        return family


def _buckets(reading: HistogramReading) -> list[tuple[str, float]]:
    """Return (upper bound, observations up to it) pairs, as Prometheus wants them."""
    bounds = [
        floatToGoString(bound)  # type: ignore[no-untyped-call]
        for bound in (*reading.bounds, float("inf"))
    ]
    return list(zip(bounds, accumulate(reading.counts), strict=True))
