"""Publishes the cache's changes on ZMQ, in vLLM's protocol, with replay.

    step thread ── publish() ──> [ kept batches, oldest falls out ] ──> PUB: topic, seq, batch
                          seq is given here               │
                                                          └──> ROUTER <── DEALER asks from a seq

One bounded buffer serves as the queue to the PUB socket and as the memory for replay: a batch gets
its sequence number when it enters, so whatever is lost later, in the buffer, in ZMQ or on the
network, shows as a gap at the subscriber. Publishing never waits for anyone.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import msgspec
import structlog
import zmq
import zmq.asyncio

from kvway_core.api import KvEventsInfo
from kvway_core.clock import Clock
from kvway_core.errors import ConfigError, ProtocolError
from kvway_core.events import (
    END_SEQ,
    BlockStored,
    EventBatch,
    KVEvent,
    encode_batch,
    pack_seq,
    unpack_seq,
)

TOPIC: Final = "kv-events"
_LINGER_MS: Final = 200
_REPLAYED_PER_TURN: Final = 64

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KvEventOptions:
    """Where KV events go and how much is kept of them.

    Attributes:
        host: Address of the interface to bind, or a name that resolves to one.
        pub_port: Port of the PUB socket; 0 takes a free one.
        replay_port: Port of the replay socket; 0 takes a free one.
        buffer_batches: Batches kept for replay, and the high-water mark of both sockets.
        buffer_bytes: Bytes of payload kept for replay.
        token_ids: Whether stored blocks carry their token ids. They are prompts: off by default.
        topic: First frame of each message.
    """

    host: str = "127.0.0.1"
    pub_port: int = 0
    replay_port: int = 0
    buffer_batches: int = 10_000
    buffer_bytes: int = 64 * 2**20
    token_ids: bool = False
    topic: str = TOPIC


class KvEventPublisher:
    """Numbers batches of KV events from 0, sends each once, and sends them again when asked.

    Constructing it binds both sockets; `run` serves them until it is cancelled; `close` frees
    them. `publish` may be called from any thread, before, during and after `run`.

    Invariants:
        1. Sequence numbers of the kept batches are consecutive and end at the last published.
        2. At most `buffer_batches` batches and `buffer_bytes` of payload are kept (one batch above
           the byte limit is kept alone).
        3. A batch is sent on PUB at most once, in order.
    """

    def __init__(self, options: KvEventOptions, *, boot_id: str, clock: Clock) -> None:
        """Bind both sockets. Must be called on the event loop that will `run` it.

        Raises:
            ConfigError: A port is taken or the host is not an address of this machine.
        """
        self._options = options
        self._boot_id = boot_id
        self._clock = clock
        self._topic = options.topic.encode()
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._lock = threading.Lock()
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._next_seq = 0
        self._next_unsent = 0
        self._closed = False
        self._context = zmq.asyncio.Context()
        try:
            self._pub, pub_port = self._bind(zmq.PUB, options.pub_port, "--kv-events-port")
            self._replay, replay_port = self._bind(
                zmq.ROUTER, options.replay_port, "--kv-events-replay-port"
            )
        except ConfigError:
            self.close()
            raise
        self.info = KvEventsInfo(pub_port=pub_port, replay_port=replay_port, topic=options.topic)

    @property
    def num_published(self) -> int:
        """Batches published so far, which is the next sequence number."""
        return self._next_seq

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Put one batch in the buffer and wake the sender; never waits, from any thread.

        Nothing is published for no events, nor after `close`.
        """
        if not events:
            return
        payload = encode_batch(
            EventBatch(
                ts=self._clock.time(),
                events=tuple(self._stripped(event) for event in events),
                boot_id=self._boot_id,
            )
        )
        with self._lock:
            if self._closed:
                return
            self._kept.append(payload)
            self._kept_bytes += len(payload)
            self._next_seq += 1
            while len(self._kept) > 1 and self._is_over_limit():
                self._kept_bytes -= len(self._kept.popleft())
            self._loop.call_soon_threadsafe(self._wake.set)

    async def run(self) -> None:
        """Send what is published and answer replays until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send(), name="kv-events-send")
            tasks.create_task(self._answer_replays(), name="kv-events-replay")

    def close(self) -> None:
        """Free sockets and ports, after `run` has ended; later `publish` calls do nothing."""
        with self._lock:
            self._closed = True
        self._context.destroy(linger=_LINGER_MS)

    def _is_over_limit(self) -> bool:
        options = self._options
        return len(self._kept) > options.buffer_batches or self._kept_bytes > options.buffer_bytes

    def _stripped(self, event: KVEvent) -> KVEvent:
        if self._options.token_ids or not isinstance(event, BlockStored):
            return event
        return msgspec.structs.replace(event, token_ids=[])

    def _from(self, seq: int) -> list[tuple[int, bytes]]:
        """Return the kept batches from `seq` on, each with its number; older ones are gone."""
        with self._lock:
            oldest = self._next_seq - len(self._kept)
            first = min(max(seq, oldest), self._next_seq)
            return list(enumerate(islice(self._kept, first - oldest, None), start=first))

    async def _send(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            for seq, payload in self._from(self._next_unsent):
                await self._pub.send_multipart([self._topic, pack_seq(seq), payload])
                self._next_unsent = seq + 1

    async def _answer_replays(self) -> None:
        while True:
            request = await self._replay.recv_multipart()
            start = _replay_start(request)
            if start is None:
                _log.debug("kv_events_replay_refused")
                continue
            peer = request[0]
            batches = self._from(start)
            _log.debug("kv_events_replayed", start_seq=start, num_batches=len(batches))
            for count, (seq, payload) in enumerate(batches, start=1):
                await self._replay.send_multipart([peer, b"", self._topic, pack_seq(seq), payload])
                if count % _REPLAYED_PER_TURN == 0:
                    await asyncio.sleep(0)
            await self._replay.send_multipart([peer, b"", self._topic, END_SEQ, b""])

    def _bind(self, kind: int, port: int, flag: str) -> tuple[zmq.asyncio.Socket, int]:
        """Return a bound socket and its port."""
        zmq_socket = self._context.socket(kind)
        # Room for one whole replay and its end; PUB and ROUTER drop above it and never wait.
        zmq_socket.set_hwm(self._options.buffer_batches + 1)
        zmq_socket.setsockopt(zmq.IPV6, 1)
        try:
            address = _numeric(self._options.host)
            zmq_socket.bind(f"tcp://{address}:{port or '*'}")
        except (OSError, zmq.ZMQError) as exc:
            reason = f"cannot bind {self._options.host}:{port} for KV events: {exc.strerror}"
            raise ConfigError([f"{flag}: {reason}"]) from exc
        endpoint = zmq_socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return zmq_socket, int(endpoint.rpartition(":")[2])


def _numeric(host: str) -> str:
    """Return `host` as ZMQ binds it: a number, in brackets for IPv6."""
    family, *_, address = socket.getaddrinfo(
        host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0])


def _replay_start(frames: Sequence[bytes]) -> int | None:
    """Return the first number a peer wants, None for what is not `[peer, b"", seq]`."""
    if len(frames) != 3 or frames[1]:
        return None
    try:
        return unpack_seq(frames[2])
    except ProtocolError:
        return None
