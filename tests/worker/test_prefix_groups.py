"""What the rows of a step share, case by case; the random ones are in tests/property."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from kvway_worker.scheduling.prefix_groups import (
    CascadeCosts,
    PrefixGroups,
    SharedRun,
    TableRow,
    paying,
)

SIZE = 4
COSTS = CascadeCosts(paged_key=4.0, run=600.0, run_key=4.0, run_pair=1.0, merge=25.0)


def row(name: str, table: str, *, own: int = 1, num_queries: int = 1) -> TableRow:
    """A row whose blocks are the letters of a word; queries begin `own` blocks before its end."""
    start = (len(table) - own) * SIZE + SIZE - num_queries
    return TableRow(name, [ord(letter) for letter in table], start, start + num_queries)


def runs(*rows: TableRow | None, window: int | None = None) -> list[SharedRun]:
    return list(PrefixGroups(SIZE, window=window).update(rows))


def test_the_drawing_of_the_module_is_what_is_found() -> None:
    rows = [
        row("0", "SSSAAx"),
        row("1", "SSSAAyz"),
        row("2", "SSSBu"),
        row("3", "SSSBvw"),
        row("4", "tu"),
    ]
    assert runs(*rows) == [((0, 1, 2, 3), 0, 3), ((0, 1), 3, 2), ((2, 3), 3, 1)]


def test_nothing_is_shared_by_nobody_one_or_strangers() -> None:
    assert runs() == []
    assert runs(row("a", "SSSx")) == []
    assert runs(row("a", "SSx"), row("b", "TTy")) == []
    assert runs(row("a", "STx"), row("b", "TSy")) == []  # the same blocks elsewhere


def test_several_groups_stand_side_by_side() -> None:
    found = runs(row("a", "Sx"), row("b", "TTy"), row("c", "Sz"), row("d", "TTw"))
    assert found == [((0, 2), 0, 1), ((1, 3), 0, 2)]


def test_a_chain_of_prefixes_that_the_same_rows_have_is_one_run() -> None:
    groups = PrefixGroups(SIZE)
    a, b, c = row("a", "STUx"), row("b", "STUy"), row("c", "Sz")
    assert groups.update([a, b, c]) == (((0, 1, 2), 0, 1), ((0, 1), 1, 2))
    assert groups.update([a, b]) == (((0, 1), 0, 3),)


def test_a_run_may_begin_behind_what_differs() -> None:
    assert runs(row("a", "xSSu"), row("b", "ySSv")) == [((0, 1), 1, 2)]


def test_only_full_blocks_in_front_of_all_queries_count() -> None:
    tables = [ord(letter) for letter in "STU"]
    cases = [(11, 2), (8, 2), (7, 1), (4, 1), (3, 0), (0, 0)]
    for start, num_blocks in cases:
        rows = [TableRow("a", tables, 12, 13), TableRow("b", tables, start, 13)]
        expected = [((0, 1), 0, num_blocks)] if num_blocks else []
        assert runs(*rows) == expected, start


def test_a_row_that_must_not_be_a_member_keeps_its_place() -> None:
    rows = [row("a", "SSx"), None, row("c", "SSz")]
    assert runs(*rows) == [((0, 2), 0, 2)]


def test_members_are_the_places_of_this_step() -> None:
    groups = PrefixGroups(SIZE)
    a, b, c = row("a", "Sx"), row("b", "Sy"), row("c", "Tz")
    assert groups.update([a, b, c]) == (((0, 1), 0, 1),)
    assert groups.update([c, b, a]) == (((1, 2), 0, 1),)
    assert groups.update([b, c, None, a]) == (((0, 3), 0, 1),)


def test_a_block_that_is_copied_on_write_is_private_from_then_on() -> None:
    groups = PrefixGroups(SIZE)
    groups.update([row("a", "STUx"), row("b", "STUy")])
    assert groups.update([row("a", "STUx"), row("b", "STVy")]) == (((0, 1), 0, 2),)
    assert groups.update([row("a", "STUx"), row("b", "STUy")]) == (((0, 1), 0, 3),)


def test_a_window_hides_blocks_that_a_query_does_not_see_whole() -> None:
    rows = [row("a", "STUVx"), row("b", "STUVWy")]  # queries at 19 and 23
    assert runs(*rows, window=24) == [((0, 1), 0, 4)]
    assert runs(*rows, window=23) == [((0, 1), 1, 3)]  # b sees [1, 24)
    assert runs(*rows, window=20) == [((0, 1), 1, 3)]
    assert runs(*rows, window=12) == [((0, 1), 3, 1)]  # b sees [12, 24)
    assert runs(*rows, window=11) == []


def test_of_several_queries_the_last_decides_what_a_window_hides() -> None:
    rows = [row("a", "STUx"), row("b", "STUy", num_queries=3)]
    assert runs(*rows, window=13) == [((0, 1), 1, 2)]
    assert runs(*rows, window=16) == [((0, 1), 0, 3)]
    assert runs(rows[0], row("b", "STUyz", own=2, num_queries=4), window=16) == [((0, 1), 0, 3)]


def test_a_request_has_one_row() -> None:
    groups = PrefixGroups(SIZE)
    groups.update([row("a", "Sx"), row("b", "Sy")])
    with pytest.raises(ValueError, match="2 rows are of 1 requests"):
        groups.update([row("a", "Sx"), row("a", "Sx")])
    assert groups.update([row("a", "Sx"), row("b", "Sy")]) == (((0, 1), 0, 1),)


def test_what_left_is_forgotten() -> None:
    groups = PrefixGroups(SIZE)
    groups.update([row("a", "SSSx"), row("b", "SSSy")])
    groups.update([])
    assert not groups._owners
    assert not groups._held
    for index in range(100):
        groups.update([row(f"a{index}", "SSSx"), row(f"b{index}", "SSSy")])
    assert max(held.bit for held in groups._held.values()) <= 8  # bits are used again


def test_an_unchanged_step_is_answered_with_the_same_value() -> None:
    groups = PrefixGroups(SIZE)
    rows = [row("a", "SSSx"), row("b", "SSSy")]
    first = groups.update(rows)
    assert groups.update([one._replace(end=one.end) for one in rows]) is first
    assert groups.update([row("a", "SSSxu"), row("b", "SSSyv")]) is first  # grown, on its own


def test_only_runs_that_pay_are_kept_and_each_by_itself() -> None:
    many = SharedRun((0, 1, 2, 3), 0, 32)
    two = SharedRun((0, 1), 32, 32)
    small = SharedRun((2, 3), 32, 2)
    assert COSTS.pays(4, 32 * SIZE)
    assert not COSTS.pays(2, 2 * SIZE)
    free = replace(COSTS, run=0.0, run_key=0.0)
    assert paying([many, two, small], COSTS, block_size=SIZE) == (many,)
    assert paying([many, two, small], free, block_size=SIZE) == (many, two)
    assert paying([small], free, block_size=SIZE) == ()


def test_a_run_must_be_cheaper_by_the_margin() -> None:
    even = CascadeCosts(paged_key=1.0, run=0.0, run_key=0.0, run_pair=1.0, merge=0.0)
    assert not even.pays(2, 100)
    assert not replace(even, paged_key=1.09).pays(2, 100)
    assert replace(even, paged_key=1.11).pays(2, 100)


costs = st.floats(0, 1e3, allow_subnormal=False)


@pytest.mark.property
@given(
    model=st.builds(CascadeCosts, costs, costs, costs, costs, costs),
    members=st.integers(2, 64),
    tokens=st.integers(1, 10_000),
    more_members=st.integers(1, 10),
    more_tokens=st.integers(1, 1000),
)
def test_what_pays_pays_with_more_members_and_with_more_tokens(
    model: CascadeCosts, members: int, tokens: int, more_members: int, more_tokens: int
) -> None:
    if model.pays(members, tokens):
        assert model.pays(members + more_members, tokens)
        assert model.pays(members, tokens + more_tokens)


def test_a_step_like_the_one_before_looks_at_no_block_by_itself() -> None:
    chooser = random.Random(1)
    prefix = chooser.sample(range(10_000), 100)
    tables = [(*prefix, *chooser.sample(range(10_000, 20_000), 50)) for _ in range(8)]

    class Counting(PrefixGroups):
        num_entered = 0

        @override
        def _add(self, bit: int, position: int, block: int) -> None:
            self.num_entered += 1
            super()._add(bit, position, block)

    groups = Counting(SIZE)
    for start in range(149 * SIZE, 150 * SIZE):
        rows = [TableRow(str(i), table, start, start + 1) for i, table in enumerate(tables)]
        assert groups.update(rows) == ((tuple(range(8)), 0, 100),)
        assert groups.num_entered == 8 * 149
