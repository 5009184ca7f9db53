"""The router's side: prompts are handed over when they end, and looked at off the request's path.

    loop    request ended --> offer: one append to a bounded line
    thread  four times a second: what is in the line, at random, while there is allowance

The thread looks at no more than its share of the process's CPU time allows. What it skips is
stood for by what it looks at: each of these counts for as many requests as there were per look.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import msgspec
import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from kvway_core.api import ChatRequest
from kvway_core.clock import Clock
from kvway_core.requests import ContentPart
from kvway_router.prefixes.finder import CountTokens, PrefixFinder
from kvway_router.prefixes.findings import Finding
from kvway_router.prefixes.seen import SeenPrompt, locate_parts
from kvway_router.prefixes.values import Kind
from kvway_router.trips import Trip

CPU_SHARE: Final = 0.015
"""Of the process's CPU time, what the thread may take."""

BURST_S: Final = 0.05
"""CPU time it may take before that: a router that just began has something to show at once."""

INTERVAL_S: Final = 0.25
MAX_WAITING: Final = 64
MAX_WAITING_CHARS: Final = 8 * 1024 * 1024
LOG_INTERVAL_S: Final = 60.0
"""At most one line of log in so much time."""

_log = structlog.get_logger(__name__)


class PrefixReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``GET /admin/prefixes`` answers.

    Attributes:
        requests: Requests since the start that this speaks of.
        looked_at: How many of them were looked at; the others are stood for by these.
        hit_rate: Prompt tokens that some replica held, by prompt tokens.
        findings: Prefix killers, the most costly first.
        avoidable_tokens: Prompt tokens lost to them since the start, by kind.
    """

    requests: float = 0.0
    looked_at: int = 0
    hit_rate: float = 0.0
    findings: tuple[Finding, ...] = ()
    avoidable_tokens: Mapping[Kind, float] = msgspec.field(
        default_factory=lambda: dict.fromkeys(Kind, 0.0)
    )


class _Offer(NamedTuple):
    ref: str
    model: str
    text: str
    request: object
    num_tokens: int
    hit_tokens: int
    ttft_s: float | None
    token_s: float | None

    def seen(self) -> SeenPrompt:
        """Returns it as the finder takes it."""
        data = self.text.encode("utf-8", "surrogatepass")
        is_chat = isinstance(self.request, ChatRequest)
        return SeenPrompt(
            ref=self.ref,
            namespace=self.model,
            data=data,
            parts=locate_parts(data, _messages(self.request)) if is_chat else (),
            num_tokens=self.num_tokens,
            hit_tokens=self.hit_tokens,
            has_tools=isinstance(self.request, ChatRequest) and bool(self.request.tools),
            ttft_s=self.ttft_s,
            token_s=self.token_s,
        )


class Allowance:
    """CPU time that may be spent: a share of what the process spends, and a little in advance."""

    def __init__(self, *, share: float, burst_s: float) -> None:
        self._share = share
        self._burst_s = burst_s
        self._owed_s = 0.0

    @property
    def left_s(self) -> float:
        """What may be spent now."""
        return max(0.0, self._burst_s - self._owed_s)

    def earn(self, process_s: float) -> None:
        """The process has spent so much more."""
        self._owed_s = max(0.0, self._owed_s - self._share * process_s)

    def spend(self, own_s: float) -> None:
        """So much was spent of what was allowed."""
        self._owed_s += own_s


class PrefixWatch:
    """One thread that looks at prompts which have ended.

    Attributes:
        report: What is known, replaced as a whole.
        cpu_s: CPU time that was spent on it.
        num_unseen: Requests that the line had no room for, or whose prompt is not text.

    Args:
        count_tokens: Tokens of a text, for the offset of a finding.
        clock: Tells the time.
    """

    def __init__(self, count_tokens: CountTokens, *, clock: Clock) -> None:
        """Starts with nothing seen; no thread runs yet."""
        self.report = PrefixReport()
        self.cpu_s = 0.0
        self.num_unseen = 0
        self._finder = PrefixFinder(count_tokens)
        self._clock = clock
        self._line: deque[_Offer] = deque()
        self._line_chars = 0
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._num_looked_at = 0
        self._allowance = Allowance(share=CPU_SHARE, burst_s=BURST_S)
        self._look_s = BURST_S / MAX_WAITING
        self._process_s = time.process_time()
        self._rng = random.Random()  # noqa: S311  not a secret
        self._log_from_s = 0.0
        self._num_not_logged = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvway-prefixes", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after the prompt that it has."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def offer(self, trip: Trip) -> None:
        """Puts a request that has ended into the line, if it is one to learn from; on the loop."""
        record, reading = trip.record, trip.reading
        if record is None or reading is None or trip.finish != "done" or trip.status != 200:
            return
        text = reading.prompt_text if record.num_prompts == 1 else None
        with self._lock:
            self._num_waiting += 1
            if (
                text is None
                or len(self._line) >= MAX_WAITING
                or self._line_chars + len(text) > MAX_WAITING_CHARS
            ):
                self.num_unseen += 1
                return
            self._line_chars += len(text)
            self._line.append(
                _Offer(
                    ref=trip.request_id,
                    model=record.model,
                    text=text,
                    request=reading.parsed,
                    num_tokens=record.prompt_tokens,
                    hit_tokens=record.reachable_tokens,
                    ttft_s=trip.ttft_s if trip.is_event_stream else None,
                    token_s=trip.token_s,
                )
            )

    def look(self) -> None:
        """Looks at what is in the line, as far as there is allowance; what the thread does."""
        with self._lock:
            offers, self._line, self._line_chars = list(self._line), deque(), 0
            num_waiting = self._num_waiting
        process_s = time.process_time()
        self._allowance.earn(process_s - self._process_s)
        self._process_s = process_s
        num = min(len(offers), int(self._allowance.left_s / self._look_s))
        if not num:
            return  # what waited is stood for by what comes next
        with self._lock:
            self._num_waiting -= num_waiting
        begun_s = time.thread_time()
        now_s, new = self._clock.time(), list[Finding]()
        for offer in self._rng.sample(offers, num):
            look = self._finder.look(offer.seen(), now_s=now_s, weight=num_waiting / num)
            new += look.proved
        self._num_looked_at += num
        self._publish(now_s)
        self._log(new)
        spent_s = time.thread_time() - begun_s
        self.cpu_s += spent_s
        self._allowance.spend(spent_s)
        self._look_s += 0.1 * (spent_s / num - self._look_s)

    def _run(self) -> None:
        while not self._closed.wait(INTERVAL_S):
            try:
                self.look()
            except Exception:  # noqa: BLE001  it is the thread's supervisor
                _log.exception("prefixes_not_looked_at")

    def _publish(self, now_s: float) -> None:
        totals = self._finder.totals
        self.report = PrefixReport(
            requests=totals.requests,
            looked_at=self._num_looked_at,
            hit_rate=totals.hit_tokens / max(1.0, totals.prompt_tokens),
            findings=tuple(self._finder.findings(now_s=now_s)),
            avoidable_tokens=dict(self._finder.avoidable_tokens),
        )

    def _log(self, new: list[Finding]) -> None:
        """One line for what has just been found, with how many others had none."""
        now_s = self._clock.monotonic()
        for finding in new:
            if now_s < self._log_from_s:
                self._num_not_logged += 1
                continue
            _log.warning(
                "prefix_killer_found",
                kind=finding.kind.value,
                role=finding.role,
                message=finding.message,
                token=finding.token,
                shape=finding.shape,
                lost_tokens_per_request=round(finding.lost_tokens_per_request),
                advice=finding.advice,
                not_logged=self._num_not_logged,
            )
            self._log_from_s, self._num_not_logged = now_s + LOG_INTERVAL_S, 0


class PrefixCollector(Collector):
    """Reads the watch when the metrics are asked for."""

    def __init__(self, watch: PrefixWatch) -> None:
        """Takes what is read."""
        self._watch = watch

    @override
    def collect(self) -> Iterator[Metric]:
        report = self._watch.report
        avoidable = CounterMetricFamily(
            "kvway_router_avoidable_prefill_tokens",
            "Prompt tokens computed again because something before them varies, about so many.",
            labels=["kind"],
        )
        for kind, tokens in report.avoidable_tokens.items():
            avoidable.add_metric([kind.value], tokens)
        yield avoidable
        yield GaugeMetricFamily(
            "kvway_router_prefix_killers",
            "Prefix killers that cost something in the last hour.",
            value=len(report.findings),
        )
        yield CounterMetricFamily(
            "kvway_router_prefix_looks",
            "Prompts that were looked at for prefix killers.",
            value=report.looked_at,
        )
        yield CounterMetricFamily(
            "kvway_router_prefix_cpu_seconds",
            "CPU time spent on looking for prefix killers.",
            value=self._watch.cpu_s,
        )


def _messages(request: object) -> Iterator[tuple[str, list[str]]]:
    """Yields role and texts of the messages of a chat."""
    assert isinstance(request, ChatRequest)  # noqa: S101  the caller's case
    for message in request.messages:
        content = message.content
        if isinstance(content, str):
            yield message.role, [content]
        elif content is not None:
            yield message.role, [_text_of(part) for part in content]
        else:
            yield message.role, []


def _text_of(part: ContentPart) -> str:
    return part.text or ""
