"""What varies between two texts: a time, an id, a name, a header, or the same things again.

Both texts are taken apart into values and what is between them. Where all between the values is
the same, the texts differ in values alone, and the values say of what kind they are. Anything else
is content, and content is no prefix killer.
"""

from __future__ import annotations

import re
from collections import Counter
from enum import StrEnum
from typing import Final, NamedTuple


class Kind(StrEnum):
    """What varies."""

    TIMESTAMP = "timestamp"
    EPOCH = "epoch"
    DATE = "date"
    UUID = "uuid"
    OPAQUE_ID = "opaque_id"
    """Hexadecimal digits, or letters and digits."""
    NUMERIC_ID = "numeric_id"
    NAME = "name"
    NUMBER = "number"
    USER_HEADER = "user_header"
    """Several fields about whoever asks."""
    REORDERED = "reordered"
    """The same blocks in another order."""
    KEY_ORDER = "key_order"
    """The same, of JSON: tools or keys."""
    WHITESPACE = "whitespace"
    HISTORY = "history"
    """Earlier messages of a conversation, left out or written anew."""


SAME_CONTENTS: Final = frozenset({Kind.REORDERED, Kind.KEY_ORDER, Kind.WHITESPACE})
"""Kinds whose varying text is itself the same each time, and lost."""

_MONTH: Final = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?"
    r"|Sep(?:t(?:ember)?)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
_DAY: Final = r"(?:Mon|Tue(?:s)?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_DATE: Final = (
    rf"(?:{_DAY},?\s+)?(?:\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{2,4}}"
    rf"|{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?,?\s+\d{{4}}"
    rf"|\d{{1,2}}(?:st|nd|rd|th)?[\s-]+{_MONTH},?[\s-]+\d{{4}})"
)
_CLOCK: Final = (
    r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?"
    r"(?:\s?(?:Z|UTC|GMT|CES?T|[EP][SD]?T)\b|\s?[+-]\d{2}:?\d{2}\b)?"
)
_OPAQUE: Final = (
    r"(?:0x[0-9a-fA-F]{4,64}|(?=[A-Za-z]{0,63}\d)(?=\d{0,63}[A-Za-z])[A-Za-z0-9]{8,64})"
)
_NUMBER: Final = (
    r"(?:(?<![\w.])-?\d{1,3}(?:[,']\d{3})+(?:\.\d+)?\b"
    r"|(?<![A-Za-z0-9.])-?\d+(?:\.\d+)?(?![A-Za-z0-9]))"
)
_VALUE: Final = re.compile(
    "|".join(
        (
            r"(?P<uuid>(?:urn:uuid:)?\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b)",
            rf"(?P<timestamp>\b{_DATE}(?:T|\s+at\s+|,?\s+){_CLOCK}|(?<![\d:]){_CLOCK}(?![\d:]))",
            rf"(?P<date>\b{_DATE}(?!\d)|\b{_DAY}\b)",
            r"(?P<email>(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,4})",
            rf"(?P<opaque_id>\b(?:[A-Za-z]{{1,12}}[_:-])?{_OPAQUE}\b)",
            rf"(?P<number>[#$€£]?{_NUMBER})",
        )
    )
)
_WORD: Final = r"[^\W\d_a-zß-öø-ÿ][\w\u2019'-]*"
_NAME: Final = re.compile(rf"{_WORD}(?:(?: | & | and | de | van | von | of ){_WORD}){{0,4}}")
_FIELD: Final = re.compile(
    r'(?P<key>(?<![\w"])"?[A-Za-z][A-Za-z0-9_ -]{0,30}"?\s*[:=]\s*)'
    r'(?P<value>"[^"\n]{0,120}"|[^\n|;{}<>"]{1,120})'
    r"|<(?P<tag>[A-Za-z_]\w{0,30})>(?P<text>[^<\n]{0,120})</(?P=tag)>"
)
_USER_WORDS: Final = re.compile(
    r"(?i)\b(user|name|e-?mail|account|customer|client|member|plan|tier|locale|time ?zone|role|org"
    r"|organi[sz]ation|team|tenant|company|phone|city|country|language|department|subscription)"
)
_WORDS: Final = re.compile(r"\w+")
_KEY: Final = re.compile(r'"\s*:')

MAX_VALUE_CHARS: Final = 2048
"""Values are looked for in no longer texts: it bounds what the expressions above can take."""

_NUMERIC_ID_DIGITS: Final = 6
_EPOCH_S: Final = (1_400_000_000, 2_200_000_000)
_EPOCH_SPREAD_S: Final = 366 * 86_400
_MOST_VALUES: Final = 16
_FEWEST_WORDS: Final = 6
_SHAPE_CHARS: Final = 64
_SHAPE: Final = re.compile(r"\d|[^\W\d_]")


class Varying(NamedTuple):
    """What differs in the later of two texts: its kind, and the characters of it."""

    kind: Kind
    begin: int
    end: int


def varying(a: str, b: str, region: tuple[int, int]) -> Varying | None:
    """Says in what two texts differ, None if it is content.

    Args:
        a: The earlier text, with some of what both have in front of the difference and behind it.
        b: The later one.
        region: The characters of `b` from where they part to where they agree again.

    Returns:
        The kind, and what varies in `b`, from the first varying value to the last one.
    """
    if "".join(a.split()) == "".join(b.split()):
        return Varying(Kind.WHITESPACE, *region)
    found = None
    if max(len(a), len(b)) <= MAX_VALUE_CHARS:
        found = _fields_differ(a, b) or _values_differ(a, b) or _names_differ(a, b)
    return found or _order_differs(a, b, region)


def is_json(text: str) -> bool:
    """Says whether a text is mostly keys and values of JSON."""
    return len(_KEY.findall(text)) * 200 >= max(400, len(text))


def shape(text: str) -> str:
    """Returns a text masked: 9 for digits, a and A for letters, all else as it is; bounded."""
    masked = _SHAPE.sub(
        lambda m: "9" if m[0].isdigit() else "A" if m[0].isupper() else "a", text[:_SHAPE_CHARS]
    )
    return masked if len(text) <= _SHAPE_CHARS else masked + "…"


def _fields_differ(a: str, b: str) -> Varying | None:
    """Two or more fields, such as ``Plan: pro``, of which one is about a person."""
    fields_a, fields_b = list(_FIELD.finditer(a)), list(_FIELD.finditer(b))
    if len(fields_a) != len(fields_b) or _FIELD.sub(_key_of, a) != _FIELD.sub(_key_of, b):
        return None
    differ = [
        (field, value)
        for other, field in zip(fields_a, fields_b, strict=True)
        if _value_of(other) != (value := _value_of(field))
    ]
    if len(differ) < 2:
        return None
    if not any(_USER_WORDS.search(_key_of(field)) or "@" in value for field, value in differ):
        return None
    return Varying(Kind.USER_HEADER, differ[0][0].start(), differ[-1][0].end())


def _key_of(field: re.Match[str]) -> str:
    return str(field["key"] or field["tag"]) + "\0"


def _value_of(field: re.Match[str]) -> str:
    return str(field["value"] or field["text"] or "").strip()


def _values_differ(a: str, b: str) -> Varying | None:
    """Values that are recognised by how they are written."""
    found_a, found_b = list(_VALUE.finditer(a)), list(_VALUE.finditer(b))
    if len(found_a) != len(found_b):
        return None
    if _VALUE.sub("\0", a) != _VALUE.sub("\0", b):
        return None
    differ = [(x, y) for x, y in zip(found_a, found_b, strict=True) if x[0] != y[0]]
    if not 0 < len(differ) <= _MOST_VALUES:
        return None
    first_a, first_b = differ[0]
    return Varying(_kind_of(first_a, first_b), first_b.start(), differ[-1][1].end())


def _kind_of(a: re.Match[str], b: re.Match[str]) -> Kind:
    group = b.lastgroup or ""
    if group == "email":
        return Kind.NAME
    if group == "date" and a.lastgroup == "timestamp":
        return Kind.TIMESTAMP
    if group != "number":
        return Kind(group)
    if a.lastgroup == "opaque_id":
        return Kind.OPAQUE_ID
    if _are_epochs(a[0], b[0]):
        return Kind.EPOCH
    digits = b[0].lstrip("#-")
    return (
        Kind.NUMERIC_ID if digits.isdigit() and len(digits) >= _NUMERIC_ID_DIGITS else Kind.NUMBER
    )


def _are_epochs(a: str, b: str) -> bool:
    """Says whether two numbers are times of one year in seconds, or parts of them, since 1970."""
    seconds = []
    for text in (a, b):
        whole = text.partition(".")[0]
        if not whole.isdigit() or len(whole) not in (10, 13, 16, 19):
            return False
        seconds.append(int(whole[:10]))
    low, high = _EPOCH_S
    return (
        all(low <= s <= high for s in seconds) and abs(seconds[0] - seconds[1]) < _EPOCH_SPREAD_S
    )


def _names_differ(a: str, b: str) -> Varying | None:
    """One run of capitalized words."""
    if _NAME.sub("\0", a) != _NAME.sub("\0", b):
        return None
    pairs = zip(_NAME.finditer(a), _NAME.finditer(b), strict=True)
    differ = [(x, y) for x, y in pairs if x[0] != y[0]]
    if len(differ) != 1:
        return None
    (x, y), skipped = differ[0], 0
    for word_a, word_b in zip(x[0].split(" "), y[0].split(" "), strict=False):
        if word_a != word_b:
            break
        skipped += len(word_b) + 1
    return Varying(Kind.NAME, y.start() + min(skipped, len(y[0])), y.end())


def _order_differs(a: str, b: str, region: tuple[int, int]) -> Varying | None:
    """The same words in another order."""
    words_a, words_b = _WORDS.findall(a), _WORDS.findall(b)
    if len(words_a) < _FEWEST_WORDS or Counter(words_a) != Counter(words_b):
        return None
    return Varying(Kind.KEY_ORDER if is_json(b) else Kind.REORDERED, *region)
