"""What clients may take of a server: bytes, time and connections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_LINE_BYTES: Final = 8190
"""Longest request line and longest header, aiohttp's own bound; of headers there may be 128."""
DEFAULT_MAX_BODY_BYTES: Final = 16 * 2**20
DEFAULT_MAX_BODIES_BYTES: Final = 256 * 2**20
DEFAULT_MAX_CONNECTIONS: Final = 4096


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What a server lets its clients take, in bytes and seconds.

    Attributes:
        max_body_bytes: Longest body; a request that announces more is refused before
            `100 Continue`.
        max_bodies_bytes: Bodies of all requests together; beyond, requests get 503.
        max_connections: Open at a time; beyond, a new one gets 503 and is closed.
        headers_timeout_s: From the beginning of a request, or of the connection, to the end of
            the headers.
        body_timeout_s: From then to the end of the body; some more for a long one.
        stall_timeout_s: How long a client may take nothing of an answer that waits for it.
        idle_timeout_s: How long a connection may be open without a request.
    """

    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_bodies_bytes: int = DEFAULT_MAX_BODIES_BYTES
    max_connections: int = DEFAULT_MAX_CONNECTIONS
    headers_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    stall_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0
