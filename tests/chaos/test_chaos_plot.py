"""The timeline shows every fault and every kind of end, and is XML."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

from loadtests.chaos_clients import Ending
from loadtests.chaos_faults import Kind, Mark
from loadtests.chaos_plot import svg
from tests.chaos.test_chaos_ledger import DONE


def test_the_timeline_shows_each_fault_and_each_end() -> None:
    outcomes = [replace(DONE, ending=ending, ended_s=float(n)) for n, ending in enumerate(Ending)]
    marks = [Mark(kind, "ab"[n % 2], "a:1", "<detail>", n, n + 0.5) for n, kind in enumerate(Kind)]
    root = ET.fromstring(svg(outcomes, marks))  # noqa: S314 - made above
    name = "{http://www.w3.org/2000/svg}"
    titles = [title.text for title in root.iter(f"{name}title")]
    assert sorted(map(str, titles)) == sorted(f"{kind} <detail>" for kind in Kind)
    texts = [text.text for text in root.iter(f"{name}text")]
    assert {*(ending.value for ending in Ending), "worker a", "worker b"} <= set(texts)
    filled = [rect.get("fill") for rect in root.iter(f"{name}rect")]
    assert all(filled.count(colour) >= 2 for colour in set(filled) - {"white"})
