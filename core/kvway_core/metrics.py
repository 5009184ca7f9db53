"""Metrics: one registry per process, passed in; the buckets that both share; the text."""

from __future__ import annotations

from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

CONTENT_TYPE = CONTENT_TYPE_LATEST

TTFT_BUCKETS_S: Final = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""For times to first token: the same in both programs, so that they can be laid side by side."""


def new_registry(program: str, *, version: str) -> CollectorRegistry:
    """Returns the registry of a process, with its build and its CPU, memory and descriptors.

    Args:
        program: "router" or "worker".
        version: Of kvway.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    build = Gauge(
        f"kvway_{program}_build_info",
        "Always 1; its label is the version.",
        ["version"],
        registry=registry,
    )
    build.labels(version).set(1)
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """Returns the metrics as Prometheus text; answer it with `CONTENT_TYPE`."""
    return generate_latest(registry)
