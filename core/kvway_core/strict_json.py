"""Reads the JSON body of a request into a type, and names what is wrong with it.

A router forwards the client's bytes, so it must not read them differently from whoever reads them
next: what JSON parsers disagree about (a key given twice in one object, however deep, NaN, a byte
order mark, lone surrogates, numbers beyond double precision, nesting without end) is refused here,
not guessed.

msgspec reads the types, fast, and skips what it is not asked for; the standard library then reads
everything once more, because only it shows every pair of every object.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

import msgspec

from kvway_core.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_DEPTH = 64
MAX_KEYS = 10_000
MAX_KEY_BYTES = 256

T = TypeVar("T", bound=msgspec.Struct)

_EXPECTED = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")
_MISSING = re.compile(r"Object missing required field `([^`]*)`")
_PATH = re.compile(r" - at `\$\.?([^`]*)`")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class BodyDecoder(Generic[T]):
    """Decodes request bodies into one struct type.

    Complexity:
        O(body) in C: a scan for the top-level fields, a typed decode and, where there are objects
        in the object or fields that nobody reads, a decode of everything.
    """

    def __init__(self, struct_type: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(struct_type)
        self._known = frozenset(struct_type.__struct_fields__)

    def decode(self, body: bytes) -> T:
        """Returns the body as the struct. Unknown fields are ignored, but must be sound JSON.

        Raises:
            InvalidRequest: With code `invalid_json`, `invalid_utf8`, `invalid_number`,
                `too_complex`, `duplicate_key`, or `invalid_request` and the field as `param`.
        """
        fields = top_level_fields(body)
        try:
            value = self._decoder.decode(body)
        except msgspec.ValidationError as exc:
            raise _invalid_value(str(exc)) from None
        except (ValueError, RecursionError) as exc:
            _refuse_malformed(body, cause=exc)
        if not (fields.keys() <= self._known and _is_flat_and_compact(body, fields)):
            _read_whole(body)
        return value


def top_level_fields(body: bytes) -> Mapping[str, msgspec.Raw]:
    """Returns the fields of the object in `body`, their values unread; of a key twice, the last.

    Raises:
        InvalidRequest: If the body is not one JSON object, or has too many fields.
    """
    try:
        body.decode("utf-8")
        fields = _FIELDS.decode(body)
    except msgspec.ValidationError:
        raise InvalidRequest("The body must be a JSON object.") from None
    except (ValueError, RecursionError) as exc:
        _refuse_malformed(body, cause=exc)
    if len(fields) > MAX_KEYS or any(len(name) > MAX_KEY_BYTES for name in fields):
        raise InvalidRequest(
            f"The body may have {MAX_KEYS} fields with names of {MAX_KEY_BYTES} bytes.",
            code="too_complex",
        )
    return fields


def plain_name(name: str) -> str | None:
    """Returns a field's name if it may be repeated to the client and in logs, else None."""
    return name if _PLAIN_NAME.fullmatch(name) else None


def _is_flat_and_compact(body: bytes, fields: Mapping[str, msgspec.Raw]) -> bool:
    """Says whether `body` is exactly `fields`: no white space between them, no objects in them.

    No shorter text holds these fields, so a body of this length has no field twice: the proof that
    spares what most completions are from being read as a whole.
    """
    if body.count(b"{") > 1 or body.count(b"[") >= MAX_DEPTH:
        return False
    punctuation = 2 + 4 * len(fields) - bool(fields)
    names = sum(len(name.encode("utf-8", "surrogatepass")) for name in fields)
    return len(body) == punctuation + names + sum(len(memoryview(raw)) for raw in fields.values())


def _read_whole(body: bytes) -> None:
    """Reads what is JSON to the last value.

    Raises:
        InvalidRequest: If an object has a key twice, a number is out of range, or it is too deep.
    """
    try:
        value = json.loads(body, object_pairs_hook=_object, parse_float=_finite)
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # an integer of thousands of digits: it is JSON, msgspec has read it
        raise _out_of_range() from None
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _refuse_depth(value)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Returns an object; raises InvalidRequest if it has a key twice."""
    members = dict(pairs)
    if len(members) == len(pairs):
        return members
    counts = Counter(name for name, _ in pairs)
    param = plain_name(counts.most_common(1)[0][0])
    field = f"the field {param}" if param else "a field"
    raise InvalidRequest(f"An object has {field} twice.", param=param, code="duplicate_key")


def _finite(text: str) -> float:
    """Returns a number with a fraction or an exponent; raises InvalidRequest beyond a double."""
    number = float(text)
    if math.isinf(number):
        raise _out_of_range()
    return number


def _refuse_depth(body: dict[str, object]) -> None:
    """Raises InvalidRequest if arrays and objects nest deeper than MAX_DEPTH."""
    containers: list[dict[str, object] | list[object]] = [body]
    for _ in range(MAX_DEPTH):
        containers = [
            inner
            for container in containers
            for inner in (container.values() if isinstance(container, dict) else container)
            if isinstance(inner, dict | list)
        ]
    if containers:
        raise _too_deep()


def _invalid_value(text: str) -> InvalidRequest:
    """Returns the error for a field of the wrong type, without a word of the client's."""
    path = _PATH.search(text)
    param = path[1] if path and path[1] else None
    if missing := _MISSING.match(text):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return InvalidRequest(f"{param} is required.", param=param)
    if "out of range" in text:
        return InvalidRequest(f"{param}: number out of range.", param=param, code="invalid_number")
    if expected := _EXPECTED.match(text):
        wanted = expected[1].replace(" | ", " or ")
        return InvalidRequest(f"{param}: expected {wanted}, got {expected[2]}.", param=param)
    return InvalidRequest(f"{param}: invalid value.", param=param)


def _refuse_malformed(body: bytes, *, cause: BaseException) -> NoReturn:
    """Raises InvalidRequest that says why the body is not JSON."""
    raise _malformed(body, cause) from None


def _malformed(body: bytes, cause: BaseException) -> InvalidRequest:
    """Returns the error for a body that is not JSON, with the position and never the bytes."""
    if not body.strip():
        return InvalidRequest("The body is empty; send a JSON object.", code="invalid_json")
    if body.startswith(_BYTE_ORDER_MARKS):
        problem = "The body starts with a byte order mark; send UTF-8 without one."
        return InvalidRequest(problem, code="invalid_json")
    if isinstance(cause, RecursionError):
        return _too_deep()
    # The standard library says where the fault is, and reads what msgspec refuses on purpose.
    problem, code = "A string has half of a surrogate pair.", "invalid_utf8"
    try:
        json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as exc:
        problem = f"The body is not UTF-8 at byte {exc.start}."
    except json.JSONDecodeError as exc:
        problem = f"The body is not JSON at line {exc.lineno} column {exc.colno}."
        code = "invalid_json"
    except InvalidRequest as exc:
        return exc
    except RecursionError:
        return _too_deep()
    except ValueError:
        problem, code = "A number has too many digits.", "invalid_number"
    return InvalidRequest(problem, code=code)


def _refuse_constant(name: str) -> NoReturn:
    """Raises InvalidRequest for NaN, Infinity and -Infinity."""
    raise InvalidRequest(f"{name} is not a JSON number.", code="invalid_number")


def _out_of_range() -> InvalidRequest:
    """Returns the error for a number that a double cannot hold, or of thousands of digits."""
    return InvalidRequest("A number is out of range.", code="invalid_number")


def _too_deep() -> InvalidRequest:
    """Returns the error for a body that nests too deep."""
    return InvalidRequest(f"The body nests deeper than {MAX_DEPTH} levels.", code="too_complex")
