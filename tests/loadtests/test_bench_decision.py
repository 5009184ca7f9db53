"""The decision benchmark measures what it says, on little."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests import bench_decision
from loadtests.bench_decision import MIXES, NAMESPACE, SIZES, Bench, prompt_of

PROMISED = {"decision_ms_2k", "decision_ms_8k", "decision_ms_131k", "next_turn_ms_131k"}


def test_the_report_has_the_figures_it_promises_or_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = tmp_path / "report.json"
    assert bench_decision.main(["--rounds", "1", "--output", str(output)]) == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert report == json.loads(output.read_text())
    measured = set(report["metrics"])
    assert measured >= PROMISED
    assert {"vs_dynamo_8k", "vs_dynamo_131k"} <= measured or "dynamo: not here" in out
    assert all(report["metrics"][key] > 0 for key in PROMISED)


@pytest.mark.parametrize("num_lengths", sorted(MIXES.values()))
def test_what_is_measured_is_a_decision_about_all_replicas(num_lengths: int) -> None:
    prompt = prompt_of(SIZES["2k"], seed=1)
    bench = Bench([prompt], num_lengths=num_lengths)
    decision = bench.decide(prompt, bench.chains)
    num_blocks = SIZES["2k"] // NAMESPACE.block_size
    held = [c.matched_blocks for c in decision.candidates]
    assert sorted(held) == sorted(
        num_blocks * (number % num_lengths) // num_lengths for number in range(16)
    )
    assert len(set(held)) == num_lengths
    assert len({c.queued_s for c in decision.candidates}) > 1
