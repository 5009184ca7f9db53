"""PromQL that more than one panel uses. Rates are over Grafana's own interval."""

from __future__ import annotations

INTERVAL = "$__rate_interval"


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Returns the rate of a counter of the instances picked, summed by labels."""
    return f"{_sum(by)}(rate({picked(metric, where)}[{INTERVAL}]))"


def ratio(part: str, whole: str, by: str = "") -> str:
    """Returns one counter's rate by another's, 0 to 1."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def quantile(share: float, histogram: str) -> str:
    """Returns a quantile of a histogram of the instances picked, all together."""
    return f"histogram_quantile({share:g}, {rate(f'{histogram}_bucket', 'le')})"


def total(metric: str, by: str = "", where: str = "") -> str:
    """Returns a gauge of the instances picked, summed by labels."""
    return f"{_sum(by)}({picked(metric, where)})"


def picked(metric: str, where: str = "") -> str:
    """Returns a metric's selector for the instances picked."""
    matchers = 'instance=~"$instance"' + (f", {where}" if where else "")
    return f"{metric}{{{matchers}}}"


def _sum(by: str) -> str:
    return f"sum by ({by}) " if by else "sum "
