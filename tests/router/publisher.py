"""The KV event sockets of an engine, real ones, for tests that decide what is sent and lost."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from kvway_core.events import END_SEQ, pack_seq, unpack_seq

ANY_PORT = "tcp://127.0.0.1:*"


class Publisher:
    """Numbers and sends what it is given; answers replays from that while it is not `mute`.

    Attributes:
        pub: Endpoint of the live batches, once it has started; the same after another start.
        replay: That of the replays; None if it has none.
        replays: The first number of each replay that was asked for.
        mute: While True, replays are noted and not answered.
        kept: What a replay can still send.

    Args:
        endpoint: Where to publish.
        topic: First frame of live batches.
        can_replay: Whether there is a socket for replays.
        names_topic: Whether replayed batches have the topic too.
    """

    def __init__(
        self,
        *,
        endpoint: str = ANY_PORT,
        topic: bytes = b"",
        can_replay: bool = True,
        names_topic: bool = False,
    ) -> None:
        self.pub = endpoint
        self.replay: str | None = ANY_PORT if can_replay else None
        self.replays: list[int] = []
        self.mute = False
        self.kept: dict[int, bytes] = {}
        self._topic = topic
        self._replay_head = [b"", topic] if names_topic else [b""]
        self._next_seq = 0
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Bind; to the same endpoints again after `stop`."""
        self._context = zmq.asyncio.Context()
        # An XPUB is a PUB that shows who subscribes.
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._tasks: list[asyncio.Task[None]] = []
        try:
            self.pub = _bind(self._pub, self.pub)
            if self.replay is not None:
                router = self._context.socket(zmq.ROUTER)
                self.replay = _bind(router, self.replay)
                self._tasks.append(asyncio.create_task(self._answer(router)))
        except zmq.ZMQError:
            await self.stop()
            raise

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._context.destroy(linger=0)

    async def subscribed(self) -> None:
        """Wait until somebody subscribes."""
        assert await self._pub.recv() == b"\x01" + self._topic

    async def asked(self, count: int) -> None:
        """Wait until so many replays were asked for."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.replays) >= count)

    def begin_again(self) -> None:
        """Begin another life behind the same sockets."""
        self.kept.clear()
        self._next_seq = 0

    async def publish_raw(self, payload: bytes, *, lost: bool = False) -> None:
        """Number a batch, keep it, and send it unless it is to be lost on the way."""
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        self.kept[seq] = payload
        if not lost:
            await self.send(self._topic, pack_seq(seq), payload)

    async def send(self, *frames: bytes) -> None:
        await self._pub.send_multipart(list(frames))

    async def _answer(self, router: zmq.asyncio.Socket) -> None:
        while True:
            peer, empty, start = await router.recv_multipart()
            assert empty == b""
            async with self._changed:
                self.replays.append(unpack_seq(start))
                self._changed.notify_all()
            if self.mute:
                continue
            head = [peer, *self._replay_head]
            for seq, payload in sorted(self.kept.items()):
                if seq >= unpack_seq(start):
                    await router.send_multipart([*head, pack_seq(seq), payload])
            await router.send_multipart([*head, END_SEQ, b""])


def _bind(socket: zmq.asyncio.Socket, endpoint: str) -> str:
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(endpoint)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
