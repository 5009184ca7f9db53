"""Where the figures of the cascade benchmark are kept: raw, as a plot, and on the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from loadtests.report import Report

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "loadtests" / "results" / "cascade.json"
PLOT: Final = ROOT / "docs" / "cascade-speedup.svg"
PAGE: Final = ROOT / "docs" / "cascade.md"
BEGIN: Final = "<!-- measured: begin -->"
END: Final = "<!-- measured: end -->"


class Outcome(NamedTuple):
    """What one part measured: a table for people, numbers for machines."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    metrics: Mapping[str, float]


def publish(
    outcomes: Sequence[Outcome], report: Report, *, plot: str, at: tuple[int, int]
) -> None:
    """Write the raw figures, the plot and the page; see `with_measured`."""
    RESULTS.write_text(report.json() + "\n", encoding="utf-8")
    PLOT.write_text(plot, encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_measured(text, outcomes, report, at=at), encoding="utf-8")


def with_measured(
    page: str, outcomes: Sequence[Outcome], report: Report, *, at: tuple[int, int]
) -> str:
    """Return the page with this run's figures in place of those between its two marks.

    Args:
        page: The page.
        outcomes: Of all parts.
        report: The figures that have a name.
        at: Shared and own tokens of the rows to show, where a table has such rows.
    """
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [BEGIN, "", f"{report.machine}; `{report.command}`.", ""]
    for outcome in outcomes:
        rows = [row for row in outcome.rows if set(at) <= set(row)] or outcome.rows
        lines += [f"{outcome.title}:", "", _markdown(outcome.header, rows), ""]
    named = {key: value for key, value in report.metrics.items() if not key.startswith("ms_")}
    figures = [(f"`{key}`", value) for key, value in sorted(named.items())]
    return before + "\n".join([*lines, _markdown(("figure", ""), figures), "", END]) + after


def _markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in cells)
