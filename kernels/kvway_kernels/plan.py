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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvway_kernels.blocks import BlockIds, block_ids, int64
from kvway_kernels.choice import chosen
from kvway_kernels.groups import DecodeGroup, decode_group, grouped
from kvway_kernels.native import Units, units
from kvway_kernels.rows import (
    PrivateRows,
    RequestRows,
    SharedRun,
    check_requests,
    check_runs,
    long_pasts,
    private_rows,
    seen_whole,
)
from kvway_kernels.tiles import PrefillRows, compute_dtype, fixed_rows, prefill_rows

__all__ = ["DecodeGroup", "PagedPlan", "RequestRows", "SharedPass", "SharedRun", "plan"]

_PIECE_KEYS = 1024
_PIECE_ROWS = 16
_MAX_PIECES = 8
"""A shared run for many rows is attended to in pieces of so many keys, which torch's operation
then finds in the processor's cache for each of its tiles of rows; few rows are one tile anyway.
What the pieces give is kept until it is merged: so there are at most 8, each larger."""


@dataclass(frozen=True, slots=True)
class SharedPass:
    """One shared run, or a piece of it, ready to be attended to by all rows of its members.

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
        passes: what is attended to without a mask: the shared runs, and what is in front of the
            chunks of long prompts; the long ones in pieces.
        num_levels: of the passes.
        prefills: the requests with several rows.
        decodes: those with one row.
        implementation: what attends.
        units: for `compiled` in float32 on a CPU: the shared runs and the requests of one row.
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
    units: Units | None
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
    splits = name in ("sdpa", "compiled") and window is None and not fixed_shapes
    runs = [*used, *(long_pasts(requests, used, block_size=block_size) if splits else ())]
    private = private_rows(requests, runs, block_size=block_size, window=window)
    for run in runs:
        _check_ids(run.members[0], _blocks(requests, run), num_blocks)
    for index, rows in enumerate(private):
        _check_ids(index, rows.blocks, num_blocks)
    several = [rows for rows in private if rows.num_rows > 1 or fixed_shapes]
    singles = [rows for rows in private if rows.num_rows == 1 and not fixed_shapes]
    like = torch.empty(0, dtype=dtype, device=device)
    make = fixed_rows if fixed_shapes else prefill_rows
    num_rows = sum(request.num_queries for request in requests)
    pieces = [piece for run in runs for piece in _pieces(run, private, block_size)]
    levels = _levels(pieces)
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
            for run, level in zip(pieces, levels, strict=True)
        ),
        num_levels=max(levels, default=-1) + 1,
        prefills=tuple(make(rows, like=like) for rows in several),
        decodes=tuple(
            decode_group(
                group,
                num_rows=num_rows,
                block_size=block_size,
                device=device,
            )
            for group in grouped(singles)
        ),
        implementation=name,
        units=_units(runs, requests, private, block_size)
        if name == "compiled" and device.type == "cpu" and dtype == torch.float32
        else None,
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


def _pieces(
    run: SharedRun, private: Sequence[PrivateRows], block_size: int
) -> Iterator[SharedRun]:
    num_rows = sum(private[member].num_rows for member in run.members)
    size = max(-(-_PIECE_KEYS // block_size), -(-run.num_blocks // _MAX_PIECES))
    if num_rows < _PIECE_ROWS or run.num_blocks < 2 * size:
        yield run
        return
    for first in range(run.first_block, run.end_block, size):
        yield run._replace(first_block=first, num_blocks=min(size, run.end_block - first))


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
    rows = _rows(run, private)
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


def _rows(run: SharedRun, private: Sequence[PrivateRows]) -> list[int]:
    return [
        row
        for member in run.members
        for row in range(private[member].row, private[member].row + private[member].num_rows)
    ]


def _units(
    runs: Sequence[SharedRun],
    requests: Sequence[RequestRows],
    private: Sequence[PrivateRows],
    block_size: int,
) -> Units:
    levels = _levels(runs)
    return units(
        [
            (_rows(run, private), _blocks(requests, run), level)
            for run, level in zip(runs, levels, strict=True)
        ],
        [rows for rows in private if rows.num_rows == 1],
        num_runs_parts=max(levels, default=-1) + 1,
        block_size=block_size,
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


def _main() -> None:
    """Print how the blocks of a small step are read."""
    tables = ([7, 2, 9, 4], [7, 2, 5], [1, 3])
    requests = [RequestRows(1, 16 * len(table), table) for table in tables]
    step = plan(
        requests,
        num_blocks=10,
        block_size=16,
        shared=[SharedRun((0, 1), 0, 2)],
        implementation="sdpa",
    )
    for index, (request, rows) in enumerate(zip(requests, step.private, strict=True)):
        print(f"request {index}: blocks {request.block_table}, for itself {rows.blocks}")  # noqa: T201
    for run in step.shared:
        print(f"read once for requests {run.members}: {_blocks(requests, run)}")  # noqa: T201
    for group in step.decodes:
        print(f"together: rows {group.rows.tolist()}, up to {group.num_keys} private keys each")  # noqa: T201


if __name__ == "__main__":
    _main()
