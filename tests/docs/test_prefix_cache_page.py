"""docs/prefix-cache.md shows what the real pool and scheduler do.

`pytest --update-golden` draws the pictures of the page anew; read the diff, and the text around
it, before you commit it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvway_worker.cache.cache_stats import MISS_REASONS
from tests.docs.prefix_cache_example import pictures

PAGE = Path(__file__).parents[2] / "docs" / "prefix-cache.md"
PICTURE = re.compile(
    r"(<!-- picture: (?P<name>.+?) -->\n```text\n)(?P<drawn>.*?)(?=^```$)",
    re.MULTILINE | re.DOTALL,
)
GOLDEN = Path(__file__).parents[1] / "golden"
LINK = re.compile(r"\]\((?!https?://)(?P<path>[^)#]+)")


def test_every_picture_of_the_example_is_on_the_page_as_the_pool_draws_it(
    request: pytest.FixtureRequest,
) -> None:
    drawn = dict(pictures())
    text = PAGE.read_text(encoding="utf-8")
    if request.config.getoption("--update-golden"):
        text = PICTURE.sub(lambda m: f"{m[1]}{drawn[m['name']]}\n", text)
        PAGE.write_text(text, encoding="utf-8")
    shown = {match["name"]: match["drawn"] for match in PICTURE.finditer(text)}
    assert list(shown) == list(drawn)
    for name, picture in drawn.items():
        assert shown[name] == f"{picture}\n", f"picture {name}"


def test_what_the_page_links_to_is_there() -> None:
    paths = [match["path"] for match in LINK.finditer(PAGE.read_text(encoding="utf-8"))]
    assert paths
    missing = [path for path in paths if not (PAGE.parent / path).exists()]
    assert not missing


def test_options_metrics_and_reasons_of_the_page_are_the_workers() -> None:
    text = PAGE.read_text(encoding="utf-8")
    options = set(re.findall(r"--[a-z][a-z-]+", (GOLDEN / "worker_help.txt").read_text()))
    asked = set(re.findall(r"(--[a-z][a-z-]+)", text))
    assert asked
    assert asked <= options
    metrics = (GOLDEN / "worker_metrics.txt").read_text()
    named = re.findall(r"((?:vllm:|kvway_worker_)[a-z_]+)", text)
    assert named
    assert not [name for name in named if name not in metrics]
    table = text[text.index("| reason |") : text.index("*Hit rate with")]
    assert tuple(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == MISS_REASONS
