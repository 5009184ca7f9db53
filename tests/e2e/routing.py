"""A router over scripted replicas, and what they were given to do, counted after the fact."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from kvway_core.clock import SystemClock
from kvway_core.testing.fake_replica import Answer, FakeReplica, Received
from tests.router.conftest import Bench

BLOCK = 16
HELD = Answer(cached_tokens=None, hold_head=True)
"""An answer that shows nothing, not even its head, until the test lets go."""
PLAIN = Answer(cached_tokens=None)


class Frozen(SystemClock):
    """A clock that stands still: what was said stays fresh, and a burst takes no time."""

    @override
    def monotonic(self) -> float:
        return 1000.0


def words(topic: str, length: int) -> str:
    """Text of so many bytes, each a token here, that differs from its first word on."""
    return (f"{topic} speaks. " * (length // (len(topic) + 9) + 1))[:length]


def text_of(request: Received) -> str:
    """The prompt that a replica was sent."""
    messages: Any = request.json()["messages"]
    return "".join(f"|{message['role']}\n{message['content']}" for message in messages)


def first_tokens(replica: FakeReplica) -> list[int]:
    """When each request had its first token if all came at once, in tokens computed until then.

    Of each prompt a replica computes those blocks that it had not had before, one prompt after the
    other.
    """
    had: list[str] = []
    done: list[int] = []
    for text in map(text_of, replica.requests):
        longest = max((_num_same(text, other) for other in had), default=0)
        done.append((done[-1] if done else 0) + len(text) - longest // BLOCK * BLOCK)
        had.append(text)
    return done


def work(replica: FakeReplica) -> int:
    """Tokens that a replica had to compute altogether."""
    return first_tokens(replica)[-1] if replica.requests else 0


def _num_same(one: str, other: str) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def num_requests(replicas: Sequence[FakeReplica]) -> int:
    """Requests that have arrived at all of them together."""
    return sum(len(replica.requests) for replica in replicas)


async def until(replicas: Sequence[FakeReplica], condition: Callable[[], bool]) -> None:
    """Waits until something holds that changes as requests arrive at any of the replicas."""
    waits = [asyncio.create_task(replica.wait_for(condition)) for replica in replicas]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def hold_all(benches: Sequence[Bench], bodies: Sequence[dict[str, Any]]) -> None:
    """Sends requests one after the other, at routers in turn, before any of them is answered.

    Then lets all go and awaits the answers, which must be good ones.
    """
    replicas = benches[0].replicas
    for replica in replicas:
        replica.answer = HELD
    before = num_requests(replicas)
    tasks = []
    for number, body in enumerate(bodies, start=1):
        bench = benches[number % len(benches)]
        tasks.append(asyncio.create_task(bench.chat("", **body)))
        await until(replicas, lambda n=number: num_requests(replicas) >= before + n)  # type: ignore[misc]
    for replica in replicas:
        replica.release()
    for status, _, _ in await asyncio.gather(*tasks):
        assert status == 200
    for replica in replicas:
        replica.hold()
        replica.answer = PLAIN


def chat(system: str, user: str, **more: Any) -> dict[str, Any]:
    """The fields of a chat with a system prompt."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"messages": messages, **more}
