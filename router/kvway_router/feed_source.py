"""Where replicas publish their KV events: told by a kvway worker itself, by an option for others.

--kv-events tcp://*:5557,replay=tcp://*:5558                of every replica, at its own host
--kv-events 10.0.0.7:8000=ipc:///run/kv.sock,topic=kv       of one replica
--kv-events 10.0.0.7:8000=tcp://*:5557,ranks=4              4 data-parallel ranks, ports 5557-60
--kv-events 10.0.0.7:8000=tcp://0.0.0.0:6000,bind           the engine connects, we listen
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from kvway_core.api import KvEventsInfo

_MAX_PORT: Final = 65_535
_MAX_RANKS: Final = 64
_HELP: Final = "[HOST:PORT=]ENDPOINT[,replay=ENDPOINT][,topic=TEXT][,ranks=N][,bind]"


@dataclass(frozen=True, slots=True)
class FeedSource:
    """Where one publisher is and whose blocks it tells of.

    Attributes:
        replica_id: What the index calls the holder of the blocks.
        pub: ZMQ endpoint of its PUB socket.
        replay: That of its replay socket; None if it has none.
        topic: First frame of its messages; empty for any.
        bind: Whether it connects to `pub`, which is ours to bind then.
    """

    replica_id: str
    pub: str
    replay: str | None
    topic: str = ""
    bind: bool = False

    @classmethod
    def of_worker(cls, replica_id: str, host: str, info: KvEventsInfo) -> Self:
        """Returns what a kvway worker says of itself."""
        shown = _bracketed(host)
        return cls(
            replica_id=replica_id,
            pub=f"tcp://{shown}:{info.pub_port}",
            replay=f"tcp://{shown}:{info.replay_port}",
            topic=info.topic,
        )


@dataclass(frozen=True, slots=True)
class EventsOption:
    """One value of ``--kv-events``.

    Attributes:
        replica_id: Whom it is for; None for all that no other value names.
        pub: Endpoint, in which a host ``*`` is the replica's own.
        replay: The same, or None.
        topic: First frame of messages; empty for any.
        ranks: Publishers; the ports of the next rank are one higher.
        bind: Whether the engine connects to us.
    """

    replica_id: str | None
    pub: str
    replay: str | None
    topic: str
    ranks: int
    bind: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads one value.

        Raises:
            ValueError: It is something else; the message says what, for a person.
        """
        where, *rest = text.split(",")
        replica_id, equals, pub = where.rpartition("=")
        fields = {"replay": "", "topic": "", "ranks": "1", "bind": ""}
        for part in rest:
            key, _, value = part.partition("=")
            if key not in fields or (key == "bind") == bool(value):
                raise ValueError(f"{text!r} has {part!r}, which is not part of {_HELP}")
            fields[key] = value or "yes"
        ranks = fields["ranks"]
        if not ranks.isascii() or not ranks.isdigit() or not 1 <= int(ranks) <= _MAX_RANKS:
            raise ValueError(f"{text!r} has ranks={ranks}, which is not 1 to {_MAX_RANKS}")
        option = cls(
            replica_id=replica_id if equals else None,
            pub=pub,
            replay=fields["replay"] or None,
            topic=fields["topic"],
            ranks=int(ranks),
            bind=bool(fields["bind"]),
        )
        option.check(text)
        return option

    def check(self, text: str) -> None:
        """Raises ValueError where an endpoint is none, or cannot be what is asked of it."""
        for endpoint in (self.pub, *([] if self.replay is None else [self.replay])):
            _check_endpoint(endpoint, text=text)
            if endpoint.startswith("ipc://") and (self.ranks > 1 or self.replica_id is None):
                raise ValueError(f"{text!r}: an ipc:// endpoint is of one replica and one rank")
        if self.bind and self.replica_id is None:
            raise ValueError(f"{text!r}: name the replica whose events come to an address of ours")
        if self.bind and "://*" in self.pub:
            raise ValueError(f"{text!r}: * is the replica's own host; name the one to bind")

    def sources(self, replica_id: str, host: str) -> list[FeedSource]:
        """Returns where the ranks of a replica publish, the first under its own name."""
        return [
            FeedSource(
                replica_id=rank_name(replica_id, rank),
                pub=_endpoint(self.pub, host, rank),
                replay=None if self.replay is None else _endpoint(self.replay, host, rank),
                topic=self.topic,
                bind=self.bind,
            )
            for rank in range(self.ranks)
        ]


def rank_name(replica_id: str, rank: int) -> str:
    """Returns what the index calls a data-parallel rank of a replica."""
    return f"{replica_id}/{rank}" if rank else replica_id


def find_option(options: Sequence[EventsOption], replica_id: str) -> EventsOption | None:
    """Returns the option that is for a replica: one that names it, else one for all."""
    for name in (replica_id, None):
        for option in options:
            if option.replica_id == name:
                return option
    return None


def _check_endpoint(endpoint: str, *, text: str) -> None:
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) <= _MAX_PORT - _MAX_RANKS
    if not endpoint.startswith("tcp://") or not host or not is_port:
        raise ValueError(
            f"{text!r}: {endpoint!r} is not tcp://HOST:PORT or ipc://PATH; the form is {_HELP}"
        )


def _endpoint(template: str, host: str, rank: int) -> str:
    if not template.startswith("tcp://"):
        return template
    name, _, port = template.removeprefix("tcp://").rpartition(":")
    return f"tcp://{_bracketed(host) if name == '*' else name}:{int(port) + rank}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
