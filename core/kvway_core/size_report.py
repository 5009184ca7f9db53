"""The numbers of `kvway size`, and how they are told."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kvway_core.sizing import (
    Demand,
    Filling,
    KVSize,
    Pool,
    PrefillSpeed,
    Tier,
    Work,
    filling,
    num_pairs,
    pool_of,
    recommended_pool,
)

_WIDTH: Final = 30


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast KV comes, by computing it and from elsewhere."""

    prefill: PrefillSpeed
    disk: Tier
    peer: Tier


class Prefill(msgspec.Struct, frozen=True, kw_only=True):
    """Prefilling a prompt with its prefix cached, and without.

    Attributes:
        prefix_tokens: The prefix.
        new_tokens: Behind it.
        cold_pairs: Pairs of tokens that attention computes without the cache.
        warm_pairs: The same with it.
        tokens_saved: How many times fewer tokens are computed: (P + S) / S.
        attention_saved: How many times fewer pairs.
        work_saved: How many times less work both are together; None if the family is not known.
        cold_s: Time without, by the prefill rate given; None without one.
        warm_s: Time with it.
    """

    prefix_tokens: int
    new_tokens: int
    cold_pairs: int
    warm_pairs: int
    tokens_saved: float
    attention_saved: float
    work_saved: float | None
    cold_s: float | None
    warm_s: float | None


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """When a prefix that is elsewhere comes sooner than it is computed.

    Attributes:
        tier: "disk" or "peer".
        bytes_per_s: How fast it was said to be.
        tokens: From how many tokens on; None for never.
        prefix_s: What the prefix takes from there.
    """

    tier: str
    bytes_per_s: float
    tokens: int | None
    prefix_s: float


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """All that `kvway size` says. Bytes are bytes; a pool is that of one replica.

    Attributes:
        block_size: Tokens per block.
        bytes_per_token_and_layer: Keys and values.
        bytes_per_token: Of all layers.
        bytes_per_block: Of all layers.
        prefix_bytes: The blocks of one prefix.
        session_bytes: The blocks of one session behind it.
        filling: How a prefix fills blocks.
        prefill: What caching it saves.
        linear_flops_per_token: In the weights of the layers; None if the family is not known.
        attention_tokens: Context at which attention doubles the work of a token; likewise.
        break_even: Of each tier; empty without a prefill rate.
        needed_bytes_per_s: How fast a tier must be to be worth it at any length; likewise None.
        pool: The blocks of a replica.
        pool_bytes: Their memory.
        scattered_bytes: What a replica would need if sessions were not kept together.
        pin_quota: Share of the pool that is pinned.
        replica_sessions: Users of one replica.
    """

    block_size: int
    bytes_per_token_and_layer: float
    bytes_per_token: float
    bytes_per_block: int
    prefix_bytes: int
    session_bytes: int
    filling: Filling
    prefill: Prefill
    linear_flops_per_token: int | None
    attention_tokens: float | None
    break_even: tuple[BreakEven, ...]
    needed_bytes_per_s: float | None
    pool: Pool
    pool_bytes: int
    scattered_bytes: int
    warm_share: float
    pin_quota: float
    replica_sessions: int


def sizes_of(
    kv: KVSize,
    *,
    work: Work | None,
    demand: Demand,
    num_users: int,
    new_tokens: int,
    speeds: Speeds | None,
    num_blocks: int | None,
) -> Sizes | None:
    """Returns the sizes, None if a given pool is too small for what runs.

    Args:
        kv: What KV takes.
        work: What the model computes; None if that is not known.
        demand: What one replica is to keep.
        num_users: Users of all replicas.
        new_tokens: What a request has behind what is cached.
        speeds: How fast KV comes; None leaves times out.
        num_blocks: Blocks that there are; None recommends some.
    """
    size = kv.block_size
    needed = recommended_pool(demand, size)
    pool = needed if num_blocks is None else pool_of(demand, size, num_blocks=num_blocks)
    if pool is None:
        return None
    own = demand.session_blocks(size)
    scattered = needed.total + (num_users - demand.sessions) * own
    return Sizes(
        block_size=size,
        bytes_per_token_and_layer=kv.bytes_per_token / kv.num_layers,
        bytes_per_token=kv.bytes_per_token,
        bytes_per_block=kv.bytes_per_block,
        prefix_bytes=kv.bytes_of(demand.prefix_tokens),
        session_bytes=own * kv.bytes_per_block,
        filling=filling(demand.prefix_tokens, size),
        prefill=_prefill(demand.prefix_tokens, new_tokens, work, speeds),
        linear_flops_per_token=work.linear if work else None,
        attention_tokens=work.attention_tokens if work else None,
        break_even=tuple(_break_evens(kv, demand.prefix_tokens, speeds)),
        needed_bytes_per_s=kv.bytes_per_token * speeds.prefill.tokens_per_s if speeds else None,
        pool=pool,
        pool_bytes=pool.total * kv.bytes_per_block,
        scattered_bytes=scattered * kv.bytes_per_block,
        warm_share=pool.warm_share,
        pin_quota=pool.pinned / pool.total if pool.total else 0.0,
        replica_sessions=demand.sessions,
    )


def _prefill(prefix: int, new: int, work: Work | None, speeds: Speeds | None) -> Prefill:
    total = prefix + new
    cold_pairs, warm_pairs = num_pairs(total, 0), num_pairs(new, prefix)
    return Prefill(
        prefix_tokens=prefix,
        new_tokens=new,
        cold_pairs=cold_pairs,
        warm_pairs=warm_pairs,
        tokens_saved=total / new,
        attention_saved=cold_pairs / warm_pairs,
        work_saved=work.prefill(total, 0) / work.prefill(new, prefix) if work else None,
        cold_s=speeds.prefill.seconds(total, 0) if speeds else None,
        warm_s=speeds.prefill.seconds(new, prefix) if speeds else None,
    )


def _break_evens(kv: KVSize, prefix: int, speeds: Speeds | None) -> Iterator[BreakEven]:
    if speeds is None:
        return
    for name, tier in (("disk", speeds.disk), ("peer", speeds.peer)):
        yield BreakEven(
            tier=name,
            bytes_per_s=tier.bytes_per_s,
            tokens=tier.break_even_tokens(speeds.prefill, kv),
            prefix_s=tier.seconds(prefix, kv),
        )


def render(sizes: Sizes) -> None:
    """Prints the sizes for a person."""
    for title, rows in (
        ("KV", _kv_rows(sizes)),
        ("Blocks", _block_rows(sizes)),
        ("Prefill", _prefill_rows(sizes)),
        ("Elsewhere", _tier_rows(sizes)),
        ("Pool of one replica", _pool_rows(sizes)),
    ):
        if rows:
            sys.stdout.write(f"{title}\n")
            sys.stdout.writelines(f"  {name:<{_WIDTH}}{value}\n" for name, value in rows)


_Rows = Sequence[tuple[str, str]]


def _kv_rows(sizes: Sizes) -> _Rows:
    return [
        ("per token and layer", f"{sizes.bytes_per_token_and_layer:,.6g} bytes"),
        ("per token", f"{sizes.bytes_per_token:,.9g} bytes"),
        (f"per block of {sizes.block_size} tokens", f"{sizes.bytes_per_block:,} bytes"),
        (f"prefix of {sizes.prefill.prefix_tokens:,} tokens", _megabytes(sizes.prefix_bytes)),
        ("session behind it", _megabytes(sizes.session_bytes)),
    ]


def _block_rows(sizes: Sizes) -> _Rows:
    filled = sizes.filling
    rows = [(f"prefix of {sizes.prefill.prefix_tokens:,} tokens", f"{filled.full_blocks} full")]
    if stranded := filled.stranded_tokens:
        rows.append(("stranded behind them", f"{_tokens(stranded)}, in no full block"))
        pad = f"{_tokens(filled.pad_tokens)}, to {filled.full_blocks + 1} full blocks"
        rows.append(("pad to share them too", pad))
    return rows


def _prefill_rows(sizes: Sizes) -> _Rows:
    it = sizes.prefill
    cold = it.prefix_tokens + it.new_tokens
    rows = [
        ("tokens computed", _fall(cold, it.new_tokens, it.tokens_saved)),
        ("pairs in attention", _fall(it.cold_pairs, it.warm_pairs, it.attention_saved)),
    ]
    if it.work_saved is not None and sizes.attention_tokens is not None:
        rows.append(("work of both", f"{it.work_saved:.2f} times less"))
        rows.append(("attention doubles it", f"from {sizes.attention_tokens:,.0f} tokens on"))
    else:
        rows.append(("work of both", "between the two: what the family computes is not known"))
    if it.cold_s is not None and it.warm_s is not None:
        rows.append(("time", f"{_seconds(it.cold_s)} without the prefix cached"))
        rows.append(("", f"{_seconds(it.warm_s)} with it"))
    return rows


def _tier_rows(sizes: Sizes) -> _Rows:
    rows = []
    for it in sizes.break_even:
        speed = f"{it.bytes_per_s / 1e6:,.0f} MB/s"
        if it.tokens is None:
            when = "always slower than computing"
        else:
            when = f"sooner than computing from {_tokens(it.tokens)} on"
        rows.append((f"{it.tier} at {speed}", f"{when}; the prefix in {_seconds(it.prefix_s)}"))
    if sizes.needed_bytes_per_s is not None:
        needed = f"{sizes.needed_bytes_per_s / 1e6:,.0f} MB/s"
        rows.append(("computing makes", f"{needed}: what is faster pays at nearly any length"))
    return rows


def _pool_rows(sizes: Sizes) -> _Rows:
    pool = sizes.pool
    memory = f"{pool.total:,} blocks, {sizes.pool_bytes / 2**30:,.2f} GiB"
    return [
        ("pinned", f"{pool.pinned:,} blocks"),
        ("of running requests", f"{pool.live:,} blocks"),
        ("warm, between two requests", f"{pool.warm:,} blocks"),
        ("in all", memory),
        ("warm share", f"{sizes.warm_share:.0%} of the pool is there to be hit"),
        ("sessions that stay", f"{pool.warm_sessions:.0%} of those between two requests"),
        (
            "if sessions were scattered",
            f"{sizes.scattered_bytes / 2**30:,.2f} GiB would be needed",
        ),
        ("for a kvway worker", f"--num-blocks {pool.total} --pin-quota {_quota(sizes)}"),
    ]


def _quota(sizes: Sizes) -> str:
    """Returns the pin quota, rounded up to a hundredth."""
    return f"{-(-sizes.pool.pinned * 100 // max(1, sizes.pool.total)) / 100:g}"


def _fall(cold: int, warm: int, times: float) -> str:
    return f"{cold:,} -> {warm:,}: {times:.2f} times fewer"


def _tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{number:,} tokens"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
