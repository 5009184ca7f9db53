r"""Long lists of numbers in a msgpack message, read a few thousand elements at a time.

A decoder reads a message in one call, and nothing else on the event loop runs meanwhile. So the
lists that make a message long, of tokens and of hashes, are taken out and read on their own:

    [ts, [["BlockStored", [h0 ... h8191], parent, [t0 ... t131071], 16, ...]], rank]
                          `- in pieces -'         `-- in pieces --'
    [ts, [["BlockStored", [mark 0],       parent, [mark 1],         16, ...]], rank]

What is left is short, and whoever decodes it puts the lists back where the marks are. msgpack is
flat: every value begins with a byte that says how long it is, so the lists are found without
knowing what is in what.
"""

from __future__ import annotations

import re
import secrets
from array import array
from collections.abc import Generator, Sequence
from typing import Final, cast

import msgspec

MIN_LIST: Final = 256
"""Elements of a list that is taken out, at least."""
PIECE: Final = 4096
"""Most elements that are read at once; a power of two."""

_INT: Final = (
    rb"[\x00-\x7f\xe0-\xff]|\xcd.{2}|\xce.{4}|\xcc.|\xcf.{8}|\xd0.|\xd1.{2}|\xd2.{4}|\xd3.{8}"
)
_ELEMENT: Final = _INT + rb"|\xc4(?:\x20.{32}|\x10.{16}|\x08.{8})|\x92(?:" + _INT + rb"){2}"
"""A number, a hash as bytes, a pair of numbers."""
_SHORT: Final = b"|".join(
    (
        _ELEMENT,
        rb"[\x80-\xa0\xc0\xc2\xc3]|\xca.{4}|\xcb.{8}|\xd4.{2}|\xd5.{3}|\xd6.{5}|\xd7.{9}|\xd8.{17}",
        *(b"%s.{%d}" % (re.escape(bytes([0xA0 + size])), size) for size in range(1, 32)),
    )
)
"""Any value, or beginning of one, whose first byte says how long it is."""
_SHORTS: Final = re.compile(b"(?:" + _SHORT + b"){1,%d}+" % PIECE, re.DOTALL)
_ELEMENTS: Final = {
    num: re.compile(b"(?:" + _ELEMENT + b"){%d}+" % num, re.DOTALL)
    for num in (PIECE >> power for power in range(PIECE.bit_length()))
}
"""So many elements, the most first."""

_SIZE_BYTES: Final = dict(
    zip((0xC4, 0xC5, 0xC6, 0xC7, 0xC8, 0xC9, 0xD9, 0xDA, 0xDB), (1, 2, 4) * 3, strict=True)
)
"""Of bytes, extensions and strings: bytes that say how long they are."""
_EXTENSIONS: Final = frozenset((0xC7, 0xC8, 0xC9))
_COUNT_BYTES: Final = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""Of arrays and maps: bytes that say how many values they have."""
_ARRAYS: Final = frozenset((0xDC, 0xDD))

_MARK: Final = secrets.randbits(38) << 25
"""Drawn anew by each process: no message can have it but by chance."""
_INDEX_MASK: Final = (1 << 25) - 1
_PIECES: Final = msgspec.msgpack.Decoder(list[int | bytes | tuple[int, int]])

Numbers = Sequence[int | bytes]
"""A list that was taken out; an array where all elements are numbers of 32 bits."""


def take_out(message: bytes) -> Generator[None, None, tuple[bytes, list[Numbers]]]:
    """Takes the long lists out of a message, yielding after each few thousand elements.

    Returns:
        The message with marks in their place, and the lists. What breaks off still does.

    Raises:
        ValueError: A byte begins no value.
    """
    kept: list[bytes] = []
    lists: list[Numbers] = []
    at = kept_to = 0
    while at < len(message):
        start, at, count = at, *_next(message, at)
        if count >= MIN_LIST:
            taken = yield from _read(message, at, count)
            if taken is not None:
                numbers, at = taken
                kept += (
                    message[kept_to:start],
                    b"\x91\xcf",
                    (_MARK | len(lists)).to_bytes(8, "big"),
                )
                lists.append(numbers)
                kept_to = at
        yield
    kept.append(message[kept_to:])
    return b"".join(kept), lists


def put_back(found: Numbers, lists: Sequence[Numbers]) -> Numbers:
    """Returns the list whose mark was found, or what was found if that is no mark."""
    first = found[0] if len(found) == 1 else None
    if isinstance(first, int) and first & ~_INDEX_MASK == _MARK:
        index = first & _INDEX_MASK
        if index < len(lists):
            return lists[index]
    return found


def _next(message: bytes, at: int) -> tuple[int, int]:
    """Returns where what begins at a place ends, and how many elements follow if it is an array.

    Of an array or a map only the beginning is passed, and some thousand short values at once.

    Raises:
        ValueError: No value begins there.
    """
    shorts = _SHORTS.match(message, at)
    if shorts is not None:
        return shorts.end(), 0
    kind = message[at]
    at += 1
    if kind in _COUNT_BYTES:
        end = at + _COUNT_BYTES[kind]
        return end, int.from_bytes(message[at:end], "big") if kind in _ARRAYS else 0
    if kind not in _SIZE_BYTES:
        raise ValueError(f"no value begins with {kind:#x}, or it breaks off")
    end = at + _SIZE_BYTES[kind]
    end += int.from_bytes(message[at:end], "big") + (kind in _EXTENSIONS)
    return end, 0


def _read(
    message: bytes, at: int, count: int
) -> Generator[None, None, tuple[Numbers, int] | None]:
    """Reads a list, yielding between pieces.

    Returns:
        Its elements, of pairs the first, and where it ends; None if it has others than numbers.
    """
    numbers: array[int] | list[int | bytes] = array("I")
    for num, pattern in _ELEMENTS.items():
        while count >= num:
            found = pattern.match(message, at)
            if found is None:
                return None
            encoded = b"\xdc%b%b" % (num.to_bytes(2, "big"), found[0])
            numbers = _extended(numbers, _PIECES.decode(encoded))
            at, count = found.end(), count - num
            yield
    return numbers, at


def _extended(
    numbers: array[int] | list[int | bytes], piece: list[int | bytes | tuple[int, int]]
) -> array[int] | list[int | bytes]:
    """Returns numbers with more of them: an array as long as it can be one."""
    if isinstance(numbers, array):
        try:
            numbers.extend(array("I", cast("list[int]", piece)))
        except (OverflowError, TypeError):
            pass  # pairs, bytes or larger numbers
        else:
            return numbers
    plain = [each[0] if isinstance(each, tuple) else each for each in piece]
    if plain != piece:
        return _extended(numbers, [*plain])
    if isinstance(numbers, array):
        return [*numbers, *plain]
    numbers += plain
    return numbers
