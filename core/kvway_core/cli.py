"""The `kvway` command: finds its subcommands, runs one, prints what is wrong with a configuration.

A component registers a subcommand as an entry point of the group `kvway.commands` that names a
`Command`. Only the one that is asked for is imported.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points, version
from importlib.util import find_spec

from kvway_core.errors import ConfigError

GROUP = "kvway.commands"
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand.

    Attributes:
        name: As typed after `kvway`.
        summary: One phrase for `kvway --help`.
        run: Takes the arguments after the name; returns the exit code.
    """

    name: str
    summary: str
    run: Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code, 2 if it was called wrongly.

    Args:
        argv: Arguments after `kvway`; those of the process by default.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {entry.name: entry for entry in entry_points(group=GROUP)}
    if not arguments:
        sys.stderr.write(_help(commands))
        return EXIT_CONFIG
    name, *rest = arguments
    if name in {"-h", "--help"}:
        sys.stdout.write(_help(commands))
        return 0
    if name == "--version":
        sys.stdout.write(f"kvway {version('kvway')}\n")
        return 0
    try:
        return _load(name, commands).run(rest)
    except ConfigError as exc:
        for problem in exc.problems:
            sys.stderr.write(f"kvway: {' '.join(problem.split())}\n")
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _load(name: str, commands: dict[str, EntryPoint]) -> Command:
    """Imports a subcommand.

    Raises:
        ConfigError: If there is none of that name, or what it needs is not installed.
    """
    entry = commands.get(name)
    if entry is None:
        kind = "option" if name.startswith("-") else "command"
        close = difflib.get_close_matches(name, commands, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(commands))}"
        raise ConfigError([f"unknown {kind} {name[:60]!r}; {hint}"])
    try:
        command = entry.load()
    except ModuleNotFoundError as exc:
        raise ConfigError([_not_installed(name, exc.name or "a library")]) from exc
    if not isinstance(command, Command):
        raise TypeError(f"the entry point {entry.value} is not a Command")
    return command


def _help(commands: dict[str, EntryPoint]) -> str:
    """Returns the text of `kvway --help`."""
    lines = ["usage: kvway COMMAND [options]", "", "commands:"]
    for name in sorted(commands):
        try:
            summary = _load(name, commands).summary
        except ConfigError:
            summary = "(not installed)"
        lines.append(f"  {name:<10}{summary}")
    lines += [
        "",
        "kvway COMMAND --help lists the options of a command; kvway --version the version.",
    ]
    return "\n".join(lines) + "\n"


def require(name: str, *modules: str) -> None:
    """Checks, without importing them, that libraries a subcommand will import later are there.

    Args:
        name: The subcommand.
        modules: Top-level modules.

    Raises:
        ConfigError: One is not installed.
    """
    for module in modules:
        if find_spec(module) is None:
            raise ConfigError([_not_installed(name, module)])


def _not_installed(name: str, module: str) -> str:
    """Returns the problem of a command whose libraries are missing."""
    extra = "router" if name == "router" else "worker"
    return f"{name} needs {module}, which is not installed; run: pip install 'kvway[{extra}]'"
