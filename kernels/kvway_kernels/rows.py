"""Who brings which rows to a step, and which keys of theirs are shared.

table of a   [ 7 | 2 | 9 | 4 ]      SharedRun(members=(a, b), first_block=0, num_blocks=2):
table of b   [ 7 | 2 | 5 ]          blocks 7 and 2 are read once for both
private      a: 9, 4   b: 5         what is left is read for one request alone
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

LONG_PAST: Final = 2048
"""Keys in front of a chunk from which on they are attended to without a mask: it gains nothing
with 1,500 keys, a fifth of the whole step with 4,096 (docs/lab-notes.md)."""

LONG_PAST_COMPILED: Final = 512
"""The same for `compiled`, whose native kernel reads them: at 1,500 keys it takes two thirds of
the time that torch's operation takes with a mask (docs/lab-notes.md)."""

_CHUNK_ROWS: Final = 16
"""Rows of one request from which on this is done."""


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


class SharedRun(NamedTuple):
    """Blocks that several requests have in common, at the same positions of their tables.

    All are full, and in front of every query row of the members. Runs of one request never
    overlap; there may be any number of them, at any position.

    Attributes:
        members: indices of the requests in the step, ascending, at least two.
        first_block: position of the first block in the members' tables.
        num_blocks: how many, at least one.
    """

    members: tuple[int, ...]
    first_block: int
    num_blocks: int

    @property
    def end_block(self) -> int:
        """Position behind the last block."""
        return self.first_block + self.num_blocks


class RunRows(NamedTuple):
    """Blocks that some rows of a step see whole.

    Attributes:
        rows: the rows, ascending.
        blocks: ids of the blocks, in order.
    """

    rows: Sequence[int]
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class PrivateRows:
    """A request's rows, and the keys that are read for it alone: never none, the rows' own.

    Attributes:
        row: first row in the packed step.
        num_rows: its rows.
        num_keys: private keys. Row i sees those before `num_keys - num_rows + i + 1`.
        first_key: what the window hides: row i sees keys from `first_key + i` on. Negative where
            it hides less than nothing.
        blocks: ids of the blocks that hold the keys, in order.
    """

    row: int
    num_rows: int
    num_keys: int
    first_key: int
    blocks: Sequence[int]


def check_requests(requests: Sequence[RequestRows], block_size: int) -> None:
    """Refuse a request whose numbers do not belong together.

    Raises:
        ValueError: no rows, more rows than keys, or too few blocks for the keys.
    """
    for index, request in enumerate(requests):
        if not 1 <= request.num_queries <= request.num_keys:
            raise ValueError(
                f"request {index} has {request.num_queries} rows and {request.num_keys} keys: "
                "expected at least 1 row and no more rows than keys"
            )
        num_needed = -(-request.num_keys // block_size)
        num_given = min(num_needed, len(request.block_table))
        if num_given < num_needed:
            raise ValueError(
                f"request {index} has {request.num_keys} keys in {num_given} blocks of "
                f"{block_size}: expected {num_needed} blocks"
            )


def check_runs(
    requests: Sequence[RequestRows], shared: Sequence[SharedRun], block_size: int
) -> None:
    """Refuse a run that is not what `SharedRun` says.

    Raises:
        ValueError: fewer than two members, not ascending or unknown; no blocks; a block that is
            not in front of all rows of a member; other blocks in one member than in another; or
            runs of a request that overlap.

    Complexity: O(blocks of the runs x members).
    """
    spans: dict[int, list[tuple[int, int]]] = {}
    for index, run in enumerate(shared):
        _check_numbers(index, run, len(requests))
        blocks: list[int] | None = None
        for member in run.members:
            request = requests[member]
            in_front = (request.num_keys - request.num_queries) // block_size
            if run.end_block > in_front:
                raise ValueError(
                    f"shared run {index} ends at block {run.end_block}, but request {member} has "
                    f"only {in_front} full blocks in front of its rows"
                )
            found = list(request.block_table[run.first_block : run.end_block])
            if blocks is not None and found != blocks:
                raise ValueError(
                    f"shared run {index}: request {member} has other blocks there than request "
                    f"{run.members[0]}"
                )
            blocks = found
            spans.setdefault(member, []).append((run.first_block, run.end_block))
    for member, ends in spans.items():
        for (_, end), (first, _) in itertools.pairwise(sorted(ends)):
            if first < end:
                raise ValueError(f"shared runs of request {member} overlap at block {first}")


def _check_numbers(index: int, run: SharedRun, num_requests: int) -> None:
    members = run.members
    if len(members) < 2 or any(a >= b for a, b in itertools.pairwise(members)):
        raise ValueError(
            f"shared run {index} has members {members}: expected two or more, ascending"
        )
    if members[0] < 0 or members[-1] >= num_requests:
        raise ValueError(
            f"shared run {index} has members {members} in a step of {num_requests} requests"
        )
    if run.first_block < 0 or run.num_blocks < 1:
        raise ValueError(
            f"shared run {index} has {run.num_blocks} blocks from block {run.first_block} on: "
            "expected at least one, from 0 or more on"
        )


def seen_whole(
    requests: Sequence[RequestRows],
    shared: Sequence[SharedRun],
    *,
    block_size: int,
    window: int | None,
) -> tuple[SharedRun, ...]:
    """Return the runs that no row's window cuts: the others are private keys of their members."""
    if window is None:
        return tuple(shared)
    return tuple(
        run
        for run in shared
        if all(
            run.first_block * block_size >= requests[member].num_keys - window
            for member in run.members
        )
    )


def long_pasts(
    requests: Sequence[RequestRows],
    shared: Sequence[SharedRun],
    *,
    block_size: int,
    least: int = LONG_PAST,
) -> list[SharedRun]:
    """Return the blocks in front of each chunk of a long prompt, as a run of one member.

    All rows of the chunk see all of it, so it needs no mask, and rows of heads that share a key
    head attend together; what needs a mask is the chunk itself. A request with shared runs keeps
    what else is in front of it among its private keys. It is done from `least` keys on.
    """
    sharing = {member for run in shared for member in run.members}
    return [
        SharedRun((index,), 0, num_blocks)
        for index, request in enumerate(requests)
        if request.num_queries >= _CHUNK_ROWS
        and index not in sharing
        and (num_blocks := (request.num_keys - request.num_queries) // block_size) * block_size
        >= least
    ]


def private_rows(
    requests: Sequence[RequestRows],
    shared: Sequence[SharedRun],
    *,
    block_size: int,
    window: int | None,
) -> list[PrivateRows]:
    """Return what is left of each request when the runs are taken away.

    Blocks that a window hides from all rows of a request are left out, too.
    """
    runs: dict[int, list[SharedRun]] = {}
    for run in sorted(shared, key=lambda run: run.first_block):
        for member in run.members:
            runs.setdefault(member, []).append(run)
    found: list[PrivateRows] = []
    row = 0
    for index, request in enumerate(requests):
        num_keys, num_rows = request.num_keys, request.num_queries
        first_key = -num_keys if window is None else num_keys - num_rows - window + 1
        start = max(0, first_key) // block_size  # blocks in front are hidden from every row
        table, end = request.block_table, -(-num_keys // block_size)
        first_key -= start * block_size
        num_keys -= start * block_size
        if index in runs:
            blocks: list[int] = []
            for run in runs[index]:
                blocks += table[start : run.first_block]
                num_keys -= run.num_blocks * block_size
                start = run.end_block
            blocks += table[start:end]
            found.append(PrivateRows(row, num_rows, num_keys, first_key, blocks))
        else:
            found.append(PrivateRows(row, num_rows, num_keys, first_key, table[start:end]))
        row += num_rows
    return found
