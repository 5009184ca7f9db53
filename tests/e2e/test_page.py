"""The page in a real browser, which asks a real router over real workers.

They run where there is a Chromium (Debian's package `chromium`); what the page asks for is tested
without one in tests/router/test_ui_*.py.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
from playwright.async_api import async_playwright, expect

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

    from tests.e2e.harness import Cluster, Process

pytestmark = [pytest.mark.e2e]

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
expect.set_options(timeout=20_000)
STABLE = "You answer in one sentence and you never guess. " * 16


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """A browser without a window."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    # The sandbox of a browser does not start as root, and only our own page is opened.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        try:
            yield browser
        finally:
            await browser.close()


class Watched:
    """A page, what it asked for, and what its console complained about."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.asked: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._console)

    def _console(self, message: Any) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(message.text)


async def opened(browser: Browser, router: Process, **options: Any) -> Watched:
    """Opens the page of a router and waits until it is live."""
    watched = Watched(await browser.new_page(**options))
    await watched.page.goto(router.ready["admin"] + "/ui")
    await watched.page.wait_for_selector("#live.ok")
    return watched


def chat(system: str, question: str) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": question},
    ]
    return {"model": "tiny", "messages": messages, "max_tokens": 4}


async def post(cluster: Cluster, router: Process, body: dict[str, Any]) -> str:
    """Sends a chat and returns its id."""
    url = router.ready["api"] + "/v1/chat/completions"
    async with cluster.http.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        return response.headers["x-kvway-request-id"]


async def test_the_page_loads_updates_zooms_and_shows_a_planted_killer(
    cluster: Cluster, browser: Browser
) -> None:
    router = await cluster.router(await cluster.worker("a"), await cluster.worker("b"))
    watched = await opened(browser, router)
    page = watched.page
    await expect(page.locator("#replicas tr")).to_have_count(2)
    assert await page.inner_text("#no-decisions") == (
        "No request yet. Send one to the API address and it shows up here."
    )

    # It updates by itself.
    await post(cluster, router, chat(STABLE, "Rivers?"))
    request_id = await post(cluster, router, chat(STABLE, "Mountains?"))
    await expect(page.locator("#decisions tr")).to_have_count(2)

    # One request: its reason, its candidates, by the keyboard alone.
    await page.focus(f"[data-id='{request_id}']")
    await page.keyboard.press("Enter")
    await page.wait_for_selector("#detail[open]")
    assert request_id in await page.inner_text("#detail-title")
    assert await page.locator("#detail-candidates .candidate").count() == 2
    await page.keyboard.press("Escape")
    await page.wait_for_selector("#detail:not([open])", state="attached")

    # The tree: the shared run, and behind it the two questions.
    await expect(page.locator("#icicle .branch").nth(2)).to_be_visible()
    await page.locator("#icicle .branch").first.focus()
    await page.keyboard.press("ArrowDown")
    child = await page.evaluate("document.activeElement.dataset.branch")
    await page.keyboard.press("Enter")
    await expect(page.locator("#crumbs button")).to_have_count(2)
    await expect(page.locator("#icicle .branch").first).to_have_attribute("data-branch", child)
    assert "of the last 2 requests" in await page.inner_text("#branch")
    await page.keyboard.press("Escape")
    await expect(page.locator("#icicle .branch").nth(2)).to_be_visible()

    # An id in front of what is always the same.
    for number in range(12):
        session = f"{0xA3F19C20 + 7919 * number:08x}-77aa-4c01-9f3e-{number * 99991:012x}"
        await post(cluster, router, chat(f"Session {session}. {STABLE}", "Now?"))
    await page.wait_for_selector("#killers .killer")
    killer = await page.inner_text("#killers .killer")
    assert "system message 1" in killer
    assert "uuid" in killer
    assert "a3f19c20" not in killer

    # Nothing came from elsewhere, and nothing went wrong.
    assert all(url.startswith(router.ready["admin"]) for url in watched.asked)
    assert watched.complaints == []


async def test_the_playground_shows_who_holds_a_prompt(cluster: Cluster, browser: Browser) -> None:
    router = await cluster.router(await cluster.worker("a"), await cluster.worker("b"))
    watched = await opened(browser, router)
    page = watched.page
    await expect(page.locator("#replicas tr")).to_have_count(2)
    await page.fill("#play-system", STABLE)
    await page.fill("#play-user", "<b>Grüße</b>")
    await page.click("#play-preview")
    await page.wait_for_selector("#play-tokens .block")
    assert await page.locator("#play-tokens .block.held").count() == 0
    assert "<b>Grüße</b>" in await page.inner_text("#play-tokens")
    assert await page.locator("#play-candidates .candidate").count() == 2

    await page.fill("#play-max", "4")
    await page.click("#play-send")
    await page.wait_for_selector("#play-tokens .block.held")
    assert await page.locator("#play-tokens .block:not(.open):not(.held)").count() == 0
    assert await page.locator("#play-tokens .block.open").count() == 1
    assert await page.locator("#play-answer-note a").count() == 1

    await page.fill("#play-user", "x" * 9000)
    await page.click("#play-preview")
    await expect(page.locator("#play-error")).to_contain_text("context has")
    # The browser itself notes in its console that the router refused that.
    assert [text for text in watched.complaints if "400" not in text] == []


async def test_the_page_survives_a_restart_of_the_router(
    cluster: Cluster, browser: Browser
) -> None:
    worker = await cluster.worker("a")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        admin_port = probe.getsockname()[1]

    async def start() -> Process:
        router = await cluster.start(
            "router",
            *("router", "--model", str(cluster.model), "--served-model-name", "tiny"),
            *("--port", "0", "--admin-port", str(admin_port), "--lame-duck-s", "0"),
            *("--replica", worker.ready["url"]),
        )
        await cluster.replicas_ready(router, 1)
        return router

    router = await start()
    page = (await opened(browser, router)).page
    await post(cluster, router, chat(STABLE, "one"))
    await expect(page.locator("#decisions tr")).to_have_count(1)
    router.popen.terminate()
    assert await router.wait(limit_s=30) == 0
    await page.wait_for_selector("#live.bad")
    assert await page.inner_text("#live-text") == "router not reached"
    assert await page.locator("#decisions tr").count() == 1  # what was known stays

    router = await start()
    await page.wait_for_selector("#live.ok")
    await expect(page.locator("#decisions tr")).to_have_count(0)
    request_id = await post(cluster, router, chat(STABLE, "two"))
    await page.wait_for_selector(f"[data-id='{request_id}']")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page_fits_narrow_and_wide_screens(
    cluster: Cluster, browser: Browser, scheme: str
) -> None:
    router = await cluster.router(await cluster.worker("a"))
    await asyncio.gather(*(post(cluster, router, chat(STABLE, str(n))) for n in range(3)))
    size = {"width": 1400, "height": 900}
    page = (await opened(browser, router, viewport=size, color_scheme=scheme)).page
    await page.wait_for_selector("#decisions tr")
    await page.wait_for_selector("#icicle .branch")

    await expect(page.locator(".uplot canvas")).to_have_count(4)
    background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    is_dark = sum(map(int, background.removeprefix("rgb(").removesuffix(")").split(","))) < 384
    assert is_dark == (scheme == "dark")
    for width in (1400, 760, 600, 360):
        await page.set_viewport_size({"width": width, "height": 900})
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        assert await page.locator("#decisions tr").first.is_visible()
