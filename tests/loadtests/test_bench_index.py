"""The index benchmark measures what it says, on little."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests import bench_index
from loadtests.bench_index import MIXES, NUM_REPLICAS, Mix, events

PROMISED = {
    "store_blocks_per_s",
    "bytes_per_block_replica",
    "match_us_8k_blocks_64_replicas",
}


def test_the_report_has_the_figures_it_promises(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = tmp_path / "report.json"
    argv = ["--blocks", "32768", "--rounds", "1", "--output", str(output)]
    assert bench_index.main(argv) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report == json.loads(output.read_text())
    assert set(report["metrics"]) >= PROMISED
    assert all(report["metrics"][key] > 0 for key in PROMISED)


@pytest.mark.parametrize("mix", [*MIXES, Mix("", 128, 16)])
def test_events_are_as_long_and_as_shared_as_their_mix_says(mix: Mix) -> None:
    made = list(events(8 * NUM_REPLICAS * mix.num_blocks, mix=mix, num_heads=4))
    assert {len(event.hashes) for event in made} == {mix.num_blocks}
    heads = {tuple(event.hashes[: mix.num_shared]) for event in made}
    assert len(heads) == (4 if mix.num_shared else 1)
    tails = {h for event in made for h in event.hashes[mix.num_shared :]}
    assert len(tails) == len(made) * (mix.num_blocks - mix.num_shared)
    of_first = {tuple(e.hashes[: mix.num_shared]) for e in made if e.replica == 0}
    assert of_first == heads
