"""The admin listener: what was decided and why, and who the replicas are.

It is a listener of its own, so that no path on the API listener leads here. The page is
in `admin_views.py`.
"""

from __future__ import annotations

from typing import Final

import msgspec
from aiohttp import web

from kvway_core.errors import InvalidRequest, NotFound
from kvway_core.web import json_response
from kvway_router.decisions import DecisionStore, DecisionSummary
from kvway_router.fleet import Fleet
from kvway_router.prefixes.watch import PrefixWatch

_DEFAULT_LIMIT: Final = 50


class DecisionList(msgspec.Struct, frozen=True):
    """The latest decisions, the newest first."""

    decisions: list[DecisionSummary]


class AdminHandlers:
    """The routes that only the admin listener has."""

    def __init__(self, *, decisions: DecisionStore, fleet: Fleet, prefixes: PrefixWatch) -> None:
        """Takes what is shown."""
        self._decisions = decisions
        self._fleet = fleet
        self._prefixes = prefixes

    def routes(self) -> list[web.RouteDef]:
        """Returns the routes."""
        return [
            web.get("/admin/decisions", self.list_decisions),
            web.get("/admin/decisions/{id}", self.decision),
            web.get("/admin/replicas", self.replicas),
            web.get("/admin/prefixes", self.prefixes),
        ]

    async def list_decisions(self, request: web.Request) -> web.Response:
        """``GET /admin/decisions?limit=N``."""
        text = request.query.get("limit", str(_DEFAULT_LIMIT))
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
            raise InvalidRequest("limit must be a whole number from 1 on.", param="limit")
        latest = self._decisions.summaries(int(text))
        return json_response(msgspec.json.encode(DecisionList(latest)))

    async def decision(self, request: web.Request) -> web.Response:
        """``GET /admin/decisions/{id}``."""
        record = self._decisions.get(request.match_info["id"])
        if record is None:
            raise NotFound("No decision of this id is remembered.", param="id")
        return json_response(msgspec.json.encode(record))

    async def replicas(self, _request: web.Request) -> web.Response:
        """``GET /admin/replicas``."""
        return json_response(msgspec.json.encode(self._fleet.view()))

    async def prefixes(self, _request: web.Request) -> web.Response:
        """``GET /admin/prefixes``."""
        return json_response(msgspec.json.encode(self._prefixes.report))
