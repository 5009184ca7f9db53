"""An open-loop client: requests go out when their time has come, however slow the answers are.

Times are counted from when a request was meant to be sent. A client that waits for an answer
before it asks again stops asking just when the server is slow, and never sees the waiting
(coordinated omission, Gil Tene). What this client could not send in time is part of its report:
`late_s`, and `was_sent` where it had as many requests open as it may.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from loadtests.load_wire import Answer, Connection, post_bytes

MAX_OPEN: Final = 4096
_DEADLINE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Shot:
    """A request that is planned.

    Attributes:
        at_s: When, since the start of the run.
        body: JSON.
        path: Where to.
    """

    at_s: float
    body: bytes
    path: str = "/v1/chat/completions"


@dataclass(slots=True)
class Fate:
    """What became of it. Times are seconds since it was meant to be sent.

    Attributes:
        shot: What was planned.
        was_sent: Whether it was sent at all: not if too many were open.
        late_s: When it was sent.
        first_s: When the first bytes of its body came; None if none did.
        ended_s: When it ended.
        answer: As it came.
        problem: What broke, if there is no answer; empty for nothing.
    """

    shot: Shot
    was_sent: bool = False
    late_s: float = 0.0
    first_s: float | None = None
    ended_s: float = 0.0
    answer: Answer = field(default_factory=Answer)
    problem: str = ""


class OpenLoop:
    """Sends what is planned to one server.

    Args:
        url: Of the server.
        max_open: Requests that are open at a time, at most.
        deadline_s: A request that takes longer is given up.
    """

    def __init__(
        self, url: str, *, max_open: int = MAX_OPEN, deadline_s: float = _DEADLINE_S
    ) -> None:
        """Nothing is sent yet."""
        self._url = url
        self._max_open = max_open
        self._deadline_s = deadline_s
        self._idle: deque[Connection] = deque()

    async def run(self, shots: Sequence[Shot]) -> list[Fate]:
        """Sends all, and returns what became of each, in the order of their times."""
        fates = [Fate(shot) for shot in sorted(shots, key=lambda shot: shot.at_s)]
        running: set[asyncio.Task[None]] = set()
        started_s = time.perf_counter()
        try:
            for fate in fates:
                due_s = started_s + fate.shot.at_s
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                if len(running) >= self._max_open:
                    fate.problem = f"{self._max_open} requests were open"
                    continue
                task = asyncio.create_task(self._send(fate, due_s))
                running.add(task)
                task.add_done_callback(running.discard)
            if running:
                await asyncio.gather(*running)
        finally:
            for task in tuple(running):
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for connection in self._idle:
                connection.close()
            self._idle.clear()
        return fates

    async def _send(self, fate: Fate, due_s: float) -> None:
        fate.was_sent = True
        fate.late_s = time.perf_counter() - due_s
        request = post_bytes(self._url, fate.shot.body, path=fate.shot.path)
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._ask(request, fate.answer)
        except TimeoutError:
            fate.problem = f"no end within {self._deadline_s:g} s"
        except OSError as exc:
            fate.problem = f"no connection: {exc}"
        else:
            if not fate.answer.is_complete:
                fate.problem = "the connection ended before the answer"
        first_s, ended_s = fate.answer.first_s, fate.answer.ended_s
        fate.first_s = None if first_s is None else first_s - due_s
        fate.ended_s = (time.perf_counter() if ended_s is None else ended_s) - due_s

    async def _ask(self, request: bytes, answer: Answer) -> None:
        """Asks on a connection that is there, or on a new one if that had been closed by then."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_usable:
                continue
            _ = await connection.ask(request, answer)
            if answer.status:
                self._keep(connection)
                return
            answer.ended_s = None
        connection = await Connection.connect(self._url)
        _ = await connection.ask(request, answer)
        self._keep(connection)

    def _keep(self, connection: Connection) -> None:
        if connection.is_usable:
            self._idle.append(connection)


def evenly(
    rate: float,
    seconds: float,
    body: bytes,
    *,
    from_s: float = 0.0,
    path: str = "/v1/chat/completions",
) -> list[Shot]:
    """Returns requests at a constant rate per second."""
    return [Shot(from_s + number / rate, body, path) for number in range(round(rate * seconds))]


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the value below which that share of them lies; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0
