"""Pins: prefixes that are evicted last, within a quota and for a time."""

from __future__ import annotations

import pytest

from kvway_core.errors import PinQuotaExceeded
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.cache.pins import MAX_PINS, PinInfo
from tests.worker.pools import hashes, num_found, serve, take

PREFIX = list(range(12))
"""Three blocks."""


def scan(pool: BlockPool, num_prompts: int = 20) -> None:
    """Asks for prompts that share nothing, each three times: they would displace anything."""
    for index in range(num_prompts):
        for _ in range(3):
            serve(pool, [1000 + index, *range(100, 107)])


def pin(
    pool: BlockPool, tokens: list[int], pin_id: str = "p", *, expires_s: float = 9.0
) -> PinInfo:
    info = pool.pin(pin_id, hashes(tokens), expires_s=expires_s)
    pool.check_invariants()
    return info


def test_what_is_pinned_outlasts_whatever_comes() -> None:
    pool = BlockPool(12, 4)
    serve(pool, PREFIX)
    assert pin(pool, PREFIX) == PinInfo("p", 3, 3, 9.0)
    assert (pool.tier("pinned"), pool.num_pinned) == ([2, 1, 0], 3)
    scan(pool)
    assert num_found(pool, [*PREFIX, 1]) == (3, 0)
    assert pool.evictions["pinned"] == 0


def test_without_the_pin_the_same_scan_takes_it() -> None:
    pool = BlockPool(12, 4)
    serve(pool, PREFIX)
    scan(pool)
    assert num_found(pool, PREFIX) == (0, 0)


def test_what_is_not_there_yet_is_pinned_when_it_is_stored() -> None:
    pool = BlockPool(12, 4)
    serve(pool, PREFIX[:4])
    assert pin(pool, PREFIX) == PinInfo("p", 3, 1, 9.0)
    serve(pool, PREFIX)
    assert pool.pins() == [PinInfo("p", 3, 3, 9.0)]
    assert pool.tier("pinned") == [2, 1, 0]
    scan(pool)
    assert num_found(pool, [*PREFIX, 1]) == (3, 0)


def test_a_pin_is_soft() -> None:
    """A request that needs every block gets them, the deepest pinned one first."""
    pool = BlockPool(12, 4)
    serve(pool, PREFIX)
    pin(pool, PREFIX)
    pool.allocate(11)
    assert pool.pins() == [PinInfo("p", 3, 1, 9.0)]
    assert num_found(pool, [*PREFIX, 1]) == (1, 0)
    pool.check_invariants()
    assert pool.evictions["pinned"] == 2


def test_what_was_evicted_is_pinned_again_when_it_comes_back() -> None:
    pool = BlockPool(12, 4)
    serve(pool, PREFIX)
    pin(pool, PREFIX)
    table = pool.allocate(11)
    pool.free(table)
    serve(pool, PREFIX)
    assert pool.pins() == [PinInfo("p", 3, 3, 9.0)]
    assert pool.num_pinned == 3


def test_overlapping_pins_count_each_block_once() -> None:
    pool = BlockPool(20, 4)
    longer = [*PREFIX, 50, 51, 52, 53]
    other = [*PREFIX, 60, 61, 62, 63]
    for prompt in (longer, other):
        serve(pool, prompt)
        pin(pool, prompt, str(prompt[-1]))
    assert pool.num_pinned == 5
    assert pool.unpin("53")
    pool.check_invariants()
    assert pool.num_pinned == 4
    assert len(pool.tier("probation")) == 1
    assert pool.unpin("63")
    assert pool.num_pinned == 0


def test_more_than_the_share_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(20, 4)  # a quarter of 20 blocks
    serve(pool, PREFIX)
    pin(pool, PREFIX)
    with pytest.raises(PinQuotaExceeded, match=r"has 3 blocks.*these are 6, and 5 may be pinned"):
        pin(pool, [*range(50, 62)], "q")
    assert [info.pin_id for info in pool.pins()] == ["p"]
    pin(pool, [*range(50, 58)], "q")


def test_a_pin_that_is_replaced_leaves_what_it_shares_to_the_other() -> None:
    pool = BlockPool(20, 4)  # five blocks may be pinned
    pin(pool, PREFIX)
    pin(pool, [*PREFIX[:8], 50, 51, 52, 53], "q")
    with pytest.raises(PinQuotaExceeded, match="these are 6, and 5 may be pinned"):
        pin(pool, [*range(60, 72)], "q")
    pin(pool, [*range(60, 68)], "q")
    assert [(info.pin_id, info.num_blocks) for info in pool.pins()] == [("p", 3), ("q", 2)]


def test_what_is_not_cached_counts_for_the_quota() -> None:
    pool = BlockPool(20, 4)
    pin(pool, list(range(20)))
    with pytest.raises(PinQuotaExceeded):
        pin(pool, [*range(50, 54)], "q")


def test_a_pin_of_the_same_id_replaces_the_old_one() -> None:
    pool = BlockPool(20, 4)
    serve(pool, list(range(20)))
    pin(pool, list(range(20)))
    pin(pool, [*range(50, 70)], expires_s=20.0)  # five blocks instead of five
    assert pool.pins() == [PinInfo("p", 5, 0, 20.0)]
    assert pool.num_pinned == 0
    with pytest.raises(PinQuotaExceeded):
        pin(pool, list(range(100, 124)))
    assert pool.pins() == [PinInfo("p", 5, 0, 20.0)]


def test_what_a_new_pin_has_of_the_old_one_of_its_id_counts_too() -> None:
    pool = BlockPool(20, 4)
    pin(pool, list(range(16)))
    pin(pool, [*range(50, 54)], "q")
    with pytest.raises(PinQuotaExceeded, match="these are 6, and 5 may be pinned"):
        pin(pool, list(range(20)))  # a fifth block behind its four
    assert [info.num_blocks for info in pool.pins()] == [4, 1]


@pytest.mark.parametrize(("quota", "num_blocks"), [(0.0, 0), (0.1, 2), (1.0, 20)])
def test_the_quota_is_a_share_of_the_pool(quota: float, num_blocks: int) -> None:
    pool = BlockPool(20, 4, pin_quota=quota)
    pin(pool, list(range(4 * num_blocks)))
    with pytest.raises(PinQuotaExceeded, match=f"and {num_blocks} may be pinned"):
        pin(pool, list(range(4 * num_blocks + 4)), "more")


@pytest.mark.parametrize("quota", [-0.1, 1.1, float("nan")])
def test_a_quota_that_is_no_share_is_refused(quota: float) -> None:
    with pytest.raises(ValueError, match="pin_quota is a share"):
        BlockPool(20, 4, pin_quota=quota)


def test_there_is_a_bound_on_the_number_of_pins() -> None:
    pool = BlockPool(20, 4)
    serve(pool, PREFIX)
    for index in range(MAX_PINS):
        pool.pin(str(index), hashes(PREFIX), expires_s=9.0)
    with pytest.raises(PinQuotaExceeded, match="256 pins already"):
        pin(pool, PREFIX, "more")
    pin(pool, PREFIX, "7")
    assert pool.num_pinned == 3
    assert len(pool.pins()) == MAX_PINS


def test_pins_end_when_their_time_is_over() -> None:
    pool = BlockPool(20, 4)
    serve(pool, PREFIX)
    pin(pool, PREFIX, "short", expires_s=5.0)
    pin(pool, PREFIX, "long", expires_s=8.0)
    assert pool.expire_pins(4.9) == []
    assert pool.expire_pins(5.0) == ["short"]
    assert pool.num_pinned == 3
    assert pool.expire_pins(8.5) == ["long"]
    assert (pool.num_pinned, pool.tier("probation")) == (0, [2, 1, 0])
    pool.check_invariants()


def test_what_was_pinned_is_new_again_and_goes_the_deepest_first() -> None:
    pool = BlockPool(20, 4)
    serve(pool, PREFIX)
    pin(pool, PREFIX)
    serve(pool, [50, 51, 52, 53])
    pool.unpin("p")
    assert pool.tier("probation") == [3, 2, 1, 0]


def test_an_unknown_pin_cannot_be_ended() -> None:
    assert not BlockPool(4, 4).unpin("p")


def test_a_block_that_is_held_is_pinned_when_it_is_free() -> None:
    pool = BlockPool(20, 4)
    table = take(pool, PREFIX)
    pin(pool, PREFIX)
    assert (pool.num_pinned, pool.tier("pinned")) == (3, [])
    pool.free(table)
    assert pool.tier("pinned") == [2, 1, 0]


def test_pinned_content_of_an_ephemeral_request_stays() -> None:
    pool = BlockPool(20, 4)
    table = take(pool, PREFIX, ephemeral=True)
    pin(pool, PREFIX[:8])
    pool.free(table)
    pool.check_invariants()
    assert num_found(pool, [*PREFIX, 1]) == (2, 0)
    pin(pool, PREFIX)
    serve(pool, PREFIX, ephemeral=True)
    assert num_found(pool, [*PREFIX, 1]) == (3, 0)


def test_a_pin_holds_nothing_behind_a_gap() -> None:
    """A pinned block whose parent is not pinned could be left behind by it."""
    pool = BlockPool(20, 4)
    serve(pool, PREFIX)
    pool.pin("p", hashes(PREFIX)[1:], expires_s=9.0)
    pool.check_invariants()
    assert pool.num_pinned == 0
    pool.pin("q", [hashes(PREFIX)[0], hashes(PREFIX)[2]], expires_s=9.0)
    pool.check_invariants()
    assert pool.num_pinned == 1


def test_p34_pins_outlast_a_reset() -> None:
    pool = BlockPool(20, 4)
    serve(pool, PREFIX)
    pin(pool, PREFIX)
    assert pool.reset()
    pool.check_invariants()
    assert pool.pins() == [PinInfo("p", 3, 0, 9.0)]
    table = take(pool, PREFIX)
    pool.free(table)
    assert pool.tier("pinned") == table[::-1]


def test_a_pinned_parent_stays_behind_what_was_pinned_later() -> None:
    """The shorter pin first: its blocks must not be the older ones of the tier."""
    pool = BlockPool(20, 4)
    serve(pool, PREFIX)
    pin(pool, PREFIX[:4], "short")
    pin(pool, PREFIX, "long")
    assert pool.tier("pinned") == [2, 1, 0]
