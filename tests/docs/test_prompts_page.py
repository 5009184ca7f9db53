"""The rules of docs/prompts.md, measured."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from kvway_router.check import run

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\|.*\| `(\w+)` \| ([\d.]+%) \| ([\d.]+%) \|$", re.MULTILINE)


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prompts", DOCS / "examples" / "prompts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_rule_raises_the_hit_rate_as_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example()
    module.write(tmp_path)
    measured = {}
    for name in module.EXAMPLES:
        assert run([str(tmp_path / f"{name}-before.jsonl"), "--fail-over", "5%"]) == 1
        before = capsys.readouterr().out
        assert run([str(tmp_path / f"{name}-after.jsonl"), "--fail-over", "0%"]) == 0
        after = capsys.readouterr().out
        assert "\n1. " in before
        assert "no prefix killer found" in after
        measured[name] = tuple(
            re.findall(r"an endless cache would hold ([\d.]+%)", told)[0]
            for told in (before, after)
        )
    page = (DOCS / "prompts.md").read_text(encoding="utf-8")
    assert {name: (before, after) for name, before, after in ROW.findall(page)} == measured


def test_the_page_shows_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example()
    module.write(tmp_path)
    assert run([str(tmp_path / "time-before.jsonl")]) == 0
    told = capsys.readouterr().out
    page = (DOCS / "prompts.md").read_text(encoding="utf-8")
    shown = page.split("$ kvway check requests.jsonl\n")[1].split("```")[0]
    assert shown in told
