"""The calls of the admin listener that change something: who the replicas are, and the options.

    POST   /admin/replicas {"url": "http://HOST:PORT"}   added, or taking requests again
    POST   /admin/replicas/{id}/drain                    finishes what it has, takes nothing new
    DELETE /admin/replicas/{id}                          gone; what it still answers is not touched
    POST   /admin/reload                                 the configuration is read again

They count until the router stops; what is to last belongs into its configuration.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from aiohttp import web

from kvway_core.errors import ConfigError, InvalidRequest, NotFound
from kvway_core.web import json_response, read_body
from kvway_router.admin_views import check_json
from kvway_router.discovery import Discovery, ReplicaAddress
from kvway_router.reload import Reloaded
from kvway_router.replicas import ReplicaSet


class _NewReplica(msgspec.Struct, forbid_unknown_fields=True):
    url: str


class ReplicaChange(msgspec.Struct, frozen=True):
    """A replica after a change.

    Attributes:
        replica_id: ``host:port``.
        state: As in ``GET /admin/replicas``; "removed" once it is in there no more.
        in_flight: Requests that it still answers.
    """

    replica_id: str
    state: str
    in_flight: int


_decode = msgspec.json.Decoder(_NewReplica).decode


class ReplicaAdmin:
    """Adds, drains and removes replicas, and has the configuration read again.

    Args:
        discovery: Knows which replicas there should be.
        replicas: Those there are.
        reload: Reads the configuration; raises `ConfigError` and changes nothing if it is none.
    """

    def __init__(
        self,
        *,
        discovery: Discovery,
        replicas: ReplicaSet,
        reload: Callable[[], Reloaded],
    ) -> None:
        """Takes what is changed."""
        self._discovery = discovery
        self._replicas = replicas
        self._reload = reload

    def routes(self) -> list[web.RouteDef]:
        """Returns the routes."""
        return [
            web.post("/admin/replicas", self.add),
            web.post("/admin/replicas/{id}/drain", self.drain),
            web.delete("/admin/replicas/{id}", self.remove),
            web.post("/admin/reload", self.reload),
        ]

    async def add(self, request: web.Request) -> web.Response:
        """``POST /admin/replicas``."""
        check_json(request)
        try:
            address = ReplicaAddress.parse(_decode(await read_body(request)).url)
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            message = 'The body must be {"url": "http://HOST:PORT"}.'
            raise InvalidRequest(message, param="url") from exc
        except ValueError as exc:
            raise InvalidRequest(
                "The URL must be http://HOST:PORT and nothing more.", param="url"
            ) from exc
        self._discovery.add(address)
        self._replicas.resume(address.id)
        return self._answer(address.id)

    async def drain(self, request: web.Request) -> web.Response:
        """``POST /admin/replicas/{id}/drain``."""
        check_json(request)
        replica_id = self._known(request)
        self._replicas.drain(replica_id)
        return self._answer(replica_id)

    async def remove(self, request: web.Request) -> web.Response:
        """``DELETE /admin/replicas/{id}``."""
        replica_id = self._known(request)
        self._discovery.remove(replica_id)
        return self._answer(replica_id)

    async def reload(self, request: web.Request) -> web.Response:
        """``POST /admin/reload``."""
        check_json(request)
        try:
            return json_response(msgspec.json.encode(self._reload()))
        except ConfigError as exc:
            raise InvalidRequest(f"Nothing was changed: {exc.message}") from exc

    def _known(self, request: web.Request) -> str:
        replica_id = request.match_info["id"]
        if self._replicas.get(replica_id) is None:
            raise NotFound("There is no replica of this id.", param="id")
        return replica_id

    def _answer(self, replica_id: str) -> web.Response:
        replica = self._replicas.get(replica_id)
        change = ReplicaChange(
            replica_id,
            "removed" if replica is None else replica.state.value,
            self._replicas.num_in_flight(replica_id),
        )
        return json_response(msgspec.json.encode(change))
