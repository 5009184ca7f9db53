"""The two ends of a request inside the router: what came in, and where the answer goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from multidict import CIMultiDict

from kvway_core.errors import InvalidRequest, KvwayError
from kvway_router.reading import Route

TIMEOUT_HEADER: Final = "x-kvway-timeout-s"
"""Seconds that a client gives its request, fewer than the router would."""
_MAX_TIMEOUT_CHARS: Final = 16
_COMPUTING: Final = (
    *("/v1/audio/", "/v1/classify", "/v1/embeddings", "/v1/images/", "/v1/moderations"),
    *("/v1/pooling", "/v1/rerank", "/v1/score"),
)
"""Paths of which it is known that an answer leaves nothing behind at its replica."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it came in.

    Attributes:
        request_id: Names it everywhere, 32 hex digits made by the router.
        route: Where it was sent.
        headers: The client's headers.
        target: Path and query for the replica.
        method: Of the request.
        tenant: Whose it is, for fairness; without API keys all are of one.
    """

    request_id: str
    route: Route
    headers: CIMultiDict[str]
    target: str
    method: str = "POST"
    tenant: str = ""

    @property
    def may_be_repeated(self) -> bool:
        """Whether it does no harm when two replicas get it, or one gets it twice."""
        if self.route is not Route.OPAQUE or self.method == "GET":
            return True
        return self.target.startswith(_COMPUTING)

    def time_s(self, *, most_s: float) -> float:
        """Returns how long the request may take: what the client wants, within `most_s`.

        Raises:
            InvalidRequest: The header is no number of seconds.
        """
        text = self.headers.get(TIMEOUT_HEADER)
        if text is None:
            return most_s
        try:
            asked_s = float(text) if len(text) <= _MAX_TIMEOUT_CHARS else 0.0
        except ValueError:
            asked_s = 0.0
        if not asked_s > 0.0:
            raise InvalidRequest(
                f"The header {TIMEOUT_HEADER} must be a number of seconds above 0, such as 30."
            )
        return min(asked_s, most_s)


class Downstream(Protocol):
    """The client's side of one request. Every method may be cancelled: the client left."""

    @property
    def started(self) -> bool:
        """Whether the client has been sent anything."""
        ...

    async def body(self) -> bytes:
        """Returns the whole body of the request.

        Raises:
            RequestError: It is too long, too slow, or encoded.
        """
        ...

    async def start(self, status: int, headers: CIMultiDict[str]) -> None:
        """Sends the head of the answer."""
        ...

    async def write(self, chunk: bytes) -> None:
        """Sends bytes of the body, and waits while the client reads too slowly.

        Raises:
            ClientDisconnected: Nobody is there any more.
        """
        ...

    async def end(self) -> None:
        """Ends the body."""
        ...

    async def break_off(self, error: KvwayError, *, as_event: bool) -> None:
        """Ends a started answer so that it cannot pass for a whole one.

        Args:
            error: Why.
            as_event: Whether the client is told by one last event, with no ``[DONE]`` after it.
        """
        ...
