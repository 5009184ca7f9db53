"""Request bodies: each bounded in bytes and time, and all of them together in bytes.

A body counts from its first byte to the end of its request, because a router keeps it for a retry.
"""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp
from aiohttp import hdrs, web

from kvway_core.errors import (
    ClientDisconnected,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    RequestTimeout,
    UnsupportedMediaType,
)
from kvway_core.web_answers import MALFORMED_HTTP
from kvway_core.web_limits import HttpLimits

MIN_BODY_BYTES_PER_S: Final = 64 * 1024
"""A body gets a second more for each so many bytes that have come."""


class BodyBudget:
    """Bytes of the bodies of all requests of a server.

    Invariants:
        1. `num_bytes` is 0 when no request runs.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes

    def refusal(self, more: int) -> Overloaded | None:
        """Returns why so many bytes more are refused, None if they are not."""
        if self.num_bytes + more <= self._max_bytes:
            return None
        return Overloaded(
            f"The bodies of all requests together may have {self._max_bytes} bytes; come back in "
            "a second."
        )


class Body:
    """The body of one request; whoever makes it must `close` it when the request has ended."""

    def __init__(self, request: web.BaseRequest, limits: HttpLimits, budget: BodyBudget) -> None:
        self._request = request
        self._limits = limits
        self._budget = budget
        self._num_bytes = 0

    async def read(self) -> bytes:
        """Returns the whole body, which must not have been read.

        Raises:
            UnsupportedMediaType: If the body is compressed.
            PayloadTooLarge: If it is over the limit, if possible before reading any of it.
            Overloaded: If there is no room for it beside those of other requests.
            RequestTimeout: If it does not arrive in time.
            InvalidRequest: If it breaks the rules of HTTP.
            ClientDisconnected: If the client leaves.
        """
        encodings = self._request.headers.getall(hdrs.CONTENT_ENCODING, ["identity"])
        if any(encoding.strip().lower() not in {"", "identity"} for encoding in encodings):
            raise UnsupportedMediaType(
                "Compressed bodies are not accepted; send them as they are."
            )
        if (length := self._request.content_length) is not None:
            self._check_size(length)
        try:
            return await self._gather()
        except TimeoutError:
            raise RequestTimeout(
                f"The body did not arrive within {self._limits.body_timeout_s:g} s, and a second "
                f"for each {MIN_BODY_BYTES_PER_S} bytes that came."
            ) from None
        except (
            aiohttp.ClientPayloadError,
            web.RequestPayloadError,
            aiohttp.http.HttpProcessingError,
        ):
            raise InvalidRequest(
                "The body breaks off or is not valid HTTP.", code=MALFORMED_HTTP
            ) from None
        except ConnectionError:
            raise ClientDisconnected("The client left while sending its body.") from None

    def close(self) -> None:
        """Gives back what the body took of the budget."""
        self._budget.num_bytes -= self._num_bytes
        self._num_bytes = 0

    async def _gather(self) -> bytes:
        body = bytearray()
        last_s = asyncio.get_running_loop().time() + self._limits.body_timeout_s
        async with asyncio.timeout_at(last_s) as deadline:
            while chunk := await self._request.content.readany():
                self._take(len(chunk))
                body += chunk
                deadline.reschedule(last_s + len(body) / MIN_BODY_BYTES_PER_S)
        return bytes(body)

    def _take(self, num_bytes: int) -> None:
        """Counts bytes that came."""
        self._check_size(self._num_bytes + num_bytes)
        if (refusal := self._budget.refusal(num_bytes)) is not None:
            raise refusal
        self._num_bytes += num_bytes
        self._budget.num_bytes += num_bytes

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._limits.max_body_bytes:
            raise PayloadTooLarge(f"The body may have {self._limits.max_body_bytes} bytes.")


BODY: Final = web.RequestKey("body", Body)
