"""Where replicas come from: a fixed list, names that DNS resolves, and calls of the admin API.

The result is always the whole set; what changed is for `ReplicaSet.set_replicas` to find out.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeAlias
from urllib.parse import urlsplit

import structlog

from kvway_core.errors import InvalidRequest

MAX_CALLS: Final = 1024
"""Replicas that are added and removed by call, at most."""

DEFAULT_PORTS: Final = {"http": 80, "https": 443}

_log = structlog.get_logger(__name__)

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""Looks up a host and a port: all its addresses. Raises OSError when it cannot."""


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """Where a replica listens.

    Attributes:
        url: `scheme://host:port`, always with the port and never with a path.
        id: `host:port`, the replica's id.
        host: Without brackets.
    """

    url: str
    id: str
    host: str

    @classmethod
    def parse(cls, url: str) -> Self:
        """Reads `http://host[:port]`.

        Raises:
            ValueError: It is something else; the message says what, for a person.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as exc:
            raise ValueError(f"{url!r} is not a URL: {exc}") from exc
        if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
            raise ValueError(f"{url!r} is not http://HOST:PORT")
        if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
            raise ValueError(f"{url!r} has more than http://HOST:PORT")
        if port == 0:
            raise ValueError(f"{url!r} has no usable port")
        host = parts.hostname
        if not _can_be_host(host):
            raise ValueError(f"{url!r} names no possible host")
        shown = f"[{host}]" if ":" in host else host
        address = f"{shown}:{port or DEFAULT_PORTS[parts.scheme]}"
        return cls(url=f"{parts.scheme}://{address}", id=address, host=host)


@dataclass(frozen=True, slots=True)
class DnsName:
    """A name behind which replicas are found, all at one port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `HOST:PORT`.

        Raises:
            ValueError: It is something else; the message says what, for a person.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit():
            raise ValueError(f"{text!r} is not HOST:PORT")
        if not 0 < int(port) < 65536:
            raise ValueError(f"{text!r} has no usable port")
        if not _can_be_host(host):
            raise ValueError(f"{text!r} names no possible host")
        return cls(host=host, port=int(port))


def _can_be_host(host: str) -> bool:
    """Says whether a look-up of `host` can be tried at all."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return host.isprintable() and not any(char.isspace() for char in host)


class Discovery:
    """The replicas there should be, kept up to date while `run` runs.

    A look-up that fails or finds nothing keeps what was last known of its name: DNS that is down
    is no reason to drop replicas that work.

    Args:
        static: URLs that are always there.
        names: Names to resolve.
        on_change: Called with all URLs at the start, and when the set differs from the last one.
        interval_s: Time between two look-ups.
        resolve: The look-up; the system's unless given.
    """

    def __init__(
        self,
        static: Sequence[str],
        names: Sequence[DnsName],
        *,
        on_change: Callable[[Sequence[str]], None],
        interval_s: float = 5.0,
        resolve: Resolve | None = None,
    ) -> None:
        """Remember what to look up; nothing is looked up yet."""
        self._static = tuple(static)
        self._found: dict[DnsName, tuple[str, ...]] = dict.fromkeys(names, ())
        self._failing: set[DnsName] = set()
        self._on_change = on_change
        self._interval_s = interval_s
        self._resolve = resolve or resolve_ipv4
        self._told: tuple[str, ...] | None = None
        self._added: dict[str, str] = {}
        self._removed: set[str] = set()
        self._has_news = asyncio.Event()

    async def run(self) -> None:
        """Looks up until cancelled."""
        self._tell()
        while True:
            self._has_news.clear()
            await self.refresh()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s if self._found else None):
                    await self._has_news.wait()

    def set_sources(self, static: Sequence[str], names: Sequence[DnsName]) -> None:
        """Takes another fixed list and other names; what is known of a name that stays is kept."""
        self._static = tuple(static)
        self._found = {name: self._found.get(name, ()) for name in names}
        self._failing &= self._found.keys()
        self._tell()
        self._has_news.set()

    def add(self, address: ReplicaAddress) -> None:
        """Adds a replica, for good: neither the list nor a name has to have it.

        Raises:
            InvalidRequest: `MAX_CALLS` were added already.
        """
        if address.id not in self._added and len(self._added) >= MAX_CALLS:
            raise InvalidRequest(f"{MAX_CALLS} replicas were added by call; remove some of them.")
        self._removed.discard(address.id)
        self._added[address.id] = address.url
        self._tell()

    def remove(self, replica_id: str) -> None:
        """Removes a replica, until it is added again: also if the list or a name has it.

        Raises:
            InvalidRequest: `MAX_CALLS` were removed already.
        """
        if len(self._removed) >= MAX_CALLS:
            raise InvalidRequest(
                f"{MAX_CALLS} replicas were removed by call; take them out of the configuration."
            )
        self._added.pop(replica_id, None)
        self._removed.add(replica_id)
        self._tell()

    async def refresh(self) -> None:
        """Looks up every name once and tells of a change."""
        for name in list(self._found):
            try:
                addresses = await self._resolve(name.host, name.port)
            except OSError as exc:
                self._note_failure(name, str(exc))
                continue
            if not addresses:
                self._note_failure(name, "no address")
                continue
            if name not in self._found:
                continue  # it was dropped meanwhile
            if name in self._failing:
                self._failing.discard(name)
                _log.info("dns_lookup_recovered", host=name.host)
            self._found[name] = tuple(f"http://{_bracketed(a)}:{name.port}" for a in addresses)
        self._tell()

    def _note_failure(self, name: DnsName, error: str) -> None:
        if name in self._found and name not in self._failing:
            self._failing.add(name)
            _log.warning(
                "dns_lookup_failed", host=name.host, error=error, kept=len(self._found[name])
            )

    def _tell(self) -> None:
        found = sorted({url for urls in self._found.values() for url in urls})
        wanted = dict.fromkeys((*self._static, *found, *self._added.values()))
        urls = tuple(url for url in wanted if ReplicaAddress.parse(url).id not in self._removed)
        if urls != self._told:
            self._told = urls
            self._on_change(urls)


async def resolve_ipv4(host: str, port: int) -> Sequence[str]:
    """Returns all A records of a host, without blocking the event loop.

    Raises:
        OSError: The look-up failed.
    """
    answers = await asyncio.get_running_loop().getaddrinfo(
        host, port, family=socket.AF_INET, type=socket.SOCK_STREAM
    )
    return [str(address[0]) for *_, address in answers]


def _bracketed(address: str) -> str:
    try:
        return f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
    except ValueError:
        return address
