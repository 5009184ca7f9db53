"""The admin API and the files of the page."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from tests.router.conftest import Bench

UI = resources.files("kvway_router") / "ui"
PAGE = (UI / "index.html").read_text()
SCRIPT = (UI / "app.js").read_text()
STYLE = (UI / "style.css").read_text()


async def test_decisions_are_listed_newest_first(bench: Bench) -> None:
    ids = [(await bench.chat(text))[1]["x-kvway-request-id"] for text in ("a", "b", "c")]
    listed = await bench.get(bench.admin("/admin/decisions?limit=2"))
    assert [decision["id"] for decision in listed["decisions"]] == ids[:0:-1]


@pytest.mark.parametrize("limit", ["0", "-1", "x", "", "1e3", "٣", "9" * 30])
async def test_a_bad_limit_is_refused(bench: Bench, limit: str) -> None:
    url = bench.admin("/admin/decisions")
    async with bench.client.get(url, params={"limit": limit}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "limit"


async def test_an_unknown_decision_is_404(bench: Bench) -> None:
    async with bench.client.get(bench.admin("/admin/decisions/nope")) as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "not_found"


async def test_replicas_show_their_state(bench: Bench) -> None:
    view = await bench.get(bench.admin("/admin/replicas"))
    (replica,) = view["replicas"]
    assert replica["replica_id"] == bench.replica.replica_id
    assert replica["url"] == bench.replica.url
    assert (replica["state"], replica["error"], replica["blocks_total"]) == ("ready", "", 1000)
    assert replica["fed"] is False
    assert view["totals"]["requests"] == 0


@pytest.mark.parametrize(
    ("content_type", "path"),
    [
        ("text/html", "/"),
        ("text/javascript", "/app.js"),
        ("text/css", "/style.css"),
        ("image/svg+xml", "/icon.svg"),
    ],
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


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for text in (PAGE, SCRIPT, STYLE):
        assert "//" not in re.sub(r"^\s*//.*", "", text, flags=re.MULTILINE)


def test_the_page_inserts_text_and_never_markup() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval", SCRIPT)
    assert not re.search(r"\son\w+=|\sstyle=|<script(?! src=)|<style", PAGE)


def test_every_element_that_the_script_names_is_on_the_page() -> None:
    named = set(re.findall(r'byId\("([\w-]+)"\)', SCRIPT))
    assert named
    assert named <= set(re.findall(r'\bid="([\w-]+)"', PAGE))
