"""Shared runs over random lives of requests, against a look at every position of every table."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvway_worker.scheduling.prefix_groups import PrefixGroups, SharedRun, TableRow

SIZE = 2
MAX_ROWS = 7


@dataclass
class Request:
    """A request between two steps: its table and what it computes next."""

    table: list[int]
    start: int
    num_queries: int = 1
    is_out: bool = False
    """It is in the step, and must not be a member."""

    def row(self, request_id: str) -> TableRow:
        return TableRow(request_id, tuple(self.table), self.start, self.start + self.num_queries)


def naive(rows: list[TableRow | None], window: int | None) -> dict[int, set[frozenset[int]]]:
    """Position -> the sets of rows that have one block there, of two rows or more."""
    found: dict[tuple[int, int], set[int]] = defaultdict(set)
    for index, row in enumerate(rows):
        if row is None:
            continue
        for position, block in enumerate(row.block_table):
            is_before = (position + 1) * SIZE <= row.start
            first_seen = 0 if window is None else row.end - window
            if is_before and position * SIZE >= first_seen:
                found[position, block].add(index)
    shared: dict[int, set[frozenset[int]]] = defaultdict(set)
    for (position, _), members in found.items():
        if len(members) > 1:
            shared[position].add(frozenset(members))
    return dict(shared)


def covered(runs: tuple[SharedRun, ...]) -> dict[int, set[frozenset[int]]]:
    """The same of runs; each member is in one run per position, once."""
    shared: dict[int, set[frozenset[int]]] = defaultdict(set)
    seen: set[tuple[int, int]] = set()
    for members, first, num_blocks in runs:
        assert list(members) == sorted(set(members))
        assert num_blocks > 0
        for position in range(first, first + num_blocks):
            shared[position].add(frozenset(members))
            places = {(position, member) for member in members}
            assert not seen & places
            seen |= places
    return dict(shared)


class Groups(RuleBasedStateMachine):
    """Requests come, grow, are copied and cut, go, and come back with another table."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Request] = {}
        self.next_block = 0
        self.next_id = 0

    @initialize(window=st.none() | st.integers(1, 12))
    def begin(self, window: int | None) -> None:
        self.window = window
        self.groups = PrefixGroups(SIZE, window=window)
        self.step()

    def fresh(self) -> int:
        self.next_block += 1
        return self.next_block

    def step(self) -> None:
        rows = [None if one.is_out else one.row(key) for key, one in self.requests.items()]
        self.rows, self.runs = rows, self.groups.update(rows)

    def one(self, data: st.DataObject) -> Request:
        return self.requests[data.draw(st.sampled_from(sorted(self.requests)))]

    @precondition(lambda self: len(self.requests) < MAX_ROWS)
    @rule(data=st.data(), num_new=st.integers(1, 3), num_queries=st.integers(1, 3))
    def join(self, data: st.DataObject, num_new: int, num_queries: int) -> None:
        table: list[int] = []
        if self.requests:
            other = self.one(data)
            table = other.table[: data.draw(st.integers(0, len(other.table)))]
        table += [self.fresh() for _ in range(num_new)]
        num_queries = min(num_queries, len(table) * SIZE)
        start = data.draw(st.integers(0, len(table) * SIZE - num_queries))
        self.next_id += 1
        self.requests[str(self.next_id)] = Request(table, start, num_queries)
        self.step()

    @precondition(lambda self: self.requests)
    @rule(num_tokens=st.integers(1, 5))
    def decode(self, num_tokens: int) -> None:
        for request in self.requests.values():
            request.start += num_tokens
            while len(request.table) * SIZE < request.start + request.num_queries:
                request.table.append(self.fresh())
        self.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def copy_on_write(self, data: st.DataObject) -> None:
        request = self.one(data)
        request.table[data.draw(st.integers(0, len(request.table) - 1))] = self.fresh()
        self.step()

    @precondition(lambda self: len(self.requests) > 1)
    @rule(data=st.data())
    def becomes_the_same(self, data: st.DataObject) -> None:
        one, other = self.one(data), self.one(data)
        position = data.draw(st.integers(0, min(len(one.table), len(other.table)) - 1))
        one.table[position] = other.table[position]
        self.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def goes_back(self, data: st.DataObject) -> None:
        request = self.one(data)
        request.start = data.draw(st.integers(0, request.start))
        del request.table[-(-(request.start + request.num_queries) // SIZE) :]
        self.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        del self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        self.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def stays_out_or_comes_in(self, data: st.DataObject) -> None:
        request = self.one(data)
        request.is_out = not request.is_out
        self.step()

    @precondition(lambda self: len(self.requests) > 1)
    @rule(data=st.data())
    def others_come_first(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(sorted(self.requests)))
        self.requests = {key: self.requests[key] for key in order}
        self.step()

    @invariant()
    def runs_cover_what_is_shared_and_nothing_else(self) -> None:
        if hasattr(self, "runs"):
            assert covered(self.runs) == naive(self.rows, self.window)

    @invariant()
    def runs_are_as_long_as_they_can_be_and_in_order(self) -> None:
        if hasattr(self, "runs"):
            begins = {(run.members, run.first_block) for run in self.runs}
            ends = {(run.members, run.first_block + run.num_blocks) for run in self.runs}
            assert not begins & ends
            assert list(self.runs) == sorted(self.runs, key=lambda r: (r.first_block, r.members))

    @invariant()
    def the_same_is_found_without_a_past(self) -> None:
        if hasattr(self, "runs"):
            assert self.runs == PrefixGroups(SIZE, window=self.window).update(self.rows)


TestGroups = pytest.mark.property(Groups.TestCase)
