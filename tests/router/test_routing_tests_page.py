"""The page that says which test stands for what: each of them exists, where it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "routing-tests.md").read_text(encoding="utf-8")


def test_each_test_that_is_named_exists_and_those_through_sockets_are_there() -> None:
    where: dict[str, set[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                where.setdefault(node.name, set()).add(path.parent.name)
    named = re.findall(r"(e2e )?`(test_\w+)`", PAGE)
    assert len(named) > 70
    missing = {name for _, name in named if name not in where}
    elsewhere = {name for e2e, name in named if bool(e2e) != ("e2e" in where.get(name, set()))}
    assert (missing, elsewhere) == (set(), set())
