"""docs/cascade.md: its example is what the cost model says, its metrics and links are there."""

from __future__ import annotations

import re
from pathlib import Path

from kvway_worker.scheduling.prefix_groups import (
    MARGIN,
    CascadeCosts,
    PrefixGroups,
    TableRow,
    paying,
)

PAGE = Path(__file__).parents[2] / "docs" / "cascade.md"
GOLDEN = Path(__file__).parents[1] / "golden"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLE = CascadeCosts(paged_key=1.0, run=300.0, run_key=1.0, run_pair=0.2, merge=5.0)
ROW = re.compile(
    r"^\| (\d+) \| (\d+) \| (\d+) µs \| .* = ([\d.]+) µs \| ([\d.]+) µs \| (pays|does not) \|$",
    re.MULTILINE,
)


def test_the_example_is_what_the_model_says() -> None:
    for name in ("paged_key 1 µs", "run 300 µs", "run_key 1 µs", "run_pair 0.2 µs", "merge 5 µs"):
        assert name in TEXT
    rows = ROW.findall(TEXT)
    assert len(rows) == 3
    for members, tokens, alone, together, with_margin, verdict in rows:
        n, p = int(members), int(tokens)
        assert float(alone) == n * p * EXAMPLE.paged_key
        expected = EXAMPLE.run + p * EXAMPLE.run_key + n * p * EXAMPLE.run_pair + n * EXAMPLE.merge
        assert round(expected, 1) == float(together)
        assert round((1 + MARGIN) * expected, 1) == float(with_margin)
        assert EXAMPLE.pays(n, p) == (verdict == "pays")


def test_of_a_system_prompt_and_a_header_the_first_is_read_once() -> None:
    system, header = range(32), range(32, 64)
    tables = [
        *((*system, *header, own) for own in (100, 101)),
        *((*system, own, own + 10) for own in (200, 201)),
    ]
    rows = [TableRow(str(i), t, len(t) * 16 - 1, len(t) * 16) for i, t in enumerate(tables)]
    runs = PrefixGroups(16).update(rows)
    assert runs == (((0, 1, 2, 3), 0, 32), ((0, 1), 32, 32))
    assert paying(runs, EXAMPLE, block_size=16) == runs[:1]


def test_the_drawing_is_what_is_found() -> None:
    tables = ["SSSAAx", "SSSAAyz", "SSSBu", "SSSBvw", "tu"]
    rows = [
        TableRow(str(i), [ord(c) for c in t], len(t) * 16 - 1, len(t) * 16)
        for i, t in enumerate(tables)
    ]
    drawn = re.findall(r"\{([\d ]+)\} x (\d+) block", TEXT)
    found = [
        (" ".join(map(str, run.members)), str(run.num_blocks))
        for run in PrefixGroups(16).update(rows)
    ]
    assert drawn == found


def test_metrics_options_and_links_are_there() -> None:
    metrics = (GOLDEN / "worker_metrics.txt").read_text(encoding="utf-8")
    named = re.findall(r"kvway_(?:attention|cascade)_[a-z_]+", TEXT)
    assert len(named) >= 6
    assert not [name for name in named if name not in metrics]
    options = (GOLDEN / "worker_help.txt").read_text(encoding="utf-8")
    assert "--no-cascade" in options
    assert "--deterministic" in options
    links = re.findall(r"\]\((?!https?://)([^)#]+)", TEXT)
    measured = {"cascade-speedup.svg", "../loadtests/results/cascade.json"}
    missing = [link for link in links if not (PAGE.parent / link).exists()]
    assert not set(missing) - measured
