"""One look at a replica: what it says of itself, or that it does not answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

import aiohttp
import msgspec

from kvway_core.api import LoadReport
from kvway_router.engine_metrics import MetricsReader
from kvway_router.engine_report import EngineReport, read_description

MAX_REPORT_BYTES: Final = 64 * 1024
MAX_PAGE_BYTES: Final = 4 * 1024 * 1024
_PIECE_BYTES: Final = 16 * 1024
"""Read at once, so that a long page of metrics takes turns with everything else on the loop."""


@dataclass(frozen=True, slots=True)
class Good:
    """The replica answered.

    Attributes:
        report: What a kvway worker says of its load; None for another engine that is healthy.
        no_report: Why there is none although it was asked for one, for a person; empty for an
            engine that does not know the question.
    """

    report: LoadReport | None
    no_report: str = ""


@dataclass(frozen=True, slots=True)
class Bad:
    """The replica did not answer as a healthy one does.

    Attributes:
        error: What happened, for a person.
        refused: True when there was nobody to connect to: there is no need to ask again.
    """

    error: str
    refused: bool = False


class Prober:
    """Asks replicas how they are. Open it as an async context manager.

    Args:
        timeout_s: Limit for a whole answer. A frozen worker still accepts connections, so only
            this tells it from a live one.
    """

    def __init__(self, *, timeout_s: float) -> None:
        """Remember the limit; nothing is opened yet."""
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Open the session."""
        # Each look is a connection of its own: a kept one would hide that nobody listens any more.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the session and its connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def probe(self, url: str) -> Good | Bad:
        """Asks `GET /load`, and `GET /health` where that gives no report.

        A replica whose reports fail may be well: whether it is, its health says.

        Never raises for what a replica does.
        """
        try:
            try:
                status, body = await self._get(f"{url}/load")
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ClientError, ValueError) as exc:
                no_report = f"/load gave a broken answer: {type(exc).__name__}"
            else:
                report = _decode_report(body)
                if report is not None:
                    return Good(report)
                no_report = f"/load answered {status}" if status not in (404, 405, 501) else ""
                if status == 200:
                    no_report = "what /load answers is no report"
            status, _ = await self._get(f"{url}/health")
        except aiohttp.ClientConnectorError as exc:
            return Bad(f"cannot connect: {exc.os_error.strerror or exc.os_error}", refused=True)
        except TimeoutError:
            return Bad(f"no answer within {self._timeout_s:g} s")
        except (aiohttp.ClientError, ValueError, OSError) as exc:
            return Bad(f"broken answer: {type(exc).__name__}")
        return Good(None, no_report) if status == 200 else Bad(f"/health answered {status}")

    async def describe(self, url: str, *, before: EngineReport | None = None) -> EngineReport:
        """Asks an engine without `GET /load` in the places where others say how they are.

        Never raises for what a replica does.

        Args:
            url: Where it is.
            before: What it said a moment ago: the pages that tell only what it holds are not asked
                for again.
        """
        report = EngineReport()
        try:
            report = await self._metrics(url)
            if report.num_tokens is None and before is not None:
                return replace(report, num_tokens=before.num_tokens)
            for path in ("/props", "/get_server_info"):
                if report.num_tokens is None:
                    status, body = await self._get(f"{url}{path}", max_bytes=MAX_PAGE_BYTES)
                    if status == 200:
                        num_tokens = read_description(body)
                        is_sglang = num_tokens is not None and path == "/get_server_info"
                        report = replace(report, num_tokens=num_tokens, is_sglang=is_sglang)
        except (aiohttp.ClientError, ValueError, OSError):
            pass  # TimeoutError is an OSError; whether it is healthy is for `probe` to say
        return report

    async def _metrics(self, url: str) -> EngineReport:
        """Reads `GET /metrics` as it comes; a page that is too long tells nothing."""
        reader = MetricsReader()
        async with self._open().get(f"{url}/metrics", allow_redirects=False) as response:
            num_bytes = 0
            async for piece in response.content.iter_chunked(_PIECE_BYTES):
                num_bytes += len(piece)
                if num_bytes > MAX_PAGE_BYTES:
                    return EngineReport()
                reader.feed(piece)
            return reader.report() if response.status == 200 else EngineReport()

    async def _get(self, url: str, *, max_bytes: int = MAX_REPORT_BYTES) -> tuple[int, bytes]:
        async with self._open().get(url, allow_redirects=False) as response:
            body = bytearray()
            async for piece in response.content.iter_chunked(_PIECE_BYTES):
                body += piece
                if len(body) > max_bytes:
                    # Whatever this is, it is not a report; leaving closes the connection.
                    return response.status, b""
            return response.status, bytes(body)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            msg = "a prober probes inside its context"
            raise RuntimeError(msg)
        return self._session


def _decode_report(body: bytes) -> LoadReport | None:
    try:
        report = msgspec.json.decode(body, type=LoadReport)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    # Zero means unknown before the model is loaded; after that nothing can be sent to such a one.
    is_known = report.max_model_len > 0 and report.block_size > 0
    return report if is_known or report.state != "ready" else None
