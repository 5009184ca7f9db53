"""`kvway size`: what KV takes, what a cached prefix saves, how many blocks to have."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kvway_core.blocks import DEFAULT_BLOCK_SIZE
from kvway_core.cli import Command
from kvway_core.config import load, option
from kvway_core.errors import ConfigError
from kvway_core.model_shapes import ModelShape, read_shape
from kvway_core.models import find_model
from kvway_core.size_report import Sizes, Speeds, render, sizes_of
from kvway_core.sizing import (
    ASSUMED_ATTENTION_TOKENS,
    KV_DTYPES,
    Demand,
    KVSize,
    PrefillSpeed,
    Tier,
)

_MAX: Final = 2**40
_GIB: Final = 2**30
_MB: Final = 1e6

SUMMARY: Final = "say what the KV of a model takes and how many blocks to have"
DESCRIPTION: Final = (
    "Says what a model's KV takes per token and block, what prefilling costs with a cached prefix "
    "and without, from when on blocks of a disk or a peer pay, and how many blocks a replica "
    "needs for the pinned prefixes and sessions that it is to keep."
)


@dataclass(frozen=True, slots=True)
class SizeOptions:
    """What `kvway size` is asked about."""

    model: str | None = option(
        None, help="model folder, or id of a fetched model; its config.json is enough"
    )
    layers: int | None = option(None, help="layers, in place of --model")
    kv_heads: int | None = option(None, help="key and value heads, in place of --model")
    head_dim: int | None = option(None, help="numbers per head, in place of --model")
    kv_dtype: str = option(
        "bfloat16", help="type of keys and values in the cache", choices=tuple(KV_DTYPES)
    )
    block_size: int = option(DEFAULT_BLOCK_SIZE, help="size of a KV block", unit="tokens")
    prefix_tokens: int = option(1500, help="length of a shared prefix", unit="tokens")
    new_tokens: int = option(100, help="what a request has behind what is cached", unit="tokens")
    prefixes: int = option(1, help="pinned prefixes")
    users: int = option(100, help="users whose sessions are to stay cached, of all replicas")
    session_tokens: int = option(2000, help="length of a session behind its prefix", unit="tokens")
    running: int = option(8, help="requests that run at a time, on all replicas")
    replicas: int = option(1, help="replicas that share the users")
    memory_gib: float | None = option(
        None, help="memory for KV that a replica has; without it what is needed", unit="GiB"
    )
    prefill_rate: float | None = option(
        None,
        help="tokens per second that a replica prefills, such as /admin/replicas tells; without"
        " it there are no times and no break-evens",
        unit="tokens/s",
    )
    attention_tokens: float | None = option(
        None,
        help="context at which attention doubles the time of a token; else the model's, or"
        f" {ASSUMED_ATTENTION_TOKENS}, from which the router begins to learn",
        unit="tokens",
    )
    disk_mb_per_s: float = option(2000.0, help="what a disk reads: measure yours", unit="MB/s")
    disk_latency_ms: float = option(0.2, help="until it begins", unit="ms")
    peer_mb_per_s: float = option(
        1000.0, help="what comes from a peer: measure yours", unit="MB/s"
    )
    peer_latency_ms: float = option(1.0, help="until it begins", unit="ms")
    json: bool = option(False, help="print JSON, sizes in bytes and times in seconds")

    def validate(self) -> Iterator[str]:
        """Yields what contradicts or is out of bounds."""
        by_hand = (self.layers, self.kv_heads, self.head_dim)
        given = sum(value is not None for value in by_hand)
        if self.model is not None and given:
            yield "--model and --layers, --kv-heads, --head-dim exclude each other"
        elif self.model is None and given < len(by_hand):
            yield "no model: give --model, or all of --layers, --kv-heads and --head-dim"
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= _MAX:
                flag = "--" + name.replace("_", "-")
                yield f"{flag} must be {least:g} to {_MAX}, got {value:g}"
        if self.running > self.users:
            yield f"--running ({self.running}) must be at most --users ({self.users})"


_LEAST: Final = {
    **dict.fromkeys(("layers", "kv_heads", "head_dim", "block_size", "new_tokens"), 1),
    "attention_tokens": 1,
    **dict.fromkeys(("prefix_tokens", "prefixes", "users", "session_tokens", "running"), 0),
    **dict.fromkeys(("prefill_rate", "disk_mb_per_s", "peer_mb_per_s", "memory_gib"), 1e-3),
    **dict.fromkeys(("disk_latency_ms", "peer_latency_ms"), 0),
    "replicas": 1,
}


def run(argv: Sequence[str]) -> int:
    """Prints the sizes.

    Raises:
        ConfigError: An option is not as it must be, or the model is not one that it knows.
    """
    options = load(
        SizeOptions, argv, env=os.environ, prog="kvway size", description=DESCRIPTION
    ).config
    sizes = measure(options)
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(sizes)).decode() + "\n")
    else:
        render(sizes)
    return 0


def measure(options: SizeOptions) -> Sizes:
    """Returns what there is to say.

    Raises:
        ConfigError: The model is not there, or not one that it knows, or the memory is too small.
    """
    shape = _shape(options)
    kv = KVSize(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=KV_DTYPES[options.kv_dtype],
        block_size=options.block_size,
    )
    num_blocks = None
    if options.memory_gib is not None:
        num_blocks = int(options.memory_gib * _GIB) // kv.bytes_per_block
    demand = Demand(
        prefixes=options.prefixes,
        prefix_tokens=options.prefix_tokens,
        sessions=math.ceil(options.users / options.replicas),
        session_tokens=options.session_tokens,
        running=math.ceil(options.running / options.replicas),
    )
    speeds = None
    if options.prefill_rate is not None:
        of_model = shape.work.attention_tokens if shape.work else ASSUMED_ATTENTION_TOKENS
        speeds = Speeds(
            prefill=PrefillSpeed(options.prefill_rate, options.attention_tokens or of_model),
            disk=Tier(options.disk_mb_per_s * _MB, options.disk_latency_ms / 1e3),
            peer=Tier(options.peer_mb_per_s * _MB, options.peer_latency_ms / 1e3),
        )
    sizes = sizes_of(
        kv,
        work=shape.work,
        demand=demand,
        num_users=options.users,
        new_tokens=options.new_tokens,
        speeds=speeds,
        num_blocks=num_blocks,
    )
    if sizes is None:
        problem = (
            f"--memory-gib {options.memory_gib:g} has {num_blocks} blocks of {kv.block_size} "
            "tokens, too few for the pinned prefixes and what runs: give more memory, more "
            "--replicas, or a smaller --kv-dtype"
        )
        raise ConfigError([problem])
    return sizes


def _shape(options: SizeOptions) -> ModelShape:
    if options.model is not None:
        return read_shape(find_model(options.model, os.environ))
    return ModelShape(
        num_layers=options.layers or 0,  # never 0: the options check it
        num_kv_heads=options.kv_heads or 0,
        head_dim=options.head_dim or 0,
        work=None,
    )


COMMAND: Final = Command(name="size", summary=SUMMARY, run=run)
