"""What the scripts of the page reckon, by the Node.js that comes with playwright: no browser."""

from __future__ import annotations

import json
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import playwright
import pytest

NODE = Path(playwright.__file__).parent / "driver" / "node"
UNKNOWN = "\u2013"
UI = resources.files("kvway_router") / "ui"


def run(module: str, expression: str) -> Any:
    """Returns the value of an expression that may use `m`, a module of the page."""
    script = (
        f"const m = await import({json.dumps('file:' + str(UI / module))});"
        f"console.log(JSON.stringify({expression}));"
    )
    done = subprocess.run(
        [NODE, "--input-type=module", "--no-warnings", "-e", script],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_numbers_are_short_and_say_when_they_are_not_known() -> None:
    shown = run(
        "format.js",
        "[m.short(1234567), m.short(12345), m.short(9999), m.short(0.5), m.short(null),"
        " m.percent(1, 8), m.percent(8, 8), m.percent(0, 8), m.percent(1, 0),"
        " m.seconds(0.0042), m.seconds(0.25), m.seconds(2.5), m.seconds(null), m.seconds(0),"
        " m.span(30), m.span(600), m.span(7200), m.span(null)]",
    )
    assert shown == [
        *("1.23 M", "12.3 k", "9,999", "0.50", UNKNOWN),
        *("12.5\u00a0%", "100\u00a0%", "0\u00a0%", UNKNOWN),
        *("4.2 ms", "250 ms", "2.50 s", UNKNOWN, "0"),
        *("30 s", "10 min", "2.0 h", "over an hour"),
    ]


def test_a_replica_keeps_its_colour_while_others_come_and_go() -> None:
    shown = run(
        "format.js",
        "[['a', 'b'], ['b', 'c'], ['b', 'c', 'd']].map((names) => {"
        " m.nameReplicas(names); return names.map(m.colour); }).concat([[m.colour('x')]])",
    )
    assert shown == [
        ["var(--r0)", "var(--r1)"],
        ["var(--r1)", "var(--r0)"],
        ["var(--r1)", "var(--r0)", "var(--r2)"],
        ["var(--quiet)"],
    ]


def test_boxes_of_the_tree_lie_within_the_box_before_them_and_side_by_side() -> None:
    # A run that four prompts pass, of which two go on one way and one another; and an idle run.
    branches = [
        {"parent": -1, "w": 4},
        {"parent": 0, "w": 1},
        {"parent": 0, "w": 2},
        {"parent": -1, "w": 0},
    ]
    boxes = run("tree.js", f"m.layOut({json.dumps(branches)}, (b) => b.w)")
    assert boxes[0] == {"left": 0, "width": 1, "row": 0}
    assert boxes[2] == {"left": 0, "width": 0.5, "row": 1}  # the wider one first
    assert boxes[1] == {"left": 0.5, "width": 0.25, "row": 1}
    assert boxes[3] == {"left": 1, "width": 0, "row": 0}
    assert run("tree.js", "m.layOut([], (b) => b.w)") == []


@pytest.mark.parametrize(
    ("since", "left"), [(60, [950, 1000]), (1, [1000]), (3600, [900, 950, 1000])]
)
def test_what_is_recent_is_reckoned_from_the_newest_sample(since: int, left: list[int]) -> None:
    samples = [{"time": time} for time in (900, 950, 1000)]
    kept = run("fleet.js", f"m.lately({json.dumps(samples)}, {since})")
    assert [sample["time"] for sample in kept] == left
