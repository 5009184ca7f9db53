"""What a worker counts, under vLLM's names where vLLM has one, so that its dashboards work.

Two sources, never both for one number: handlers observe requests as they end; gauges and the
counters of the pool are read from the engine's loop at the moment of the scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

TTFT_BUCKETS_S: Final = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
ITL_BUCKETS_S: Final = (
    *(0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0),
)
E2E_BUCKETS_S: Final = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
)
_MODEL: Final = ("model_name",)


@dataclass(frozen=True, slots=True)
class PoolGauges:
    """The engine's loop and its pool at one moment.

    Attributes:
        num_running: Requests in the batch.
        num_waiting: Requests waiting for a place.
        num_preemptions: Requests that lost their blocks and waited again, since the start.
        block_size: Tokens per block.
        live_blocks: Blocks that a request holds.
        cached_blocks: Blocks no request holds whose content can still be hit.
        free_blocks: Blocks with nothing in them.
        num_evictions: Cached blocks given up for new content, since the start.
    """

    num_running: int
    num_waiting: int
    num_preemptions: int
    block_size: int
    live_blocks: int
    cached_blocks: int
    free_blocks: int
    num_evictions: int

    @property
    def total_blocks(self) -> int:
        """Blocks in the pool."""
        return self.live_blocks + self.cached_blocks + self.free_blocks


class WorkerMetrics:
    """Counts requests; every series carries the served model's name.

    Args:
        registry: Where the metrics register; one worker per registry.
        model_name: The served model's name.
    """

    def __init__(self, registry: CollectorRegistry, *, model_name: str) -> None:
        self.registry = registry
        self.model_name = model_name

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, _MODEL, registry=registry).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(name, text, _MODEL, buckets=buckets, registry=registry)
            return metric.labels(model_name)

        self.prefix_queries = counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_hits = counter(
            "vllm:prefix_cache_hits", "Prompt tokens whose KV was in the prefix cache."
        )
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self.ttft_s = histogram(
            "vllm:time_to_first_token_seconds",
            "Arrival of the request to its first token, at the worker.",
            TTFT_BUCKETS_S,
        )
        self.itl_s = histogram(
            "vllm:inter_token_latency_seconds",
            "Gap between two tokens of a request.",
            ITL_BUCKETS_S,
        )
        self.e2e_s = histogram(
            "vllm:e2e_request_latency_seconds",
            "Arrival of the request to its last token, at the worker.",
            E2E_BUCKETS_S,
        )
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended, by why: stop, length or abort.",
            (*_MODEL, "finished_reason"),
            registry=registry,
        )
        self._http_errors = Counter(
            "kvway_worker_http_errors",
            "Requests answered with an error, by its code.",
            (*_MODEL, "code"),
            registry=registry,
        )

    def request_ended(self, finished_reason: str) -> None:
        """Count one request under the reason of its end."""
        self._success.labels(self.model_name, finished_reason).inc()

    def http_error(self, code: str) -> None:
        """Count one error answer (or error event) under its code."""
        self._http_errors.labels(self.model_name, code).inc()

    def watch(self, read: Callable[[], PoolGauges]) -> None:
        """Read the engine's numbers through `read` at each scrape from now on."""
        self.registry.register(_PoolCollector(read, model_name=self.model_name))


class _PoolCollector(Collector):
    """Turns one reading of the engine into metrics."""

    def __init__(self, read: Callable[[], PoolGauges], *, model_name: str) -> None:
        self._read = read
        self._model_name = model_name

    @override
    def describe(self) -> list[Metric]:
        """Return nothing: the registry need not read the engine to learn the names."""
        return []

    @override
    def collect(self) -> Iterator[Metric]:
        """Read the engine once and yield what it says."""
        now = self._read()
        usage = now.live_blocks / now.total_blocks if now.total_blocks else 0.0
        yield self._gauge("vllm:num_requests_running", "Requests in the batch.", now.num_running)
        yield self._gauge(
            "vllm:num_requests_waiting", "Requests waiting for a place.", now.num_waiting
        )
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "Share of the KV blocks held by requests, 0 to 1; cached blocks count as free.",
            usage,
        )
        yield self._counter(
            "vllm:num_preemptions", "Requests that lost their blocks.", now.num_preemptions
        )
        yield self._counter(
            "kvway_worker_evictions", "Cached blocks given up for new content.", now.num_evictions
        )
        blocks = GaugeMetricFamily(
            "kvway_worker_blocks",
            "KV blocks: live (a request holds them), cached (can be hit or reused), free.",
            labels=(*_MODEL, "state"),
        )
        for state, count in (
            ("live", now.live_blocks),
            ("cached", now.cached_blocks),
            ("free", now.free_blocks),
        ):
            blocks.add_metric((self._model_name, state), count)
        yield blocks
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The KV cache as configured; always 1.",
            labels=(*_MODEL, "block_size", "num_gpu_blocks"),
        )
        config.add_metric((self._model_name, str(now.block_size), str(now.total_blocks)), 1)
        yield config

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=_MODEL)
        family.add_metric((self._model_name,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=_MODEL)
        family.add_metric((self._model_name,), value)
        return family
