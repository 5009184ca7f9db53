"""The registry, its text, and the two clocks."""

from __future__ import annotations

import pytest
from prometheus_client import Counter, Histogram
from prometheus_client.parser import text_string_to_metric_families

from kvway_core import metrics
from kvway_core.clock import Clock, SystemClock
from kvway_core.testing.fake_clock import FakeClock


def test_a_registry_holds_what_it_is_given_and_the_process() -> None:
    registry = metrics.new_registry("router", version="1.2.3")
    Counter("kvway_router_requests_total", "Requests.", registry=registry).inc()
    Histogram(
        "kvway_router_request_duration_seconds",
        "Duration.",
        buckets=metrics.TTFT_BUCKETS_S,
        registry=registry,
    ).observe(0.02)
    text = metrics.render(registry).decode()
    assert 'kvway_router_build_info{version="1.2.3"} 1.0' in text
    assert "kvway_router_requests_total 1.0" in text
    assert 'kvway_router_request_duration_seconds_bucket{le="0.02"} 1.0' in text
    assert "process_resident_memory_bytes" in text
    assert "_created" not in text
    assert list(text_string_to_metric_families(text))


def test_registries_share_nothing() -> None:
    one, two = (metrics.new_registry("worker", version=v) for v in ("1", "2"))
    assert b'"2"' not in metrics.render(one)
    assert b'"1"' not in metrics.render(two)


@pytest.mark.parametrize("buckets", [metrics.TTFT_BUCKETS_S])
def test_buckets_rise(buckets: tuple[float, ...]) -> None:
    assert list(buckets) == sorted(set(buckets))


def test_the_system_clock_tells_the_time() -> None:
    clock: Clock = SystemClock()
    assert clock.monotonic() <= clock.monotonic()
    assert clock.time() > 1_700_000_000


def test_the_fake_clock_moves_when_told() -> None:
    fake = FakeClock(monotonic_s=1, time_s=2)
    clock: Clock = fake
    fake.advance(0.5)
    assert (clock.monotonic(), clock.time()) == (1.5, 2.5)
    with pytest.raises(ValueError, match="cannot go back"):
        fake.advance(-1)
