"""The options of `kvway up`, and what can be checked before anything starts."""

from __future__ import annotations

import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvway_core.config import option
from kvway_core.errors import ConfigError

DEFAULT_MODEL: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
_MAX_PORT: Final = 65_535
_MAX_REPLICAS: Final = 256

# What `kvway up` decides for its children; an extra argument may not set it again.
_WORKER_OWN: Final = frozenset(
    {"--host", "--port", "--model", "--served-model-name", "--engine", "--ready-file"}
    | {"--help", "-h", "--print-config"}
)
_ROUTER_OWN: Final = frozenset(
    {"--host", "--port", "--admin-port", "--model", "--served-model-name", "--ready-file"}
    | {"--replica", "--replica-dns", "--help", "-h", "--print-config"}
)


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What `kvway up` starts, and where it listens."""

    replicas: int = option(2, help="workers to start", unit="processes")
    model: str = option(
        DEFAULT_MODEL,
        help="a folder, or a hub id that is fetched when it is not here",
        metavar="PATH_OR_ID",
    )
    served_model_name: str | None = option(
        None, help="name clients use; without it the id as given, or the folder's name"
    )
    engine: str = option(
        "torch",
        help="the model itself, or a cost model with made-up text",
        choices=("torch", "sim"),
    )
    host: str = option("127.0.0.1", help="address the router's API listens on")
    port: int = option(0, help="port of the router's API; 0 takes a free one")
    admin_port: int = option(0, help="port of its page and admin API; 0 takes a free one")
    worker_arg: tuple[str, ...] = option(
        (), help="more arguments for each worker: --worker-arg='--num-blocks 512'", metavar="ARGS"
    )
    router_arg: tuple[str, ...] = option(
        (), help="more arguments for the router, likewise", metavar="ARGS"
    )
    ready_file: Path | None = option(
        None,
        help="file to write when all is ready: JSON with api, admin, replicas",
        metavar="FILE",
    )
    log_dir: Path | None = option(
        None,
        help="folder for what the processes print; without it a new temporary one",
        metavar="DIR",
    )
    start_timeout_s: float = option(
        300.0, help="time the processes have to get ready", unit="seconds"
    )

    def validate(self) -> list[str]:
        """Return every problem that the values alone show, one line each."""
        problems = []
        if not 1 <= self.replicas <= _MAX_REPLICAS:
            problems.append(f"--replicas must be 1 to {_MAX_REPLICAS}: {self.replicas}")
        for flag, port in (("--port", self.port), ("--admin-port", self.admin_port)):
            if not 0 <= port <= _MAX_PORT:
                problems.append(f"{flag} must be 0 to {_MAX_PORT}: {port}")
        if self.port and self.port == self.admin_port:
            problems.append(f"--port and --admin-port must differ: both are {self.port}")
        if self.start_timeout_s <= 0:
            problems.append(f"--start-timeout-s must be more than 0: {self.start_timeout_s:g}")
        problems += _extra_problems("--worker-arg", self.worker_arg, own=_WORKER_OWN)
        problems += _extra_problems("--router-arg", self.router_arg, own=_ROUTER_OWN)
        return problems


def check_surroundings(options: UpOptions) -> None:
    """Check what would otherwise fail at the end of a long start; remove an old ready file.

    Raises:
        ConfigError: a port is taken, a folder is missing, or this is not Linux.
    """
    problems = []
    if not sys.platform.startswith("linux"):
        problems.append(
            "`kvway up` needs Linux: elsewhere start `kvway router` and `kvway worker`"
        )
    for flag, host, port in (
        ("--port", options.host, options.port),
        ("--admin-port", "127.0.0.1", options.admin_port),
    ):
        try:
            _try_to_listen(host, port)
        except OSError as error:
            problems.append(f"{flag}: cannot listen on {host}:{port}: {error.strerror or error}")
    if options.ready_file is not None:
        try:
            options.ready_file.unlink(missing_ok=True)  # of an earlier run: nothing is ready yet
            if not options.ready_file.parent.is_dir():
                problems.append(f"--ready-file: no such folder: {options.ready_file.parent}")
        except OSError as error:
            problems.append(f"--ready-file: cannot replace {options.ready_file}: {error.strerror}")
    if problems:
        raise ConfigError(problems)


def make_log_dir(wanted: Path | None) -> Path:
    """Return the folder for what the processes print: `wanted`, or a new temporary one.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        if wanted is None:
            return Path(tempfile.mkdtemp(prefix="kvway-up-"))
        wanted.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=wanted).close()
    except OSError as error:
        raise ConfigError(
            [f"--log-dir: cannot make or write to {wanted}: {error.strerror}"]
        ) from error
    return wanted


def _try_to_listen(host: str, port: int) -> None:
    """Listen for a moment.

    Raises:
        OSError: that does not work.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()


def _extra_problems(flag: str, values: Sequence[str], *, own: frozenset[str]) -> Iterator[str]:
    for value in values:
        try:
            words = shlex.split(value)
        except ValueError as error:
            yield f"{flag} {value!r}: {error}"
            continue
        for name in sorted({word.partition("=")[0] for word in words} & own):
            yield f"{flag} sets {name}, which `kvway up` sets itself"
