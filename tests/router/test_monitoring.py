"""Dashboards and alerts ask for metrics that there are, with the labels that they have.

The router's are those of a router that runs here, with a feed and a failed attempt; the worker's
are those of tests/golden, which its own test holds to what a worker says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import promql_parser as promql
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard as GrafanaDashboard
from prometheus_client.parser import text_string_to_metric_families

from kvway_core.testing.fake_replica import Answer
from monitoring.dashboards import DASHBOARDS, FOLDER, path_of
from monitoring.panels import Dashboard
from tests.router.conftest import StartBench
from tests.router.zmq_worker import ZmqWorker, stored

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "monitoring" / "prometheus"
PAGE = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
WORKER_METRICS = (ROOT / "tests" / "golden" / "worker_metrics.txt").read_text(encoding="utf-8")
WORKER_PAGE = (ROOT / "docs" / "worker-metrics.md").read_text(encoding="utf-8")
JOBS = ("kvway-router", "kvway-worker")
ADDED: Final[dict[str, set[str]]] = {"job": set(JOBS), "instance": set()}
"""What Prometheus adds to each series."""

Known = dict[str, dict[str, set[str]]]
"""By metric and label, the values that were seen."""


def seen(text: str) -> Known:
    known: Known = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = known.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return known


def unseen(text: str) -> Known:
    """Returns counters that nothing has counted yet, with the labels that their page tells."""
    told = re.findall(r"`([\w:]+)\{([\w, ]+)\}` \| counter", WORKER_PAGE)
    return {
        name: {label: set() for label in labels.split(", ")}
        for name, labels in told
        if f"# TYPE {name} counter" in text
    }


@pytest.fixture
async def known(start_bench: StartBench) -> Known:
    """Every metric that a router or a worker tells, and ``up``."""
    bench = await start_bench(2)
    async with ZmqWorker() as worker:
        await worker.publish(stored(11, 12))
        ports = {
            "pub_port": worker.info.pub_port,
            "replay_port": worker.info.replay_port,
            "topic": worker.info.topic,
        }
        fed = bench.replicas[0]
        fed.pages["/load"] = (200, fed.load(kv_events=ports))
        replicas = bench.router.replicas
        await replicas.wait_for(lambda: replicas.is_fed(fed.replica_id))
        for replica in bench.replicas:
            replica.answer = Answer(status=503)
        await bench.chat("x")
        async with bench.client.get(bench.api("/metrics")) as response:
            text = await response.text()
    return unseen(WORKER_METRICS) | seen(text) | seen(WORKER_METRICS) | {"up": {}}


def rules() -> list[dict[str, Any]]:
    content = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))
    return [rule for group in content["groups"] for rule in group["rules"]]


def expressions(dashboard: Dashboard) -> Iterator[str]:
    for row in dashboard.rows:
        for panel in row.panels:
            for query in getattr(panel, "queries", None) or [panel.query]:  # type: ignore[union-attr]
                yield query.expr.replace("$__rate_interval", "5m")


def nodes(expr: promql.Expr) -> list[promql.Expr]:
    found: list[promql.Expr] = []
    promql.walk(expr, found.append)
    return found


def check(text: str, known: Known) -> None:
    """Fails where an expression names a metric, a label or a value that there is not."""
    found = nodes(promql.parse(text))
    labels: set[str] = set(ADDED)
    for node in found:
        if not isinstance(node, promql.VectorSelector):
            continue
        name = node.name
        assert name in known, f"{name} in {text}"
        has = known[name] | ADDED
        labels |= set(has)
        for matcher in node.matchers.matchers:
            assert matcher.name in has, f"{name} has no label {matcher.name}: {text}"
            if matcher.op == promql.MatchOp.Equal and has[matcher.name]:
                assert matcher.value in has[matcher.name], f"{matcher.value}: {text}"
    for node in found:
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            assert set(node.modifier.labels) <= labels, text


async def test_every_expression_asks_for_what_there_is(known: Known) -> None:
    asked = [rule["expr"] for rule in rules()]
    asked += [expr for dashboard in DASHBOARDS for expr in expressions(dashboard)]
    assert len(asked) > 60
    for text in asked:
        check(text, known)


@pytest.mark.parametrize(
    "text",
    [
        "sum(kvway_router_nothing)",
        'kvway_router_replicas{stat="ready"}',
        'kvway_router_replicas{state="lost"}',
        "sum by (colour) (kvway_router_replicas)",
        "rate(vllm:nothing_total[5m]) > 1",
    ],
)
async def test_what_there_is_not_is_noticed(text: str, known: Known) -> None:
    with pytest.raises(AssertionError):
        check(text, known)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda it: it.uid)
def test_a_dashboard_is_written_as_it_is_defined_and_loads(dashboard: Dashboard) -> None:
    """By Grafana's own model of a dashboard: nothing of the file gets lost in it."""
    text = path_of(dashboard).read_text(encoding="utf-8")
    assert text == dashboard.json(), "run make dashboards"
    content = json.loads(text)
    loaded = GrafanaDashboard.from_json(content)
    assert json.loads(JSONEncoder(sort_keys=True).encode(loaded)) == content
    ids = [panel["id"] for panel in content["panels"]]
    assert len(set(ids)) == len(ids)
    places = [panel["gridPos"] for panel in content["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)


def test_every_dashboard_file_has_a_definition() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {path_of(it).name for it in DASHBOARDS}


def test_every_alert_has_a_case_and_a_line_on_the_page() -> None:
    cases = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text(encoding="utf-8"))
    named = [rule["alert"] for rule in rules()]
    assert len(set(named)) == len(named)
    assert {case["name"] for case in cases["tests"]} == set(named)
    table = re.findall(r"^\| `(Kvway\w+)` \| (\w+) \| (\S+) \|", PAGE, re.MULTILINE)
    assert table == [
        (rule["alert"], rule["labels"]["severity"], rule.get("for", "0m")) for rule in rules()
    ]


def test_jobs_are_those_that_prometheus_scrapes() -> None:
    content = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    assert tuple(job["job_name"] for job in content["scrape_configs"]) == JOBS
    assert {dashboard.job for dashboard in DASHBOARDS} == set(JOBS)


def test_what_compose_mounts_for_monitoring_is_there() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    monitoring = {
        name: service
        for name, service in services.items()
        if "monitoring" in service.get("profiles", ())
    }
    assert set(monitoring) == {"prometheus", "grafana"}
    for service in monitoring.values():
        mounted = [volume for volume in service["volumes"] if volume.startswith("./")]
        assert mounted
        assert all((ROOT / volume.split(":")[0]).exists() for volume in mounted)
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
