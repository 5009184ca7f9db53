"""The load tests, short: what holds in every run is promised here, times are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests import load_run
from loadtests.load_run import JUDGED_S, PARTS, broken


@pytest.mark.e2e
@pytest.mark.parametrize("part", PARTS)
def test_a_short_load_keeps_its_promises(
    part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = tmp_path / "report.json"
    code = load_run.main(["--only", part, "--seconds", "2", "--output", str(output)])
    printed = capsys.readouterr()
    assert code == 0, printed.out + printed.err
    report = json.loads(printed.out.splitlines()[-1])
    assert report == json.loads(output.read_text())
    promised = {*PARTS[part].AT_MOST, *PARTS[part].AT_LEAST}
    assert promised <= report["metrics"].keys()


@pytest.mark.parametrize("key", [key for part in PARTS.values() for key in part.AT_MOST])
def test_more_than_was_promised_is_said(key: str) -> None:
    (limit,) = (part.AT_MOST[key] for part in PARTS.values() if key in part.AT_MOST)
    assert broken({key: limit}, seconds=JUDGED_S) == []
    (failure,) = broken({key: limit + 1}, seconds=JUDGED_S)
    assert failure.startswith(key)


@pytest.mark.parametrize("key", [key for part in PARTS.values() for key in part.AT_LEAST])
def test_less_than_was_promised_is_said(key: str) -> None:
    (limit,) = (part.AT_LEAST[key] for part in PARTS.values() if key in part.AT_LEAST)
    assert broken({key: limit}, seconds=JUDGED_S) == []
    assert len(broken({key: limit / 2}, seconds=JUDGED_S)) == 1


def test_times_of_a_short_run_are_not_judged() -> None:
    assert broken({"lag_loop_ms_max": 1e6, "overload_goodput": 0.1}, seconds=2.0) == []
    assert broken({"lag_broken": 1}, seconds=2.0) != []
