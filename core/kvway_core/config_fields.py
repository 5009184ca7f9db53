"""The fields of a configuration: how one is declared, and how its value is read from text.

Import `option` from `kvway_core.config`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, cast

T = TypeVar("T")

_METADATA = "kvway"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class Option:
    """What `--help` says about a field besides its name and default."""

    help: str
    unit: str | None
    choices: tuple[str, ...] | None
    metavar: str | None


def option(
    default: T,
    *,
    help: str,  # noqa: A002 (the word argparse taught everyone)
    unit: str | None = None,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
) -> T:
    """Declares a field of a configuration.

    Fields may be str, int, float, bool, Path, tuple[str, ...], each also with `| None`. There are
    no required fields: what must be given has default None and is checked by `validate`.

    Args:
        default: Value when nothing else is given.
        help: One phrase for `--help`, no full stop.
        unit: What the number counts, e.g. "seconds".
        choices: The only values allowed.
        metavar: Placeholder in `--help`; by default it follows from the type.
    """
    described = Option(help, unit, tuple(choices) if choices is not None else None, metavar)
    return dataclasses.field(default=default, metadata={_METADATA: described})


@dataclass(frozen=True, slots=True)
class Field:
    """One field, ready to be read from any source.

    Attributes:
        name: Of the field.
        kind: str, int, float, bool or Path.
        repeatable: Whether it is a tuple of such.
        default: Its value when nothing else is given.
        option: What `--help` says.
    """

    name: str
    kind: type
    repeatable: bool
    default: object
    option: Option

    @classmethod
    def of(cls, field: dataclasses.Field[object], hint: object) -> Field:
        """Reads the declaration of a field.

        Raises:
            TypeError: If its type is not one that can be read from a flag: a bug of ours.
        """
        kinds = [hint]
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
            kinds = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
        kind = kinds[0]
        repeatable = typing.get_origin(kind) is tuple and typing.get_args(kind) == (str, ...)
        if repeatable or typing.get_origin(kind) is Literal:
            kind = str
        if len(kinds) != 1 or kind not in {str, int, float, bool, Path}:
            raise TypeError(f"{field.name}: fields of type {hint} cannot be configured")
        described = field.metadata[_METADATA]
        return cls(field.name, cast("type", kind), repeatable, field.default, described)

    @property
    def flag(self) -> str:
        """The flag, with its dashes."""
        return "--" + self.name.replace("_", "-")

    @property
    def metavar(self) -> str:
        """The placeholder for the value in `--help`."""
        if self.option.metavar is not None:
            return self.option.metavar
        return {int: "N", float: "X", Path: "PATH"}.get(self.kind, "TEXT")

    @property
    def help(self) -> str:
        """The line of `--help`: what it is, its unit, its default."""
        notes = [self.option.unit] if self.option.unit else []
        if self.repeatable:
            notes.append("repeatable")
        if self.default is None or self.default == ():
            notes.append("not set")
        elif isinstance(self.default, bool):
            notes.append(f"default {'on' if self.default else 'off'}")
        else:
            notes.append(f"default {self.default}")
        return f"{self.option.help} ({'; '.join(notes)})".replace("%", "%%")

    def from_text(self, text: str) -> object:
        """Returns the value that a flag or a variable spells.

        Raises:
            ValueError: Saying what was expected.
        """
        if self.kind is bool:
            lowered = text.strip().lower()
            if lowered not in _TRUE | _FALSE:
                raise ValueError("expected true or false")
            return lowered in _TRUE
        if self.kind in {int, float}:
            return self._number(text)
        if self.option.choices is not None and text not in self.option.choices:
            raise ValueError(f"expected one of {', '.join(self.option.choices)}")
        if not text:
            raise ValueError("expected a value, got an empty one")
        return Path(text) if self.kind is Path else text

    def from_toml(self, value: object) -> object:
        """Returns the value that a TOML value means.

        Raises:
            ValueError: Saying what was expected.
        """
        if self.repeatable:
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise ValueError("expected an array of strings")
            return tuple(self.from_text(item) for item in value)
        if self.kind is float and type(value) is int:
            return self._number(str(value))
        wanted = str if self.kind is Path else self.kind
        if type(value) is not wanted:
            raise ValueError(f"expected {_TOML_NAMES[wanted]}")
        return self.from_text(str(value))

    def _number(self, text: str) -> object:
        """Returns a whole or finite number."""
        try:
            number = self.kind(text)
        except ValueError:
            wanted = "a whole number" if self.kind is int else "a number"
            raise ValueError(f"expected {wanted}") from None
        if number != number or number in {float("inf"), float("-inf")}:  # noqa: PLR0124 (NaN)
            raise ValueError("expected a finite number")
        return number


_TOML_NAMES: Mapping[type, str] = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def fields_of(cls: type) -> list[Field]:
    """Returns the fields of a dataclass, in order.

    Raises:
        TypeError: If it is no dataclass or has a field that cannot be read: a bug of ours.
    """
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a dataclass")
    hints = typing.get_type_hints(cls)
    return [Field.of(field, hints[field.name]) for field in dataclasses.fields(cls)]
