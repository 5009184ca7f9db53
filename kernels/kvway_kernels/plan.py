"""What one step attends to, worked out once on the host and used by every layer.

A step packs the new tokens of several requests into one row axis:

    rows         | request a: 3 | b: 1 | c: 5        |       T = 9 query rows
    keys of a    blocks 7, 2          [0 .. num_keys)        the last 3 are a's own new tokens

A row attends to every key of its request up to and including its own position. Keys in a shared
run are read once for all members' rows; the rest is private. Requests that bring one row (decode)
are grouped by how many private keys they have and attended to together; those that bring more are
attended to one by one, in tiles of rows. Partial results merge exactly.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvway_kernels.blocks import BlockIds, block_ids, int64
from kvway_kernels.choice import chosen
from kvway_kernels.rows import (
    PrivateRows,
    RequestRows,
    SharedRun,
    check_requests,
    check_runs,
    private_rows,
    seen_whole,
)
from kvway_kernels.tiles import PrefillRows, compute_dtype, fixed_rows, prefill_rows

__all__ = ["DecodeGroup", "PagedPlan", "RequestRows", "SharedPass", "SharedRun", "plan"]

_GROUP_TOKENS = 16_384
"""Keys per call of a decode group: bounds what is copied or kept of scores, which must stay in
the processor's cache."""

_GROUP_FILL = 0.75
"""A decode group pads its members to the longest; at least this share of the keys is real."""


@dataclass(frozen=True, slots=True)
class SharedPass:
    """One shared run, ready to be attended to by all rows of its members.

    Attributes:
        rows: the rows: int64 [num_rows], or a slice where they follow each other.
        num_rows: how many.
        blocks: the run's blocks, all full.
        num_keys: tokens in them. Every row sees all.
        level: passes of one level have no row in common. From 0 on, without a gap.
        dtype: what is multiplied in.
    """

    rows: slice | Tensor
    num_rows: int
    blocks: BlockIds
    num_keys: int
    level: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Requests of one row each, attended to together.

    Attributes:
        rows: their rows in the packed step: int64 [n].
        tables: the blocks of their private keys, padded with the request's own first one, so that
            nothing of another request, and nothing never written, is ever read: int64 [n, blocks].
        lengths: their private keys: int64 [n].
        first_keys: the first that the row's window shows: int64 [n], 0 where there is no window.
        lone_blocks: where there is one request: its blocks, as a slice if they follow each other.
        slots: for `compiled`: where the keys are, int64 [n, num_keys]. Where a row sees no key,
            its request's first private one is. Else empty.
        is_whole_step: the rows are all rows of the step, in order.
        num_keys: private keys of the longest.
        is_even: nothing is padded and nothing hidden.
    """

    rows: Tensor
    tables: Tensor
    lengths: Tensor
    first_keys: Tensor
    lone_blocks: BlockIds | None
    slots: Tensor
    is_whole_step: bool
    num_keys: int
    is_even: bool

    @property
    def num_requests(self) -> int:
        """Requests in the group."""
        return len(self.rows)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class PagedPlan:
    """A step, ready for every layer. Made by `plan`.

    Attributes:
        num_rows: query rows of all requests. Rows a caller adds behind them are ignored.
        slot_mapping: the slot of each row's own key and value: int64 [num_rows].
        requests: as planned for.
        shared: the runs that are read once: those given, without those that a window cuts.
        window: keys that a row sees, its own included; None: all.
        private: per request, what is left of its keys.
        passes: the shared runs.
        num_levels: of the passes.
        prefills: the requests with several rows.
        decodes: those with one row.
        implementation: what attends.
        num_blocks: blocks in the caches that this plan is for.
        block_size: tokens per block.
        key: the plan's name in `torch.ops.kvway`, an int64 of no dimension; good while the plan
            lives.
    """

    num_rows: int
    slot_mapping: Tensor
    requests: tuple[RequestRows, ...]
    shared: tuple[SharedRun, ...]
    window: int | None
    private: tuple[PrivateRows, ...]
    passes: tuple[SharedPass, ...]
    num_levels: int
    prefills: tuple[PrefillRows, ...]
    decodes: tuple[DecodeGroup, ...]
    implementation: str
    num_blocks: int
    block_size: int
    key: Tensor


_keys = itertools.count(1)
_plans: Final[WeakValueDictionary[int, PagedPlan]] = WeakValueDictionary()


def live_plan(key: int) -> PagedPlan:
    """Return the plan that a key names.

    Raises:
        KeyError: it is not alive any more.
    """
    try:
        return _plans[key]
    except KeyError:
        raise KeyError(
            f"no plan of key {key} is alive: keep the plan while its step runs"
        ) from None


def plan(  # noqa: PLR0913
    requests: Sequence[RequestRows],
    *,
    num_blocks: int,
    block_size: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    fixed_shapes: bool = False,
    shared: Sequence[SharedRun] = (),
    implementation: str = "auto",
    window: int | None = None,
) -> PagedPlan:
    """Work out one step for `write_kv`, `paged_attention` and `cascade_attention`.

    Args:
        requests: in the order of their rows. May be empty.
        num_blocks: blocks in the caches.
        block_size: tokens per block.
        device: where the caches are.
        dtype: what keys and values are multiplied in; the queries' dtype. A step for queries of
            another type is right, too, but slower.
        fixed_shapes: attend in calls of one shape only. In float32 on a CPU a row's result is then
            the same, bit for bit, whatever else is in the step and however its request was split
            over steps; decode costs several times more. Shares nothing, and is only for `sdpa`,
            which `auto` then means.
        shared: runs of blocks to read once for all their members. One that the window of a member
            cuts is not used: its keys are private then.
        implementation: `reference`, `sdpa`, `compiled`, `triton`, or `auto`: see `chosen`.
        window: a row sees only so many last keys, its own included. None: all.

    Raises:
        ValueError: a request has no rows, more rows than keys, too few blocks for its keys, or a
            block id outside the caches; a shared run is not what `SharedRun` says; the window is
            below 1; the implementation is unknown or cannot run here; or fixed shapes are asked
            for with shared runs or another implementation than `sdpa`.

    Complexity: O(blocks) of all requests, plus O(keys) of those with several rows.
    """
    device = torch.device(device)
    _check_options(fixed_shapes=fixed_shapes, shared=shared, window=window, name=implementation)
    name = "sdpa" if fixed_shapes else chosen(implementation, device=device)[0]
    check_requests(requests, block_size)
    check_runs(requests, shared, block_size)
    used = seen_whole(requests, shared, block_size=block_size, window=window)
    private = private_rows(requests, used, block_size=block_size, window=window)
    for run in used:
        _check_ids(run.members[0], _blocks(requests, run), num_blocks)
    for index, rows in enumerate(private):
        _check_ids(index, rows.blocks, num_blocks)
    several = [rows for rows in private if rows.num_rows > 1 or fixed_shapes]
    singles = [rows for rows in private if rows.num_rows == 1 and not fixed_shapes]
    like = torch.empty(0, dtype=dtype, device=device)
    make = fixed_rows if fixed_shapes else prefill_rows
    num_rows = sum(request.num_queries for request in requests)
    levels = _levels(used)
    key = next(_keys)
    made = PagedPlan(
        num_rows=num_rows,
        slot_mapping=_new_slots(private, block_size).to(device),
        requests=tuple(requests),
        shared=used,
        window=window,
        private=tuple(private),
        passes=tuple(
            _pass(run, level, requests, private, block_size=block_size, like=like)
            for run, level in zip(used, levels, strict=True)
        ),
        num_levels=max(levels, default=-1) + 1,
        prefills=tuple(make(rows, like=like) for rows in several),
        decodes=tuple(
            _decode_group(
                group,
                num_rows=num_rows,
                block_size=block_size,
                device=device,
                with_slots=name == "compiled",
            )
            for group in _grouped(singles)
        ),
        implementation=name,
        num_blocks=num_blocks,
        block_size=block_size,
        key=torch.tensor(key),
    )
    _plans[key] = made
    return made


def _check_options(
    *, fixed_shapes: bool, shared: Sequence[SharedRun], window: int | None, name: str
) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: expected at least 1, or None")
    if fixed_shapes and shared:
        raise ValueError(f"fixed shapes share nothing, but there are {len(shared)} shared runs")
    if fixed_shapes and name not in ("auto", "sdpa"):
        raise ValueError(f"fixed shapes are for sdpa only, not for {name}")


def _check_ids(index: int, blocks: Sequence[int], num_blocks: int) -> None:
    if min(blocks) < 0 or max(blocks) >= num_blocks:
        raise ValueError(f"request {index} has a block id outside [0, {num_blocks})")


def _blocks(requests: Sequence[RequestRows], run: SharedRun) -> Sequence[int]:
    return requests[run.members[0]].block_table[run.first_block : run.end_block]


def _levels(shared: Sequence[SharedRun]) -> list[int]:
    """Give each run the lowest level at which it has no member in common with those before."""
    taken: dict[int, set[int]] = {}
    levels: list[int] = []
    for run in shared:
        others = set().union(*(taken.get(member, ()) for member in run.members))
        level = next(n for n in itertools.count() if n not in others)
        for member in run.members:
            taken.setdefault(member, set()).add(level)
        levels.append(level)
    return levels


def _pass(
    run: SharedRun,
    level: int,
    requests: Sequence[RequestRows],
    private: Sequence[PrivateRows],
    *,
    block_size: int,
    like: Tensor,
) -> SharedPass:
    rows = [
        row
        for member in run.members
        for row in range(private[member].row, private[member].row + private[member].num_rows)
    ]
    first = rows[0]
    return SharedPass(
        rows=slice(first, first + len(rows))
        if rows[-1] - first + 1 == len(rows)  # they ascend
        else int64(rows).to(like.device),
        num_rows=len(rows),
        blocks=block_ids(_blocks(requests, run), like.device),
        num_keys=run.num_blocks * block_size,
        level=level,
        dtype=compute_dtype(len(rows), like.dtype, like.device),
    )


def _new_slots(private: Sequence[PrivateRows], block_size: int) -> Tensor:
    slots: list[int] = []
    for rows in private:
        blocks = rows.blocks
        slots += [
            blocks[key // block_size] * block_size + key % block_size
            for key in range(rows.num_keys - rows.num_rows, rows.num_keys)
        ]
    return int64(slots) if slots else torch.zeros(0, dtype=torch.int64)


def _grouped(singles: Sequence[PrivateRows]) -> Iterator[list[PrivateRows]]:
    """Split decode requests into groups of similar length, each bounded and in order of rows."""
    group: list[PrivateRows] = []
    longest = num_real = 0
    for rows in sorted(singles, key=lambda rows: rows.num_keys, reverse=True):
        padded = longest * (len(group) + 1)
        fits = padded <= _GROUP_TOKENS and num_real + rows.num_keys >= _GROUP_FILL * padded
        if group and not fits:
            yield sorted(group, key=lambda rows: rows.row)
            group = []
        if not group:
            longest, num_real = rows.num_keys, 0
        group.append(rows)
        num_real += rows.num_keys
    if group:
        yield sorted(group, key=lambda rows: rows.row)


def _decode_group(
    group: Sequence[PrivateRows],
    *,
    num_rows: int,
    block_size: int,
    device: torch.device,
    with_slots: bool,
) -> DecodeGroup:
    num_keys = max(rows.num_keys for rows in group)
    width = max(len(rows.blocks) for rows in group)
    buffer = array("q")
    for rows in group:
        buffer.extend(rows.blocks)
        buffer.extend([rows.blocks[0]] * (width - len(rows.blocks)))
    tables = torch.frombuffer(buffer, dtype=torch.int64).view(len(group), width).to(device)
    lengths = int64([rows.num_keys for rows in group]).to(device)
    first_keys = int64([max(0, rows.first_key) for rows in group]).to(device)
    slots = tables.new_zeros(0, 0)
    if with_slots:
        slots = _seen_slots(tables, lengths, first_keys, num_keys, block_size)
    return DecodeGroup(
        rows=int64([rows.row for rows in group]).to(device),
        tables=tables,
        lengths=lengths,
        first_keys=first_keys,
        lone_blocks=block_ids(group[0].blocks, device) if len(group) == 1 else None,
        slots=slots,
        is_whole_step=len(group) == num_rows,
        num_keys=num_keys,
        is_even=all(rows.num_keys == num_keys and rows.first_key <= 0 for rows in group),
    )


def _seen_slots(
    tables: Tensor, lengths: Tensor, first_keys: Tensor, num_keys: int, block_size: int
) -> Tensor:
    """Return the slots of each request's keys; the first one's where its row sees none."""
    within = torch.arange(block_size, device=tables.device)
    slots = (tables[:, :, None] * block_size + within).flatten(1)[:, :num_keys]
    key = torch.arange(num_keys, device=tables.device)
    is_seen = (key < lengths[:, None]) & (key >= first_keys[:, None])
    return torch.where(is_seen, slots, slots[:, :1])
