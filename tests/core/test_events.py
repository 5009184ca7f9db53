"""KV events on the wire: pinned bytes, other engines' dialects, and junk."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvway_core.errors import ProtocolError
from kvway_core.events import (
    END_SEQ,
    MAX_BATCH_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    encode_batch,
    pack_seq,
    unpack_seq,
)

u64 = st.integers(0, 2**64 - 1)
hashes = st.one_of(u64, st.binary(max_size=32))
events = st.one_of(
    st.builds(
        BlockStored,
        block_hashes=st.lists(hashes, max_size=4),
        parent_block_hash=st.none() | hashes,
        token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=8),
        block_size=st.integers(1, 256),
        lora_id=st.none() | st.integers(0, 9),
        medium=st.none() | st.text(max_size=4),
        lora_name=st.none() | st.text(max_size=4),
    ),
    st.builds(BlockRemoved, block_hashes=st.lists(hashes, max_size=4)),
    st.just(AllBlocksCleared()),
)
batches = st.builds(
    EventBatch,
    ts=st.floats(allow_nan=False),
    events=st.lists(events, max_size=4).map(tuple),
    data_parallel_rank=st.none() | st.integers(0, 7),
    boot_id=st.none() | st.text(max_size=8),
)
EXAMPLE = EventBatch(
    ts=1700000000.25,
    events=(
        BlockStored([1, 2**64 - 1], None, [5, 6, 7, 8], 2),
        BlockStored([b"\x01" * 16], 2**63, [], 16, medium=None, lora_name="a"),
        BlockRemoved([3]),
        AllBlocksCleared(),
    ),
    boot_id="b00t",
)


def pack(*fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


def test_golden_bytes(golden: Callable[[str, bytes], None]) -> None:
    golden("event_batch.msgpack", encode_batch(EXAMPLE))


def test_a_vllm_router_can_read_our_batches() -> None:
    """It wants maps with all of its own fields, and ignores what follows the rank."""
    ts, maps, rank, boot_id = msgspec.msgpack.decode(encode_batch(EXAMPLE))
    assert (ts, rank, boot_id) == (1700000000.25, None, "b00t")
    assert maps[0] == {
        "type": "BlockStored",
        "block_hashes": [1, 2**64 - 1],
        "parent_block_hash": None,
        "token_ids": [5, 6, 7, 8],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    assert maps[2:] == [
        {"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"},
        {"type": "AllBlocksCleared"},
    ]


@given(batches)
def test_what_is_encoded_is_decoded(batch: EventBatch) -> None:
    assert decode_batch(encode_batch(batch)) == batch


def test_vllm_maps_with_fields_we_do_not_know() -> None:
    stored = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": 2,
        "token_ids": [3],
        "block_size": 1,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [[["x", 1]]],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    (event,) = decode_batch(pack(1.0, [stored | {"from_the_future": {"a": 1}}], 3)).events
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.parent_block_hash, event.token_ids) == ([1], 2, [3])
    assert (event.extra_keys, event.group_idx) == ([[["x", 1]]], 0)
    assert event.kv_cache_spec_kind == "full_attention"
    assert decode_batch(pack(1.0, [stored], 3)).data_parallel_rank == 3


def test_arrays_of_older_vllm_and_sglang() -> None:
    payload = pack(
        2.0,
        [
            ["BlockStored", [1], None, [3, 4], 2, None, "GPU", None, None, 0, "full_attention"],
            ["BlockStored", [-5], b"parent", [1], 1],
            ["BlockRemoved", [b"\x01"], "CPU_PINNED", 0],
            ["AllBlocksCleared"],
        ],
    )
    assert decode_batch(payload).events == (
        BlockStored(
            [1],
            None,
            [3, 4],
            2,
            extra_keys=None,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        ),
        BlockStored([-5], b"parent", [1], 1),
        BlockRemoved([b"\x01"], "CPU_PINNED", 0),
        AllBlocksCleared(),
    )


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "BlockMoved", "block_hashes": [1]},
        ["BlockMoved", [1]],
        {"block_hashes": [1]},
        {"type": "BlockStored", "block_hashes": [1]},
        {"type": "BlockRemoved", "block_hashes": ["text"]},
        {"type": "BlockRemoved", "block_hashes": [2**64 - 1, 1.5]},
        ["BlockStored", [1], None, [[1, 2, 3]], 1],
        [],
        {},
        None,
        7,
        "BlockStored",
    ],
)
def test_a_bad_event_costs_itself_alone(bad: object) -> None:
    good = {"type": "BlockRemoved", "block_hashes": [1]}
    batch = decode_batch(pack(1.0, [good, bad, good]))
    assert batch.events == (BlockRemoved([1]), BlockRemoved([1]))
    assert batch.num_skipped == 1


@pytest.mark.parametrize("fourth", [None, 7, [1], {"a": 1}])
def test_a_fourth_field_that_is_not_ours_is_no_boot_id(fourth: object) -> None:
    assert decode_batch(pack(1.0, [], 0, fourth, "more")).boot_id is None


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc0",
        pack(),
        pack(1.0),
        pack("now", []),
        pack(1.0, {}),
        pack(1.0, []) + b"\x00",
        msgspec.msgpack.encode({"ts": 1.0}),
        b"\x92\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
    ],
)
def test_a_batch_that_is_none_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_batch(payload)


def test_a_batch_nested_without_end_inside_an_event_costs_the_event() -> None:
    deep = b"\x92\xcb" + bytes(8) + b"\x91" + b"\x91" * 500 + b"\xc0"
    assert decode_batch(deep).num_skipped == 1


def test_size_limits() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        decode_batch(bytes(MAX_BATCH_BYTES + 1))
    with pytest.raises(ProtocolError):
        decode_batch(pack(1.0, [None] * (2**18 + 1)))
    assert decode_batch(pack(1.0, [None] * 2**18)).num_skipped == 2**18


@given(st.binary(max_size=200))
def test_junk_is_a_protocol_error_or_a_batch(payload: bytes) -> None:
    try:
        batch = decode_batch(payload)
    except ProtocolError:
        return
    assert isinstance(batch, EventBatch)


@given(batches, st.data())
def test_a_damaged_batch_is_a_protocol_error_or_a_batch(
    batch: EventBatch, data: st.DataObject
) -> None:
    payload = bytearray(encode_batch(batch))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_batch(bytes(payload))
    except ProtocolError:
        return


@given(u64)
def test_sequence_numbers_survive_the_wire(seq: int) -> None:
    assert unpack_seq(pack_seq(seq)) == seq


def test_sequence_frames_sort_as_numbers() -> None:
    frames = [pack_seq(seq) for seq in (0, 1, 255, 256, 2**32, 2**64 - 2)]
    assert all(one < other for one, other in itertools.pairwise(frames))
    assert frames[-1] < END_SEQ
    assert int.from_bytes(END_SEQ, "big", signed=True) == -1


@pytest.mark.parametrize("seq", [-1, 2**64])
def test_a_number_that_is_no_sequence(seq: int) -> None:
    with pytest.raises(ValueError, match="sequence number"):
        pack_seq(seq)


@pytest.mark.parametrize("frame", [b"", b"1234567", b"123456789"])
def test_a_frame_that_is_no_sequence(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_seq(frame)


def stored_map(**fields: object) -> dict[str, object]:
    base: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [3, 4],
        "block_size": 1,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return base | fields


# As the engines' own schemas write them, byte by byte.
WIRE = {
    # vLLM 0.10: [ts, [event, ...], rank], nothing behind lora_id.
    "vllm_0_10": (
        "93cb3ff80000000000009296ab426c6f636b53746f7265649201cf8000000000000000c0"
        "92030401c092ac426c6f636b52656d6f766564910700"
    ),
    # vLLM 0.32: the batch an array, its events maps.
    "vllm_0_32": (
        "93cb3ff80000000000009188a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739201"
        "cf8000000000000000b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473920304aa626c"
        "6f636b5f73697a6501a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c000"
    ),
    # A later vLLM: the batch is a map too.
    "vllm_map_batch": (
        "83a27473cb3ff8000000000000a66576656e74739182a474797065ac426c6f636b52656d6f766564ac626c6f"
        "636b5f6861736865739107b2646174615f706172616c6c656c5f72616e6b02"
    ),
    # SGLang: a page an event, hashes with a sign.
    "sglang": (
        "93cb3ff80000000000009197ab426c6f636b53746f72656491d3800000000000000005920304"
        "02c0a347505500"
    ),
    # SGLang with EAGLE: pairs of tokens.
    "sglang_eagle": ("92cb3ff80000000000009196ab426c6f636b53746f7265649101c09292030492040502c0"),
}


@pytest.mark.parametrize(
    ("name", "events"),
    [
        ("vllm_0_10", (BlockStored([1, 2**63], None, [3, 4], 1), BlockRemoved([7]))),
        ("vllm_0_32", (BlockStored([1, 2**63], None, [3, 4], 1),)),
        ("vllm_map_batch", (BlockRemoved([7]),)),
        ("sglang", (BlockStored([-(2**63)], 5, [3, 4], 2),)),
        ("sglang_eagle", (BlockStored([1], None, [3, 4], 2),)),
    ],
)
def test_each_engine_is_understood(name: str, events: tuple[object, ...]) -> None:
    batch = decode_batch(bytes.fromhex(WIRE[name]))
    assert (batch.ts, batch.events, batch.num_skipped, batch.boot_id) == (1.5, events, 0, None)
    assert batch.data_parallel_rank == {"vllm_map_batch": 2, "sglang_eagle": None}.get(name, 0)


@pytest.mark.parametrize(
    ("fields", "num_plain"),
    [
        ({}, 2),
        ({"extra_keys": None}, 2),
        ({"extra_keys": [None, None]}, 2),
        ({"extra_keys": [[], None]}, 2),
        ({"extra_keys": [None, [["image", 3]]]}, 1),
        ({"extra_keys": [["a salt"], None]}, 0),
        ({"extra_keys": [None]}, 0),
        ({"extra_keys": "junk"}, 0),
        ({"lora_name": "an-adapter"}, 0),
        ({"lora_id": 0}, 0),
        ({"metadata": {"cache_salt": "a salt"}}, 0),
        ({"metadata": {"cache_salt": None}}, 2),
        ({"group_idx": "junk", "kv_cache_spec_kind": 3, "locality": 7}, 2),
        # What is not understood is not plain, whatever it is called and whatever it says.
        ({"metadata": None}, 2),
        ({"metadata": {}}, 2),
        ({"metadata": []}, 2),
        ({"metadata": {"cache_salt": []}}, 2),
        ({"metadata": {"cache_salt": ""}}, 0),
        ({"metadata": {"salt": "x"}}, 0),
        ({"metadata": {"extra_key": 0}}, 0),
        ({"metadata": {"cache_salt": None, "other": False}}, 0),
        ({"metadata": [["cache_salt", "x"]]}, 0),
        ({"metadata": 7}, 0),
        ({"metadata": ""}, 0),
        ({"cache_salt": "x"}, 0),
        ({"cache_salt": ""}, 0),
        ({"extra_key": 0}, 0),
        ({"extra_key": {}}, 0),
        ({"extra_key": None, "cache_salt": []}, 2),
        ({"extra_key": None, "cache_salt": "x"}, 0),
        ({"not_known": "x"}, 0),
        ({"not_known": None}, 2),
        ({"extra_keys": [0, None]}, 0),
        ({"extra_keys": ["", None]}, 0),
        ({"extra_keys": [None, 0]}, 1),
        ({"extra_keys": [None, False]}, 1),
        ({"extra_keys": [{}, None]}, 0),
        # Of vLLM, and only informs.
        ({"kv_cache_spec_sliding_window": 128, "ownership": "own", "session_id": "s"}, 2),
    ],
)
def test_what_depends_on_more_than_tokens_is_told_apart(
    fields: dict[str, object], num_plain: int
) -> None:
    batch = decode_batch(pack(1.0, [stored_map(**fields)]))
    (event,) = batch.events
    assert isinstance(event, BlockStored)
    assert event.num_plain() == num_plain


TAIL: list[object] = [None, "GPU", None, None, 0, "full_attention", 128]
"""Behind the block size, as the vLLM that wrote arrays last: up to the sliding window."""


@pytest.mark.parametrize(
    ("more", "num_plain"),
    [
        ([], 2),
        ([None], 2),
        ([None, []], 2),
        ([0], 0),
        ([""], 0),
        ([None, None, {"cache_salt": "x"}], 0),
        (["x", None], 0),
    ],
)
def test_an_array_that_is_longer_than_any_that_is_known(
    more: list[object], num_plain: int
) -> None:
    batch = decode_batch(pack(1.0, [["BlockStored", [1, 2], None, [3, 4], 1, *TAIL, *more]]))
    (event,) = batch.events
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.token_ids, event.block_size) == ([1, 2], [3, 4], 1)
    assert (event.medium, event.kv_cache_spec_kind) == ("GPU", "full_attention")
    assert event.num_plain() == num_plain


def test_fields_that_are_not_known_cost_nothing_else() -> None:
    """Byte hashes, pairs of tokens and removals are read as ever."""
    stored = stored_map(block_hashes=[b"\x01" * 32, 2**64 - 1], parent_block_hash=b"p", more="x")
    array = ["BlockStored", [b"\x02"], -5, [[3, 4], [4, 5]], 2, *TAIL, "x"]
    removed = {"type": "BlockRemoved", "block_hashes": [7], "more": "x"}
    batch = decode_batch(pack(1.0, [stored, array, removed, ["BlockRemoved", [8], "GPU", 0, "x"]]))
    one, other, *gone = batch.events
    assert isinstance(one, BlockStored)
    assert isinstance(other, BlockStored)
    assert (one.block_hashes, one.parent_block_hash) == ([b"\x01" * 32, 2**64 - 1], b"p")
    assert (other.block_hashes, other.token_ids) == ([b"\x02"], [3, 4])
    assert gone == [BlockRemoved([7]), BlockRemoved([8], "GPU", 0)]
    assert batch.num_skipped == 0


@pytest.mark.parametrize("field", ["block_hashes", "token_ids", "block_size"])
def test_a_bad_event_with_fields_that_are_not_known_costs_itself_alone(field: str) -> None:
    batch = decode_batch(pack(1.0, [stored_map(more=1) | {field: "junk"}, stored_map()]))
    assert (len(batch.events), batch.num_skipped) == (1, 1)
