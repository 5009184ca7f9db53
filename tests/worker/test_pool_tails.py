"""Reuse by the token: partly filled blocks that stay, and the beginnings of blocks."""

from __future__ import annotations

import random

import pytest

from kvway_core.blocks import BlockHash, Namespace
from kvway_core.errors import OutOfBlocks
from kvway_worker.cache.block_content import BlockContent, Tail, TailContent
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.cache.children import Children
from tests.worker.batching import (
    COMMON,
    Bench,
    OneHash,
    answer,
    first_step_table,
    request,
    run,
    scheduled,
    step,
)
from tests.worker.pools import NAMESPACE, give_back, hashes, num_found, serve, take

FIRST = [1, 2, 3, 4]

# --- what is found ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ([1, 2, 3, 4, 5, 6], (1, 1)),  # one of the two is computed: the last one
        ([1, 2, 3, 4, 5, 6, 9], (1, 2)),
        ([1, 2, 3, 4, 5, 9, 9, 9, 9], (1, 1)),
        ([1, 2, 3, 4, 9, 5, 6], (1, 0)),
        ([1, 2, 3, 9], (0, 3)),  # of a full block
        ([1, 2], (0, 1)),
        ([1], (0, 0)),
        ([2, 2, 3, 4, 5, 6], (0, 0)),
    ],
)
def test_the_longest_beginning_is_found_to_the_token(
    prompt: list[int], found: tuple[int, int]
) -> None:
    """P31: hits finer than a block; SGLang's test_match_page_size_gt_1_rounds_down, unrounded."""
    pool = BlockPool(9, 4)
    serve(pool, [*FIRST, 5, 6])
    assert num_found(pool, prompt) == found


@pytest.mark.parametrize("length", [1, 2, 5, 7, 2000])
@pytest.mark.parametrize("at", [0, 1, 2, 63, 64, 65, 127, 128, 511, 512, 513, 1234, 1999])
def test_a_prompt_that_differs_somewhere_is_reused_up_to_there(length: int, at: int) -> None:
    """SGLang's test_match_long_keys_exponential_search: what is found ends where it differs."""
    pool = BlockPool(600, 4)
    known = list(range(10, 10 + length))
    serve(pool, known)
    asked = [*known, 7] if at >= length else [*known[:at], 5, *known[at + 1 :]]
    num_blocks, num_copied = num_found(pool, asked)
    assert 4 * num_blocks + num_copied == min(at, length, len(asked) - 1)


def test_s2_looking_up_never_changes_what_is_there() -> None:
    """S2: nothing is split; SGLang's test_advanced_prefix_match_with_node_splits."""
    pool = BlockPool(9, 4)
    serve(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    serve(pool, [1, 2, 9, 10])
    order = pool.free_order()
    assert num_found(pool, [1, 2, 3, 4, 999, 999]) == (1, 0)
    assert num_found(pool, [1, 2, 3, 4, 5, 6, 777, 7]) == (1, 2)
    assert num_found(pool, [1, 2, 3, 4, 5, 6, 7, 8]) == (2, 0)
    assert num_found(pool, [1, 2, 9, 10]) == (1, 0)
    assert num_found(pool, [1, 2, 9, 11, 12]) == (0, 3)
    assert pool.free_order() == order


def test_the_best_of_many_siblings_is_found() -> None:
    """Against looking at each of them, for random blocks of few different tokens."""
    rng = random.Random(3)
    children = Children()
    known = {
        tuple(rng.randrange(3) for _ in range(rng.randrange(1, 7))): block for block in range(200)
    }
    for tokens, block in known.items():
        children.add(NAMESPACE, tokens, block)
    for _ in range(300):
        query = tuple(rng.randrange(4) for _ in range(6))
        best = max(_shared(tokens, query) for tokens in known)
        found = children.nearest(NAMESPACE, query)
        assert (found[1] if found else 0) == best
        if found:
            (tokens,) = (tokens for tokens, block in known.items() if block == found[0])
            assert _shared(tokens, query) == best
    for tokens, block in known.items():
        children.remove(NAMESPACE, tokens, block)
    assert list(children) == []


def _shared(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    same = [one == other for one, other in zip(left, right, strict=False)]
    return (*same, False).index(False)


def test_p27_pending_blocks_are_not_copied() -> None:
    pool = BlockPool(9, 4)
    table = pool.allocate(1)
    pool.publish(table[0], BlockContent(hashes(FIRST)[0], NAMESPACE, tuple(FIRST)))
    assert num_found(pool, [1, 2, 3, 9]) == (0, 0)
    pool.commit()
    assert num_found(pool, [1, 2, 3, 9]) == (0, 3)


def test_rows_are_only_copied_within_a_namespace() -> None:
    """S11, section 6 no 3: other salts share nothing, not even three tokens."""
    pool = BlockPool(9, 4)
    serve(pool, [*FIRST, 5, 6])
    other = Namespace("m", block_size=4, cache_salt="tenant b")
    assert num_found(pool, [*FIRST, 5, 6, 7], other) == (0, 0)
    assert num_found(pool, [1, 2, 3], other) == (0, 0)


def test_rows_are_only_copied_behind_the_same_block() -> None:
    pool = BlockPool(9, 4)
    serve(pool, [*FIRST, 5, 6])
    serve(pool, [9, 9, 9, 9])
    assert num_found(pool, [9, 9, 9, 9, 5, 6, 7]) == (1, 0)


def test_rows_behind_a_block_found_by_a_colliding_hash_are_not_copied() -> None:
    """Section 6 no 3: the search for rows begins behind verified blocks only."""
    pool = BlockPool(9, 4)
    serve(pool, [*FIRST, 5, 6])
    forged = [hashes(FIRST)[0]]
    found = pool.match(forged, [7, 7, 7, 7, 5, 6, 7], namespace=NAMESPACE)
    assert (found.blocks, found.tail) == ((), None)


# --- what is kept -----------------------------------------------------------------------------


def test_s4_the_tail_of_a_request_that_ended_stays_without_hash_or_event() -> None:
    """S4: SGLang frees the unaligned tail; here it can still be copied."""
    pool = BlockPool(9, 4)
    table = take(pool, [*FIRST, 5, 6])
    pool.take_events()
    give_back(pool, table, [*FIRST, 5, 6])
    assert pool.take_events() == []
    assert pool.tail(table[1]) == TailContent(table[0], (5, 6))
    assert pool.content(table[1]) is None
    assert len(pool.committed()) == 1
    assert pool.num_cached == 2


def test_a_tail_is_evicted_before_the_block_in_front_of_it() -> None:
    """P7 for tails; a request evicts neither what it hits nor, if it can, what it copies."""
    pool = BlockPool(3, 4)
    serve(pool, [*FIRST, 5, 6])
    assert pool.free_order() == [2, 1, 0]
    pool.allocate(2)
    assert num_found(pool, [*FIRST, 5, 6, 7]) == (1, 0)
    assert pool.num_evictions == 1
    assert pool.take_events()[1:] == [], "nobody was told of it"


def test_a_tail_that_says_nothing_new_is_not_kept() -> None:
    pool = BlockPool(9, 4)
    serve(pool, [*FIRST, 5, 6, 7])
    cached = pool.num_cached
    serve(pool, [*FIRST, 5, 6])  # its tail is the beginning of the one that is there
    serve(pool, [*FIRST, 5, 6, 7])  # the same again
    serve(pool, [1, 2, 3])  # the beginning of a full block
    assert pool.num_cached == cached
    serve(pool, [*FIRST, 5, 6, 8])
    assert pool.num_cached == cached + 1


def test_a_longer_tail_replaces_its_beginning() -> None:
    pool = BlockPool(9, 4)
    serve(pool, [*FIRST, 5])
    serve(pool, [*FIRST, 5, 6])
    assert pool.num_cached == 2
    assert num_found(pool, [*FIRST, 5, 6, 9]) == (1, 2)
    serve(pool, [*FIRST, 5, 6, 7, 8])
    assert pool.num_cached == 2
    assert len(pool.committed()) == 2, "the full block took its place"


def test_a_tail_of_a_block_that_others_hold_is_not_kept() -> None:
    pool = BlockPool(9, 4)
    table = take(pool, [*FIRST, 5])
    for block in table:
        pool.touch(block)
    give_back(pool, table, [*FIRST, 5])
    assert pool.tail(table[1]) is None
    give_back(pool, table, [*FIRST, 5])
    assert pool.tail(table[1]) is not None


def test_a_tail_whose_parent_cannot_be_found_is_not_kept() -> None:
    pool = BlockPool(9, 4)
    table = pool.allocate(2)
    pool.keep_tail(table[1], TailContent(table[0], (5,)))
    pool.free(table)
    pool.check_invariants()
    assert pool.num_cached == 0


def test_without_prefix_caching_no_tail_is_kept() -> None:
    pool = BlockPool(9, 4, prefix_caching=False)
    table = pool.allocate(1)
    pool.keep_tail(table[0], TailContent(NAMESPACE, (5,)))
    pool.free(table)
    assert pool.num_cached == 0


def test_p34_a_reset_forgets_tails() -> None:
    pool = BlockPool(9, 4)
    serve(pool, [*FIRST, 5, 6])
    assert pool.reset()
    assert num_found(pool, [*FIRST, 5, 6]) == (0, 0)
    pool.check_invariants()


# --- while blocks are taken -------------------------------------------------------------------


def test_p15_what_is_copied_is_not_evicted_for_it_and_is_new_again() -> None:
    pool = BlockPool(4, 4)
    serve(pool, [5, 5])  # the oldest: next to be evicted
    serve(pool, [6, 6])
    pool.allocate(2)
    assert pool.free_order() == [0, 1]
    found = pool.match([], [5, 5, 5], namespace=NAMESPACE)
    assert found.tail == Tail(0, 2)
    assert pool.allocate(1, source=0) == [1]
    assert pool.free_order() == [0]
    assert pool.num_references(0) == 0


def test_p14_what_is_copied_uses_up_a_free_block_meanwhile() -> None:
    """Section 6 no 2, for the source of a copy: it counts, and a refusal changes nothing."""
    pool = BlockPool(2, 4)
    serve(pool, [5, 5])
    pool.allocate(1)
    assert pool.can_allocate(1)
    assert not pool.can_allocate(1, hits=[0])
    with pytest.raises(OutOfBlocks, match="1 new blocks and 1 hits do not fit in 1 free"):
        pool.allocate(1, source=0)
    assert pool.free_order() == [0]
    assert num_found(pool, [5, 5, 5]) == (0, 2)


# --- through the scheduler --------------------------------------------------------------------


def test_the_next_turn_computes_only_what_is_new() -> None:
    bench = Bench(40)
    first = request("0", range(100), max_tokens=7)
    bench.finish(first)
    turn = [*first.token_ids, 500, 501, 502]
    second = request("1", turn, max_tokens=3)
    bench.add(second)
    plan, _ = step(bench.scheduler, bench.engine)
    assert scheduled(plan) == {"1": 4}, "the last token of the answer was never fed back"
    assert second.cached_tokens == 106
    ((source, target, num_tokens),) = plan.copies
    assert (target, num_tokens) == (plan.rows[0].block_table[6], 10)
    assert bench.pool.num_references(source) == 0
    for _ in run(bench.scheduler, bench.engine):
        pass
    assert second.output_token_ids == answer(turn, 3)


def test_turn_after_turn_computes_only_what_is_new() -> None:
    """Tails are copied, grown and kept again."""
    bench = Bench(40)
    known = list(range(5))
    for turn in range(12):
        seq = request(str(turn), known, max_tokens=3)
        bench.add(seq)
        assert bench.scheduler.waiting_uncached_tokens() == (2 if turn else 5)
        for _ in run(bench.scheduler, bench.engine):
            pass
        assert seq.cached_tokens == (len(known) - 2 if turn else 0)
        assert seq.output_token_ids == answer(known, 3)
        known = [*seq.token_ids, 300 + turn]


def test_rows_of_a_block_that_is_in_use_are_copied() -> None:
    bench = Bench(40)
    first_step_table(bench, request("0", COMMON, max_tokens=9))
    second = request("1", [*COMMON[:40], 7, 7, 7], max_tokens=3)
    bench.add(second)
    assert bench.step() == {"0": 1, "1": 3}
    assert second.cached_tokens == 40
    for _ in run(bench.scheduler, bench.engine):
        pass
    assert second.output_token_ids == answer([*COMMON[:40], 7, 7, 7], 3)


def test_a_tail_without_room_for_it_is_computed() -> None:
    bench = Bench(2)
    bench.finish(request("0", range(10)))
    second = request("1", range(12), max_tokens=6)
    bench.add(second)
    assert bench.step() == {"1": 2}
    bench.abort(second)
    bench = Bench(1)
    bench.finish(request("0", range(10)))
    third = request("1", range(12), max_tokens=4)
    bench.add(third)
    assert bench.step() == {"1": 12}


def test_rows_that_are_still_to_be_copied_are_not_kept() -> None:
    """Section 6 no 1: aborted between plan and execution, the copy never was."""
    bench = Bench(20)
    bench.finish(request("0", range(10)))
    tails = bench.pool.num_cached
    second = request("1", [*range(10), 50, 51], max_tokens=4)
    bench.add(second)
    plan = bench.scheduler.plan()
    assert len(plan.copies) == 1
    bench.abort(second)
    assert bench.pool.num_cached == tails
    bench.scheduler.commit(plan, bench.engine.execute(plan))
    third = request("2", [*range(10), 50, 51], max_tokens=4)
    bench.finish(third)
    assert third.output_token_ids == answer([*range(10), 50, 51], 4)


def test_what_a_step_computed_before_an_abort_is_kept_and_nothing_else() -> None:
    bench = Bench(20)
    first = request("0", range(20), max_tokens=9)
    bench.add(first)
    bench.step()
    plan = bench.scheduler.plan()  # computes the 21st token
    bench.abort(first)
    bench.scheduler.commit(plan, bench.engine.execute(plan))
    second = request("1", [*first.token_ids, 5], max_tokens=3)
    bench.finish(second)
    assert second.cached_tokens == 20
    assert second.output_token_ids == answer([*first.token_ids, 5], 3)


def test_a_failed_step_keeps_the_tail_that_was_computed_before() -> None:
    bench = Bench(20)
    first = request("0", range(20), max_tokens=9)
    bench.add(first)
    bench.step()
    bench.scheduler.fail(bench.scheduler.plan())
    bench.scheduler.check_invariants()
    second = request("1", range(22), max_tokens=3)
    bench.finish(second)
    assert second.cached_tokens == 20
    assert second.output_token_ids == answer(range(22), 3)


def test_colliding_hashes_never_copy_the_wrong_rows() -> None:
    """Section 6 no 3: every block has one hash, and everyone still says what is theirs."""
    bench = Bench(40)
    prompts = [[*range(start, start + 36), *range(900, 904)] for start in (0, 100, 0, 200)]
    for index, prompt in enumerate(prompts):
        seq = request(str(index), prompt, max_tokens=9, chain=OneHash())
        bench.finish(seq)
        assert seq.output_token_ids == answer(prompt, 9)


def test_a_hash_of_other_tokens_finds_nothing_to_copy() -> None:
    pool = BlockPool(9, 4)
    serve(pool, FIRST)
    found = pool.match([BlockHash(b"0123456789abcdef")], [8, 8, 8, 8, 1], namespace=NAMESPACE)
    assert (found.blocks, found.tail) == ((), None)
