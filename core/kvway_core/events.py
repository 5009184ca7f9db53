"""KV events: what a worker tells routers about its cache, in vLLM's wire protocol.

A publisher sends three frames per batch, `[topic, seq, payload]`: seq is an unsigned 64-bit
big-endian counter that starts at 0 with the process, payload is msgpack
`[ts, [event, ...], dp_rank, boot_id]`. Events are maps tagged by `type`, as vLLM 0.32 writes them;
`boot_id` is ours, at the end, where other readers ignore it.

A subscriber that misses a number asks the replay socket: a DEALER sends `[b"", seq]`, and a ROUTER
answers `[b"", topic, seq, payload]` for every batch it still has from there on, then
`[b"", topic, END_SEQ, b""]`.

Decoding is liberal: batches and events as maps and as arrays, integer and byte hashes, unknown
fields and unknown events. One bad event costs itself, never its batch, and what only informs is
never a reason to lose an event. But a field of a stored block that is not known may name what its
KV depends on, so that the block is no plain one then.

    vLLM 0.10 .. 0.23   [ts, [["BlockStored", hashes, parent, tokens, size, lora id, ...]], rank]
    vLLM since          [ts, [{"type": "BlockStored", "block_hashes": ...}], rank], or all of it
                        a map: {"ts": ..., "events": [...], "data_parallel_rank": ...}
    SGLang              arrays as vLLM 0.10, hashes with a sign, pairs of tokens with EAGLE; later
                        maps, with the salt in "metadata"
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Generator, Sequence
from typing import Annotated, Final

import msgspec
from msgspec.structs import replace

from kvway_core.errors import ProtocolError
from kvway_core.long_lists import Numbers, put_back, take_out

MAX_BATCH_BYTES = 32 * 2**20
"""Larger payloads are refused unread."""
MAX_BATCH_EVENTS = 2**18
"""A batch that claims more events is refused."""
WHOLE_BYTES: Final = 64 * 1024
"""Of a longer payload the long lists are read apart, piece by piece: see `long_lists.py`."""

END_SEQ = b"\xff" * 8
"""The seq frame that ends a replay: -1 as a signed 64-bit integer."""


class BlockStored(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """Blocks became usable as a prefix, in chain order.

    Attributes:
        block_hashes: One per block; ours are the low 64 bits of the block hash.
        parent_block_hash: The block before the first, None when it starts a prompt.
        token_ids: Tokens of all the blocks; empty when the worker keeps prompts to itself.
        block_size: Tokens per block.
        lora_id: Deprecated by vLLM, always None here.
        medium: Where the blocks are, "GPU" for the pool itself.
        lora_name: Adapter name.
        extra_keys: Of vLLM: for each block what its KV depends on besides tokens, or None.
        group_idx: Of vLLM: which of the model's groups of layers the blocks are for.
        kv_cache_spec_kind: Of vLLM: how that group attends, such as "full_attention".
        locality: Of vLLM: "REMOTE" when the blocks are not the worker's own.
        metadata: Of SGLang: a map that may have a "cache_salt".
        kv_dtype: Ours: what keys and values in the blocks are kept as, such as "int8". Left out
            where it is unknown; vLLM's readers skip it.
        not_known: Values of fields that are not known. Not on the wire.

    What other engines alone send is typed loosely and left out where it is not set: ours is on the
    wire as it always was.
    """

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: object = msgspec.UNSET
    group_idx: object = msgspec.UNSET
    kv_cache_spec_kind: object = msgspec.UNSET
    locality: object = msgspec.UNSET
    metadata: object = msgspec.UNSET
    kv_dtype: object = msgspec.UNSET
    not_known: object = msgspec.UNSET

    def num_plain(self) -> int:
        """Counts the leading blocks whose KV depends on nothing but the model and the tokens.

        The others belong to an adapter, a salt, an image or the like, and so does all that follows
        them: no prompt of tokens alone finds them. Nor does one find what is not understood: any
        metadata and any unknown field that has a value.
        """
        more = self.metadata
        if self.lora_name or self.lora_id is not None or _says_something(self.not_known):
            return 0
        if any(map(_says_something, more.values() if isinstance(more, dict) else (more,))):
            return 0
        keys = self.extra_keys
        if keys is None or keys is msgspec.UNSET:
            return len(self.block_hashes)
        if not isinstance(keys, list) or len(keys) != len(self.block_hashes):
            return 0  # not understood, so nothing is known of any of them
        special = (place for place, key in enumerate(keys) if _says_something(key))
        return next(special, len(keys))


class BlockRemoved(msgspec.Struct, frozen=True, tag_field="type"):
    """Blocks are gone from a medium; `group_idx` and `locality` as of `BlockStored`."""

    block_hashes: list[int | bytes]
    medium: str | None = "GPU"
    group_idx: object = msgspec.UNSET
    locality: object = msgspec.UNSET


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
    steps = decode_in_steps(payload)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            batch: EventBatch = done.value
            return batch


def decode_in_steps(payload: bytes) -> Generator[None, None, EventBatch]:
    """Does what `decode_batch` does in small steps: for whoever has other work between them.

    A step reads an event, or some thousand elements of a long list in one.

    Raises:
        ProtocolError: As `decode_batch`.
    """
    if len(payload) > MAX_BATCH_BYTES:
        raise ProtocolError(
            f"a KV event batch of {len(payload)} bytes is over the limit of {MAX_BATCH_BYTES}"
        )
    is_map = bool(payload) and _is_map(payload)
    lists: list[Numbers] = []
    try:
        if len(payload) > WHOLE_BYTES:
            payload, lists = yield from take_out(payload)
        wire = (_MAP_BATCH_DECODER if is_map else _ARRAY_BATCH_DECODER).decode(payload)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError("a KV event batch is not msgpack [ts, [event, ...], rank]") from exc
    events: list[KVEvent] = []
    for raw in wire.events:
        event = _decode_event(raw)
        if lists and event is not None:
            event = _with_lists(event, lists)
        if event is not None:
            events.append(event)
        yield
    return EventBatch(
        ts=wire.ts,
        events=tuple(events),
        data_parallel_rank=rank if isinstance(rank := wire.data_parallel_rank, int) else None,
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


class _StoredArray(
    msgspec.Struct, frozen=True, array_like=True, tag="BlockStored", forbid_unknown_fields=True
):
    """BlockStored as vLLM up to 0.23 and SGLang write it: an array, longer with each year."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int | tuple[int, int]]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: object = msgspec.UNSET
    group_idx: object = msgspec.UNSET
    kv_cache_spec_kind: object = msgspec.UNSET
    kv_cache_spec_sliding_window: object = msgspec.UNSET
    not_known: object = msgspec.UNSET

    def event(self) -> BlockStored:
        """Returns it as all events are; of a pair of tokens the first is the block's own."""
        token_ids = [token if isinstance(token, int) else token[0] for token in self.token_ids]
        return BlockStored(
            block_hashes=self.block_hashes,
            parent_block_hash=self.parent_block_hash,
            token_ids=token_ids,
            block_size=self.block_size,
            lora_id=self.lora_id,
            medium=self.medium,
            lora_name=self.lora_name,
            extra_keys=self.extra_keys,
            group_idx=self.group_idx,
            kv_cache_spec_kind=self.kv_cache_spec_kind,
            not_known=self.not_known,
        )


class _RemovedArray(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    """BlockRemoved as a tagged array."""

    block_hashes: list[int | bytes]
    medium: str | None = "GPU"
    group_idx: object = msgspec.UNSET

    def event(self) -> BlockRemoved:
        """Returns it as all events are."""
        return BlockRemoved(self.block_hashes, self.medium, self.group_idx)


class _ClearedArray(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    """AllBlocksCleared as a tagged array."""

    def event(self) -> AllBlocksCleared:
        """Returns it as all events are."""
        return AllBlocksCleared()


_RawEvents = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_BATCH_EVENTS)]


class _ArrayBatch(msgspec.Struct, frozen=True, array_like=True):
    """The batch around events that are not read yet."""

    ts: float
    events: _RawEvents
    data_parallel_rank: object = None
    boot_id: object = None


class _MapBatch(msgspec.Struct, frozen=True):
    """The same, as the map that some versions of vLLM write."""

    ts: float
    events: _RawEvents
    data_parallel_rank: object = None
    boot_id: object = None


_NOT_KNOWN: Final = "not_known"
_STORED_FIELDS: Final = {"type", *BlockStored.__struct_fields__} - {_NOT_KNOWN}
_UNDERSTOOD_FIELDS: Final = _STORED_FIELDS | {
    "kv_cache_spec_sliding_window",
    "ownership",
    "session_id",
}
"""With those of vLLM that say nothing of what KV depends on."""
_ARRAY_MARKS: Final = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))
_SEQ = struct.Struct(">Q")
_ENCODER = msgspec.msgpack.Encoder()
_ARRAY_BATCH_DECODER = msgspec.msgpack.Decoder(_ArrayBatch)
_MAP_BATCH_DECODER = msgspec.msgpack.Decoder(_MapBatch)
_MAP_DECODER: msgspec.msgpack.Decoder[KVEvent] = msgspec.msgpack.Decoder(KVEvent)
_ARRAY_DECODER = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)


def _decode_event(raw: msgspec.Raw) -> KVEvent | None:
    """Returns the event in either form, None when it is unknown or malformed."""
    is_map = _is_map(memoryview(raw))
    try:
        return _MAP_DECODER.decode(raw) if is_map else _ARRAY_DECODER.decode(raw).event()
    except (ValueError, RecursionError):
        if not is_map and memoryview(raw)[0] not in _ARRAY_MARKS:
            return None
    try:
        return _decode_future_map(raw) if is_map else _decode_future_array(raw)
    except (ValueError, RecursionError):
        return None


def _with_lists(event: KVEvent, lists: Sequence[Numbers]) -> KVEvent | None:
    """Returns an event with the lists that were read apart, None if its tokens are no numbers."""
    if isinstance(event, AllBlocksCleared):
        return event
    block_hashes = [*put_back(event.block_hashes, lists)]
    if isinstance(event, BlockRemoved):
        return replace(event, block_hashes=block_hashes)
    token_ids = put_back(event.token_ids, lists)
    if token_ids is not event.token_ids and not isinstance(token_ids, array):
        return None
    return replace(event, block_hashes=block_hashes, token_ids=token_ids)


def _decode_future_map(raw: msgspec.Raw) -> KVEvent:
    """Reads stored blocks with fields that are not known.

    Raises:
        ValueError: It is something else, or malformed.
    """
    fields = msgspec.msgpack.decode(raw, type=dict[str, object])
    known = {key: value for key, value in fields.items() if key in _STORED_FIELDS}
    values = [value for key, value in fields.items() if key not in _UNDERSTOOD_FIELDS]
    return msgspec.convert(known | {_NOT_KNOWN: _that_say_something(values)}, BlockStored)


def _decode_future_array(raw: msgspec.Raw) -> KVEvent:
    """Reads stored blocks that are told in a longer array; errors as `_decode_future_map`."""
    items = msgspec.msgpack.decode(raw, type=list[object])
    # The tag is in front, and what comes last here is never on the wire.
    num_known = len(_StoredArray.__struct_fields__)
    known, values = items[:num_known], items[num_known:]
    if len(known) < num_known:
        raise ValueError("a malformed event, not a longer one")
    return msgspec.convert([*known, _that_say_something(values)], _StoredArray).event()


def _is_map(raw: Sequence[int]) -> bool:
    """Says whether a msgpack value is a map, by its first byte."""
    return raw[0] & 0xF0 == 0x80 or raw[0] in (0xDE, 0xDF)


def _says_something(value: object) -> bool:
    """Says whether a field has a value: an empty list is how some engines write none."""
    return value is not None and value is not msgspec.UNSET and value != []


def _that_say_something(values: list[object]) -> list[object]:
    return [value for value in values if _says_something(value)]
