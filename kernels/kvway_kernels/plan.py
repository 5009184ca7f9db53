"""What one step attends to, worked out once on the host and used by every layer.

A step packs the new tokens of several requests into one row axis:

    rows         | request a: 3 | b: 1 | c: 5        |       T = 9 query rows
    keys of a    blocks 7, 2          [0 .. num_keys)        the last 3 are a's own new tokens

A row attends to every key of its request up to and including its own position. Requests that bring
one row (decode) are grouped by length and attended to together; those that bring more are
attended to one by one, in tiles of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_TILE_ROWS = 256
"""Rows per call where a mask is needed: bounds the mask to 256 x num_keys, and what is computed of
keys behind a row's own. With fewer than 192 rows torch attends in smaller pieces, slower."""

_FLOAT32_ROWS = 16
"""From so many rows on, float32 is faster than bfloat16 on a CPU without a matrix unit for it: by
a quarter at 100 rows, conversion of all keys and values included."""

_GROUP_TOKENS = 16_384
"""Keys per call of a decode group: bounds the gathered copy, which must stay in the cache."""

_GROUP_FILL = 0.75
"""A decode group pads its members to the longest; at least this share of the keys is real."""

_FIXED_ROWS = 16
_FIXED_KEYS = 512
"""In fixed shapes: rows of each call, and what its number of keys is a multiple of."""


@dataclass(frozen=True, slots=True)
class RequestRows:
    """One request's part of a packed step.

    Attributes:
        num_queries: query rows it brings, at least 1: the last tokens of its keys.
        num_keys: tokens it attends to, those rows' own tokens included.
        block_table: ids of the blocks that hold them, in order. Ids past the last token are
            never read.
    """

    num_queries: int
    num_keys: int
    block_table: Sequence[int]


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of one request that one call attends with.

    Attributes:
        row: first row in the packed step.
        num_rows: rows in the tile.
        num_pad_rows: rows to add behind them, whose results are dropped.
        num_keys: leading keys of the request to attend to.
        mask: added to the scores, 0 where a row sees a key and -inf elsewhere: [num_rows +
            num_pad_rows, num_keys]. None: each row sees every key, or the keys up to its own where
            `is_causal`.
        is_causal: the rows are the request's first, and there are as many as keys.
    """

    row: int
    num_rows: int
    num_pad_rows: int
    num_keys: int
    mask: Tensor | None
    is_causal: bool


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """A request with several rows: where its keys are, and the tiles of its rows.

    Attributes:
        slots: the keys' slots, in order. A slice where the blocks follow each other: no copy.
        tiles: its rows, in order.
        dtype: what queries, keys and values are multiplied in.
    """

    slots: slice | Tensor
    tiles: tuple[Tile, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Requests of one row each, attended to together.

    Attributes:
        rows: their rows in the packed step: int64 [num_requests].
        slots: their keys' slots, int64 [num_requests * max_keys], or a slice for a lone request.
            Padding repeats the request's own first slot, so that nothing of another request, and
            nothing never written, is ever read.
        mask: added to the scores, 0 where a key is real and -inf elsewhere: [num_requests, 1, 1,
            max_keys]. None: all are.
    """

    rows: Tensor
    slots: slice | Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """A step, ready for every layer. Made by `plan`.

    Attributes:
        num_rows: query rows of all requests. Rows a caller adds behind them are ignored.
        slot_mapping: the slot of each row's own key and value: int64 [num_rows].
        prefills: the requests with several rows.
        decodes: those with one row.
        num_blocks: blocks in the caches that this plan is for.
        block_size: tokens per block.
    """

    num_rows: int
    slot_mapping: Tensor
    prefills: tuple[PrefillRows, ...]
    decodes: tuple[DecodeGroup, ...]
    num_blocks: int
    block_size: int


def plan(
    requests: Sequence[RequestRows],
    *,
    num_blocks: int,
    block_size: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    fixed_shapes: bool = False,
) -> PagedPlan:
    """Work out one step for `write_kv` and `paged_attention`.

    Args:
        requests: in the order of their rows. May be empty.
        num_blocks: blocks in the caches.
        block_size: tokens per block.
        device: where the caches are.
        dtype: theirs. It decides what is computed in: a step for caches of another type is right,
            too, but slower.
        fixed_shapes: attend in calls of one shape only. In float32 on a CPU a row's result is then
            the same, bit for bit, whatever else is in the step and however its request was split
            over steps; decode costs several times more.

    Raises:
        ValueError: a request has no rows, more rows than keys, too few blocks for its keys, or a
            block id outside the caches.

    Complexity: O(keys of all requests).
    """
    tables: list[Tensor] = []
    for index, request in enumerate(requests):
        _check(index, request, num_blocks=num_blocks, block_size=block_size)
        tables.append(_slots(request, block_size))
    starts = [0]
    for request in requests:
        starts.append(starts[-1] + request.num_queries)

    new_slots = [slots[-r.num_queries :] for r, slots in zip(requests, tables, strict=True)]
    singles = [i for i, r in enumerate(requests) if r.num_queries == 1 and not fixed_shapes]
    several = [i for i, r in enumerate(requests) if r.num_queries > 1 or fixed_shapes]
    make = _fixed_rows if fixed_shapes else _prefill_rows
    like = torch.empty(0, dtype=dtype, device=device)
    return PagedPlan(
        num_rows=starts[-1],
        slot_mapping=torch.cat(new_slots or [torch.zeros(0, dtype=torch.int64)]).to(device),
        prefills=tuple(make(requests[i], tables[i], starts[i], like=like) for i in several),
        decodes=tuple(
            _decode_group([tables[i] for i in group], [starts[i] for i in group], like=like)
            for group in _grouped(singles, [r.num_keys for r in requests])
        ),
        num_blocks=num_blocks,
        block_size=block_size,
    )


def _check(index: int, request: RequestRows, *, num_blocks: int, block_size: int) -> None:
    if not 1 <= request.num_queries <= request.num_keys:
        raise ValueError(
            f"request {index} has {request.num_queries} rows and {request.num_keys} keys: "
            "expected at least 1 row and no more rows than keys"
        )
    num_needed = -(-request.num_keys // block_size)
    used = request.block_table[:num_needed]
    if len(used) < num_needed:
        raise ValueError(
            f"request {index} has {request.num_keys} keys in {len(used)} blocks of {block_size}: "
            f"expected {num_needed} blocks"
        )
    if min(used) < 0 or max(used) >= num_blocks:
        raise ValueError(f"request {index} has a block id outside [0, {num_blocks})")


def _slots(request: RequestRows, block_size: int) -> Tensor:
    num_used = -(-request.num_keys // block_size)
    blocks = torch.tensor(request.block_table[:num_used], dtype=torch.int64)
    slots = blocks[:, None] * block_size + torch.arange(block_size)
    return slots.flatten()[: request.num_keys]


def _run_or_index(slots: Tensor, device: torch.device | str) -> slice | Tensor:
    """Return a slice where the slots follow each other: attention then reads them in place."""
    first, last = int(slots[0]), int(slots[-1])
    is_run = last - first + 1 == len(slots) and bool((slots[1:] > slots[:-1]).all())
    return slice(first, last + 1) if is_run else slots.to(device)


def _causal(num_rows: int, num_keys: int) -> Tensor:
    """Return who sees what when the rows are the last of the keys."""
    return torch.ones(num_rows, num_keys, dtype=torch.bool).tril(num_keys - num_rows)


def _mask(sees: Tensor, like: Tensor) -> Tensor:
    """Return what to add to the scores: torch would make the same of `sees`, in every layer."""
    mask = torch.zeros(sees.shape, dtype=like.dtype).masked_fill_(~sees, -torch.inf)
    return mask.to(like.device)


def _prefill_rows(request: RequestRows, slots: Tensor, start: int, *, like: Tensor) -> PrefillRows:
    num_rows, num_keys = request.num_queries, request.num_keys
    if num_rows >= _FLOAT32_ROWS and _is_slow_in(like):
        like = like.float()
    if num_rows == num_keys:
        tiles = [Tile(start, num_rows, 0, num_keys, mask=None, is_causal=True)]
    else:
        tiles = []
        for first in range(0, num_rows, _TILE_ROWS):
            size = min(_TILE_ROWS, num_rows - first)
            seen = num_keys - num_rows + first + size
            mask = _mask(_causal(size, seen), like)
            tiles.append(Tile(start + first, size, 0, seen, mask=mask, is_causal=False))
    return PrefillRows(_run_or_index(slots, like.device), tuple(tiles), like.dtype)


def _is_slow_in(like: Tensor) -> bool:
    """Tell whether many rows are attended to faster in float32 than in this dtype."""
    on_cpu = like.dtype == torch.bfloat16 and like.device.type == "cpu"
    return on_cpu and not torch.cpu._is_amx_tile_supported()  # noqa: SLF001 (no public name)


def _fixed_rows(request: RequestRows, slots: Tensor, start: int, *, like: Tensor) -> PrefillRows:
    """Like `_prefill_rows`, but every call has 16 rows and a multiple of 512 keys."""
    num_rows, num_keys = request.num_queries, request.num_keys
    tiles = []
    for first in range(0, num_rows, _FIXED_ROWS):
        size = min(_FIXED_ROWS, num_rows - first)
        seen = num_keys - num_rows + first + size
        padded = -(-seen // _FIXED_KEYS) * _FIXED_KEYS
        sees = torch.zeros(_FIXED_ROWS, padded, dtype=torch.bool)
        sees[:size, :seen] = _causal(size, seen)
        sees[size:, 0] = True  # a row that sees nothing is undefined
        pad = _FIXED_ROWS - size
        tiles.append(Tile(start + first, size, pad, padded, _mask(sees, like), is_causal=False))
    pad_keys = slots[:1].expand(-num_keys % _FIXED_KEYS)
    return PrefillRows(torch.cat([slots, pad_keys]).to(like.device), tuple(tiles), like.dtype)


def _grouped(singles: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Split decode requests into groups of similar length, longest first, each bounded."""
    group: list[int] = []
    longest = num_real = 0
    for index in sorted(singles, key=lambda i: lengths[i], reverse=True):
        padded = longest * (len(group) + 1)
        fits = padded <= _GROUP_TOKENS and num_real + lengths[index] >= _GROUP_FILL * padded
        if group and not fits:
            yield group
            group = []
        if not group:
            longest, num_real = lengths[index], 0
        group.append(index)
        num_real += lengths[index]
    if group:
        yield group


def _decode_group(tables: Sequence[Tensor], rows: Sequence[int], *, like: Tensor) -> DecodeGroup:
    row_index = torch.tensor(rows, dtype=torch.int64).to(like.device)
    if len(tables) == 1:
        return DecodeGroup(row_index, _run_or_index(tables[0], like.device), mask=None)
    longest = max(len(table) for table in tables)
    slots = torch.stack(
        [torch.cat([table, table[:1].expand(longest - len(table))]) for table in tables]
    )
    lengths = torch.tensor([len(table) for table in tables])
    is_real = torch.arange(longest) < lengths[:, None]
    return DecodeGroup(
        row_index,
        slots.flatten().to(like.device),
        mask=None if bool(is_real.all()) else _mask(is_real, like)[:, None, None, :],
    )
