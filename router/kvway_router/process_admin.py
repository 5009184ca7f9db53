"""The admin listener of a router of several processes: asks them, and puts the answers together.

GET /metrics                 all metrics of all, each with the label ``process``
GET /health, /ready          of the parent; of all that serve
GET /admin/processes         who they are
GET /admin/decisions/{id}    of whichever decided it
changes (admin_replicas.py)  told to all; one that starts later is told, too
anything else                of process 0, or of another one by ``?process=N``
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import aiohttp
import msgspec
import structlog
from aiohttp import hdrs, web

from kvway_core.errors import InvalidRequest, NoReplicaAvailable, NotFound
from kvway_core.metrics import CONTENT_TYPE
from kvway_core.web import json_response, read_body
from kvway_router.proxy import end_to_end

if TYPE_CHECKING:
    from kvway_router.processes import RouterProcess

PROCESS_HEADER: Final = "x-kvway-process"
_LIMIT_S: Final = 10.0
_MAX_CHANGES: Final = 4096
_CHANGES: Final = "/admin/replicas"
_RELOAD: Final = "/admin/reload"

_log = structlog.get_logger(__name__)


class ProcessView(msgspec.Struct, frozen=True):
    """One router process. `url` is its own admin listener; None while it does not serve."""

    process: int
    pid: int | None
    url: str | None
    num_restarts: int


class ProcessList(msgspec.Struct, frozen=True):
    """All router processes."""

    processes: list[ProcessView]


class ProcessAnswer(msgspec.Struct, frozen=True):
    """What one process answered to a change."""

    process: int
    status: int
    answer: msgspec.Raw


class ProcessAnswers(msgspec.Struct, frozen=True):
    """What all of them answered."""

    processes: list[ProcessAnswer]


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


@dataclass(frozen=True, slots=True)
class _Asked:
    method: str
    target: str
    body: bytes
    content_type: str


class ProcessAdmin:
    """Speaks for all router processes. Open it as an async context manager.

    Attributes:
        processes: Those it speaks for.
    """

    def __init__(self) -> None:
        """Nothing is open."""
        self.processes: Sequence[RouterProcess] = ()
        self._changes: list[_Asked] = []
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Opens the way to the processes."""
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=_LIMIT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes it."""
        if self._session is not None:
            await self._session.close()

    def routes(self) -> list[web.RouteDef]:
        """Returns the routes."""
        return [
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/metrics", self.metrics),
            web.get("/admin/processes", self.list_processes),
            web.get("/admin/decisions/{id}", self.decision),
            web.post(_CHANGES, self.change),
            web.post(_CHANGES + "/{id}/drain", self.change),
            web.delete(_CHANGES + "/{id}", self.change),
            web.post(_RELOAD, self.change),
            web.get("/{path:.*}", self.one),
            web.post("/admin/playground/{path:.*}", self.one),
        ]

    async def health(self, _request: web.Request) -> web.Response:
        """``GET /health``: the parent runs."""
        return json_response(b'{"status":"ok"}')

    async def ready(self, _request: web.Request) -> web.Response:
        """``GET /ready``: 200 while each that serves would find a replica: any may be asked."""
        answers = await self._ask_all(_Asked("GET", "/ready", b"", ""))
        bad = [answer for _, answer in answers if answer.status != 200]
        if bad or not answers:
            body = bad[0].body if bad else b'{"status":"no process serves"}'
            return json_response(body, status=503)
        return json_response(b'{"status":"ready"}')

    async def metrics(self, _request: web.Request) -> web.Response:
        """``GET /metrics``, in the text format of Prometheus."""
        answers = await self._ask_all(_Asked("GET", "/metrics", b"", ""))
        pages = [(number, answer.body.decode()) for number, answer in answers]
        body = merged_metrics(pages).encode()
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})

    async def list_processes(self, _request: web.Request) -> web.Response:
        """``GET /admin/processes``."""
        views = [ProcessView(p.number, p.pid, p.url, p.num_restarts) for p in self.processes]
        return json_response(msgspec.json.encode(ProcessList(views)))

    async def decision(self, request: web.Request) -> web.Response:
        """``GET /admin/decisions/{id}``."""
        answers = await self._ask_all(await _asked(request))
        for number, answer in answers:
            if answer.status == 200:
                return _passed(number, answer)
        raise NotFound("No decision of this id is remembered.", param="id")

    async def change(self, request: web.Request) -> web.Response:
        """Changes: told to all. The status is the worst of theirs."""
        asked = await _asked(request)
        answers = await self._ask_all(asked)
        if not answers:
            raise NoReplicaAvailable("No router process serves; try again.")
        worst = max(answer.status for _, answer in answers)
        if worst == 200 and request.path != _RELOAD:
            self._remember(asked)
        told = ProcessAnswers(
            [ProcessAnswer(number, a.status, msgspec.Raw(a.body)) for number, a in answers]
        )
        return json_response(msgspec.json.encode(told), status=worst)

    async def one(self, request: web.Request) -> web.Response:
        """Anything else: asked of one."""
        text = request.query.get("process", "")
        serving = [process for process in self.processes if process.url is not None]
        if text:
            serving = [process for process in serving if str(process.number) == text]
            if not serving:
                raise InvalidRequest("No process of this number serves.", param="process")
        if not serving:
            raise NoReplicaAvailable("No router process serves; try again.")
        url = serving[0].url or ""
        answer = await self._ask(url, await _asked(request))
        if answer is None:
            raise NoReplicaAvailable("The router process did not answer; try again.")
        return _passed(serving[0].number, answer)

    async def catch_up(self, url: str) -> None:
        """Tells a process that has just been started what was changed before."""
        for asked in self._changes:
            answer = await self._ask(url, asked)
            if answer is None or answer.status != 200:
                _log.warning("change_not_repeated", method=asked.method, target=asked.target)

    def _remember(self, asked: _Asked) -> None:
        if len(self._changes) >= _MAX_CHANGES:
            _log.warning("changes_forgotten", number=len(self._changes))
            self._changes.clear()
        self._changes.append(asked)

    async def _ask_all(self, asked: _Asked) -> list[tuple[int, _Answer]]:
        """Returns the answers of those that serve and gave one."""
        urls = [(process.number, process.url) for process in self.processes if process.url]
        answers = await asyncio.gather(*(self._ask(url, asked) for _, url in urls))
        pairs = zip(urls, answers, strict=True)
        return [(number, answer) for (number, _), answer in pairs if answer is not None]

    async def _ask(self, url: str, asked: _Asked) -> _Answer | None:
        if self._session is None:
            raise RuntimeError("the admin listener is not open")
        headers = {hdrs.CONTENT_TYPE: asked.content_type} if asked.content_type else {}
        try:
            async with self._session.request(
                asked.method,
                url + asked.target,
                data=asked.body or None,
                headers=headers,
                allow_redirects=False,
            ) as answer:
                kept = tuple(end_to_end(answer.headers).items())
                return _Answer(answer.status, kept, await answer.read())
        except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            return None


async def _asked(request: web.Request) -> _Asked:
    content_type = request.headers.get(hdrs.CONTENT_TYPE, "")
    return _Asked(request.method, request.raw_path, await read_body(request), content_type)


def _passed(number: int, answer: _Answer) -> web.Response:
    response = web.Response(status=answer.status, body=answer.body)
    dropped = {"content-length", "content-encoding", "date", "server"}
    for name, value in answer.headers:
        if name.lower() not in dropped:
            response.headers[name] = value
    response.headers[PROCESS_HEADER] = str(number)
    return response


def merged_metrics(pages: Iterable[tuple[int, str]]) -> str:
    """Returns one page of metrics made of those of several processes.

    Every sample gets the label ``process``; all of one metric stand together, under one head.

    Args:
        pages: Number of the process and its page, which is in the text format of Prometheus.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for number, page in pages:
        name = ""
        for line in page.splitlines():
            if line.startswith("# "):
                _, _, name, *_ = line.split(" ", 3)
                head = heads.setdefault(name, [])
                if line not in head:
                    head.append(line)
            elif line:
                samples.setdefault(name, []).append(_labelled(line, number))
    lines = [line for name in heads for line in (*heads[name], *samples.get(name, ()))]
    return "\n".join(lines) + "\n"


def _labelled(sample: str, number: int) -> str:
    """Returns a sample with one label more, before its others."""
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        comma = "" if sample[brace + 1] == "}" else ","
        return f'{sample[: brace + 1]}process="{number}"{comma}{sample[brace + 1 :]}'
    return f'{sample[:space]}{{process="{number}"}}{sample[space:]}'
