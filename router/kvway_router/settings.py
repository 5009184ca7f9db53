"""Every option of `kvway router`: its meaning, unit and default, written once.

Flags, environment variables (``KVWAY_ROUTER_<FIELD>``) and the keys of the TOML file are derived
from these fields; ``config.example.toml`` shows them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kvway_core.blocks import DEFAULT_BLOCK_SIZE
from kvway_core.config import option
from kvway_core.piece_cache import DEFAULT_CACHE_BYTES
from kvway_core.tokenizing import AUTO, LIBRARIES
from kvway_core.web_limits import (
    DEFAULT_MAX_BODIES_BYTES,
    DEFAULT_MAX_BODY_BYTES,
    DEFAULT_MAX_CONNECTIONS,
    HttpLimits,
)
from kvway_router.discovery import DnsName, ReplicaAddress
from kvway_router.feed_source import EventsOption
from kvway_router.index import MAX_BYTES, MIN_BYTES
from kvway_router.policies.registry import DEFAULT_POLICY, POLICIES

_MAX_PORT: Final = 65_535
_POSITIVE: Final = (
    "block_size",
    "processes",
    "max_body_bytes",
    "max_connections",
    "headers_timeout_s",
    "client_stall_timeout_s",
    "max_attempts",
    "reader_threads",
    "max_replica_blocks",
    "body_timeout_s",
    "tokenize_timeout_s",
    "connect_timeout_s",
    "request_timeout_s",
    "first_token_timeout_s",
    "token_timeout_s",
    "replica_slots",
    "queue_timeout_s",
    "probe_interval_s",
    "probe_timeout_s",
)
_NOT_NEGATIVE: Final = (
    "host_reload_us",
    "disk_reload_us",
    "max_waiting_prompts",
    "max_queued",
    "max_decisions",
    "trace_share",
    "tokenizer_cache_bytes",
    "lame_duck_s",
    "drain_timeout_s",
)
_MOST: Final = {
    "host_reload_us": 1e6,
    "disk_reload_us": 1e6,
    "processes": 256,
    "trace_share": 1.0,
    "request_timeout_s": 1800.0,
    "first_token_timeout_s": 1800.0,
    "token_timeout_s": 1800.0,
    "queue_timeout_s": 600.0,
    "lame_duck_s": 300.0,
    "drain_timeout_s": 1800.0,
    "max_queued": 65_536,
    "replica_slots": 65_536,
}


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """What a router needs to know before it starts."""

    model: str | None = option(
        None,
        help="model folder, or id of a fetched model, for its tokenizer and chat template",
        metavar="PATH_OR_ID",
    )
    served_model_name: str | None = option(
        None, help="name clients use; without it the id as given, or the folder's name"
    )
    replica: tuple[str, ...] = option((), help="address of a replica", metavar="URL")
    replica_dns: tuple[str, ...] = option(
        (),
        help="name whose every address is a replica, looked up again and again",
        metavar="HOST:PORT",
    )
    host: str = option("127.0.0.1", help="address of the API listener")
    port: int = option(8080, help="port of the API listener, 0 for any free one")
    processes: int = option(
        1, help="router processes that share the port; each has its own limits and threads"
    )
    share_port: bool = option(
        False, help="be one of several processes on the port instead of starting them"
    )
    admin_host: str = option("127.0.0.1", help="address of the page and the admin API")
    admin_port: int = option(8081, help="port of the page and the admin API, 0 for any free one")
    ready_file: Path | None = option(
        None, help="file to write once both listeners are up: JSON with api and admin"
    )
    block_size: int = option(
        DEFAULT_BLOCK_SIZE, help="size of the replicas' KV blocks", unit="tokens"
    )
    max_replica_blocks: int = option(
        262_144, help="index entries of a replica that does not tell its capacity", unit="blocks"
    )
    max_index_bytes: int = option(
        128 * 1024 * 1024,
        help="memory of the index of all replicas together; the ceiling takes a quarter more",
        unit="bytes",
    )
    index_snapshot: Path | None = option(
        None, help="file that keeps the index across restarts: read first, written every minute"
    )
    kv_events: tuple[str, ...] = option(
        (),
        help="where an engine publishes KV events, if it is not a kvway worker, which tells it",
        metavar="[REPLICA=]ENDPOINT[,replay=ENDPOINT]",
    )
    policy: str = option(
        DEFAULT_POLICY,
        help=f"how a replica is chosen: {', '.join(POLICIES)}",
        metavar="NAME",
    )
    host_reload_us: float = option(
        8.0, help="time to bring the KV of a token back from host memory", unit="microseconds"
    )
    disk_reload_us: float = option(
        80.0, help="time to bring the KV of a token back from a disk", unit="microseconds"
    )
    max_attempts: int = option(3, help="replicas one request is tried at, at most")
    max_body_bytes: int = option(DEFAULT_MAX_BODY_BYTES, help="largest request body", unit="bytes")
    max_bodies_bytes: int = option(
        DEFAULT_MAX_BODIES_BYTES,
        help="request bodies in memory, all together; beyond, requests get 503",
        unit="bytes",
    )
    max_connections: int = option(
        DEFAULT_MAX_CONNECTIONS, help="clients' connections at a time; beyond, they get 503"
    )
    headers_timeout_s: float = option(
        10.0, help="time for the headers of a request to arrive", unit="seconds"
    )
    body_timeout_s: float = option(30.0, help="time for a request body to arrive", unit="seconds")
    client_stall_timeout_s: float = option(
        60.0,
        help="how long a client may take nothing of an answer before it is cut off",
        unit="seconds",
    )
    connect_timeout_s: float = option(1.0, help="time to connect to a replica", unit="seconds")
    request_timeout_s: float = option(
        600.0,
        help="time of a request from its arrival to its end; a client may ask for less",
        unit="seconds",
    )
    first_token_timeout_s: float = option(
        120.0, help="longest wait for the first token of a stream", unit="seconds"
    )
    token_timeout_s: float = option(
        30.0, help="longest silence of a replica between two tokens of a stream", unit="seconds"
    )
    replica_slots: int = option(
        128, help="requests that a replica runs at once if it does not tell", unit="requests"
    )
    max_queued: int = option(
        256,
        help="requests that wait for a replica with room, at most; beyond, requests get 503",
        unit="requests",
    )
    queue_timeout_s: float = option(
        10.0, help="longest wait for a replica with room", unit="seconds"
    )
    probe_interval_s: float = option(
        1.0, help="time between two probes of a replica", unit="seconds"
    )
    probe_timeout_s: float = option(
        1.0, help="time a replica has to answer a probe", unit="seconds"
    )
    reader_threads: int = option(2, help="threads that decode, tokenize and hash prompts")
    max_waiting_prompts: int = option(
        256, help="prompts that may wait for such a thread; beyond, requests get 503"
    )
    tokenizer: str = option(
        AUTO,
        help="library that tokenizes: auto takes fastokens where its ids are proved the same",
        choices=LIBRARIES,
    )
    tokenizer_cache_bytes: int = option(
        DEFAULT_CACHE_BYTES, help="memory for texts whose tokens are known", unit="bytes"
    )
    tokenize_timeout_s: float = option(
        0.5,
        help="time to tokenize a prompt; then a replica is chosen by what is known of it",
        unit="seconds",
    )
    max_decisions: int = option(1000, help="decisions that are remembered", unit="records")
    lame_duck_s: float = option(
        3.0,
        help="time after SIGTERM in which requests are still taken while /ready says 503",
        unit="seconds",
    )
    drain_timeout_s: float = option(
        30.0, help="time that running requests have to end after that", unit="seconds"
    )
    trace_endpoint: str | None = option(
        None,
        help="where traces go: an OpenTelemetry collector that takes OTLP over HTTP",
        metavar="URL",
    )
    trace_share: float = option(
        1.0, help="of requests without a traceparent, the share that is traced"
    )
    log_level: str = option(
        "info", help="least level that is logged", choices=("debug", "info", "warning", "error")
    )

    @property
    def http_limits(self) -> HttpLimits:
        """What clients may take."""
        return HttpLimits(
            max_body_bytes=self.max_body_bytes,
            max_bodies_bytes=self.max_bodies_bytes,
            max_connections=self.max_connections,
            headers_timeout_s=self.headers_timeout_s,
            body_timeout_s=self.body_timeout_s,
            stall_timeout_s=self.client_stall_timeout_s,
        )

    def validate(self) -> Sequence[str]:
        """Returns every problem of the values as a whole."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.model is None:
            yield "no model: give --model PATH_OR_ID, for its tokenizer and chat template"
        if not self.replica and not self.replica_dns:
            yield "no replicas: give --replica URL (repeatable) or --replica-dns HOST:PORT"
        for url in self.replica:
            yield from _refusal("--replica", url, ReplicaAddress.parse)
        for name in self.replica_dns:
            yield from _refusal("--replica-dns", name, DnsName.parse)
        for text in self.kv_events:
            yield from _refusal("--kv-events", text, EventsOption.parse)
        if self.policy not in POLICIES:
            yield f"--policy {self.policy!r} is not one of {', '.join(POLICIES)}"
        if self.trace_endpoint is not None and not _is_http(self.trace_endpoint):
            yield f"--trace-endpoint {self.trace_endpoint!r} is not like http://localhost:4318"
        yield from self._number_problems()
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                yield f"{_flag(name)} must be {most:g} at most, got {getattr(self, name)}"

    def _number_problems(self) -> Iterator[str]:
        for name in ("port", "admin_port"):
            if not 0 <= getattr(self, name) <= _MAX_PORT:
                yield f"{_flag(name)} must be 0 to {_MAX_PORT}, got {getattr(self, name)}"
        if self.port == self.admin_port != 0 and self.host == self.admin_host:
            yield f"--port and --admin-port are both {self.port}"
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                yield f"{_flag(name)} must be more than 0, got {getattr(self, name)}"
        if not MIN_BYTES <= self.max_index_bytes <= MAX_BYTES:
            yield (
                f"--max-index-bytes must be {MIN_BYTES} to {MAX_BYTES}, got {self.max_index_bytes}"
            )
        if self.max_bodies_bytes < self.max_body_bytes:
            yield (
                f"--max-bodies-bytes must be at least --max-body-bytes ({self.max_body_bytes}), "
                f"got {self.max_bodies_bytes}"
            )
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                yield f"{_flag(name)} must not be negative, got {getattr(self, name)}"


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        return False


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _refusal(flag: str, text: str, parse: Callable[[str], object]) -> Iterator[str]:
    try:
        parse(text)
    except ValueError as exc:
        yield f"{flag}: {exc}"
