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

import functools
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
from kvway_kernels.groups import DecodeGroup, decode_group, grouped
from kvway_kernels.native import Units, Work, units
from kvway_kernels.rows import (
    LONG_PAST,
    LONG_PAST_COMPILED,
    PrivateRows,
    RequestRows,
    RunRows,
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


@dataclass(frozen=True, eq=False)
class PagedPlan:
    """A step, ready for every layer. Made by `plan`.

    What only some implementations read is made when one of them first does.

    Attributes:
        num_rows: query rows of all requests. Rows a caller adds behind them are ignored.
        slot_mapping: the slot of each row's own key and value: int64 [num_rows].
        requests: as planned for.
        shared: the runs that are read once: those given, without those that a window cuts.
        window: keys that a row sees, its own included; None: all.
        runs: what is attended to without a mask: the shared runs, and what is in front of the
            chunks of long prompts.
        private: per request, what is left of its keys.
        blocks: of all runs, then of all private keys, one after the other: int64.
        implementation: what attends.
        num_blocks: blocks in the caches that this plan is for.
        block_size: tokens per block.
        fixed_shapes: attend in calls of one shape only.
        like: of the caches' device, and of the dtype that keys and values are multiplied in.
        key: the plan's name in `torch.ops.kvway`, an int64 of no dimension; good while the plan
            lives.
    """

    num_rows: int
    slot_mapping: Tensor
    requests: tuple[RequestRows, ...]
    shared: tuple[SharedRun, ...]
    window: int | None
    runs: tuple[RunRows, ...]
    private: tuple[PrivateRows, ...]
    blocks: Tensor
    implementation: str
    num_blocks: int
    block_size: int
    fixed_shapes: bool
    like: Tensor
    key: Tensor

    @functools.cached_property
    def passes(self) -> tuple[SharedPass, ...]:
        """The runs as calls of torch's operation attend to them: long ones in pieces."""
        pieces = [piece for run in self.runs for piece in _pieces(run, self.block_size)]
        return tuple(
            _pass(piece, level, block_size=self.block_size, like=self.like)
            for piece, level in zip(pieces, _levels(pieces), strict=True)
        )

    @property
    def num_levels(self) -> int:
        """Levels of the passes."""
        return max((run.level for run in self.passes), default=-1) + 1

    @functools.cached_property
    def prefills(self) -> tuple[PrefillRows, ...]:
        """The requests with several rows, cut into tiles."""
        make = fixed_rows if self.fixed_shapes else prefill_rows
        return tuple(
            make(rows, like=self.like) for rows in self.private if not self._decodes(rows)
        )

    @functools.cached_property
    def decodes(self) -> tuple[DecodeGroup, ...]:
        """The requests with one row, in groups."""
        with torch.inference_mode(mode=False):  # the same kind of tensors in every step
            return tuple(
                decode_group(
                    group,
                    num_rows=self.num_rows,
                    block_size=self.block_size,
                    device=self.like.device,
                )
                for group in grouped([rows for rows in self.private if self._decodes(rows)])
            )

    @functools.cached_property
    def units(self) -> Units:
        """The runs and the requests of one row, for one call of C++."""
        levels = _levels(self.runs)
        last = max(levels, default=-1) + 1
        work, first = [], 0
        for run, level in zip(self.runs, levels, strict=True):
            end = len(run.blocks) * self.block_size
            work.append(Work(run.rows, first, 0, end, level))
            first += len(run.blocks)
        for rows in self.private:
            if self._decodes(rows):
                first_key = max(0, rows.first_key)
                work.append(Work((rows.row,), first, first_key, rows.num_keys, last))
            first += len(rows.blocks)
        return units(work, self.blocks, num_levels=last + 1)

    def _decodes(self, rows: PrivateRows) -> bool:
        return rows.num_rows == 1 and not self.fixed_shapes


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
    least = LONG_PAST_COMPILED if name == "compiled" else LONG_PAST
    pasts = long_pasts(requests, used, block_size=block_size, least=least) if splits else []
    runs = [*used, *pasts]
    private = private_rows(requests, runs, block_size=block_size, window=window)
    laid = [_run_rows(run, requests, private) for run in runs]
    key = next(_keys)
    made = PagedPlan(
        num_rows=sum(request.num_queries for request in requests),
        slot_mapping=_new_slots(private, block_size).to(device),
        requests=tuple(requests),
        shared=used,
        window=window,
        runs=tuple(laid),
        private=tuple(private),
        blocks=_checked_blocks(laid, private, num_blocks),
        implementation=name,
        num_blocks=num_blocks,
        block_size=block_size,
        fixed_shapes=fixed_shapes,
        like=torch.empty(0, dtype=dtype, device=device),
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


def _checked_blocks(
    runs: Sequence[RunRows], private: Sequence[PrivateRows], num_blocks: int
) -> Tensor:
    """Return all blocks, one after the other: int64.

    Raises:
        ValueError: one is outside the caches.
    """
    buffer = array("q")
    for run in runs:
        buffer.fromlist(list(run.blocks))
    for rows in private:
        buffer.fromlist(list(rows.blocks))  # twice as fast as `extend`
    if not buffer:
        return torch.zeros(0, dtype=torch.int64)
    found = torch.frombuffer(buffer, dtype=torch.int64)
    least, most = found.aminmax()
    if least < 0 or most >= num_blocks:
        owners = [(min(run.rows), run.blocks) for run in runs]
        owners += [(rows.row, rows.blocks) for rows in private]
        row = next(row for row, ids in owners if min(ids) < 0 or max(ids) >= num_blocks)
        index = max(index for index, rows in enumerate(private) if rows.row <= row)
        raise ValueError(f"request {index} has a block id outside [0, {num_blocks})")
    return found


def _run_rows(
    run: SharedRun, requests: Sequence[RequestRows], private: Sequence[PrivateRows]
) -> RunRows:
    blocks = requests[run.members[0]].block_table[run.first_block : run.end_block]
    members = [private[member] for member in run.members]
    rows = [row for each in members for row in range(each.row, each.row + each.num_rows)]
    return RunRows(rows, blocks)


def _pieces(run: RunRows, block_size: int) -> Iterator[RunRows]:
    num_blocks = len(run.blocks)
    size = max(-(-_PIECE_KEYS // block_size), -(-num_blocks // _MAX_PIECES))
    if len(run.rows) < _PIECE_ROWS or num_blocks < 2 * size:
        yield run
        return
    for first in range(0, num_blocks, size):
        yield run._replace(blocks=run.blocks[first : first + size])


def _levels(runs: Sequence[RunRows]) -> list[int]:
    """Give each run the lowest level at which it has no row in common with those before."""
    taken: list[set[int]] = []
    levels = []
    for run in runs:
        free = (level for level, rows in enumerate(taken) if rows.isdisjoint(run.rows))
        level = next(free, len(taken))
        if level == len(taken):
            taken.append(set())
        taken[level].update(run.rows)
        levels.append(level)
    return levels


def _pass(run: RunRows, level: int, *, block_size: int, like: Tensor) -> SharedPass:
    rows = run.rows
    first = rows[0]
    return SharedPass(
        rows=slice(first, first + len(rows))
        if rows[-1] - first + 1 == len(rows)  # they ascend
        else int64(rows).to(like.device),
        num_rows=len(rows),
        blocks=block_ids(run.blocks, like.device),
        num_keys=len(run.blocks) * block_size,
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
    for run, laid in zip(step.shared, step.runs, strict=True):
        print(f"read once for requests {run.members}: {laid.blocks}")  # noqa: T201
    for group in step.decodes:
        print(f"together: rows {group.rows.tolist()}, up to {group.num_keys} private keys each")  # noqa: T201


if __name__ == "__main__":
    _main()
