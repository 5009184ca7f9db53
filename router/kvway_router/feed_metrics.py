"""Metrics of the feeds, ``kvway_router_kv_...``: of each replica whose KV events are followed.

Labels are the replicas that are there now. An engine with several data-parallel ranks is one
replica: it is up when all its feeds are, and as old as the oldest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from kvway_router.replicas import ReplicaSet

_COUNTERS: Final = {
    "batches": "Batches of KV events that were applied.",
    "events": "KV events in them.",
    "bad": "KV events and batches that were skipped: not readable, or without what they need.",
    "duplicates": "Batches seen before, or of a past life of the replica.",
    "gaps": "Times that a number was missing.",
    "replays": "Replays asked for: at the start, for a gap, or to see whether one was missed.",
    "lost": "Times that missing batches could not be replayed and the replica was cleared.",
    "restarts": "Times that events of another life of the replica came.",
    "outages": "Times that the feed went down.",
    "unreplayable": "Times that a batch too large to be replayed was passed over.",
}
"""What `FeedStats` counts, each as ``num_...``."""


class FeedCollector(Collector):
    """Reads the feeds when the metrics are asked for."""

    def __init__(self, replicas: ReplicaSet) -> None:
        """Takes whose feeds are read."""
        self._replicas = replicas

    @override
    def collect(self) -> Iterator[Metric]:
        up = _gauge("kv_feed_up", "Whether KV events keep the index true to a replica now.")
        age = _gauge("kv_feed_age_seconds", "Time since the index was last known to be true.")
        counters = {
            what: CounterMetricFamily(f"kvway_router_kv_feed_{what}", text, labels=["replica"])
            for what, text in _COUNTERS.items()
        }
        for replica in self._replicas.all():
            feeds = self._replicas.feeds(replica.id)
            if not feeds:
                continue
            up.add_metric([replica.id], all(feed.is_up for feed in feeds))
            age.add_metric([replica.id], max(feed.age_s for feed in feeds))
            for what, counter in counters.items():
                counter.add_metric([replica.id], getattr(replica.feed_stats, f"num_{what}"))
        yield from (up, age, *counters.values())


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvway_router_{name}", text, labels=["replica"])
