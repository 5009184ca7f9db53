"""A short run of the chaos: every promise is kept, and the report says all it is to say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests import chaos

PROMISED = {
    "requests",
    "lost_before_first_byte",
    "without_terminal_state",
    "crossed",
    "duplicated",
    "leaked_inflight",
    "attempts_per_request",
    "seed",
}


@pytest.mark.e2e
def test_a_short_run_keeps_every_promise(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output, plot = tmp_path / "report.json", tmp_path / "timeline.svg"
    argv = ["--requests", "300", "--rate", "25", "--seed", "7"]
    argv += ["--output", str(output), "--plot", str(plot)]
    code = chaos.main(argv)
    printed = capsys.readouterr()
    assert code == 0, printed.out + printed.err
    report = json.loads(printed.out.splitlines()[-1])
    assert report == json.loads(output.read_text())
    metrics = report["metrics"]
    assert set(metrics) >= PROMISED
    assert metrics["requests"] == 300
    assert metrics["faults"] >= 5
    assert metrics["done"] > 150
    assert f"seed {metrics['seed']}" in printed.err
    assert plot.read_text().startswith("<svg")
