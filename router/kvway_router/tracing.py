"""Traces by OpenTelemetry, sent to a collector over OTLP/HTTP, if one is configured.

    the client's span, by its ``traceparent``
      `- a request in the router            kvway.request
           `- an attempt at a replica       kvway.attempt: its ``traceparent`` is sent

Without a collector nothing of this is imported, and a ``traceparent`` passes like any other
header. Spans hold names, numbers and times, and no text of a prompt. They are sent by a thread of
the SDK from a bounded line; what does not fit, or cannot be delivered, is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from multidict import CIMultiDict

from kvway_core.errors import ConfigError, KvwayError
from kvway_router.call import Call

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from kvway_router.trips import Trip

_EXPORT_S: Final = 5.0
_MAX_WAITING: Final = 2048
_PATH: Final = "/v1/traces"


class Tracer:
    """Traces requests.

    Args:
        endpoint: Of the collector, such as ``http://localhost:4318``.
        share: Of the requests that begin a trace, how many are traced; whoever comes with a
            ``traceparent`` has decided that.
        version: Of kvway.

    Raises:
        ConfigError: The SDK is not installed.
    """

    def __init__(self, endpoint: str, *, share: float, version: str) -> None:
        """Starts the thread that sends."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
            from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as exc:
            raise ConfigError(
                [f"--trace-endpoint needs {exc.name}; run: pip install 'kvway[tracing]'"]
            ) from exc
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + _PATH, timeout=_EXPORT_S)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(share)),
            resource=Resource.create({"service.name": "kvway-router", "service.version": version}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=_MAX_WAITING)
        )
        self._tracer = self._provider.get_tracer("kvway_router", version)
        self._propagator = TraceContextTextMapPropagator()
        self._in_context = set_span_in_context
        self._server, self._client = SpanKind.SERVER, SpanKind.CLIENT
        self._error = Status(StatusCode.ERROR)
        self._open: dict[str, Span] = {}

    @contextmanager
    def request(self, call: Call) -> Iterator[None]:
        """Traces a request while the context is open; its parent is what its headers name."""
        parent = self._propagator.extract(_lowered(call.headers))
        attributes = {
            "http.request.method": call.method,
            "http.route": call.route.value,
            "kvway.request_id": call.request_id,
        }
        span = self._tracer.start_span(
            "kvway.request", context=parent, kind=self._server, attributes=attributes
        )
        self._open[call.request_id] = span
        try:
            yield
        finally:
            del self._open[call.request_id]
            span.end()

    @contextmanager
    def attempt(self, call: Call, replica_id: str, headers: CIMultiDict[str]) -> Iterator[None]:
        """Traces an attempt while the context is open, and puts it into the replica's headers."""
        context = self._in_context(self._open[call.request_id])
        span = self._tracer.start_span(
            "kvway.attempt",
            context=context,
            kind=self._client,
            attributes={"kvway.replica": replica_id},
        )
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._in_context(span))
        headers.update(carrier)
        try:
            yield
        except KvwayError as exc:
            span.set_attribute("error.type", exc.code)
            span.set_status(self._error)
            raise
        finally:
            span.end()

    def ended(self, trip: Trip) -> None:
        """Puts how a request ended into its span."""
        span = self._open.get(trip.request_id)
        if span is None or not span.is_recording():
            return
        record = trip.record
        values: dict[str, str | int | float | None] = {
            "kvway.end": trip.end,
            "http.response.status_code": trip.status,
            "error.type": trip.error,
            "kvway.read_s": trip.read_s,
            "kvway.queued_s": trip.queued_s,
            "kvway.ttft_s": trip.ttft_s,
            "gen_ai.usage.input_tokens": trip.request.num_tokens if trip.request else None,
        }
        if record is not None:
            values |= {
                "kvway.replica": record.replica_id,
                "kvway.reason": record.reason,
                "kvway.attempts": len(record.attempts),
                "kvway.matched_tokens": record.matched_tokens,
                "kvway.cached_tokens": trip.cached_tokens,
                "kvway.predicted_ttft_s": record.predicted_ttft_s,
            }
        span.set_attributes({name: value for name, value in values.items() if value is not None})
        if trip.status is None or trip.status >= 500 or trip.finish == "failed":
            span.set_status(self._error)

    async def close(self) -> None:
        """Sends what is left, for as long as one export may take."""
        await asyncio.to_thread(self._provider.shutdown)


def _lowered(headers: CIMultiDict[str]) -> dict[str, str]:
    """Returns the headers that tell of a trace, as the propagator looks for them."""
    names = ("traceparent", "tracestate")
    return {name: ",".join(headers.getall(name)) for name in names if name in headers}
