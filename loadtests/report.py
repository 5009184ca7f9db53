"""What every benchmark prints: a table for people, then one JSON object for machines."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Report(msgspec.Struct, frozen=True):
    """One benchmark run: what ran, on which commit and machine, and what it measured."""

    bench: str
    commit: str
    machine: str
    command: str
    metrics: Mapping[str, float | int | str]

    def json(self) -> str:
        """The report as one line of JSON."""
        return msgspec.json.encode(self, order="deterministic").decode()


class Spread(NamedTuple):
    """Of some measurements: the median, and between what the middle half of them lies."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Summarize measurements, at least one."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def metrics(self, key: str, digits: int = 2) -> dict[str, float]:
        """Return the three under `key`, `key_p25` and `key_p75`."""
        names = (key, f"{key}_p25", f"{key}_p75")
        return {name: round(value, digits) for name, value in zip(names, self, strict=True)}

    def text(self, digits: int = 2) -> str:
        """Return the three for a table."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def machine() -> str:
    """Name this machine: processor, usable cores, memory, Python."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0].partition(":")[2].strip() if names else model
    cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {cores} cores, {memory_gib:.0f} GiB, Python {platform.python_version()}"


def commit() -> str:
    """Commit of the working tree, with "+changes" when it is not clean."""
    root = Path(__file__).parent
    head = _git(root, "rev-parse", "--short", "HEAD") or "unknown"
    return head + ("+changes" if _git(root, "status", "--porcelain") else "")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out rows under a header in aligned columns."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(r, widths, strict=True)) for r in cells]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def _git(root: Path, *args: str) -> str:
    done = subprocess.run(  # noqa: S603 - a fixed command, no shell
        ["git", "-C", str(root), *args],  # noqa: S607 - the one on the PATH
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()
