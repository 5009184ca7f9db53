"""What a worker counts, under vLLM's names where vLLM has one, so that its dashboards work.

Two sources, never both for one number: handlers observe requests; what the engine counts is read
from its loop at the moment of the scrape (see `engine_metrics`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from kvway_core.metrics import TTFT_BUCKETS_S
from kvway_worker.engine_metrics import EngineCollector
from kvway_worker.load import EngineLoad

ITL_BUCKETS_S: Final = (
    *(0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0),
)
E2E_BUCKETS_S: Final = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
)
_MODEL: Final = ("model_name",)


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

        self.prompt_tokens = counter(
            "vllm:prompt_tokens", "Prompt tokens of requests that got a first token."
        )
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
            "Requests that ended, by why: stop, length, abort or error.",
            (*_MODEL, "finished_reason"),
            registry=registry,
        )
        self._http_errors = Counter(
            "kvway_worker_http_errors",
            "Requests answered with an error, by HTTP status.",
            (*_MODEL, "status"),
            registry=registry,
        )
        self._broken_streams = Counter(
            "kvway_worker_broken_streams",
            "Streams that ended with an error event, by its code.",
            (*_MODEL, "code"),
            registry=registry,
        )

    def request_ended(self, finished_reason: str) -> None:
        """Count one request under the reason of its end."""
        self._success.labels(self.model_name, finished_reason).inc()

    def http_error(self, status: int) -> None:
        """Count one answer with an error status."""
        self._http_errors.labels(self.model_name, str(status)).inc()

    def stream_broke(self, code: str) -> None:
        """Count one stream that ended with an error event."""
        self._broken_streams.labels(self.model_name, code).inc()

    def watch(self, read: Callable[[], EngineLoad], *, block_size: int) -> None:
        """Read the engine's numbers through `read` at each scrape from now on.

        Args:
            read: Gives the engine's loop and its pool at this moment.
            block_size: Tokens per block.
        """
        self.registry.register(
            EngineCollector(read, model_name=self.model_name, block_size=block_size)
        )
