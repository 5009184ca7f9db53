"""The relay benchmark measures what it says, and the peers that are not there are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvway_core.testing.byte_model import write_byte_model
from loadtests import bench_relay
from loadtests.bench_relay import Measured, Sample, figures, scenarios
from loadtests.load_peers import OURS, PEERS, command

PROMISED = {"small_rps_per_core", "added_ms_p50", "added_ms_p99", "cpu_us_per_chunk"}


@pytest.mark.e2e
def test_the_report_has_the_figures_it_promises_and_names_who_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = tmp_path / "report.json"
    argv = ["--rounds", "1", "--seconds", "0.1", "--requests", "20", "--output", str(output)]
    argv += ["--only", "small", "stream"]
    argv += ["--model", str(write_byte_model(tmp_path / "model"))]
    argv += [word for name in PEERS for word in (f"--{name}", str(tmp_path / "nobody"))]
    assert bench_relay.main(argv) == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert report == json.loads(output.read_text())
    metrics = report["metrics"]
    assert metrics.keys() >= PROMISED
    assert metrics["missing"] == "sglang-router, nginx, haproxy"
    assert all(f"{name}: not here" in out for name in PEERS)
    assert metrics["small_rps_per_core"] > 0


def test_ratios_are_requests_per_core_of_ours_over_theirs() -> None:
    def samples(*cpu_us: float) -> list[Sample]:
        return [Sample(us, 1.0, 2.0, 100.0) for us in cpu_us]

    measured = Measured(
        samples={
            "small": {OURS: samples(100, 200, 100), "sglang-router": samples(150, 300, 500)},
            "stream": {OURS: samples(2500), "sglang-router": samples(5000)},
        },
        added={OURS: (0.25, 0.5), "nginx": (0.02, 0.03)},
        versions={OURS: "1"},
    )
    metrics = figures(measured)
    assert metrics["small_rps_per_core"] == 10_000
    assert metrics["small_vs_sglang_router"] == 1.5
    assert metrics["stream_vs_sglang_router"] == 2
    assert metrics["cpu_us_per_chunk"] == 25
    assert metrics["added_ms_p50"] == 0.25
    assert metrics["nginx_added_ms_p99"] == 0.03


def test_big_requests_share_their_documents_and_nothing_else() -> None:
    (big,) = (scenario for scenario in scenarios() if scenario.name == "big")
    bodies = [json.loads(big.body(number)) for number in range(16)]
    documents = {body["messages"][0]["content"] for body in bodies}
    assert len(documents) == bench_relay.NUM_DOCUMENTS
    assert all(60_000 < len(document) < 72_000 for document in documents)
    assert len({body["messages"][1]["content"] for body in bodies}) == 16


@pytest.mark.parametrize("name", [OURS, *PEERS])
def test_every_router_is_told_of_all_replicas(name: str, tmp_path: Path) -> None:
    urls = ["http://127.0.0.1:5001", "http://127.0.0.1:5002"]
    words = command(
        name, Path("/bin/x"), port=5000, replicas=urls, folder=tmp_path, model=Path("model")
    )
    told = " ".join(words) + "".join(path.read_text() for path in tmp_path.iterdir())
    assert "5000" in told
    assert all(url.removeprefix("http://") in told for url in urls)
