"""The soak finds what grows, and a short one runs through without an error."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from loadtests import soak
from loadtests.soak import LIMITS, Samples, grown


def samples(resident_mb: list[float], num_files: list[int]) -> Samples:
    """One reading a minute."""
    return Samples([float(n) for n in range(len(resident_mb))], resident_mb, num_files)


def test_growth_is_what_comes_after_the_warm_up() -> None:
    warm = [50.0, 60.0, 70.0]
    flat = samples([*warm, *[70.0] * 6], [10, 40, 90, *[12] * 6])
    assert flat.mb_per_min() == pytest.approx(0)
    assert flat.more_files() == 0
    growing = samples([*warm, *[70.0 + n / 2 for n in range(6)]], [9, 9, 9, *range(20, 32, 2)])
    assert growing.mb_per_min() == pytest.approx(0.5)
    assert growing.more_files() == 10


@pytest.mark.parametrize("key", LIMITS)
def test_what_grows_beyond_its_limit_breaks_a_promise_of_a_long_run(key: str) -> None:
    metrics: dict[str, float | int] = dict(LIMITS)
    assert grown(metrics, minutes=30) == []
    metrics[key] += 0.1
    (failure,) = grown(metrics, minutes=30)
    assert failure.startswith(key)
    assert grown(metrics, minutes=1) == []


def test_memory_and_files_of_a_process_are_read() -> None:
    read = Samples()
    read.read(os.getpid(), 0.5)
    with Path(os.devnull).open():
        read.read(os.getpid(), 1.0)
    assert read.minutes == [0.5, 1.0]
    assert read.num_files[1] == read.num_files[0] + 1
    assert 10 < read.resident_mb[0] < 100_000


@pytest.mark.e2e
def test_a_short_soak_runs_through(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    argv = ["--minutes", "0.1", "--every", "2", "--seed", "3", "--output", str(output)]
    code = soak.main(argv)
    printed = capsys.readouterr()
    assert code == 0, printed.out + printed.err
    report = json.loads(printed.out.splitlines()[-1])
    assert report == json.loads(output.read_text())
    metrics = report["metrics"]
    assert metrics["requests"] == 120
    assert set(metrics) >= {*LIMITS, "loop_busy_ms_p99", "leaked_inflight"}
    assert metrics["router_files"] > 5
    assert metrics["loop_busy_ms_max"] > 0
