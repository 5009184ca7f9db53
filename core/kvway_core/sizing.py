"""How much memory and work the KV of a model takes. Arithmetic alone: no model is loaded.

    a token in a layer      2 x Hkv x D numbers: keys and values
    prefill of u tokens     u x linear + pairs x attention        FLOPs
    behind c cached ones    pairs = u c + u (u + 1) / 2

Each of the u tokens goes through the weights once, and attends to all tokens before it and to
itself: also to the cached ones, so that part of its work no cache saves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

BUSY_SHARE: Final = 0.8
"""Share of a pool that running requests may hold before a router sends new ones elsewhere."""

ASSUMED_ATTENTION_TOKENS: Final = 60_000
"""Context at which attention doubles the time of a token, where nothing else is known."""

_ALIGNMENT: Final = 16
"""Bytes of a quantised block in a layer are a multiple of it."""


class KVDtype(NamedTuple):
    """What a number of the KV takes, and what the scale of a token's head takes: bytes."""

    number_bytes: int
    scale_bytes: int = 0


KV_DTYPES: Final = MappingProxyType(
    {
        "float32": KVDtype(4),
        "float16": KVDtype(2),
        "bfloat16": KVDtype(2),
        "int8": KVDtype(1, 2),
        "fp8_e4m3": KVDtype(1, 2),
    }
)
"""By the name of `kvway worker --dtype` and `--kv-dtype`."""


@dataclass(frozen=True, slots=True)
class KVSize:
    """What the KV of a model takes.

    Attributes:
        num_layers: Layers that attend to all tokens before.
        num_kv_heads: Key and value heads per layer.
        head_dim: Numbers per head.
        dtype: Of the numbers.
        block_size: Tokens per block.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: KVDtype
    block_size: int

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of a block over all layers, with scales and what aligns them."""
        num_rows = self.block_size * self.num_kv_heads
        side = num_rows * self.head_dim * self.dtype.number_bytes
        if self.dtype.scale_bytes:
            side = _up(side, self.dtype.scale_bytes) + num_rows * self.dtype.scale_bytes
            side = _up(side, _ALIGNMENT)
        return 2 * self.num_layers * side

    @property
    def bytes_per_token(self) -> float:
        """A token's share of a block."""
        return self.bytes_per_block / self.block_size

    def bytes_of(self, num_tokens: int) -> int:
        """Returns what the blocks of so many tokens take, the last one full or not."""
        return math.ceil(num_tokens / self.block_size) * self.bytes_per_block


@dataclass(frozen=True, slots=True)
class Filling:
    """How tokens fill blocks: only full blocks are shared.

    Attributes:
        full_blocks: Blocks that are full.
        stranded_tokens: Tokens behind them, in no block that could be shared.
        pad_tokens: Tokens that would make these one more full block; 0 where none is stranded.
    """

    full_blocks: int
    stranded_tokens: int
    pad_tokens: int


def filling(num_tokens: int, block_size: int) -> Filling:
    """Returns how so many tokens fill blocks."""
    full_blocks, stranded = divmod(num_tokens, block_size)
    return Filling(full_blocks, stranded, -num_tokens % block_size)


def num_pairs(new_tokens: int, cached_tokens: int) -> int:
    """Returns how many pairs of a new token and one before it, or itself, attention computes."""
    return new_tokens * cached_tokens + new_tokens * (new_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class Work:
    """What a model computes, in FLOPs.

    Attributes:
        linear: Per token, in the weights of its layers.
        attention: Per pair of tokens, over all layers.
    """

    linear: int
    attention: int

    @property
    def attention_tokens(self) -> float:
        """Context at which attention doubles the work of a token: the A of the router's cost."""
        return self.linear / self.attention

    def prefill(self, new_tokens: int, cached_tokens: int) -> int:
        """Returns the FLOPs of prefilling new tokens behind cached ones."""
        pairs = num_pairs(new_tokens, cached_tokens)
        return new_tokens * self.linear + pairs * self.attention


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """How fast a replica prefills: the same two numbers as in the router's cost.

    Attributes:
        tokens_per_s: R, of tokens without context.
        attention_tokens: A, context at which a token takes twice as long; infinite for never.
    """

    tokens_per_s: float
    attention_tokens: float

    def seconds(self, new_tokens: int, cached_tokens: int) -> float:
        """Returns how long prefilling new tokens behind cached ones takes."""
        context = num_pairs(new_tokens, cached_tokens) / self.attention_tokens
        return (new_tokens + context) / self.tokens_per_s


@dataclass(frozen=True, slots=True)
class Tier:
    """Where blocks may come from besides the replica's own memory.

    Attributes:
        bytes_per_s: How fast they come.
        latency_s: Before the first one comes.
    """

    bytes_per_s: float
    latency_s: float

    def seconds(self, num_tokens: int, kv: KVSize) -> float:
        """Returns how long bringing the KV of so many tokens takes."""
        return self.latency_s + num_tokens * kv.bytes_per_token / self.bytes_per_s

    def break_even_tokens(self, speed: PrefillSpeed, kv: KVSize) -> int | None:
        """Returns from how many tokens on a prefix comes sooner than it is computed.

        None if it never does. It is where n tokens take alike: with computing (n + n (n + 1) /
        2A) / R and bringing L + n b, the root of a quadratic equation in n.
        """
        square = 1 / (2 * speed.attention_tokens * speed.tokens_per_s)
        gain_s = 1 / speed.tokens_per_s + square - kv.bytes_per_token / self.bytes_per_s
        if square == 0:
            tokens = self.latency_s / gain_s if gain_s > 0 else math.inf
        else:
            root = math.sqrt(gain_s**2 + 4 * square * self.latency_s)
            tokens = (root - gain_s) / (2 * square)
        return max(1, math.ceil(tokens)) if math.isfinite(tokens) else None


@dataclass(frozen=True, slots=True)
class Demand:
    """What one replica is to keep.

    Attributes:
        prefixes: Pinned prefixes.
        prefix_tokens: Tokens of each.
        sessions: Sessions that come again.
        session_tokens: Tokens of each behind its prefix.
        running: How many of them have a request running at a time.
    """

    prefixes: int
    prefix_tokens: int
    sessions: int
    session_tokens: int
    running: int

    def session_blocks(self, block_size: int) -> int:
        """Returns the blocks of a session that it does not share."""
        shared = self.prefix_tokens // block_size if self.prefixes else 0
        total = self.session_tokens + (self.prefix_tokens if self.prefixes else 0)
        return math.ceil(total / block_size) - shared


@dataclass(frozen=True, slots=True)
class Pool:
    """The blocks of one replica.

    Attributes:
        pinned: Of the prefixes, each once.
        live: Of sessions with a running request.
        warm: Of sessions between two requests, to be hit by the next.
        total: What it takes, or what there is.
        warm_sessions: Share of the sessions between two requests that stay, 0 to 1.
    """

    pinned: int
    live: int
    warm: int
    total: int
    warm_sessions: float

    @property
    def warm_share(self) -> float:
        """Share of the pool that is there to be hit: what no running request needs to itself."""
        return (self.pinned + self.warm) / self.total if self.total else 0.0


def recommended_pool(demand: Demand, block_size: int) -> Pool:
    """Returns the pool that keeps all of it, with running requests in `BUSY_SHARE` at most."""
    pinned, live, warm = _blocks(demand, block_size)
    total = max(pinned + live + warm, math.ceil((pinned + live) / BUSY_SHARE))
    return Pool(pinned=pinned, live=live, warm=warm, total=total, warm_sessions=1.0)


def pool_of(demand: Demand, block_size: int, *, num_blocks: int) -> Pool | None:
    """Returns what a pool of so many blocks keeps, None if it is too small for what runs."""
    pinned, live, wanted = _blocks(demand, block_size)
    room = num_blocks - pinned - live
    if room < 0:
        return None
    own = demand.session_blocks(block_size)
    warm = min(wanted, room // own * own) if own else 0
    share = warm / wanted if wanted else 1.0
    return Pool(pinned=pinned, live=live, warm=warm, total=num_blocks, warm_sessions=share)


def _blocks(demand: Demand, block_size: int) -> tuple[int, int, int]:
    own = demand.session_blocks(block_size)
    pinned = demand.prefixes * (demand.prefix_tokens // block_size)
    return pinned, demand.running * own, (demand.sessions - demand.running) * own


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
