"""The units that Triton programs compute: host code, tested without triton.

What a unit does is written out here, pair by pair and key by key: `computed` is the kernel's
contract with the tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvway_kernels.plan import PagedPlan, RequestRows, SharedRun, plan
from kvway_kernels.triton.units import LARGE_TILE, SMALL_TILE, Units, chunk_keys, work_units
from tests.kernels.trees import TREES, Tree

BLOCK_SIZE = 16
CPU = torch.device("cpu")

Slot = tuple[int, int]
Key = tuple[int, int]


def computed(step: PagedPlan, units: Units, group: int) -> list[tuple[int, Slot, list[Key]]]:
    """Return (row, (slot, head), keys as (block, offset)) for each live pair of each unit."""
    rows, bounds, blocks = units.rows.tolist(), units.bounds.tolist(), units.blocks.tolist()
    slots, found = units.slots.tolist(), []
    for index, unit in enumerate(units.units.tolist()):
        row_start, num_rows, first_pair, block_start, first, end, slot_start, is_open = unit
        tile = SMALL_TILE if index < units.num_small else units.large_tile
        assert first < end
        assert first_pair < num_rows * group
        for pair in range(first_pair, min(first_pair + tile, num_rows * group)):
            row = rows[row_start + pair // group]
            begin, stop = (0, end) if is_open else bounds[row]
            keys = [
                (blocks[block_start + key // step.block_size], key % step.block_size)
                for key in range(max(first, begin), min(end, stop))
            ]
            slot = slots[slot_start + pair // group]
            found.append((row, (slot, pair % group), keys))
    return found


def seen(requests: Sequence[RequestRows], window: int | None) -> list[list[Key]]:
    """Return the keys that each row must see."""
    found = []
    for request in requests:
        for end in range(request.num_keys - request.num_queries + 1, request.num_keys + 1):
            begin = 0 if window is None else max(0, end - window)
            found.append(
                [(request.block_table[k // BLOCK_SIZE], k % BLOCK_SIZE) for k in range(begin, end)]
            )
    return found


def check(step: PagedPlan, *, group: int, num_sms: int) -> None:
    units = work_units(step, group=group, num_sms=num_sms, device=CPU)
    done = computed(step, units, group)
    expected = seen(step.requests, step.window)
    row_slots = units.row_slots.tolist()

    written = Counter(slot for _, slot, _ in done)
    assert set(written.values()) <= {1}, "a slot is written once"
    assert set(written) == {(s, g) for s in range(len(units.slots)) for g in range(group)}
    assert row_slots[0] == 0
    assert row_slots[-1] == len(units.slots)
    keys_of: dict[tuple[int, int], Counter[Key]] = {}
    for row, (slot, g), keys in done:
        assert row_slots[row] <= slot < row_slots[row + 1], "a slot is merged into its own row"
        assert keys, "no slot is without a key"
        keys_of.setdefault((row, g), Counter()).update(keys)
    for row, keys in enumerate(expected):
        for g in range(group):
            assert keys_of[row, g] == Counter(keys), "each key once, and no other"


@pytest.mark.parametrize("window", [None, 1, 17, 60])
@pytest.mark.parametrize("tree", TREES)
def test_each_row_gets_each_of_its_keys_once(tree: str, window: int | None) -> None:
    case = Tree.of(TREES[tree], head_dim=16)
    step = plan(
        case.requests,
        num_blocks=len(case.k_cache),
        block_size=BLOCK_SIZE,
        shared=case.shared,
        window=window,
    )
    check(step, group=3, num_sms=132)


def test_more_heads_per_key_head_than_a_tile_has_pairs() -> None:
    """71, as Falcon 7B has."""
    step = plan([RequestRows(2, 20, [0, 1])], num_blocks=2, block_size=BLOCK_SIZE)
    check(step, group=71, num_sms=132)


@st.composite
def steps(draw: st.DrawFn) -> PagedPlan:
    """Requests that share the first blocks, or some in the middle, or nothing."""
    num_shared = draw(st.integers(0, 40))
    base = list(range(num_shared))
    next_block = num_shared
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        num_queries = draw(st.integers(1, 12))
        num_keys = (
            num_shared * BLOCK_SIZE + num_queries + draw(st.sampled_from([0, 1, 15, 16, 200, 600]))
        )
        own = -(-num_keys // BLOCK_SIZE) - num_shared
        requests.append(
            RequestRows(num_queries, num_keys, [*base, *range(next_block, next_block + own)])
        )
        next_block += own
    shared = []
    if num_shared >= 2 and len(requests) >= 2:
        first = draw(st.integers(0, num_shared - 1))
        size = draw(st.integers(1, num_shared - first))
        shared.append(SharedRun(tuple(range(len(requests))), first, size))
        if first >= 1 and len(requests) >= 3:
            shared.append(SharedRun((0, 2), 0, first))
    return plan(
        requests,
        num_blocks=next_block,
        block_size=BLOCK_SIZE,
        shared=shared,
        window=draw(st.none() | st.integers(1, 2000)),
    )


@pytest.mark.property
@given(step=steps(), group=st.sampled_from([1, 3, 8]), num_sms=st.integers(1, 200))
def test_any_step_is_cut_into_units_without_loss(
    step: PagedPlan, group: int, num_sms: int
) -> None:
    check(step, group=group, num_sms=num_sms)


def lone_row(num_keys: int) -> RequestRows:
    return RequestRows(1, num_keys, list(range(-(-num_keys // BLOCK_SIZE))))


def test_a_decode_rows_chunks_do_not_depend_on_its_company() -> None:
    alone, company = (
        plan(requests, num_blocks=400, block_size=BLOCK_SIZE)
        for requests in ([lone_row(5000)], [lone_row(n) for n in (5000, 70, 6000, 1)])
    )
    one = work_units(alone, group=4, num_sms=132, device=CPU).units
    many = work_units(company, group=4, num_sms=132, device=CPU).units
    many = many[many[:, 0] == 0]
    assert one[:, 4:6].tolist() == many[:, 4:6].tolist()
    assert len(one) > 10


def test_chunks_are_long_enough_and_few_enough() -> None:
    assert chunk_keys(100, 4, num_sms=132) == 256
    assert chunk_keys(8192, 4, num_sms=132) == 256, "a lone row is spread over the device"
    assert chunk_keys(32_768, 4, num_sms=132) == 1024
    assert chunk_keys(8192, 256, num_sms=132) == 1024, "many pairs make fewer chunks"
    assert chunk_keys(2048, 100_000, num_sms=132) == 2048, "a whole prompt makes one"


def test_many_rows_go_into_large_tiles_and_few_into_small_ones() -> None:
    run = [RequestRows(1, 40, [0, 1, 2 + i]) for i in range(30)]
    step = plan(
        run, num_blocks=40, block_size=BLOCK_SIZE, shared=[SharedRun(tuple(range(30)), 0, 2)]
    )
    units = work_units(step, group=3, num_sms=132, device=CPU)
    large = units.units[units.num_small :]
    assert units.num_small == 30
    assert [unit[2] for unit in large.tolist()] == [0, LARGE_TILE], "30 rows x 3 heads: 90 pairs"


def test_units_are_cut_once_per_plan() -> None:
    step = plan([lone_row(50)], num_blocks=9, block_size=BLOCK_SIZE)
    first = work_units(step, group=3, num_sms=132, device=CPU)
    assert work_units(step, group=3, num_sms=132, device=CPU) is first
    assert work_units(step, group=4, num_sms=132, device=CPU) is not first


def test_an_empty_step_has_no_units() -> None:
    units = work_units(
        plan([], num_blocks=9, block_size=BLOCK_SIZE), group=3, num_sms=132, device=CPU
    )
    assert len(units.units) == len(units.slots) == 0
    assert units.row_slots.tolist() == [0]
