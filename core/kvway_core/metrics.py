"""Metrics: one registry per process, passed in; the buckets, written once; the text."""

from __future__ import annotations

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

CONTENT_TYPE = CONTENT_TYPE_LATEST

SECONDS_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
"""For whole requests and times to first token."""
STEP_SECONDS_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
)
"""For decisions, steps and gaps between tokens."""
TOKENS_BUCKETS = (*(1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144),)
"""For counts of tokens."""


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
