"""KV event sockets of other engines, real ones: each writes as its own published schema has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq

from tests.router.publisher import ANY_PORT, Publisher

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


class EnginePublisher(Publisher):
    """Publishes as vLLM and SGLang do: no boot id, a time of its own in every batch.

    Replays are without the topic, as those of SGLang and vLLM before 0.23.
    """

    def __init__(
        self, encode: Encode, *, can_replay: bool = True, endpoint: str = ANY_PORT
    ) -> None:
        super().__init__(endpoint=endpoint, can_replay=can_replay)
        self.encode = encode
        self._now = 1000.0

    async def publish(self, *events: dict[str, Any], rank: int = 0, lost: bool = False) -> None:
        self._now += 1.0
        await self.publish_raw(self.encode(self._now, events, rank), lost=lost)


@asynccontextmanager
async def two_ranks(encode: Encode) -> AsyncIterator[tuple[EnginePublisher, EnginePublisher]]:
    """Publishes as an engine with two data-parallel ranks, at ports one apart."""
    while True:
        async with EnginePublisher(encode, can_replay=False) as one:
            host, _, port = one.pub.rpartition(":")
            two = EnginePublisher(encode, can_replay=False, endpoint=f"{host}:{int(port) + 1}")
            try:
                await two.start()
            except zmq.ZMQError:
                continue  # somebody has the next port: look for another pair
            try:
                yield one, two
            finally:
                await two.stop()
            return
