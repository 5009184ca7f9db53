"""The files of the page: served with a strict policy, whole, and safe against what they show."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from kvway_router import admin_views
from tests.router.conftest import Bench

UI = resources.files("kvway_router") / "ui"
PAGE = (UI / "index.html").read_text()
SCRIPTS = {
    name: (UI / name).read_text()
    for name, kind in admin_views._FILES.items()
    if kind == "text/javascript" and not name.startswith("vendor/")
}
STYLES = [
    (UI / name).read_text()
    for name, kind in admin_views._FILES.items()
    if kind == "text/css" and not name.startswith("vendor/")
]


@pytest.mark.parametrize(
    ("content_type", "path"),
    [("text/html", "/ui")]
    + [(content_type, f"/ui/{name}") for name, content_type in admin_views._FILES.items()],
)
async def test_the_page_is_served_with_a_strict_policy(
    bench: Bench, content_type: str, path: str
) -> None:
    async with bench.client.get(bench.admin(path)) as response:
        assert response.status == 200
        assert response.content_type == content_type
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert await response.read()


@pytest.mark.parametrize("path", ["/", "/ui/"])
async def test_the_root_leads_to_the_page(bench: Bench, path: str) -> None:
    async with bench.client.get(bench.admin(path)) as response:
        assert (response.status, response.url.path) == (200, "/ui")
        assert response.content_type == "text/html"


def test_every_file_of_the_page_is_served() -> None:
    folders = [UI, UI / "vendor"]
    there = {path.name for folder in folders for path in folder.iterdir() if path.is_file()}
    assert there - {"index.html"} == {name.split("/")[-1] for name in admin_views._FILES}


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for text in (PAGE, *SCRIPTS.values(), *STYLES):
        assert "//" not in re.sub(r"(^|\s)// .*", "", text, flags=re.MULTILINE)


def test_the_page_inserts_text_and_never_markup() -> None:
    for script in SCRIPTS.values():
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|new Function", script
        )
    assert not re.search(r"\son\w+=|\sstyle=|<script(?! src=)|<style", PAGE)


def test_every_element_that_the_scripts_name_is_on_the_page() -> None:
    named = {name for text in SCRIPTS.values() for name in re.findall(r'byId\("([\w-]+)"\)', text)}
    assert named
    assert named <= set(re.findall(r'\bid="([\w-]+)"', PAGE))


def test_the_chart_library_comes_with_its_licence() -> None:
    assert "Leon Sorokin" in (UI / "vendor" / "uPlot.LICENSE.txt").read_text()
    assert "uPlot" in (UI / "vendor" / "uPlot.iife.min.js").read_text()[:300]
