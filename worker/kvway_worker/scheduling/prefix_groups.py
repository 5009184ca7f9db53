"""What the requests of a step have in common: runs of blocks that several tables share. Pure.

Blocks of four requests' tables, by position; a letter is a block, and what two or more rows have
at one position is in capitals:

    position     0   1   2   3   4   5   6
    request 0    S   S   S   A   A   x
    request 1    S   S   S   A   A   y   z
    request 2    S   S   S   B   u                     a system prompt S of three blocks, under it
    request 3    S   S   S   B   v   w                 a tenant's header A of two, another B of one
    request 4    t   u                                 shares nothing
                 └─ 0123 ──┘ └ 01 ─┘
                             └23┘                      runs: (0123, 0, 3), (01, 3, 2), (23, 3, 1)

A run goes as far as its members stay the same, so a chain of prefixes that the same requests have
is one run. Cascade attention reads a run once for all its members; `paying` chooses the runs that
are worth it, and the keys of the others stay private.

Between two steps little changes: tables grow at their end, a request comes, another leaves. Each
table is compared with what it was before (in C: some microseconds for 500 blocks), and only what
differs is entered into a map from (position, block) to the set of its owners, an integer with one
bit per request. Runs are found anew only when a block that is shared has other owners than before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MARGIN = 0.1
"""A run must be cheaper by this share of what it costs: costs are measured, and vary."""


class SharedRun(NamedTuple):
    """Blocks that several requests of a step have at the same positions of their tables.

    Attributes:
        members: Indices of the requests among the rows, ascending, at least two.
        first_block: Position of the first block.
        num_blocks: How many blocks, at least one.
    """

    members: tuple[int, ...]
    first_block: int
    num_blocks: int


class TableRow(NamedTuple):
    """One request's part of a step.

    Attributes:
        request_id: Unique among the rows of a step.
        block_table: Its blocks, in order: those of [0, end), at least.
        start: Position of its first query row.
        end: Position behind its last one.
    """

    request_id: str
    block_table: Sequence[int]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CascadeCosts:
    """What attention costs in one layer, all heads, seconds. None is below zero.

    Attributes:
        paged_key: A key of one decode row, read through its block table.
        run: A shared run, whatever its size.
        run_key: Each key of a run.
        run_pair: Each key of a run, for each member.
        merge: Each member of a run: its two partial results become one.
    """

    paged_key: float
    run: float
    run_key: float
    run_pair: float
    merge: float

    def pays(self, num_members: int, num_tokens: int) -> bool:
        """Say whether one pass over shared keys is cheaper than each member reading them.

        What pays goes on to pay with more members and with more tokens.
        """
        alone = num_members * num_tokens * self.paged_key
        together = self.run + num_members * self.merge
        together += num_tokens * (self.run_key + num_members * self.run_pair)
        return alone > (1 + MARGIN) * together


def paying(
    runs: Sequence[SharedRun], costs: CascadeCosts, *, block_size: int
) -> tuple[SharedRun, ...]:
    """Return the runs that are worth a pass of their own, in the same order.

    Costs add up, so each run is decided by itself: keys of one that does not pay are read by each
    member as its own, and change nothing for the runs above and below.

    Args:
        runs: What `PrefixGroups.update` found, of decode rows: costs are those of one query row.
        costs: Of the implementation that will run, on this machine.
        block_size: Tokens per block.
    """
    return tuple(run for run in runs if costs.pays(len(run.members), run.num_blocks * block_size))


class _Held:
    """What is entered of one request: blocks [first, first + len(blocks)) of its table."""

    __slots__ = ("bit", "blocks", "first")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.first = 0
        self.blocks: tuple[int, ...] = ()


class PrefixGroups:
    """Finds what the rows of each step share, from what the step before had.

    Args:
        block_size: Tokens per block.
        window: Keys that a query row sees, its own included; None for all before it. A block is
            only offered for a row if all of the row's queries see all of it.

    Invariants:
        1. `_owners[p][b]` has the bits of exactly those requests of the last update that have
           block b at position p, full and seen by all of their query rows.
        2. `_shared[p]` holds those of its values that have two bits or more.
    """

    __slots__ = (
        "_bits",
        "_block_size",
        "_free_bits",
        "_held",
        "_is_stale",
        "_named",
        "_owners",
        "_runs",
        "_shared",
        "_window",
    )

    def __init__(self, block_size: int, *, window: int | None = None) -> None:
        self._block_size = block_size
        self._window = window
        self._held: dict[str, _Held] = {}
        self._free_bits: list[int] = []
        self._owners: list[dict[int, int]] = []
        self._shared: list[set[int]] = []
        self._runs: list[tuple[int, int, int]] = []  # first block, number of blocks, owners
        self._is_stale = False
        self._bits: list[int] = []
        self._named: tuple[SharedRun, ...] = ()

    def update(self, rows: Sequence[TableRow | None]) -> tuple[SharedRun, ...]:
        """Return what the rows of a step share: all of it, each block once, and nothing else.

        For each position, rows that have the same block there are in the same run, if there are
        two or more. Only full blocks in front of all query rows of a member count. Runs of the
        same members that follow each other are one.

        Args:
            rows: In the order of the step. None for a row that must not be a member.

        Returns:
            The runs by first block, then by members: those above come before those below.

        Raises:
            ValueError: Two rows are of the same request.

        Complexity: O(blocks of all rows) comparisons of integers in C. In Python O(rows), and
        O(blocks) of those tables that changed; where owners of a shared block changed, also
        O(shared blocks).
        """
        bits = [0 if row is None else self._enter(row) for row in rows]
        present = set(bits) - {0}
        num_rows = len(bits) - bits.count(0)
        if len(present) != num_rows:
            raise ValueError(f"{num_rows} rows are of {len(present)} requests: expected one each")
        if len(present) != len(self._held):
            self._leave(present)
        if self._is_stale:
            self._runs = self._find_runs()
        if self._is_stale or bits != self._bits:
            self._named = self._name_members(bits)
        self._is_stale, self._bits = False, bits
        return self._named

    def _enter(self, row: TableRow) -> int:
        held = self._held.get(row.request_id)
        if held is None:
            bit = self._free_bits.pop() if self._free_bits else 1 << len(self._held)
            held = self._held[row.request_id] = _Held(bit)
        first = 0
        if self._window is not None:
            first = -(-max(0, row.end - self._window) // self._block_size)
        blocks = tuple(row.block_table[first : row.start // self._block_size])
        if blocks != held.blocks or first != held.first:
            self._replace(held, first, blocks)
        return held.bit

    def _leave(self, present: set[int]) -> None:
        for request_id in [key for key, held in self._held.items() if held.bit not in present]:
            held = self._held.pop(request_id)
            self._replace(held, 0, ())
            self._free_bits.append(held.bit)
        while self._owners and not self._owners[-1]:
            self._owners.pop()
            self._shared.pop()

    def _replace(self, held: _Held, first: int, blocks: tuple[int, ...]) -> None:
        """Enter a table in place of what it was: by far mostly the same, and some more."""
        old_first, old = held.first, held.blocks
        held.first, held.blocks = first, blocks
        missing = first + len(blocks) - len(self._owners)
        self._owners += [{} for _ in range(missing)]
        self._shared += [set() for _ in range(missing)]
        if first == old_first and blocks[: len(old)] == old:
            for position, block in enumerate(blocks[len(old) :], first + len(old)):
                self._add(held.bit, position, block)
            return
        before, after = dict(enumerate(old, old_first)), dict(enumerate(blocks, first))
        for position, block in before.items():
            if after.get(position) != block:
                self._remove(held.bit, position, block)
        for position, block in after.items():
            if before.get(position) != block:
                self._add(held.bit, position, block)

    def _add(self, bit: int, position: int, block: int) -> None:
        owners = self._owners[position]
        others = owners.get(block, 0)
        owners[block] = others | bit
        if others:
            self._is_stale = True
            self._shared[position].discard(others)
            self._shared[position].add(others | bit)

    def _remove(self, bit: int, position: int, block: int) -> None:
        owners = self._owners[position]
        others = owners[block] ^ bit
        if not others:
            del owners[block]
            return
        self._is_stale = True
        owners[block] = others
        self._shared[position].discard(others | bit)
        if others & (others - 1):
            self._shared[position].add(others)

    def _find_runs(self) -> list[tuple[int, int, int]]:
        runs = []
        begun: dict[int, int] = {}
        previous: set[int] = set()
        for position, shared in enumerate((*self._shared, set[int]())):
            if shared == previous:
                continue
            for owners in previous - shared:
                first = begun.pop(owners)
                runs.append((first, position - first, owners))
            for owners in shared - previous:
                begun[owners] = position
            previous = shared
        return runs

    def _name_members(self, bits: Sequence[int]) -> tuple[SharedRun, ...]:
        indices = {bit: index for index, bit in enumerate(bits) if bit}
        named = []
        for first, num_blocks, owners in self._runs:
            members = []
            rest = owners
            while rest:
                lowest = rest & -rest
                members.append(indices[lowest])
                rest ^= lowest
            named.append(SharedRun(tuple(sorted(members)), first, num_blocks))
        named.sort(key=lambda run: (run.first_block, run.members))
        return tuple(named)
