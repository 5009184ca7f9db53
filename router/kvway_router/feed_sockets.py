"""The ZMQ sockets of a feed: what all have set, and the one that an answer comes by."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvway_core.events import MAX_BATCH_BYTES, pack_seq

_DRAINED_PER_TURN: Final = 64
_RECONNECT_MAX_MS: Final = 2_000
_HEARTBEAT_MS: Final = 5_000
"""A peer that does not answer in three times that is taken for gone."""

Take = Callable[[Sequence[bytes]], Awaitable[None]]
"""Deals with the frames of one message."""


def set_up(
    socket: zmq.asyncio.Socket, endpoint: str, *, max_batches: int, bind: bool = False
) -> None:
    """Connects or binds a socket, with a bound on what it buffers.

    Raises:
        zmq.ZMQError: The endpoint cannot be used.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
    socket.setsockopt(zmq.RCVHWM, max_batches)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS)
    if bind:
        socket.bind(endpoint)
    else:
        socket.connect(endpoint)


def monitor_of(socket: zmq.asyncio.Socket) -> zmq.asyncio.Socket:
    """Returns the socket that tells when a connection of `socket` begins and ends."""
    return socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)


def has_ended(frames: Sequence[bytes]) -> bool:
    """Whether a message of a monitor says that the connection ended, else it began."""
    return bool(parse_monitor_message(list(frames))["event"] == zmq.EVENT_DISCONNECTED)


async def drain(socket: zmq.asyncio.Socket, take: Take) -> bool:
    """Takes what has arrived, up to a limit, while it is open; says whether that is all."""
    for _ in range(_DRAINED_PER_TURN):
        if socket.closed:
            return False
        try:
            frames = await socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return True
        await take(frames)
    return False


class ReplayAnswer:
    """The answer to a question for a replay, by a socket of its own: earlier answers are gone.

    Attributes:
        is_cut: Whether its connection has ended; what came before may still be here.

    Args:
        context: Owner of the socket's thread.
        endpoint: Where the worker answers.
        max_batches: Batches that wait to be read.
    """

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, *, max_batches: int) -> None:
        """Connect; nothing is asked yet.

        Raises:
            zmq.ZMQError: The endpoint cannot be used.
        """
        self.is_cut = False
        self._has_begun = False
        self._socket = context.socket(zmq.DEALER)
        self._monitor = monitor_of(self._socket)
        try:
            set_up(self._socket, endpoint, max_batches=max_batches)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def sockets(self) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]:
        """What to wait for."""
        return self._socket, self._monitor

    @property
    def is_open(self) -> bool:
        """Whether it is still of interest."""
        return not self._socket.closed

    async def ask(self, start_seq: int) -> None:
        """Asks for all batches from a number on."""
        await self._socket.send_multipart([b"", pack_seq(start_seq)])

    async def read(self, ready: set[zmq.asyncio.Socket], take: Take) -> bool:
        """Takes what has arrived, up to a limit; says whether that is all that will ever come."""
        if self._monitor in ready:
            await drain(self._monitor, self._on_connection)
        if not self.is_cut and self._socket not in ready:
            return False
        is_empty = await drain(self._socket, take)
        return is_empty and self.is_cut and self.is_open

    def close(self) -> None:
        """Hang up."""
        if self.is_open:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
            self._monitor.close(linger=0)

    async def _on_connection(self, frames: Sequence[bytes]) -> None:
        if has_ended(frames):
            self.is_cut = self._has_begun
        else:
            self._has_begun = True
