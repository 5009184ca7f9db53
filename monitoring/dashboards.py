"""Writes the Grafana dashboards: ``python -m monitoring.dashboards``, or ``make dashboards``."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from monitoring.fleet_dashboard import FLEET
from monitoring.panels import Dashboard
from monitoring.router_dashboard import ROUTER
from monitoring.worker_dashboard import WORKER

FOLDER: Final = Path(__file__).parent / "grafana" / "dashboards"
DASHBOARDS: Final[tuple[Dashboard, ...]] = (FLEET, ROUTER, WORKER)


def path_of(dashboard: Dashboard) -> Path:
    """Returns the file of a dashboard."""
    return FOLDER / f"{dashboard.uid}.json"


def main() -> None:
    """Writes them all."""
    for dashboard in DASHBOARDS:
        path_of(dashboard).write_text(dashboard.json(), encoding="utf-8")


if __name__ == "__main__":
    main()
