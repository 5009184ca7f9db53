"""KV events: what a worker tells routers about its cache, in vLLM's wire protocol.

A publisher sends three frames per batch, `[topic, seq, payload]`: seq is an unsigned 64-bit
big-endian counter that starts at 0 with the process, payload is msgpack
`[ts, [event, ...], dp_rank, boot_id]`. Events are maps tagged by `type`, as vLLM 0.32 writes them;
`boot_id` is ours, at the end, where other readers ignore it.

A subscriber that misses a number asks the replay socket: a DEALER sends `[b"", seq]`, and a ROUTER
answers `[b"", topic, seq, payload]` for every batch it still has from there on, then
`[b"", topic, END_SEQ, b""]`.

Decoding is liberal: map and array events, integer and byte hashes, unknown fields and unknown
events. One bad event costs itself, never its batch.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Annotated

import msgspec

from kvway_core.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_BATCH_BYTES = 32 * 2**20
"""Larger payloads are refused unread."""
MAX_BATCH_EVENTS = 2**18
"""A batch that claims more events is refused."""

END_SEQ = b"\xff" * 8
"""The seq frame that ends a replay: -1 as a signed 64-bit integer."""


class BlockStored(msgspec.Struct, frozen=True, tag_field="type"):
    """Blocks became usable as a prefix, in chain order.

    Attributes:
        block_hashes: One per block; ours are the low 64 bits of the block hash.
        parent_block_hash: The block before the first, None when it starts a prompt.
        token_ids: Tokens of all the blocks; empty when the worker keeps prompts to itself.
        block_size: Tokens per block.
        lora_id: Deprecated by vLLM, always None here.
        medium: Where the blocks are, "GPU" for the pool itself.
        lora_name: Adapter name.
    """

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag_field="type"):
    """Blocks are gone from a medium."""

    block_hashes: list[int | bytes]
    medium: str | None = "GPU"


class AllBlocksCleared(msgspec.Struct, frozen=True, tag_field="type"):
    """The whole cache is empty now."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True):
    """What one message carries.

    Attributes:
        ts: Unix time of sending, seconds.
        events: In the order they happened.
        data_parallel_rank: Set by data-parallel engines.
        boot_id: Names one life of the worker process; None from workers other than ours.
        num_skipped: Events of the message that could not be read. Not on the wire.
    """

    ts: float
    events: tuple[KVEvent, ...]
    data_parallel_rank: int | None = None
    boot_id: str | None = None
    num_skipped: int = 0


def encode_batch(batch: EventBatch) -> bytes:
    """Returns the payload frame of a batch."""
    return _ENCODER.encode((batch.ts, batch.events, batch.data_parallel_rank, batch.boot_id))


def decode_batch(payload: bytes) -> EventBatch:
    """Reads a payload frame of any worker that speaks the protocol.

    Events that are unknown or malformed are left out and counted in `num_skipped`.

    Raises:
        ProtocolError: If the batch around the events cannot be read or is too large.
    """
    if len(payload) > MAX_BATCH_BYTES:
        raise ProtocolError(
            f"a KV event batch of {len(payload)} bytes is over the limit of {MAX_BATCH_BYTES}"
        )
    try:
        wire = _BATCH_DECODER.decode(payload)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError("a KV event batch is not msgpack [ts, [event, ...], rank]") from exc
    events = [event for event in map(_decode_event, wire.events) if event is not None]
    return EventBatch(
        ts=wire.ts,
        events=tuple(events),
        data_parallel_rank=wire.data_parallel_rank,
        boot_id=wire.boot_id if isinstance(wire.boot_id, str) else None,
        num_skipped=len(wire.events) - len(events),
    )


def pack_seq(seq: int) -> bytes:
    """Returns the frame of a sequence number.

    Raises:
        ValueError: If it does not fit an unsigned 64-bit integer.
    """
    try:
        return _SEQ.pack(seq)
    except struct.error as exc:
        raise ValueError(f"a sequence number must be in [0, 2**64), got {seq}") from exc


def unpack_seq(frame: bytes) -> int:
    """Returns the sequence number in a frame; compare a replay's frame with END_SEQ first.

    Raises:
        ProtocolError: If the frame is not 8 bytes.
    """
    if len(frame) != _SEQ.size:
        raise ProtocolError(f"a sequence frame must have {_SEQ.size} bytes, got {len(frame)}")
    (seq,) = _SEQ.unpack(frame)
    return int(seq)


class _StoredArray(BlockStored, frozen=True, array_like=True, tag="BlockStored"):
    """BlockStored as vLLM up to 0.23 and SGLang write it: a tagged array."""


class _RemovedArray(BlockRemoved, frozen=True, array_like=True, tag="BlockRemoved"):
    """BlockRemoved as a tagged array."""


class _ClearedArray(AllBlocksCleared, frozen=True, array_like=True, tag="AllBlocksCleared"):
    """AllBlocksCleared as a tagged array."""


class _WireBatch(msgspec.Struct, frozen=True, array_like=True):
    """The batch around events that are not read yet."""

    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_BATCH_EVENTS)]
    data_parallel_rank: int | None = None
    boot_id: object = None


_SEQ = struct.Struct(">Q")
_ENCODER = msgspec.msgpack.Encoder()
_BATCH_DECODER = msgspec.msgpack.Decoder(_WireBatch)
_MAP_DECODER: msgspec.msgpack.Decoder[KVEvent] = msgspec.msgpack.Decoder(KVEvent)
_ARRAY_DECODER = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)


def _decode_event(raw: msgspec.Raw) -> KVEvent | None:
    """Returns the event in either form, None when it is unknown or malformed."""
    try:
        if _is_map(memoryview(raw)):
            return _MAP_DECODER.decode(raw)
        event = _ARRAY_DECODER.decode(raw)
    except (ValueError, RecursionError):
        return None
    fields = msgspec.structs.astuple(event)
    if isinstance(event, _StoredArray):
        return BlockStored(*fields)
    return BlockRemoved(*fields) if isinstance(event, _RemovedArray) else AllBlocksCleared()


def _is_map(raw: Sequence[int]) -> bool:
    """Says whether a msgpack value is a map, by its first byte."""
    return raw[0] & 0xF0 == 0x80 or raw[0] in (0xDE, 0xDF)
