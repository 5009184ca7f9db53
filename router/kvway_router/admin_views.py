"""The page, and what it asks the admin listener for besides replicas and decisions.

A page of some other site may send a browser here. It cannot read what is answered, and it cannot
send a POST: these must be JSON by their content type, which browsers ask us about first.
"""

from __future__ import annotations

import math
from importlib import resources
from typing import Final

import msgspec
from aiohttp import web

from kvway_core.errors import InvalidRequest, NotFound
from kvway_core.web import json_response, read_body
from kvway_router.handlers import ApiHandlers
from kvway_router.insight import Insight
from kvway_router.playground import Playground
from kvway_router.reading import GENERATING, Route

MAX_BODY_BYTES: Final = 1024 * 1024
"""The largest prompt of the playground, as JSON."""

_FILES: Final = {
    "app.js": "text/javascript",
    "charts.js": "text/javascript",
    "fleet.js": "text/javascript",
    "format.js": "text/javascript",
    "killers.js": "text/javascript",
    "playground.js": "text/javascript",
    "requests.js": "text/javascript",
    "tree.js": "text/javascript",
    "style.css": "text/css",
    "parts.css": "text/css",
    "icon.svg": "image/svg+xml",
    "vendor/uPlot.iife.min.js": "text/javascript",
    "vendor/uPlot.min.css": "text/css",
    "vendor/uPlot.LICENSE.txt": "text/plain",
}
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_PAGE: Final = "/ui"


class AdminViews:
    """The routes of the page.

    Args:
        insight: The last hour and the tree.
        playground: Tells what would be decided.
        api: Answers what the playground sends.
    """

    def __init__(self, *, insight: Insight, playground: Playground, api: ApiHandlers) -> None:
        """Reads the files of the page."""
        self._insight = insight
        self._playground = playground
        self._api = api
        folder = resources.files("kvway_router") / "ui"
        self._page = {_PAGE: ((folder / "index.html").read_bytes(), "text/html")} | {
            f"{_PAGE}/{name}": ((folder / name).read_bytes(), content_type)
            for name, content_type in _FILES.items()
        }

    def routes(self) -> list[web.RouteDef]:
        """Returns the routes."""
        return [
            web.get("/", self.to_page),
            web.get(f"{_PAGE}/", self.to_page),
            *(web.get(path, self.page) for path in self._page),
            web.get("/admin/history", self.history),
            web.get("/admin/tree", self.tree),
            *(web.post(f"/admin/playground{route.value}", self.preview) for route in GENERATING),
            *(web.post(f"/admin/playground/send{route.value}", self.send) for route in GENERATING),
        ]

    async def to_page(self, request: web.Request) -> web.Response:
        """Leads to the page, from wherever a proxy in front has put the root."""
        location = "ui" if request.path == "/" else f"..{_PAGE}"
        return web.Response(status=307, headers={"Location": location})

    async def page(self, request: web.Request) -> web.Response:
        """``GET /ui`` and the files of the page."""
        body, content_type = self._page[request.path]
        return web.Response(
            body=body, content_type=content_type, charset="utf-8", headers=_HEADERS
        )

    async def history(self, request: web.Request) -> web.Response:
        """``GET /admin/history?since=UNIX_SECONDS``."""
        text = request.query.get("since", "0")
        try:
            since_s = float(text)
        except ValueError:
            since_s = math.nan
        if not math.isfinite(since_s):
            raise InvalidRequest("since must be a number of seconds since 1970.", param="since")
        return _json(self._insight.history(since_s=since_s))

    async def tree(self, request: web.Request) -> web.Response:
        """``GET /admin/tree?root=HASH``: 16 hexadecimal digits, as its answers have them."""
        text = request.query.get("root", "")
        if text and not (len(text) == 16 and set(text) <= set("0123456789abcdef")):
            raise InvalidRequest("root must be 16 hexadecimal digits.", param="root")
        try:
            return _json(self._insight.tree(int(text, 16) if text else None))
        except LookupError as exc:
            raise NotFound("No replica holds this run any more.", param="root") from exc

    async def preview(self, request: web.Request) -> web.Response:
        """``POST /admin/playground/v1/...``: what would be decided of a request."""
        check_json(request)
        route = Route(request.path.removeprefix("/admin/playground"))
        return _json(await self._playground.preview(await read_body(request), route=route))

    async def send(self, request: web.Request) -> web.StreamResponse:
        """``POST /admin/playground/send/v1/...``: as the API listener answers it."""
        check_json(request)
        is_chat = request.path.endswith(Route.CHAT.value)
        return await (self._api.chat(request) if is_chat else self._api.completions(request))


def check_json(request: web.Request) -> None:
    """Refuses a POST that the page of another site could have a browser send.

    Raises:
        InvalidRequest: It is not JSON by its content type.
    """
    if request.content_type != "application/json":
        raise InvalidRequest("The content type must be application/json.")


def _json(value: msgspec.Struct) -> web.Response:
    return json_response(msgspec.json.encode(value))
