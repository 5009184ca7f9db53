"""The relay alone: whose time it is while an answer passes."""

from __future__ import annotations

from typing import Any, cast

from multidict import CIMultiDict

from kvway_core.testing.fake_clock import FakeClock
from kvway_router.passing import Passing
from kvway_router.relay import Relay

WORD = b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


class Scene:
    """Both sides of a stream, on a clock that chunks and a slow client move; what happened."""

    status = 200
    headers = CIMultiDict[str]()
    is_event_stream = True

    def __init__(self, *chunks: bytes, gap_s: float, client_s: float) -> None:
        self.clock = FakeClock()
        self.chunks = [*chunks, b""]
        self.gap_s = gap_s
        self.client_s = client_s
        self.told: list[str | float] = []
        self.sent = b""

    async def read_chunk(self) -> bytes:
        self.clock.advance(self.gap_s)
        return self.chunks.pop(0)

    async def start(self, *_: object) -> None:
        pass

    async def write(self, chunk: bytes) -> None:
        self.sent += chunk
        self.clock.advance(self.client_s)

    async def end(self) -> None:
        self.told.append("end")

    def token(self) -> None:
        self.told.append("token")

    def pause(self) -> None:
        self.told.append("pause")

    def rest(self) -> None:
        self.told.append("rest")

    def expect(self, within_s: float, _error: object) -> None:
        self.told.append(within_s)

    def answered(self, *_: object, **__: object) -> None:
        pass

    def done(self, **_: object) -> None:
        pass

    first_data = done

    async def play(self, held: bytes) -> list[str | float]:
        part = cast("Any", self)
        passing = Passing(self.headers, is_event_stream=True)
        relay = Relay(
            part, passing, part, part, part, token_s=30.0, now=self.clock.monotonic, trip=part
        )
        await relay.run(held)
        return self.told


async def test_each_token_has_its_own_time() -> None:
    scene = Scene(WORD, WORD, DONE, gap_s=20.0, client_s=0.0)
    told = await scene.play(WORD)
    assert [what for what in told if isinstance(what, float)] == [30.0] * 4
    assert "pause" not in told
    assert scene.sent == WORD * 3 + DONE


async def test_comments_take_from_the_time_of_the_next_token() -> None:
    told = await Scene(b": ping\n\n", b": ping\n\n", WORD, DONE, gap_s=8.0, client_s=0.0).play(
        WORD
    )
    assert [what for what in told if isinstance(what, float)] == [30.0, 22.0, 14.0, 30.0, 30.0]


async def test_the_time_in_which_the_client_does_not_read_is_not_the_replicas() -> None:
    """It is no gap between tokens, and no silence; nothing is expected meanwhile."""
    told = await Scene(WORD, DONE, gap_s=0.0, client_s=100.0).play(WORD)
    assert told == ["rest", *["token", "rest", "pause", 30.0] * 3, "end"]
