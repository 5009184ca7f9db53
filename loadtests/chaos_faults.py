"""What goes wrong in a chaos run, and when: one thing each second, drawn from a seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kvway_core.testing.faults import End, Fault
from loadtests.chaos_fleet import Fleet, WorkerHost

EVERY_S: Final = 1.0
MIN_WELL: Final = 2
"""So many workers are well at any time, but for their feed: there is somebody to retry at."""
_BACK_LIMIT_S: Final = 20.0


class Kind(StrEnum):
    """What can be done to a worker; the last one is the only one that costs no request."""

    KILL = "kill -9"
    STOP = "SIGSTOP"
    DRAIN = "SIGTERM"
    DROP = "packets dropped"
    CONNECTIONS = "connections"
    FEED = "feed lost"


CONNECTION_FAULTS: Final[dict[str, Fault]] = {
    "reset at accept": Fault(End.RESET),
    "accept and hang": Fault(End.SILENCE),
    "reset in the request": Fault(End.RESET, request_bytes=200),
    "reset after the request": Fault(End.RESET, answer_bytes=0),
    "closed after the request": Fault(End.CLOSE, answer_bytes=0),
    "reset in the head": Fault(End.RESET, answer_bytes=40),
    "reset in the answer": Fault(End.RESET, answer_bytes=1500),
    "closed in the answer": Fault(End.CLOSE, answer_bytes=1500),
    "cut in a chunk": Fault(End.CLOSE, in_chunk=True, answer_bytes=900),
    "junk for a chunk's size": Fault(junk_chunk=True, answer_bytes=900),
    "silence in the answer": Fault(End.SILENCE, answer_bytes=1200),
    "half-closed answer": Fault(End.HALF_CLOSE, answer_bytes=1200),
    "half-closed request": Fault(End.HALF_CLOSE, request_bytes=400),
    "reset when used again": Fault(End.RESET, reused=True),
    "50 ms late": Fault(delay_s=0.05),
    "4 KB/s": Fault(bytes_per_s=4096),
}


@dataclass(slots=True)
class Mark:
    """Something that went wrong, for the books and the picture.

    Attributes:
        kind: What.
        worker: Whose.
        replica: The router's name for that worker.
        detail: More about it, for people.
        began_s: Since the start of the run.
        ended_s: When all was well again.
    """

    kind: Kind
    worker: str
    replica: str
    detail: str
    began_s: float
    ended_s: float


class Chaos:
    """Hurts a worker every second until it is told to end.

    Args:
        fleet: Whose workers.
        seed: Draws what happens; how it meets the requests is the machine's affair.
        now_s: Tells the time since the start of the run.
        kinds: What is done.
        every_s: How often.

    Attributes:
        marks: What was done, in the order in which it ended.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        seed: int,
        now_s: Callable[[], float],
        kinds: Sequence[Kind] = tuple(Kind),
        every_s: float = EVERY_S,
    ) -> None:
        """Takes whom to hurt; nothing happens yet."""
        self.marks: list[Mark] = []
        self._fleet = fleet
        self._rng = random.Random(seed)
        self._now_s = now_s
        self._kinds = kinds
        self._every_s = every_s
        self._busy: dict[str, Kind] = {}

    async def run(self, end: asyncio.Event) -> None:
        """Begins one thing after the other; returns when `end` is set and all is mended."""
        async with asyncio.TaskGroup() as group:
            while not end.is_set():
                self._begin(group)
                try:
                    await asyncio.wait_for(end.wait(), self._every_s)
                except TimeoutError:
                    continue

    def _begin(self, group: asyncio.TaskGroup) -> None:
        idle = [worker for worker in self._fleet.workers if worker.name not in self._busy]
        if not idle:
            return
        num_hurt = sum(kind is not Kind.FEED for kind in self._busy.values())
        may_hurt = num_hurt < len(self._fleet.workers) - MIN_WELL
        kinds = self._kinds if may_hurt else [Kind.FEED]
        worker = self._rng.choice(idle)
        # Connections break in many more ways than the others.
        (kind,) = self._rng.choices(kinds, [2 if k is Kind.CONNECTIONS else 1 for k in kinds])
        self._busy[worker.name] = kind
        _ = group.create_task(self._do(worker, kind))

    async def _do(self, worker: WorkerHost, kind: Kind) -> None:
        began_s = self._now_s()
        detail, action = self._action(worker, kind)
        await action
        mark = Mark(kind, worker.name, worker.api.address, detail, began_s, self._now_s())
        self.marks.append(mark)
        if kind is not Kind.FEED:
            await self._fleet.back(worker, limit_s=_BACK_LIMIT_S)
        del self._busy[worker.name]

    def _action(self, worker: WorkerHost, kind: Kind) -> tuple[str, Coroutine[Any, Any, None]]:
        seconds = self._rng.uniform(1.0, 5.0)
        match kind:
            case Kind.KILL:
                return "", worker.kill()
            case Kind.DRAIN:
                return "", worker.drain()
            case Kind.STOP:
                return "", worker.stop(seconds)
            case Kind.DROP:
                return "in a namespace" if worker.namespace else "", worker.drop(seconds)
            case Kind.FEED:
                return "", worker.lose_feed(seconds / 2)
            case Kind.CONNECTIONS:
                name = self._rng.choice(list(CONNECTION_FAULTS))
                fault = CONNECTION_FAULTS[name]
                return name, worker.break_connections(fault, seconds / 2)
