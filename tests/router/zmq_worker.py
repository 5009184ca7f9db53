"""A worker's KV event sockets, real ones, for tests that decide what is sent and what is lost."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from kvway_core.api import KvEventsInfo
from kvway_core.events import (
    END_SEQ,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEvent,
    encode_batch,
    pack_seq,
    unpack_seq,
)

TOPIC = b"kv-events"


def stored(*hashes: int, parent: int | None = None, block_size: int = 16) -> BlockStored:
    return BlockStored(
        block_hashes=list(hashes), parent_block_hash=parent, token_ids=[], block_size=block_size
    )


def removed(*hashes: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=list(hashes))


class ZmqWorker:
    """Publishes on demand; answers replays from what was published while it is not `mute`.

    Attributes:
        replays: The first number of each replay that was asked for.
        mute: While True, replays are noted and not answered.
        kept: What a replay can still send.
    """

    def __init__(self, *, boot_id: str = "boot-1") -> None:
        self.boot_id = boot_id
        self.replays: list[int] = []
        self.mute = False
        self.kept: dict[int, bytes] = {}
        self._next_seq = 0
        self._changed = asyncio.Condition()
        self._ports = (0, 0)

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
        """Bind; on the same ports again after `stop`."""
        self._context = zmq.asyncio.Context()
        # An XPUB is a PUB that shows who subscribes.
        self._pub = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        self._ports = (_bind(self._pub, self._ports[0]), _bind(self._router, self._ports[1]))
        self._task = asyncio.create_task(self._answer())

    async def stop(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._context.destroy(linger=0)

    @property
    def info(self) -> KvEventsInfo:
        return KvEventsInfo(
            pub_port=self._ports[0], replay_port=self._ports[1], topic=TOPIC.decode()
        )

    async def subscribed(self) -> None:
        """Wait until somebody subscribes."""
        assert await self._pub.recv() == b"\x01" + TOPIC

    async def asked(self, count: int) -> None:
        """Wait until so many replays were asked for."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.replays) >= count)

    async def publish(self, *events: KVEvent, lost: bool = False) -> None:
        """Number a batch, keep it, and send it unless it is to be lost on the way."""
        batch = EventBatch(ts=0.0, events=events, boot_id=self.boot_id)
        await self.publish_raw(encode_batch(batch), lost=lost)

    async def publish_raw(self, payload: bytes, *, lost: bool = False) -> None:
        seq = self._next_seq
        self._next_seq += 1
        self.kept[seq] = payload
        if not lost:
            await self.send(TOPIC, pack_seq(seq), payload)

    async def send(self, *frames: bytes) -> None:
        await self._pub.send_multipart(list(frames))

    def restart(self, boot_id: str) -> None:
        """Begin another life behind the same sockets."""
        self.boot_id = boot_id
        self.kept.clear()
        self._next_seq = 0

    async def _answer(self) -> None:
        while True:
            peer, empty, start = await self._router.recv_multipart()
            assert empty == b""
            async with self._changed:
                self.replays.append(unpack_seq(start))
                self._changed.notify_all()
            if self.mute:
                continue
            for seq, payload in sorted(self.kept.items()):
                if seq >= unpack_seq(start):
                    await self._router.send_multipart([peer, b"", TOPIC, pack_seq(seq), payload])
            await self._router.send_multipart([peer, b"", TOPIC, END_SEQ, b""])


def _bind(socket: zmq.asyncio.Socket, port: int) -> int:
    socket.setsockopt(zmq.LINGER, 0)
    if socket.type == zmq.XPUB:
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
    socket.bind(f"tcp://127.0.0.1:{port or '*'}")
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return int(endpoint.rpartition(":")[2])
