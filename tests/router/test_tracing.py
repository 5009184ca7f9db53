"""Traces: what a collector gets, what a replica is told, and nothing of it when it is off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from kvway_core.testing.fake_replica import Answer
from tests.router.conftest import Bench, StartBench

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class Collector:
    """A collector of our own: takes OTLP over HTTP and keeps the spans."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Span] = []

    async def take(self, request: web.Request) -> web.Response:
        assert request.path == "/v1/traces"
        taken = ExportTraceServiceRequest.FromString(await request.read())
        for resource in taken.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return web.Response()


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/{path:.*}", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield collector
    await runner.cleanup()


async def flush(bench: Bench) -> None:
    assert bench.router._tracer is not None
    assert await asyncio.to_thread(bench.router._tracer._provider.force_flush)


def attributes(span: Span) -> dict[str, str | int | float]:
    values = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        assert kind is not None
        values[pair.key] = getattr(pair.value, kind)
    return values


def told(bench: Bench) -> list[str]:
    return [r.headers["traceparent"] for each in bench.replicas for r in each.requests]


async def test_each_attempt_is_a_span_of_the_clients_trace(
    start_bench: StartBench, collector: Collector
) -> None:
    bench = await start_bench(2, trace_endpoint=collector.url)
    for replica in bench.replicas:
        replica.script(Answer(status=503, body=b"{}"))
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    bench.client.headers.update(headers)
    status, got, _ = await bench.chat("canary in a prompt")
    assert status == 503
    await flush(bench)
    *attempts, request = sorted(collector.spans, key=lambda span: span.name)
    assert (request.name, request.parent_span_id.hex()) == ("kvway.request", PARENT)
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert [span.parent_span_id for span in attempts] == [request.span_id] * 2
    sent = {f"00-{TRACE}-{span.span_id.hex()}-01" for span in attempts}
    assert set(told(bench)) == sent
    values = attributes(request)
    assert values["kvway.request_id"] == got["x-kvway-request-id"]
    assert (values["kvway.end"], values["kvway.attempts"]) == ("PW", 2)
    assert request.status.code == 2
    replicas = {attributes(span)["kvway.replica"] for span in attempts}
    assert replicas == {replica.replica_id for replica in bench.replicas}
    assert {attributes(span)["error.type"] for span in attempts} == {"replica_rejected"}
    assert "canary" not in str(collector.spans)


async def test_a_request_without_a_trace_begins_one_of_the_share(
    start_bench: StartBench, collector: Collector
) -> None:
    bench = await start_bench(trace_endpoint=collector.url, trace_share=0.0)
    assert (await bench.chat())[0] == 200
    bench.client.headers["traceparent"] = f"00-{TRACE}-{PARENT}-01"
    assert (await bench.chat(stream=True))[0] == 200
    await flush(bench)
    assert [span.name for span in collector.spans] == ["kvway.attempt", "kvway.request"]
    values = attributes(collector.spans[1])
    assert values["kvway.end"] == "OK"
    assert float(values["kvway.ttft_s"]) > 0
    is_sampled = [int(header.rsplit("-")[-1], 16) & 1 for header in told(bench)]
    assert is_sampled == [0, 1]


async def test_a_collector_that_is_gone_costs_nothing(start_bench: StartBench) -> None:
    bench = await start_bench(trace_endpoint="http://127.0.0.1:9")
    assert (await bench.chat())[0] == 200
    assert bench.router._tracer is not None
    assert not bench.router._tracer._open


async def test_without_a_collector_a_traceparent_passes_as_it_is(bench: Bench) -> None:
    bench.client.headers["traceparent"] = "what-ever"
    assert (await bench.chat())[0] == 200
    assert told(bench) == ["what-ever"]


def test_without_a_collector_the_sdk_is_not_imported() -> None:
    code = (
        "import sys, kvway_router.app, kvway_router.serving; "
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
