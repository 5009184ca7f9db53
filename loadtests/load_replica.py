"""A replica that costs next to nothing: it stands behind a router whose own cost is measured.

It answers completions without reading them: what counts in a body are ``max_tokens``, by its newer
name too, and ``stream``. With a step of 0 the whole answer is there at once. Else it works like an
engine: all requests that it runs get one token at each step, at most `slots` of them at a time,
and the others wait in line. It speaks HTTP/1.1 with Content-Length only, on connections that are
kept.

    python -m loadtests.load_replica --port 0 --ready-file F --slots 64 --step-ms 20

``GET /count`` tells what it has seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, cast

import uvloop
from typing_extensions import override

DEFAULT_TOKENS: Final = 16
EVENT: Final = (
    b'data: {"id":"c-1","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    b'[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)
_END: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_WHOLE: Final = (
    b'{"id":"c-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"hello world"},"finish_reason":"stop"}],"usage":'
    b'{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}'
)
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_STREAM: Final = re.compile(rb'"stream"\s*:\s*true')
_MAX_TOKENS: Final = re.compile(rb'"max_(?:completion_)?tokens"\s*:\s*(\d+)')


@dataclass(slots=True)
class Count:
    """What a replica has seen.

    Attributes:
        num_asked: Completions that were asked for.
        num_done: Those that were answered to the end.
        num_left: Those whose client went away before.
        num_running: Those that get tokens now.
        num_waiting: Those in line.
        num_tokens: Tokens of streams that were sent.
    """

    num_asked: int = 0
    num_done: int = 0
    num_left: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_tokens: int = 0


class Replica:
    """All connections of one replica.

    Args:
        slots: Requests that run at once.
        step_s: From one token to the next; 0 for none.
        event_bytes: Of the event that brings a token; 0 for as few as usual.
    """

    def __init__(self, *, slots: int, step_s: float, event_bytes: int = 0) -> None:
        """Nobody is connected."""
        event = EVENT.replace(b" token", b" token".ljust(event_bytes - len(EVENT) + 6, b"."))
        self.chunk = b"%x\r\n%b\r\n" % (len(event), event)
        self.count = Count()
        self.slots = slots
        self.step_s = step_s
        self._running: set[Connection] = set()
        self._waiting: deque[Connection] = deque()

    def take(self, connection: Connection) -> None:
        """Runs a request, or lets it wait."""
        self.count.num_asked += 1
        if not self.step_s:
            connection.finish()
            return
        self._waiting.append(connection)
        self._fill()

    def drop(self, connection: Connection) -> None:
        """Forgets a request whose client has left."""
        self.count.num_left += 1
        self._running.discard(connection)
        if connection in self._waiting:
            self._waiting.remove(connection)
        self._fill()

    def done(self, connection: Connection) -> None:
        """A request was answered."""
        self.count.num_done += 1
        self._running.discard(connection)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self.slots:
            self._running.add(self._waiting.popleft())
        self.count.num_running = len(self._running)
        self.count.num_waiting = len(self._waiting)

    async def step(self) -> None:
        """Gives each running request a token again and again."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            due_s = max(due_s + self.step_s, loop.time())
            await asyncio.sleep(due_s - loop.time())
            for connection in tuple(self._running):
                connection.token()
            self._fill()

    def page(self, path: str) -> bytes:
        """Returns what it says of itself where routers ask for it."""
        if path == "/count":
            return json.dumps(asdict(self.count)).encode()
        if path == "/load":
            return json.dumps(self._load()).encode()
        if path == "/v1/models":
            card = {"id": "m", "object": "model", "owned_by": "sglang", "max_model_len": 131072}
            return json.dumps({"object": "list", "data": [card]}).encode()
        if path in ("/get_model_info", "/model_info", "/get_server_info", "/server_info"):
            return json.dumps({"model_path": "m", "tokenizer_path": "m", "dp_size": 1}).encode()
        return b'"ok"'

    def _load(self) -> dict[str, object]:
        return {
            "boot_id": "boot-1",
            "model": "m",
            "block_size": 16,
            "hash_scheme": "kvway-1",
            "state": "ready",
            "num_running": self.count.num_running,
            "num_waiting": self.count.num_waiting,
            "waiting_uncached_tokens": 0,
            "blocks": {"free": 65536, "cached": 0, "total": 65536},
            "prefill_tokens_per_s": 20000.0,
            "decode_step_s": self.step_s,
            "max_model_len": 131072,
            "max_num_seqs": self.slots,
            "kv_events": None,
        }


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, replica: Replica) -> None:
        """Nothing was asked."""
        self._replica = replica
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._left: int | None = None
        self._is_stream = False
        self._is_paused = False

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._left is not None:
            self._replica.drop(self)

    @override
    def pause_writing(self) -> None:
        self._is_paused = True

    @override
    def resume_writing(self) -> None:
        self._is_paused = False

    @override
    def data_received(self, data: bytes) -> None:
        self._received += data
        head_end = self._received.find(b"\r\n\r\n")
        if head_end < 0:
            return
        length = _LENGTH.search(self._received, 0, head_end)
        end = head_end + 4 + (int(length[1]) if length else 0)
        if len(self._received) < end:
            return
        request = bytes(self._received[:end])
        del self._received[:end]
        method, path, _ = request.split(b" ", 2)
        if method != b"POST":
            self._write(_answer(self._replica.page(path.decode())))
            return
        self._is_stream = _STREAM.search(request, head_end) is not None
        asked = _MAX_TOKENS.search(request, head_end)
        self._left = int(asked[1]) if asked else DEFAULT_TOKENS
        if self._is_stream:
            self._write(_STREAM_HEAD)
        self._replica.take(self)

    def token(self) -> None:
        """One step is over; who takes nothing gets nothing."""
        if self._left is None or self._is_paused:
            return
        self._left -= 1
        if self._is_stream:
            self._replica.count.num_tokens += 1
            self._write(self._replica.chunk)
        if self._left <= 0:
            self._end()

    def finish(self) -> None:
        """Gives the whole answer at once."""
        if self._is_stream and self._left:
            self._replica.count.num_tokens += self._left
            for _ in range(self._left):
                self._write(self._replica.chunk)
        self._end()

    def _end(self) -> None:
        self._write(_END if self._is_stream else _answer(_WHOLE))
        self._left = None
        self._replica.done(self)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _answer(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


async def serve(args: argparse.Namespace) -> None:
    """Answers until the process is ended."""
    replica = Replica(slots=args.slots, step_s=args.step_ms / 1000, event_bytes=args.event_bytes)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(replica), "127.0.0.1", args.port, backlog=4096
    )
    port = server.sockets[0].getsockname()[1]
    if args.ready_file is not None:
        made = args.ready_file.with_suffix(".part")
        made.write_text(json.dumps({"url": f"http://127.0.0.1:{port}"}))
        made.rename(args.ready_file)
    if replica.step_s:
        await replica.step()
    await server.serve_forever()


def main(argv: Sequence[str]) -> None:
    """Run one replica."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.load_replica", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 for any free one")
    parser.add_argument("--ready-file", type=Path, help="JSON with its url, once it listens")
    parser.add_argument("--slots", type=int, default=1024, help="requests that run at once")
    parser.add_argument("--step-ms", type=float, default=0.0, help="from one token to the next")
    parser.add_argument("--event-bytes", type=int, default=0, help="of the event of each token")
    uvloop.run(serve(parser.parse_args(argv)))


if __name__ == "__main__":
    main(sys.argv[1:])
