"""KV event sockets of other engines, real ones: each writes as its own published schema has it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

from kvway_core.events import END_SEQ, pack_seq, unpack_seq

Encode = Callable[[float, Sequence[dict[str, Any]], int], bytes]
"""Writes a batch: time, events as maps with ``type``, data-parallel rank."""

STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")


def stored(
    hashes: Sequence[int | bytes],
    tokens: Sequence[int],
    *,
    parent: int | bytes | None = None,
    **fields: Any,
) -> dict[str, Any]:
    size = len(tokens) // len(hashes)
    named = zip(STORED, (list(hashes), parent, list(tokens), size, None), strict=True)
    return {"type": "BlockStored", **dict(named), "medium": "GPU", "lora_name": None, **fields}


def removed(*hashes: int | bytes) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


def vllm_maps(ts: float, events: Sequence[dict[str, Any]], rank: int) -> bytes:
    """Writes as vLLM 0.32: with the group of layers, and extra keys where there are some."""
    group = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    maps = [e | group if e["type"] == "BlockStored" else e | {"group_idx": 0} for e in events]
    return msgspec.msgpack.encode([ts, maps, rank])


def vllm_map_of_maps(ts: float, events: Sequence[dict[str, Any]], rank: int) -> bytes:
    """Writes as the versions in which the batch is a map too."""
    return msgspec.msgpack.encode({"ts": ts, "events": events, "data_parallel_rank": rank})


def vllm_0_10(ts: float, events: Sequence[dict[str, Any]], rank: int) -> bytes:
    """Writes arrays without a medium: all is on the GPU."""
    return msgspec.msgpack.encode([ts, [_array(e, STORED, ()) for e in events], rank])


def vllm_arrays(ts: float, events: Sequence[dict[str, Any]], rank: int) -> bytes:
    """Writes as vLLM 0.11 to 0.23: fields were added at the end."""
    fields = (*STORED, "medium", "lora_name", "extra_keys")
    return msgspec.msgpack.encode([ts, [_array(e, fields, ("medium",)) for e in events], rank])


def sglang(ts: float, events: Sequence[dict[str, Any]], rank: int) -> bytes:
    """Writes an event for each page, hashes with a sign."""
    pages: list[dict[str, Any]] = []
    for event in events:
        if event["type"] != "BlockStored":
            pages.append(event | {"block_hashes": [*map(_signed, event["block_hashes"])]})
            continue
        parent, size = event["parent_block_hash"], event["block_size"]
        for place, block_hash in enumerate(event["block_hashes"]):
            page = {
                "block_hashes": [_signed(block_hash)],
                "parent_block_hash": None if parent is None else _signed(parent),
                "token_ids": event["token_ids"][place * size : (place + 1) * size],
            }
            pages.append(event | page)
            parent = block_hash
    fields = (*STORED, "medium")
    return msgspec.msgpack.encode([ts, [_array(e, fields, ("medium",)) for e in pages], rank])


def _array(event: dict[str, Any], stored: Sequence[str], removed: Sequence[str]) -> list[Any]:
    kind = event["type"]
    fields = {"BlockStored": stored, "BlockRemoved": ("block_hashes", *removed)}.get(kind, ())
    return [kind, *(event.get(field) for field in fields)]


def _signed(block_hash: int) -> int:
    return block_hash - 2**64 if block_hash >= 2**63 else block_hash


class EnginePublisher:
    """Publishes as vLLM and SGLang do: no boot id, a time of its own in every batch.

    Attributes:
        replays: First number of each replay that was asked for.
        kept: What a replay can send.
    """

    def __init__(
        self, encode: Encode, *, can_replay: bool = True, endpoint: str = "tcp://127.0.0.1:*"
    ) -> None:
        self.encode = encode
        self.replays: list[int] = []
        self.kept: dict[int, bytes] = {}
        self._endpoint = endpoint
        self._can_replay = can_replay
        self._next_seq = 0
        self._now = 1000.0

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
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._pub.bind(self._endpoint)
        self._endpoint = self.pub = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay: str | None = None
        self._task: asyncio.Task[None] | None = None
        if self._can_replay:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.bind("tcp://127.0.0.1:*")
            self.replay = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
            self._task = asyncio.create_task(self._answer())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._context.destroy(linger=0)

    async def subscribed(self) -> None:
        """Wait until somebody subscribes."""
        assert await self._pub.recv() == b"\x01"

    def restart(self) -> None:
        """Begin another life behind the same sockets."""
        self.kept.clear()
        self._next_seq = 0

    async def publish(self, *events: dict[str, Any], rank: int = 0, lost: bool = False) -> None:
        self._now += 1.0
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        payload = self.kept[seq] = self.encode(self._now, events, rank)
        if not lost:
            await self._pub.send_multipart([b"", pack_seq(seq), payload])

    async def _answer(self) -> None:
        while True:
            peer, _, start = await self._router.recv_multipart()
            self.replays.append(unpack_seq(start))
            for seq, payload in sorted(self.kept.items()):
                if seq >= unpack_seq(start):
                    # Without the topic, as SGLang and vLLM before 0.23.
                    await self._router.send_multipart([peer, b"", pack_seq(seq), payload])
            await self._router.send_multipart([peer, b"", END_SEQ, b""])
