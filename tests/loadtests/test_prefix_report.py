"""What `make prefix-report` counts, and that it fails when less is found."""

from __future__ import annotations

import json

import pytest

from kvway_core.testing.planted_prompts import Case, Span, clean_case, planted_case
from kvway_router.prefixes.finder import PrefixFinder
from loadtests import prefix_report
from loadtests.prefix_report import score


def test_the_last_line_is_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    code = prefix_report.main(["--cases", "13", "--first-seed", "800", "--clean-seeds", "1"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert {"precision", "recall", "kind_accuracy", "clean_false_findings"} <= set(
        result["metrics"]
    )
    assert result["metrics"]["recall"] == 1


def test_nothing_found_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PrefixFinder, "findings", lambda *_, **__: [])
    assert prefix_report.main(["--cases", "13", "--clean-seeds", "1"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]["recall"] == 0


def test_a_finding_on_clean_traffic_counts_against_it() -> None:
    case = planted_case("uuid", seed=1)
    result = score([Case(case.name, None, case.requests, (None,) * len(case.requests))])
    assert (result.extra, result.precision) == (1, 0.0)


def test_another_kind_and_another_place_are_wrong() -> None:
    case = planted_case("uuid", seed=1)
    named = score([Case(case.name, "date", case.requests, case.spans)])
    assert (named.found.total(), named.named.total(), named.recall) == (1, 0, 0.0)
    spans = tuple(span and Span(span.message, span.end + 1, span.end + 9) for span in case.spans)
    placed = score([Case(case.name, "uuid", case.requests, spans)])
    assert (placed.named.total(), placed.placed.total(), placed.kind_accuracy) == (1, 0, 1.0)
    assert score([clean_case("chats", seed=1)]).recall == 0
