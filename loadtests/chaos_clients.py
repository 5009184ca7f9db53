"""The clients of a chaos run: each sends one request and writes down how it ended.

What the sim engine answers depends on every token of the prompt, and each prompt has a nonce. So
each client knows its own answer beforehand, and somebody else's can never pass for it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Final

from kvway_core.testing.byte_model import IM_END_ID, IM_START_ID
from kvway_worker.sim import answer
from loadtests.chaos_fleet import MODEL
from loadtests.raw_http import NoAnswer, RawAnswer, post

DEADLINE_S: Final = 60.0
SLOW_READ_BYTES: Final = 2048
_SLOW_PAUSE_S: Final = 0.05
_TOPICS: Final = ("rivers", "mountains", "harbours", "deserts", "islands", "forests")
_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"


class Ending(StrEnum):
    """How a request ended, as its client saw it. The last three must not happen."""

    DONE = "done"
    """The whole answer, and its end."""
    REFUSED = "refused"
    """503 or 429 with Retry-After and a reason: nothing was done, come back later."""
    INTERRUPTED = "interrupted"
    """After some content the answer broke, and says so: an error event, no end."""
    LEFT = "left"
    """The client went away."""
    FAILED = "failed"
    """An error in place of an answer, or a break before the first content."""
    LOST = "lost"
    """The connection ended without a status."""
    UNCLEAR = "unclear"
    """No end at all, an end without a reason, or two ends."""


@dataclass(frozen=True, slots=True)
class Request:
    """What one client does.

    Attributes:
        client_id: Sent as ``x-request-id``, and seen by the worker.
        at_s: When, since the start of the run.
        path: Chat or completions.
        prompt: Without what all prompts of its topic begin with.
        topic: Names that beginning.
        max_tokens: Exactly so long is the answer: the sim engine knows no end.
        stream: Whether it is asked for in events.
        leaves_after: Tokens after which the client leaves; 0 is before the first one.
        is_slow: Whether it reads slower than the answer is made.
    """

    client_id: str
    at_s: float
    path: str
    topic: str
    prompt: str
    max_tokens: int
    stream: bool
    leaves_after: int | None
    is_slow: bool

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        fields = {"model": MODEL, "max_tokens": self.max_tokens, "stream": self.stream}
        if self.path == _CHAT:
            system = {"role": "system", "content": beginning(self.topic)}
            return fields | {"messages": [system, {"role": "user", "content": self.prompt}]}
        return fields | {"prompt": beginning(self.topic) + self.prompt}

    def expected(self) -> str:
        """The one right answer."""
        if self.path == _CHAT:
            tokens = [
                *_message("system", beginning(self.topic)),
                *_message("user", self.prompt),
                *(IM_START_ID, *b"assistant\n"),
            ]
        else:
            tokens = list((beginning(self.topic) + self.prompt).encode())
        return bytes(answer(tokens, self.max_tokens)).decode()


@dataclass(slots=True)
class Outcome:
    """What became of a request.

    Attributes:
        request: The request.
        ending: How it ended.
        text: The answer, as far as it came.
        sent_s: When it was sent, since the start of the run.
        first_s: When its first content came; None if none did.
        ended_s: When it ended.
        status: Of the answer; None without one.
        router_id: The router's name for it, if it was told.
        replica: Who answered, if it was told.
        detail: An error's code, or what else there is to say.
    """

    request: Request
    sent_s: float = 0.0
    ending: Ending = Ending.UNCLEAR
    text: str = ""
    first_s: float | None = None
    ended_s: float = 0.0
    status: int | None = None
    router_id: str | None = None
    replica: str | None = None
    detail: str = ""


def plan(seed: int, num_requests: int, rate: float) -> list[Request]:
    """Draws the requests of a run: when they come, what they ask, and how their clients behave."""
    rng = random.Random(seed)
    requests: list[Request] = []
    at_s = 0.0
    for _ in range(num_requests):
        at_s += rng.expovariate(rate)
        kind = rng.random()
        is_slow, leaves = kind < 0.03, 0.03 <= kind < 0.15
        max_tokens = 150 if is_slow else rng.randint(4, 40)
        requests.append(
            Request(
                client_id=f"chaos-{rng.getrandbits(64):016x}",
                at_s=at_s,
                path=rng.choice((_CHAT, _COMPLETIONS)),
                topic=rng.choice(_TOPICS),
                prompt=f"{rng.getrandbits(128):032x} and then " + "more " * rng.randint(0, 40),
                max_tokens=max_tokens,
                stream=is_slow or rng.random() < 0.6,
                leaves_after=rng.randrange(max_tokens) if leaves else None,
                is_slow=is_slow,
            )
        )
    return requests


class Client:
    """Sends requests to one router and waits for how they end.

    Args:
        url: The router's.
    """

    def __init__(self, url: str) -> None:
        """Begins to count time."""
        self._url = url
        self._started_s = asyncio.get_running_loop().time()

    def now_s(self) -> float:
        """Returns the time since the start of the run."""
        return asyncio.get_running_loop().time() - self._started_s

    async def send(self, request: Request, outcome: Outcome | None = None) -> Outcome:
        """Sends a request when its time has come; always returns how it ended.

        `outcome` is filled in as things happen, for whoever waits for them.
        """
        await asyncio.sleep(max(0.0, request.at_s - self.now_s()))
        outcome = outcome or Outcome(request)
        outcome.sent_s = self.now_s()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._ask(request, outcome)
        except TimeoutError:
            outcome.detail = f"no end within {DEADLINE_S:g} s"
        except _Left:
            outcome.ending = Ending.LEFT
        except NoAnswer as exc:
            outcome.ending, outcome.detail = Ending.LOST, str(exc)
        except (ValueError, KeyError, TypeError) as exc:
            outcome.detail = f"not understood: {exc!r}"
        outcome.ended_s = self.now_s()
        return outcome

    async def _ask(self, request: Request, outcome: Outcome) -> None:
        if request.leaves_after is None:
            await self._answer(request, outcome)
            return
        # Before the first token, and of a whole answer, it is time that makes a client leave.
        limit_s = None if request.stream and request.leaves_after else request.leaves_after / 100
        patience = asyncio.timeout(limit_s)
        try:
            async with patience:
                await self._answer(request, outcome)
        except TimeoutError:
            if patience.expired():
                raise _Left from None
            raise

    async def _answer(self, request: Request, outcome: Outcome) -> None:
        async with post(
            self._url + request.path,
            request.body,
            headers={"x-request-id": request.client_id},
            receive_bytes=SLOW_READ_BYTES if request.is_slow else None,
        ) as answer:
            outcome.status = answer.status
            outcome.router_id = answer.headers.get("x-kvway-request-id")
            outcome.replica = answer.headers.get("x-kvway-replica")
            if answer.status != 200:
                outcome.detail = str(json.loads(await answer.read())["error"]["code"])
                is_refusal = answer.status in (429, 503) and "Retry-After" in answer.headers
                outcome.ending = Ending.REFUSED if is_refusal else Ending.FAILED
            elif request.stream:
                await self._events(answer, outcome)
            else:
                await self._whole(answer, outcome)

    async def _whole(self, answer: RawAnswer, outcome: Outcome) -> None:
        body = await answer.read()
        if not answer.is_complete:
            outcome.ending, outcome.detail = Ending.FAILED, "breaks off"
            return
        outcome.text = _text(json.loads(body))
        outcome.first_s = self.now_s()
        outcome.ending = Ending.DONE

    async def _events(self, answer: RawAnswer, outcome: Outcome) -> None:
        request = outcome.request
        num_tokens, end = 0, ""
        async for line in answer.lines():
            if not line.startswith(b"data: "):
                continue
            if end:
                outcome.detail = f"more after {end}"
                return
            payload = line.removeprefix(b"data: ")
            if payload == b"[DONE]":
                end = "[DONE]"
                continue
            event = json.loads(payload)
            if "error" in event:
                end = "an error event"
                outcome.detail = str(event["error"]["code"])
                continue
            text = _text(event)
            if text and outcome.first_s is None:
                outcome.first_s = self.now_s()
            outcome.text += text
            num_tokens += bool(text)
            if request.leaves_after is not None and num_tokens >= request.leaves_after > 0:
                raise _Left
            if request.is_slow:
                await asyncio.sleep(_SLOW_PAUSE_S)
        self._judge_end(end, outcome, is_complete=answer.is_complete)

    def _judge_end(self, end: str, outcome: Outcome, *, is_complete: bool) -> None:
        """A stream ends with [DONE] and whole, or with an error event and not whole."""
        if end == "[DONE]" and is_complete:
            outcome.ending = Ending.DONE
        elif end == "an error event" and not is_complete:
            outcome.ending = Ending.INTERRUPTED if outcome.text else Ending.FAILED
        else:
            how = "cleanly" if is_complete else "by breaking off"
            outcome.detail = f"{outcome.detail} ends {how} after {end or 'neither end'}".strip()


class _Left(Exception):
    """The client has seen enough."""


def _text(payload: dict[str, Any]) -> str:
    text = ""
    for choice in payload["choices"]:
        message = choice.get("delta") or choice.get("message") or {}
        text += choice.get("text") or message.get("content") or ""
    return text


@cache
def beginning(topic: str) -> str:
    """Returns what all prompts of a topic begin with: about 600 tokens."""
    return f"On {topic}: " + "You answer in one sentence and you never guess. " * 12


def _message(role: str, content: str) -> Iterable[int]:
    return (IM_START_ID, *f"{role}\n{content}".encode(), IM_END_ID, *b"\n")
