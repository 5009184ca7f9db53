"""A Grafana dashboard as a value: rows of panels, each with its PromQL; and its JSON."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard

WIDTH = 24
STAT_HEIGHT = 4
CHART_HEIGHT = 8
DATASOURCE = "$datasource"


@dataclass(frozen=True, slots=True)
class Query:
    """What is drawn, and what a line is called: may name labels as ``{{label}}``."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over time.

    Attributes:
        title: What is seen, no full stop.
        text: How to read it.
        queries: The lines.
        unit: Grafana's name of the unit.
        stacked: Whether the lines add up.
        width: Of 24.
    """

    title: str
    text: str
    queries: Sequence[Query]
    unit: str = "short"
    stacked: bool = False
    width: int = 8


@dataclass(frozen=True, slots=True)
class Number:
    """One number now, with its curve behind it."""

    title: str
    text: str
    query: Query
    unit: str = "short"
    width: int = 4


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one title."""

    title: str
    panels: Sequence[Chart | Number]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard.

    Attributes:
        uid: Its name in addresses, for good.
        title: What it is of.
        job: Prometheus job whose instances can be picked as ``$instance``.
        rows: What it shows.
    """

    uid: str
    title: str
    job: str
    rows: Sequence[Row]

    def json(self) -> str:
        """Returns what Grafana loads."""
        built = (
            dashboards.Dashboard(self.title)
            .uid(self.uid)
            .tags(["kvway"])
            .refresh("10s")
            .time("now-1h", "now")
            .timezone("browser")
            .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
            .with_variable(
                dashboards.DatasourceVariable("datasource").label("Source").type("prometheus")
            )
            .with_variable(
                dashboards.QueryVariable("instance")
                .label("Instance")
                .query(f'label_values(up{{job="{self.job}"}}, instance)')
                .datasource(_source())
                .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
                .multi(multi=True)
                .include_all(include_all=True)
                .all_value(".*")
            )
        )
        ids = itertools.count(1)
        for row in self.rows:
            built = built.with_row(dashboards.Row(row.title).id(next(ids)))
            for panel in row.panels:
                built = built.with_panel(_panel(panel).id(next(ids)))
        return JSONEncoder(sort_keys=True, indent=1).encode(built.build()) + "\n"


def _source() -> dashboard.DataSourceRef:
    return dashboard.DataSourceRef(type_val="prometheus", uid=DATASOURCE)


def _target(number: int, query: Query) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).ref_id(chr(ord("A") + number))
    return target.legend_format(query.legend) if query.legend else target


def _panel(panel: Chart | Number) -> timeseries.Panel | stat.Panel:
    if isinstance(panel, Number):
        return (
            stat.Panel()
            .title(panel.title)
            .description(panel.text)
            .datasource(_source())
            .unit(panel.unit)
            .span(panel.width)
            .height(STAT_HEIGHT)
            .with_target(_target(0, panel.query))
        )
    built = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.text)
        .datasource(_source())
        .unit(panel.unit)
        .span(panel.width)
        .height(CHART_HEIGHT)
        .axis_soft_min(0)
        .fill_opacity(30 if panel.stacked else 5)
        .legend(
            common_builders.VizLegendOptions()
            .show_legend(show_legend=True)
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
        )
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    )
    if panel.stacked:
        stacking = common_builders.StackingConfig().mode(common.StackingMode.NORMAL)
        built = built.stacking(stacking)
    for number, query in enumerate(panel.queries):
        built = built.with_target(_target(number, query))
    return built
