"""A scripted OpenAI server on a real socket, for tests of whatever talks to replicas.

It speaks HTTP/1.1 by hand, so that it can also do what no server library lets one do: close
without a byte, break in the middle of a chunk, answer with junk. A test tells it what to do with
the next requests (`script`), waits for what it saw (`wait_for`), and reads its ledger afterwards:
raw bodies, headers, and which connections the other side closed. Nothing in it sleeps; a slow
answer is one that the test holds back and lets go of.

    async with FakeReplica() as replica:
        replica.script(Answer(hold_head=True))
        ...                                             # send it a request
        await replica.wait_for(lambda: len(replica.requests) == 1)
        replica.release()
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_MAX_HEAD_BYTES: Final = 64 * 1024
_CHAT_PATH: Final = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Answer:
    """What to do with one completion request. The default is a good answer.

    Attributes:
        pieces: The text of the answer, one SSE chunk (or a part of the one text) each.
        cached_tokens: What ``usage`` and ``x-kvway-cached-tokens`` report; None reports neither.
        status: With anything but 200, `body` is the whole answer.
        body: Sent as it is in place of a generated JSON body or event stream.
        headers: Added to, or in place of, the headers of the answer.
        raw: Bytes sent in place of a whole HTTP answer, before closing; ``b""`` just closes.
        hold_head: Send nothing at all until `FakeReplica.release`.
        hold_after_pieces: After that many chunks, send no more until `FakeReplica.release`.
        break_after_pieces: After that many chunks, close in the middle of the answer. In an
            answer that is one JSON body, 0 breaks after the head.
    """

    pieces: tuple[str, ...] = ("Hello", " there", ".")
    cached_tokens: int | None = 0
    status: int = 200
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    hold_head: bool = False
    hold_after_pieces: int | None = None
    break_after_pieces: int | None = None


@dataclass(slots=True)
class Received:
    """One request as it arrived, and how it ended."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    finished: bool = False
    disconnected: bool = False

    @property
    def wants_stream(self) -> bool:
        """Whether its body is JSON that asks for an event stream."""
        return self.body.startswith(b"{") and self.json().get("stream") is True

    def json(self) -> dict[str, object]:
        """Decode the body, which must be a JSON object."""
        return msgspec.json.decode(self.body, type=dict[str, object])


class FakeReplica:
    """One scripted replica. Use it as an async context manager; it listens inside it.

    Attributes:
        requests: Requests to paths below ``/v1`` that are no pages, in the order of their arrival.
        probes: How often each other path (``/load``, ``/health``, ...) was asked for.
        pages: What the other paths answer: a status and a JSON value, or bytes that are sent as
            they are. Change it at will; a missing path answers 404. None as the status closes the
            connection without a byte.
    """

    def __init__(self, *, model: str = "test-model", answer: Answer | None = None) -> None:
        """Make a replica of `model` that answers with `answer` unless a script says else."""
        self.model = model
        self.answer = answer if answer is not None else Answer()
        self.requests: list[Received] = []
        self.probes: dict[str, int] = {}
        self.pages: dict[str, tuple[int | None, object]] = {
            "/health": (200, {"status": "ok"}),
            "/v1/models": (200, {"object": "list", "data": [{"id": model, "object": "model"}]}),
            "/load": (200, self.load()),
        }
        self._scripted: deque[Answer] = deque()
        self._released = asyncio.Event()
        self._changed = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self._port = 0
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def __aenter__(self) -> Self:
        """Start to listen on a free loopback port."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening and close every connection."""
        await self.stop()

    @property
    def replica_id(self) -> str:
        """``host:port``, as the router names it."""
        return f"127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.replica_id}"

    @property
    def num_disconnected(self) -> int:
        """Completion requests whose client went away before the answer was complete."""
        return sum(request.disconnected for request in self.requests)

    def load(self, **changes: object) -> dict[str, object]:
        """Return a ``GET /load`` report of an idle, ready replica, with `changes`."""
        report: dict[str, object] = {
            "boot_id": "boot-1",
            "model": self.model,
            "block_size": 16,
            "hash_scheme": "kvway-1",
            "state": "ready",
            "num_running": 0,
            "num_waiting": 0,
            "waiting_uncached_tokens": 0,
            "blocks": {"free": 1000, "cached": 0, "total": 1000},
            "prefill_tokens_per_s": 1000.0,
            "decode_step_s": 0.01,
            "max_model_len": 8192,
            "max_num_seqs": 8,
            "kv_events": None,
        }
        return report | changes

    def script(self, *answers: Answer) -> None:
        """Use `answers` for the next requests, in order, before the default one."""
        self._scripted.extend(answers)

    def release(self) -> None:
        """Let every held answer, now and later, go on."""
        self._released.set()

    def hold(self) -> None:
        """Take `release` back: answers that ask for it are held again."""
        self._released.clear()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds; it is looked at whenever the ledger changes."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def start(self, port: int = 0) -> None:
        """Listen on `port` of the loopback interface, 0 for any; the last one to come back."""
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", port, limit=_MAX_HEAD_BYTES
        )
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop like a killed process: refuse connections and cut those that are open."""
        if self._server is None:
            return
        self._server.close()
        tasks = list(self._connections)
        for task, writer in self._connections.items():
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    async def restart(self) -> None:
        """Come back on the same port after `stop`."""
        await self.start(self._port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # a stream handler runs in a task
        self._connections[task] = writer
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the other side left, or stop() did it: either ends this connection
        finally:
            del self._connections[task]
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False when the connection must close after it."""
        request = await _read_request(reader)
        if request.path in self.pages or not request.path.startswith("/v1/"):
            return await self._serve_page(request, writer)
        answer = self._scripted.popleft() if self._scripted else self.answer
        self.requests.append(request)
        await self._notify()
        eof = asyncio.ensure_future(reader.read(1))
        sending = asyncio.ensure_future(self._send(request, answer, writer))
        try:
            await asyncio.wait((eof, sending), return_when=asyncio.FIRST_COMPLETED)
            request.disconnected = not sending.done()
            return sending.result() if sending.done() else False
        except ConnectionError:
            request.disconnected = True
            return False
        finally:
            for pending in (eof, sending):
                pending.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                    await pending
            request.finished = True
            await self._notify()

    async def _serve_page(self, request: Received, writer: asyncio.StreamWriter) -> bool:
        self.probes[request.path] = self.probes.get(request.path, 0) + 1
        await self._notify()
        status, page = self.pages.get(request.path, (404, {"error": {"message": "not found"}}))
        if status is None:
            return False
        body = page if isinstance(page, bytes) else msgspec.json.encode(page)
        writer.write(_response(status, body, {}))
        await writer.drain()
        return True

    async def _send(self, request: Received, answer: Answer, writer: asyncio.StreamWriter) -> bool:
        if answer.hold_head:
            await self._released.wait()
        if answer.raw is not None:
            writer.write(answer.raw)
            await writer.drain()
            return False
        if answer.status == 200 and answer.body is None and request.wants_stream:
            return await self._send_events(request, answer, writer)
        body = answer.body if answer.body is not None else self._completion(request, answer)
        headers = _cached_header(answer) | dict(answer.headers)
        data = _response(answer.status, body, headers)
        if answer.break_after_pieces is not None:
            writer.write(data[: len(data) - len(body) + len(body) // 2])
            await writer.drain()
            return False
        writer.write(data)
        await writer.drain()
        return True

    async def _send_events(
        self, request: Received, answer: Answer, writer: asyncio.StreamWriter
    ) -> bool:
        headers = {
            "content-type": "text/event-stream",
            "transfer-encoding": "chunked",
            **_cached_header(answer),
            **answer.headers,
        }
        writer.write(_head(200, headers))
        for num_sent, event in enumerate(self._events(request, answer)):
            if answer.hold_after_pieces == num_sent:
                await writer.drain()
                await self._released.wait()
            if answer.break_after_pieces == num_sent:
                await writer.drain()
                return False
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def _events(self, request: Received, answer: Answer) -> list[bytes]:
        chat = request.path.startswith(_CHAT_PATH)
        payloads: list[dict[str, object]] = []
        for num, piece in enumerate(answer.pieces, start=1):
            finish = "stop" if num == len(answer.pieces) else None
            choice: dict[str, object] = {"index": 0, "finish_reason": finish}
            if chat:
                choice["delta"] = {"content": piece}
            else:
                choice["text"] = piece
            payloads.append({"choices": [choice]})
        if answer.cached_tokens is not None:
            payloads.append({"choices": [], "usage": _usage(answer)})
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = {"id": "fake-1", "object": kind, "created": 0, "model": self.model}
        events = [b"data: " + msgspec.json.encode(head | load) + b"\n\n" for load in payloads]
        return [*events, b"data: [DONE]\n\n"]

    def _completion(self, request: Received, answer: Answer) -> bytes:
        text = "".join(answer.pieces)
        choice: dict[str, object] = {"index": 0, "finish_reason": "stop"}
        if request.path.startswith(_CHAT_PATH):
            choice["message"] = {"role": "assistant", "content": text}
            kind = "chat.completion"
        else:
            choice["text"] = text
            kind = "text_completion"
        head: dict[str, object] = {
            "id": "fake-1", "object": kind, "created": 0, "model": self.model, "choices": [choice]
        }  # fmt: skip
        if answer.cached_tokens is not None:
            head["usage"] = _usage(answer)
        return msgspec.json.encode(head)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _read_request(reader: asyncio.StreamReader) -> Received:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    request_line, *lines = head.rstrip("\r\n").split("\r\n")
    method, path, _ = request_line.split(" ", 2)
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        body = await _read_chunked(reader)
    else:
        body = b""
    return Received(method, path, headers, body)


async def _read_chunked(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return bytes(body)


def _cached_header(answer: Answer) -> dict[str, str]:
    if answer.cached_tokens is None:
        return {}
    return {"x-kvway-cached-tokens": str(answer.cached_tokens)}


def _usage(answer: Answer) -> dict[str, object]:
    return {
        "prompt_tokens": 0,
        "completion_tokens": len(answer.pieces),
        "total_tokens": len(answer.pieces),
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} Scripted", *(f"{k}: {v}" for k, v in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _response(status: int, body: bytes, headers: Mapping[str, str]) -> bytes:
    base = {"content-type": "application/json", "content-length": str(len(body))}
    return _head(status, base | dict(headers)) + body
