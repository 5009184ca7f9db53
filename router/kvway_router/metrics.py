"""Metrics of the router, ``kvway_router_...``: each defined once, in one registry per router.

Labels come from closed sets: routes, statuses, reasons, states, error codes and the replicas that
are there now. What happened is counted as it happens; what the fleet looks like is read from its
parts at the moment of the scrape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from kvway_core.metrics import TTFT_BUCKETS_S, render
from kvway_core.tokenizing import TextTokenizer
from kvway_router.admission import Admission
from kvway_router.fleet import Fleet, FleetView
from kvway_router.policies.reasons import Reason
from kvway_router.reader_pool import ReaderPool
from kvway_router.replica import ReplicaState
from kvway_router.rests import RestReader
from kvway_router.retry import Refusal
from kvway_router.rotation import Rotation
from kvway_router.running import RunningRequests
from kvway_router.trips import Trip

ERROR_BUCKETS_S: Final = (
    *(-10.0, -3.0, -1.0, -0.3, -0.1, -0.03, -0.01),
    *(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
)
READ_BUCKETS_S: Final = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)


_COUNTED: Final = {
    "prompt_tokens": ("Prompt tokens of answers that told cached tokens.", "prompt_tokens"),
    "ceiling_tokens": (
        "Those of them that had been sent before, to whichever replica.",
        "ceiling_tokens",
    ),
    "reachable_tokens": (
        "Those of them that the candidate with the longest match held, by the index.",
        "reachable_tokens",
    ),
    "matched_tokens": (
        "Those of them that the chosen replica held, by the index.",
        "matched_tokens",
    ),
    "cached_tokens": (
        "Those of them that the replica says it had cached.",
        "cached_tokens",
    ),
    "predicted_streams": (
        "Streams whose time to first token was predicted and seen.",
        "streams",
    ),
    "predicted_ttft_seconds": (
        "Sum of their predicted times to first token.",
        "predicted_ttft_s",
    ),
    "real_ttft_seconds": ("Sum of their real times to first token.", "ttft_s"),
    "ttft_error_seconds": (
        "Sum of how far each prediction was off, either way.",
        "ttft_error_s",
    ),
}
"""What is counted per replica: name, meaning, and where it comes from."""


class RouterMetrics:
    """Counts what happened to requests.

    Args:
        registry: Where the metrics register; one router per registry.
        reasons: Those that the router's policy may give.
    """

    def __init__(self, registry: CollectorRegistry, *, reasons: Iterable[Reason]) -> None:
        """Registers every metric, so that each is there from the first scrape."""

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvway_router_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"kvway_router_{name}", text, buckets=buckets, registry=registry)

        self.registry = registry
        self._requests = counter("requests", "Requests by route and status.", "route", "code")
        self._decisions = counter("decisions", "Choices of a replica by reason.", "reason")
        self._failed_attempts = counter(
            "failed_attempts", "Attempts at a replica that failed, by error code.", "error"
        )
        self._retries = counter("retries", "Attempts after the first one of a request.")
        self._refused = counter(
            "retries_refused", "Requests that failed and were not tried again, by why.", "why"
        )
        self._disconnects = counter(
            "client_disconnects", "Clients that left before their answer was complete.", "phase"
        )
        self._ttft_s = histogram(
            "time_to_first_token_seconds",
            "Arrival to the first byte of a streamed answer, at the router.",
            TTFT_BUCKETS_S,
        )
        self._ttft_error_s = histogram(
            "ttft_prediction_error_seconds",
            "Real minus predicted time to first token of a streamed answer.",
            ERROR_BUCKETS_S,
        )
        self._read_s = histogram(
            "prompt_read_seconds",
            "Time to decode, tokenize and hash a prompt, with the wait for a thread.",
            READ_BUCKETS_S,
        )
        self._prompts = counter(
            "prompts",
            "Prompts by how far they were read before the choice: whole, to where nobody could "
            "hold more, or to where their time was up.",
            "read",
        )
        self._queued_s = histogram(
            "queue_wait_seconds",
            "Time that a request waited for a replica with room.",
            READ_BUCKETS_S,
        )
        for refusal in Refusal:
            self._refused.labels(refusal.value)
        for how in ("whole", "front", "overdue"):
            self._prompts.labels(how)
        for reason in reasons:
            self._decisions.labels(reason.value)
        for phase in ("before_first_byte", "in_stream"):
            self._disconnects.labels(phase)

    def observe(self, trip: Trip) -> None:
        """Counts a request that has ended."""
        self._requests.labels(trip.route.value, str(trip.status)).inc()
        if trip.read_s is not None:
            self._read_s.observe(trip.read_s)
        if trip.queued_s is not None:
            self._queued_s.observe(trip.queued_s)
        if trip.refusal is not None:
            self._refused.labels(trip.refusal.value).inc()
        if trip.prompt_read is not None:
            self._prompts.labels(trip.prompt_read).inc()
        if trip.finish == "client_gone":
            begun = trip.ttft_s is not None
            self._disconnects.labels("in_stream" if begun else "before_first_byte").inc()
        record = trip.record
        if record is None:
            return
        for attempt in record.attempts:
            self._decisions.labels(attempt.reason).inc()
            if attempt.error is not None:
                self._failed_attempts.labels(attempt.error).inc()
        self._retries.inc(max(0, len(record.attempts) - 1))
        if trip.shows_ttft and trip.ttft_s is not None:
            self._ttft_s.observe(trip.ttft_s)
            self._ttft_error_s.observe(trip.ttft_s - record.predicted_ttft_s)

    def render(self) -> bytes:
        """Returns all metrics in the text format of Prometheus."""
        return render(self.registry)


class FleetCollector(Collector):
    """Reads the fleet when the metrics are asked for."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        readers: ReaderPool,
        rests: RestReader,
        texts: TextTokenizer,
        running: RunningRequests,
        admission: Admission,
        rotation: Rotation,
    ) -> None:
        """Takes what is read."""
        self._fleet = fleet
        self._readers = readers
        self._rests = rests
        self._texts = texts
        self._running = running
        self._admission = admission
        self._rotation = rotation

    @override
    def collect(self) -> Iterator[Metric]:
        view = self._fleet.view()
        states = dict.fromkeys((state.value for state in ReplicaState), 0)
        for replica in view.replicas:
            states[replica.state] += 1
        by_state = _gauge("replicas", "Replicas by state.", "state")
        for state, number in states.items():
            by_state.add_metric([state], number)
        yield by_state

        in_flight = _gauge("in_flight_requests", "Requests at a replica.", "replica")
        queued = _gauge(
            "queued_prefill_seconds", "Prefill work sent to a replica and not done.", "replica"
        )
        held = _gauge("index_blocks", "Blocks the index lists for a replica.", "replica")
        for replica in view.replicas:
            in_flight.add_metric([replica.replica_id], replica.in_flight)
            queued.add_metric([replica.replica_id], replica.queued_prefill_s)
            held.add_metric([replica.replica_id], replica.blocks_held)
        yield from (in_flight, queued, held)

        for name, (text, of) in _COUNTED.items():
            counter = _counter(name, text)
            for replica in view.replicas:
                counts = self._fleet.traffic.of(replica.replica_id)
                counter.add_metric([replica.replica_id], getattr(counts, of))
            yield counter

        yield GaugeMetricFamily(
            "kvway_router_running_requests",
            "Requests inside the router.",
            value=self._running.num_running,
        )
        yield GaugeMetricFamily(
            "kvway_router_waiting_prompts",
            "Prompts waiting for a thread to read them.",
            value=self._readers.num_waiting,
        )
        yield from self._traffic_control(view)
        yield from self._tokenizing()

    def _traffic_control(self, view: FleetView) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "kvway_router_queued_requests",
            "Requests waiting for a replica with room.",
            value=self._admission.num_waiting,
        )
        shed = CounterMetricFamily(
            "kvway_router_shed_requests",
            "Requests refused because they would have waited, by why.",
            labels=["why"],
        )
        for why, number in self._admission.num_shed.items():
            shed.add_metric([why], number)
        yield shed
        yield GaugeMetricFamily(
            "kvway_router_ejected_replicas",
            "Replicas that a breaker holds something against.",
            value=sum(self._rotation.is_ejected(replica.replica_id) for replica in view.replicas),
        )
        yield CounterMetricFamily(
            "kvway_router_ejections",
            "Times that a breaker took a replica out.",
            value=self._rotation.num_ejections,
        )

    def _tokenizing(self) -> Iterator[Metric]:
        texts = self._texts
        info = GaugeMetricFamily(
            "kvway_router_tokenizer_info",
            "Always 1: the library that tokenizes, and where it may cut prompts.",
            labels=["library", "cut_at"],
        )
        info.add_metric([texts.backend, texts.cutter.kind], 1)
        yield info
        yield GaugeMetricFamily(
            "kvway_router_tokenizer_cache_bytes",
            "Memory of the pieces of text whose tokens are known.",
            value=texts.cache.size_bytes,
        )
        yield CounterMetricFamily(
            "kvway_router_tokenizer_failures",
            "Pieces of text that the faster library failed at; the reference did them instead.",
            value=texts.num_failed,
        )
        yield CounterMetricFamily(
            "kvway_router_rests_dropped",
            "Rests of prompts that were never read because too many waited.",
            value=self._rests.num_dropped,
        )


def _gauge(name: str, text: str, label: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvway_router_{name}", text, labels=[label])


def _counter(name: str, text: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"kvway_router_{name}", text, labels=["replica"])
