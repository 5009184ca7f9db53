"""Long lists of a message are read in pieces, and the message is the same."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvway_core import events, long_lists
from kvway_core.errors import ProtocolError
from kvway_core.events import BlockRemoved, BlockStored, EventBatch, decode_batch, decode_in_steps
from kvway_core.long_lists import MIN_LIST, PIECE, put_back, take_out

TOKENS = [7, 300, 70_000, 2**31, 0, 127, 128, 65_536]
HASHES: dict[str, Any] = {
    "numbers": [2**64 - 1, 3, -5, 2**40, 200, -(2**63), -200, -40_000],
    "32 bytes": [bytes([byte]) * 32 for byte in range(8)],
    "16 bytes": [bytes([byte]) * 16 for byte in range(8)],
    "8 bytes": [bytes([byte]) * 8 for byte in range(8)],
}


def taken_out(message: bytes) -> tuple[bytes, list[Any], int]:
    """What is left, what was taken, in how many steps."""
    steps, num_steps = take_out(message), 0
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return *done.value, num_steps
        num_steps += 1


def whole(value: object, lists: list[Any]) -> object:
    """A value with its lists put back, wherever they were."""
    if isinstance(value, list):
        found = put_back(value, lists)
        return [whole(each, lists) for each in found]
    if isinstance(value, dict):
        return {key: whole(each, lists) for key, each in value.items()}
    return value


_NUMBERS = st.integers(-(2**63), 2**64 - 1)
_LONG = st.builds(
    lambda few, num: (few * num)[:num],
    st.lists(_NUMBERS | st.binary(max_size=40), min_size=1, max_size=5),
    st.sampled_from([MIN_LIST - 1, MIN_LIST, 1000, PIECE, PIECE + 1, 2 * PIECE + 300]),
)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | _NUMBERS
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300)
    | _LONG,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(_VALUES)
def test_what_is_left_and_what_was_taken_are_the_whole(value: object) -> None:
    left, lists, _ = taken_out(msgspec.msgpack.encode(value))
    assert whole(msgspec.msgpack.decode(left), lists) == value
    assert all(len(each) >= MIN_LIST for each in lists)


def test_extensions_are_passed_over() -> None:
    value = [msgspec.msgpack.Ext(5, b"x" * size) for size in (1, 2, 4, 8, 16, 3, 300, 70_000)]
    message = msgspec.msgpack.encode([value, [1] * MIN_LIST])
    left, lists, _ = taken_out(message)
    assert msgspec.msgpack.decode(left)[0] == value
    assert [list(each) for each in lists] == [[1] * MIN_LIST]


@pytest.mark.parametrize("hashes", HASHES)
@pytest.mark.parametrize("form", ["map", "array", "array of pairs"])
@pytest.mark.parametrize("num", [MIN_LIST, PIECE + 9])
def test_an_event_is_the_same_however_it_is_read(
    monkeypatch: pytest.MonkeyPatch, form: str, hashes: str, num: int
) -> None:
    token_ids: list[Any] = (TOKENS * num)[:num]
    if form == "array of pairs":
        token_ids = [(token, token + 1) for token in token_ids]
    block_hashes = (HASHES[hashes] * num)[:num]
    stored: Any = ["BlockStored", block_hashes, 5, token_ids, 1, None, "CPU"]
    removed: Any = ["BlockRemoved", block_hashes, "GPU"]
    if form == "map":
        names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size")
        stored = dict(zip(names, stored, strict=False)) | {"medium": "CPU"}
        removed = {"type": "BlockRemoved", "block_hashes": block_hashes}
    message = msgspec.msgpack.encode([1.0, [stored, ["BlockStored", [9]], removed], 0, "boot"])
    monkeypatch.setattr(events, "WHOLE_BYTES", 2**30)
    at_once = decode_batch(message)
    monkeypatch.setattr(events, "WHOLE_BYTES", 0)
    in_pieces = decode_batch(message)
    assert at_once.num_skipped == in_pieces.num_skipped == 1
    assert (at_once.ts, at_once.boot_id) == (in_pieces.ts, in_pieces.boot_id)
    for one, other in zip(at_once.events, in_pieces.events, strict=True):
        assert type(one) is type(other)
        for field in one.__struct_fields__:
            value = getattr(other, field)
            value = value.tolist() if isinstance(value, array) else value
            assert value == getattr(one, field)


def test_no_decoder_is_given_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read at once is bounded, whatever the message has; so is what a step does."""
    sizes: list[int] = []

    class Watched:
        def __init__(self, decoder: Any) -> None:
            self.decoder = decoder

        def decode(self, data: Any) -> Any:
            sizes.append(len(memoryview(data)))
            return self.decoder.decode(data)

    names = ("_MAP_BATCH_DECODER", "_ARRAY_BATCH_DECODER", "_MAP_DECODER", "_ARRAY_DECODER")
    for module, name in ((long_lists, "_PIECES"), *((events, name) for name in names)):
        monkeypatch.setattr(module, name, Watched(getattr(module, name)))
    num_tokens = 131_072
    event = BlockStored(
        [2**63 + number for number in range(num_tokens // 16)],
        None,
        [number % 128_000 for number in range(num_tokens)],
        16,
    )
    message = events.encode_batch(EventBatch(1.0, (event, BlockRemoved(event.block_hashes))))
    assert len(message) > events.WHOLE_BYTES
    batch = decode_batch(message)
    assert [len(each.block_hashes) for each in batch.events] == [num_tokens // 16] * 2  # type: ignore[union-attr]
    # Nine bytes a number, and three that say how many.
    assert max(sizes) <= 9 * PIECE + 3
    assert sum(1 for _ in decode_in_steps(message)) >= (num_tokens + num_tokens / 8) / PIECE


@pytest.mark.parametrize(
    "end", [b"\xc1", b"\xd9", b"\xda\xff\xff" + b"x" * 9, b"\xdd\xff\xff\xff\xff", b"\xcf1"]
)
def test_a_long_message_that_breaks_off_is_refused(end: bytes) -> None:
    message = msgspec.msgpack.encode([1.0, [["BlockStored", [2**40] * 10_000]]]) + end
    with pytest.raises(ProtocolError):
        decode_batch(message)


def test_what_has_other_tokens_than_numbers_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "WHOLE_BYTES", 0)
    for token in (2**32, -1, b"x" * 8):
        event = ["BlockStored", [1] * 300, None, [token] * 300, 1]
        batch = decode_batch(msgspec.msgpack.encode([1.0, [event]]))
        assert (batch.events, batch.num_skipped) == ((), 1)


def test_a_mark_that_stands_for_no_list_is_a_number() -> None:
    _, lists, _ = taken_out(msgspec.msgpack.encode([[1] * 300]))
    mark = long_lists._MARK | 1
    assert put_back([mark], lists) == [mark]
    assert put_back([0], lists) == [0]
    assert put_back([mark ^ 1, 2], lists) == [mark ^ 1, 2]
    assert list(put_back([mark ^ 1], lists)) == [1] * 300
