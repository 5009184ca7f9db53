"""The work of one step, cut into units of similar size for the Triton kernels. Host code.

A **segment** is a list of keys and the query rows that attend to them: a shared run with the rows
of all its members, or a request's private keys with its own rows. Its keys are cut into chunks,
and the (row, query head) pairs that share a key head into tiles:

    segment              1,024 keys, 8 rows, 4 query heads per key head: 32 pairs
      chunk 0            keys 0 .. 256         -> one unit: pairs 0 .. 32 in a tile of 64
      chunk 1            keys 256 .. 512       -> one unit
      ...

A unit is what one program computes, once for each key head. Each row of a chunk has a **slot** for
its partial result. The slots of one row follow each other, shared runs first, so that they merge
in one order whatever else is in the step.

The form follows FastTree (MLSys 2025): the tree of shared runs becomes a flat list of (query tile,
key chunk). Here tiles are cut from pairs, so that three query heads per key head leave no tile
partly empty, and every row says which keys it sees, so that one kernel serves runs, chunks of a
prompt and decode rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvway_kernels.plan import PagedPlan

SMALL_TILE = 16
"""Pairs of the small tile, for decode rows: the least that a matrix instruction takes."""

LARGE_TILE = 64
"""Pairs of the large tile: what Hopper's matrix unit takes at once."""

UNIT_FIELDS = 8

_MIN_CHUNK_KEYS = 256
"""Fewer keys per chunk do not pay: a chunk writes and reads back a float32 row per query head."""

_FAR = 1 << 40


@dataclass(frozen=True, slots=True)
class Units:
    """A step's work, as int32 tensors on its device.

    Attributes:
        units: [U, 8]. Columns: offset in `rows` of the unit's first row; number of rows; first
            pair of the tile; offset in `blocks` of the segment's first block; first key and end of
            the keys, counted from there; offset in `slots` of the first row; 1 where every row
            sees every key. Units with small tiles come first.
        num_small: how many of them have a tile of `SMALL_TILE` pairs; the others have
            `large_tile`.
        large_tile: pairs of the other units' tiles.
        rows: rows of the packed step, segment by segment; the first T are 0 .. T - 1, and serve
            all private segments.
        bounds: [T, 2]. The private keys that a row sees: first and end.
        blocks: block ids, segment by segment.
        slots: [num_slots]. The slot of each row of each chunk.
        row_slots: [T + 1]. Row r has the slots [row_slots[r], row_slots[r + 1]), at least one.
    """

    units: Tensor
    num_small: int
    large_tile: int
    rows: Tensor
    bounds: Tensor
    blocks: Tensor
    slots: Tensor
    row_slots: Tensor


class _Segment(NamedTuple):
    """One line of the table that `_chunks` cuts. Row i sees the keys [hidden + i, seen + i)."""

    row_start: int
    num_rows: int
    block_start: int
    num_keys: int
    chunk_keys: int
    hidden: int
    seen: int
    is_open: bool


def chunk_keys(num_keys: int, num_pairs: int, *, num_sms: int) -> int:
    """Return how many keys of a segment one unit takes, a power of two.

    A segment alone, with 8 key heads, should fill the device about twice: it is cut into
    `num_sms` / 4 chunks, and into fewer the more tiles its pairs make, since a chunk costs every
    pair a partial result. Other segments have no say, so that what a decode row gets from its
    private keys does not depend on who else is in the step.

    Args:
        num_keys: of the segment.
        num_pairs: its rows times the query heads per key head.
        num_sms: multiprocessors of the device.
    """
    num_chunks = max(1, num_sms // 4 // -(-num_pairs // LARGE_TILE))
    return max(_MIN_CHUNK_KEYS, 1 << (-(-num_keys // num_chunks) - 1).bit_length())


_made: WeakKeyDictionary[PagedPlan, dict[tuple[int, int, int, torch.device], Units]] = (
    WeakKeyDictionary()
)


def work_units(
    step: PagedPlan,
    *,
    group: int,
    num_sms: int,
    device: torch.device,
    large_tile: int = LARGE_TILE,
) -> Units:
    """Return the units of a step: cut at the first call for a plan, then kept with it.

    Args:
        step: the plan.
        group: query heads per key head.
        num_sms: multiprocessors of the device: decides how many chunks fill it.
        device: where the tensors go, in one transfer.
        large_tile: pairs of a tile where there are more than `SMALL_TILE`.

    Complexity: O(blocks of the plan + slots), most of it in tensor operations.
    """
    kept = _made.setdefault(step, {})
    key = (group, num_sms, large_tile, device)
    if key not in kept:
        kept[key] = _cut(step, group, num_sms, large_tile, device)
    return kept[key]


def _cut(
    step: PagedPlan, group: int, num_sms: int, large_tile: int, device: torch.device
) -> Units:
    rows, blocks = array("q", range(step.num_rows)), array("q")
    segments: list[_Segment] = []
    for run in sorted(step.shared, key=lambda run: run.first_block):
        row_start, block_start = len(rows), len(blocks)
        for member in run.members:
            private = step.private[member]
            rows.extend(range(private.row, private.row + private.num_rows))
        blocks.extend(step.requests[run.members[0]].block_table[run.first_block : run.end_block])
        num_rows, num_keys = len(rows) - row_start, run.num_blocks * step.block_size
        size = chunk_keys(num_keys, num_rows * group, num_sms=num_sms)
        segments.append(
            _Segment(row_start, num_rows, block_start, num_keys, size, -_FAR, _FAR, is_open=True)
        )
    for private in step.private:
        size = chunk_keys(private.num_keys, private.num_rows * group, num_sms=num_sms)
        seen = private.num_keys - private.num_rows + 1
        segments.append(
            _Segment(
                row_start=private.row,
                num_rows=private.num_rows,
                block_start=len(blocks),
                num_keys=private.num_keys,
                chunk_keys=size,
                hidden=private.first_key,
                seen=seen,
                is_open=private.num_rows == 1 and private.first_key <= 0,
            )
        )
        blocks.extend(private.blocks)
    row_list = _int64(rows)
    chunks = _chunks(torch.tensor(segments, dtype=torch.int64).view(-1, len(_Segment._fields)))
    slots, row_slots = _slots(chunks, row_list, step.num_rows)
    small, large = _tiles(chunks, group, large_tile)
    parts = [torch.cat([small, large]), row_list, _bounds(step), _int64(blocks), slots, row_slots]
    units, rows_, bounds, blocks_, slots, row_slots = _upload(parts, device)
    return Units(units, len(small), large_tile, rows_, bounds, blocks_, slots, row_slots)


def _int64(values: array[int]) -> Tensor:
    return torch.frombuffer(values, dtype=torch.int64) if values else _EMPTY


_EMPTY = torch.zeros(0, dtype=torch.int64)


def _counted(counts: Tensor) -> Tensor:
    """Return 0 .. count - 1 for each count, one after the other."""
    ends = counts.cumsum(0)
    return torch.arange(int(counts.sum())) - (ends - counts).repeat_interleave(counts)


def _bounds(step: PagedPlan) -> Tensor:
    per_request = torch.tensor(
        [(p.num_rows, p.first_key, p.num_keys - p.num_rows + 1) for p in step.private],
        dtype=torch.int64,
    ).view(-1, 3)
    counts = per_request[:, 0]
    bounds = per_request[:, 1:].repeat_interleave(counts, dim=0) + _counted(counts)[:, None]
    return bounds.clamp(min=0)


def _chunks(segments: Tensor) -> Tensor:
    """Cut segments into chunks, and each chunk's rows down to those that see a key of it.

    Returns:
        int64 [C, 7]: row start, number of rows, block start, first key, end of the keys, offset of
        the first slot, and whether every row sees every key.
    """
    counts = (segments[:, 3] + segments[:, 4] - 1) // segments[:, 4]
    row_start, num_rows, block_start, num_keys, size, hidden, seen, is_open = (
        segments.repeat_interleave(counts, dim=0).unbind(1)
    )
    first = _counted(counts) * size
    end = torch.minimum(first + size, num_keys)
    from_row = (first - seen + 1).clamp(min=0)  # the first whose seen + i is above `first`
    to_row = torch.minimum(num_rows, end - hidden)  # the first whose hidden + i is not below `end`
    chunks = torch.stack(
        [row_start + from_row, to_row - from_row, block_start, first, end, end, is_open], dim=1
    )[to_row > from_row]
    chunks[:, 5] = chunks[:, 1].cumsum(0) - chunks[:, 1]
    return chunks


def _slots(chunks: Tensor, rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Number the rows of all chunks so that a row's slots follow each other, in chunk order."""
    counts = chunks[:, 1]
    row_of = rows[chunks[:, 0].repeat_interleave(counts) + _counted(counts)]
    slots = row_of.argsort(stable=True).argsort()
    ends = torch.bincount(row_of, minlength=num_rows).cumsum(0)
    return slots, torch.cat([torch.zeros(1, dtype=torch.int64), ends])


def _tiles(chunks: Tensor, group: int, large_tile: int) -> tuple[Tensor, Tensor]:
    """Cut the pairs of each chunk into tiles: units with small ones, units with large ones."""
    num_pairs = chunks[:, 1] * group
    is_small = num_pairs <= SMALL_TILE
    cut = []
    for wanted, tile in ((is_small, SMALL_TILE), (~is_small, large_tile)):
        counts = (num_pairs[wanted] + tile - 1) // tile
        units = chunks[wanted].repeat_interleave(counts, dim=0)
        first_pair = _counted(counts) * tile
        cut.append(torch.cat([units[:, :2], first_pair[:, None], units[:, 2:]], dim=1))
    return cut[0], cut[1]


def _upload(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Move int64 host tensors to the device as int32, in one transfer, each 16 byte aligned."""
    starts = [0, *accumulate(part.numel() + -part.numel() % 4 for part in parts)]
    on_cuda = device.type == "cuda"
    packed = torch.zeros(starts[-1], dtype=torch.int32, pin_memory=on_cuda)
    for part, start in zip(parts, starts, strict=False):
        packed[start : start + part.numel()] = part.flatten()
    moved = packed.to(device, non_blocking=on_cuda)
    return [
        moved[start : start + part.numel()].view(part.shape)
        for part, start in zip(parts, starts, strict=False)
    ]
