"""Asks a router's admin listener, for commands that a person runs beside it."""

from __future__ import annotations

import http.client
from argparse import ArgumentParser
from typing import Final, NoReturn, TypeVar
from urllib.parse import urlsplit

import msgspec
from typing_extensions import override

from kvway_core.errors import ConfigError
from kvway_router.settings import RouterSettings

DEFAULT_ADMIN: Final = f"http://{RouterSettings().admin_host}:{RouterSettings().admin_port}"
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
_TIMEOUT_S: Final = 5.0

T = TypeVar("T")


class AskFailed(Exception):
    """The listener did not answer, or not with what was asked for; `status` is its HTTP status."""

    def __init__(self, problem: str, *, status: int | None = None) -> None:
        super().__init__(problem)
        self.status = status


class AdminParser(ArgumentParser):
    """Reads the arguments of a command that asks; `--admin` is there."""

    def __init__(self, *, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self.add_argument(
            "--admin",
            metavar="URL",
            default=DEFAULT_ADMIN,
            help="the router's admin listener (%(default)s)",
        )

    @override
    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError([f"{message} (see {self.prog} --help)"])


class AdminClient:
    """One admin listener.

    Args:
        url: Its address, ``http://host:port``; that of its page will do.

    Raises:
        ConfigError: It is no such address.
    """

    def __init__(self, url: str) -> None:
        """Connects to nothing yet."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        is_root = parts.path.rstrip("/") in {"", "/ui"}
        if parts.scheme not in {"http", "https"} or not parts.hostname or not is_root:
            raise ConfigError([f"--admin must be like {DEFAULT_ADMIN}, got {url!r}"])
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._is_tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, port

    def get(self, path: str, kind: type[T]) -> T:
        """Returns what the listener answers, as a `kind`.

        Raises:
            AskFailed: It is not there, refuses, or answers something else.
        """
        status, body = self._ask(path)
        if status != http.HTTPStatus.OK:
            raise AskFailed(f"{self.url} answers {status}{_message(body)}", status=status)
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as exc:
            raise AskFailed(f"{self.url} is no kvway router of this version: {exc}") from exc

    def _ask(self, path: str) -> tuple[int, bytes]:
        connect = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = connect(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read(MAX_ANSWER_BYTES + 1)
        except (OSError, http.client.HTTPException) as exc:
            why = str(exc) or type(exc).__name__
            raise AskFailed(f"no router's admin listener at {self.url}: {why}") from exc
        finally:
            connection.close()
        if len(body) > MAX_ANSWER_BYTES:
            raise AskFailed(f"{self.url} answers with more than {MAX_ANSWER_BYTES} bytes")
        return response.status, body


def _message(body: bytes) -> str:
    """Returns the message of an error in OpenAI's form, as a clause; empty if there is none."""
    try:
        message = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""
    return f": {message}"
