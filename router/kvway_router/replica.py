"""One replica's state: a pure machine, moved by what looks at it found.

                   good probe                    hard failure, or bad probes in a row
    STARTING ------------------------> READY ---------------------------------> UNHEALTHY
        ^                              |   ^                                        |
        | it says "starting"           |   |        good probes in a row            |
        +------------------------------+   +----------------------------------------+
                                       |
                                       | it says "draining", or is told to drain
                                       v
                                    DRAINING      finishes what it has, takes nothing new

A failure to connect is hard: one is enough, whether a probe or a request met it. A replica that is
new stays STARTING while it does not answer. Only READY replicas are candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvway_core.api import LoadReport
from kvway_router.discovery import ReplicaAddress
from kvway_router.feed_source import EventsOption
from kvway_router.feed_state import FeedOptions, FeedStats


class ReplicaState(StrEnum):
    """Whether a replica can take a request."""

    STARTING = "starting"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """How replicas are watched.

    Attributes:
        interval_s: Time between two looks at a replica.
        jitter: Each interval is longer or shorter by up to this share of it.
        timeout_s: Limit for one look.
        failures: Bad looks in a row that make a READY replica UNHEALTHY.
        successes: Good looks in a row that bring an UNHEALTHY one back.
        slots: Requests that a replica runs at once if it does not tell.
        num_routers: Routers that share all replicas evenly, this one among them.
        engine_interval_s: Time between two looks at what an engine without reports says of itself.
        feed: How KV events are read.
        kv_events: Where engines publish them that do not say it themselves.
    """

    interval_s: float = 1.0
    jitter: float = 0.1
    timeout_s: float = 1.0
    failures: int = 3
    successes: int = 2
    slots: int = 128
    num_routers: int = 1
    engine_interval_s: float = 5.0
    feed: FeedOptions = field(default_factory=FeedOptions)
    kv_events: tuple[EventsOption, ...] = ()


class Replica:
    """One replica and its state. A pure state machine: it does no I/O and knows no time.

    Attributes:
        id: `host:port`.
        url: `http://host:port`, without a slash at the end.
        host: Its host alone.
        state: Where it is in the picture above.
        boot_id: The life of the worker process that last answered; None for other engines.
        report: The last thing a kvway worker said of itself; None for other engines.
        error: Why it is not READY, for a person; empty when it is.
        no_report: Why it is used without a report, for a person; empty when nothing is wrong.
        feed_stats: What became of its KV events, over all feeds it had.
        is_sglang: Whether it is SGLang, which wants to be told of requests that nobody waits for.
        is_drained: Whether it was told to take nothing new, by whoever runs the router.
    """

    __slots__ = (
        "_num_bad",
        "_num_good",
        "_options",
        "boot_id",
        "error",
        "feed_stats",
        "host",
        "id",
        "is_drained",
        "is_sglang",
        "no_report",
        "report",
        "state",
        "url",
    )

    def __init__(self, address: ReplicaAddress, *, options: ReplicaOptions) -> None:
        """Start as STARTING."""
        self.id = address.id
        self.url = address.url
        self.host = address.host
        self.state = ReplicaState.STARTING
        self.report: LoadReport | None = None
        self.boot_id: str | None = None
        self.error = "not seen yet"
        self.no_report = ""
        self.feed_stats = FeedStats()
        self.is_sglang = False
        self.is_drained = False
        self._options = options
        self._num_good = 0
        self._num_bad = 0

    def on_good(self, report: LoadReport | None, *, problem: str = "") -> None:
        """Moves on after an answer.

        Args:
            report: What it said; None from engines without reports.
            problem: Why it is of no use although it answers, such as serving another model.
        """
        self.report = report
        says = "ready" if report is None else report.state
        if problem or says == "failed":
            self._num_good = 0
            self._set(ReplicaState.UNHEALTHY, problem or "its engine failed")
            return
        self._num_bad = 0
        self._num_good += 1
        if self.is_drained:
            self._set(ReplicaState.DRAINING, "it was told to drain")
        elif says == "draining":
            self._set(ReplicaState.DRAINING, "it is draining")
        elif says == "starting":
            self._set(ReplicaState.STARTING, "it is starting")
        elif self.state is not ReplicaState.UNHEALTHY or self._num_good >= self._options.successes:
            self._set(ReplicaState.READY, "")

    def drain(self) -> None:
        """Takes nothing new, until `is_drained` is taken back."""
        self.is_drained = True
        if self.state is not ReplicaState.UNHEALTHY:
            self._set(ReplicaState.DRAINING, "it was told to drain")

    def on_bad(self, error: str, *, hard: bool) -> None:
        """Moves on after no answer or a bad one; `hard` means that one is enough."""
        self._num_good = 0
        self._num_bad += 1
        if self.state is ReplicaState.STARTING:
            self.error = error
        elif hard or self._num_bad >= self._options.failures:
            self._set(ReplicaState.UNHEALTHY, error)

    def _set(self, state: ReplicaState, error: str) -> None:
        self.state = state
        self.error = error
