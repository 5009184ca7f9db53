"""One frozen dataclass per process, read from flags, environment and a TOML file.

    @dataclass(frozen=True, slots=True)
    class WorkerConfig:
        num_blocks: int = option(4096, help="KV blocks in the pool", unit="blocks")

gives `--num-blocks N`, `KVWAY_WORKER_NUM_BLOCKS` and `num_blocks = N` in the file of `--config`.
A flag wins over the environment, that over the file, that over the default; each value remembers
where it came from. Everything wrong is reported at once.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, NoReturn, TypeVar

from typing_extensions import override

from kvway_core.config_fields import Field, Option, fields_of, option
from kvway_core.errors import ConfigError

__all__ = ["Loaded", "Option", "Source", "env_name", "load", "option", "render_config"]

T = TypeVar("T")

Source = Literal["flag", "environment", "file", "default"]
HELP_WIDTH = 99

_SERVICE_LINK = re.compile(
    r"SERVICE_(HOST|PORT(_\w+)?)=.*|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?=.*|=(tcp|udp|sctp)://.*)"
)
"""What Kubernetes puts into the environment of every pod when a service is called kvway-router."""


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """A configuration and where each of its values came from."""

    config: T
    sources: Mapping[str, Source]


def load(
    cls: type[T],
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    prog: str,
    description: str,
) -> Loaded[T]:
    """Returns the effective configuration of a process.

    `cls` may have a method `validate() -> Sequence[str]` that returns what contradicts in it.
    `--help` and `--print-config` print and exit with status 0, the latter also what contradicts.

    Args:
        cls: Frozen dataclass of `option` fields.
        argv: Arguments after the command's name.
        env: Environment; names are `KVWAY_` and the field's, with the last word of prog between.
        prog: The command as the user types it, e.g. "kvway worker".
        description: First sentence of `--help`.

    Raises:
        ConfigError: With every problem: unknown names, malformed and contradictory values.
    """
    fields = fields_of(cls)
    parser = _build_parser(fields, prog=prog, description=description)
    flags, unknown = parser.parse_known_args(list(argv))
    strange_flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    names = [field.flag for field in fields]
    problems = [_unknown(word, names) for word in strange_flags or unknown]
    layers: list[tuple[Source, Mapping[str, object]]] = [
        ("file", _read_file(flags.config, fields, problems=problems)),
        ("environment", _read_env(env, fields, prog=prog, problems=problems)),
        ("flag", _read_flags(vars(flags), fields, problems=problems)),
    ]
    values = {field.name: field.default for field in fields}
    sources: dict[str, Source] = dict.fromkeys(values, "default")
    for source, layer in layers:
        values.update(layer)
        sources.update(dict.fromkeys(layer, source))
    if problems:
        raise ConfigError(problems)
    loaded = Loaded(cls(**values), sources)
    if flags.print_config:
        sys.stdout.write(render_config(loaded))
        raise SystemExit(0)
    validate = getattr(loaded.config, "validate", None)
    if validate is not None and (contradictions := list(validate())):
        raise ConfigError(contradictions)
    return loaded


def render_config(loaded: Loaded[T]) -> str:
    """Returns the effective values as TOML, each with its source; unset ones as comments."""
    lines: list[str] = []
    for name, source in loaded.sources.items():
        value = getattr(loaded.config, name)
        text = f"# {name} is not set" if value is None else f"{name} = {_toml(value)}"
        lines.append(f"{text}  # {source}")
    return "\n".join(lines) + "\n"


def env_name(prog: str, name: str) -> str:
    """Returns the environment variable of a field, e.g. KVWAY_WORKER_NUM_BLOCKS."""
    return f"KVWAY_{prog.rsplit(maxsplit=1)[-1]}_{name}".upper().replace("-", "_")


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of printing its usage and exiting."""

    @override
    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError([f"{message} (see {self.prog} --help)"])


def _formatter(prog: str) -> argparse.HelpFormatter:
    """Returns a formatter that ignores the terminal: `--help` is the same everywhere."""
    return argparse.HelpFormatter(prog, width=HELP_WIDTH, max_help_position=36)


def _build_parser(fields: Sequence[Field], *, prog: str, description: str) -> _Parser:
    """Returns the parser whose flags are the fields; values stay text, read in one place."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [options]",
        description=description,
        epilog=(
            f"Each option can also be set in the environment ({env_name(prog, 'option')} for"
            " --option) or in the file of --config (option = value). A flag wins over the"
            " environment, that over the file."
        ),
        allow_abbrev=False,
        add_help=False,
        formatter_class=_formatter,
    )
    group = parser.add_argument_group("options")
    for field in fields:
        if field.kind is bool:
            group.add_argument(
                field.flag,
                dest=field.name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=field.help,
            )
            continue
        choices = field.option.choices
        group.add_argument(
            field.flag,
            dest=field.name,
            action="append",
            metavar="{" + ",".join(choices) + "}" if choices else field.metavar,
            default=argparse.SUPPRESS,
            help=field.help,
        )
    group.add_argument("--config", metavar="FILE", type=Path, help="read options from a TOML file")
    group.add_argument(
        "--print-config", action="store_true", help="print the effective options and exit"
    )
    group.add_argument("-h", "--help", action="help", help="print this and exit")
    return parser


def _read_flags(
    flags: Mapping[str, object], fields: Sequence[Field], *, problems: list[str]
) -> dict[str, object]:
    """Returns the values given by flags. Of a flag given twice the last one counts."""
    values: dict[str, object] = {}
    for field in fields:
        given = flags.get(field.name)
        if isinstance(given, bool):
            values[field.name] = given
        elif isinstance(given, list):
            texts = given if field.repeatable else given[-1:]
            _read_into(values, field, field.flag, texts, problems=problems)
    return values


def _read_env(
    env: Mapping[str, str], fields: Sequence[Field], *, prog: str, problems: list[str]
) -> dict[str, object]:
    """Returns the values given by the environment; an empty variable counts as not set."""
    values: dict[str, object] = {}
    names = {env_name(prog, field.name): field for field in fields}
    prefix = env_name(prog, "")
    for variable in sorted(env):
        text = env[variable]
        if not variable.startswith(prefix) or not text:
            continue
        if _SERVICE_LINK.fullmatch(f"{variable.removeprefix(prefix)}={text}"):
            continue
        field = names.get(variable)
        if field is None:
            problems.append(_unknown(variable, list(names)))
            continue
        texts = text.split(",") if field.repeatable else [text]
        _read_into(values, field, variable, texts, problems=problems)
    return values


def _read_file(
    path: Path | None, fields: Sequence[Field], *, problems: list[str]
) -> dict[str, object]:
    """Returns the values given by a TOML file, none when there is no file."""
    if path is None:
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        problems.append(f"--config {path}: {exc.strerror}")
        return {}
    except ValueError as exc:
        problems.append(f"--config {path}: {exc}")
        return {}
    values: dict[str, object] = {}
    by_name = {field.name: field for field in fields}
    for key, value in table.items():
        field = by_name.get(key)
        if field is None:
            problems.append(f"--config {path}: {_unknown(key, list(by_name))}")
            continue
        try:
            values[key] = field.from_toml(value)
        except ValueError as exc:
            problems.append(f"--config {path}: {key}: {exc}, got {str(value)[:60]!r}")
    return values


def _read_into(
    values: dict[str, object],
    field: Field,
    name: str,
    texts: Sequence[str],
    *,
    problems: list[str],
) -> None:
    """Sets the value that texts spell, or notes the problem under the user's name for it."""
    read: list[object] = []
    for text in texts:
        try:
            read.append(field.from_text(text))
        except ValueError as exc:
            problems.append(f"{name}: {exc}, got {text[:60]!r}")
            return
    values[field.name] = tuple(read) if field.repeatable else read[0]


def _unknown(name: str, known: Sequence[str]) -> str:
    """Returns the problem of a name that is none of ours, with the one that was probably meant."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"unknown option {name}" + (f"; did you mean {close[0]}?" if close else "")


def _toml(value: object) -> str:
    """Returns a value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return json.dumps(str(value))
