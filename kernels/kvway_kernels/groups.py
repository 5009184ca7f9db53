"""Requests that bring one row each, put into groups that are attended to together."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvway_kernels.blocks import BlockIds, block_ids, int64
from kvway_kernels.rows import PrivateRows

_GROUP_TOKENS = 16_384
"""Keys per call of a decode group: bounds what is copied or kept of scores, which must stay in
the processor's cache."""

CHUNK_KEYS: Final = 32
"""Keys that `compiled` sums up at once. The sums are written: 1 / 32 of what the values take, for
every query head of a key head."""

_GROUP_FILL = 0.75
"""A decode group pads its members to the longest; at least this share of the keys is real."""


@dataclass(frozen=True)
class DecodeGroup:
    """Requests of one row each, attended to together.

    Attributes:
        rows: their rows in the packed step: int64 [n].
        tables: the blocks of their private keys, padded with the request's own first one, so that
            nothing of another request, and nothing never written, is ever read: int64 [n, blocks].
        lengths: their private keys: int64 [n].
        first_keys: the first that the row's window shows: int64 [n], 0 where there is no window.
        lone_blocks: where there is one request: its blocks, as a slice if they follow each other.
        block_size: tokens per block.
        is_whole_step: the rows are all rows of the step, in order.
        num_keys: private keys of the longest.
        is_even: nothing is padded and nothing hidden.
    """

    rows: Tensor
    tables: Tensor
    lengths: Tensor
    first_keys: Tensor
    lone_blocks: BlockIds | None
    block_size: int
    is_whole_step: bool
    num_keys: int
    is_even: bool

    @property
    def num_requests(self) -> int:
        """Requests in the group."""
        return len(self.rows)

    @functools.cached_property
    def slots(self) -> Tensor:
        """Where the keys are, in chunks of 32: int64 [n, chunks, 32].

        Where there is no key that the row sees, its request's first private one is.
        """
        with torch.inference_mode(mode=False):  # the same kind of tensor in every step
            return _seen_slots(
                self.tables, self.lengths, self.first_keys, self.num_keys, self.block_size
            )


def grouped(singles: Sequence[PrivateRows]) -> Iterator[list[PrivateRows]]:
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


def decode_group(
    group: Sequence[PrivateRows],
    *,
    num_rows: int,
    block_size: int,
    device: torch.device,
) -> DecodeGroup:
    """Prepare requests of one row each, in order of rows."""
    num_keys = max(rows.num_keys for rows in group)
    width = max(len(rows.blocks) for rows in group)
    buffer = array("q")
    for rows in group:
        buffer.extend(rows.blocks)
        buffer.extend([rows.blocks[0]] * (width - len(rows.blocks)))
    tables = torch.frombuffer(buffer, dtype=torch.int64).view(len(group), width).to(device)
    lengths = int64([rows.num_keys for rows in group]).to(device)
    first_keys = int64([max(0, rows.first_key) for rows in group]).to(device)
    return DecodeGroup(
        rows=int64([rows.row for rows in group]).to(device),
        tables=tables,
        lengths=lengths,
        first_keys=first_keys,
        lone_blocks=block_ids(group[0].blocks, device) if len(group) == 1 else None,
        block_size=block_size,
        is_whole_step=len(group) == num_rows,
        num_keys=num_keys,
        is_even=all(rows.num_keys == num_keys and rows.first_key <= 0 for rows in group),
    )


def _seen_slots(
    tables: Tensor, lengths: Tensor, first_keys: Tensor, num_keys: int, block_size: int
) -> Tensor:
    """Return the slots of each request's keys; the first one's where its row sees none."""
    num_chunks = -(-num_keys // CHUNK_KEYS)
    within = torch.arange(block_size, device=tables.device)
    slots = (tables[:, :, None] * block_size + within).flatten(1)
    missing = num_chunks * CHUNK_KEYS - slots.shape[1]
    if missing > 0:
        slots = torch.cat([slots, slots[:, :1].expand(-1, missing)], dim=1)
    slots = slots[:, : num_chunks * CHUNK_KEYS]
    key = torch.arange(slots.shape[1], device=tables.device)
    is_seen = (key < lengths[:, None]) & (key >= first_keys[:, None])
    return torch.where(is_seen, slots, slots[:, :1]).view(len(slots), num_chunks, CHUNK_KEYS)
