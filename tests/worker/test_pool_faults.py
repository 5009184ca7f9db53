"""What users of other engines suffered, kind by kind; the numbers are those of the list of faults.

Everything runs on the audited engine: no shared block is written, and the KV that a row reads is
that of its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvway_core.blocks import Namespace, block_hashes
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.scheduling.sequence import Sequence as Request
from kvway_worker.scheduling.sequence import Status
from kvway_worker.scheduling.step import StepPlan
from tests.worker.batching import COMMON, Bench, OneHash, answer, request, run, scheduled
from tests.worker.pools import hashes, num_found, serve

# --- 1: hashes of what was never computed -----------------------------------------------------


def fail(bench: Bench, plan: StepPlan, writer: Request) -> None:
    bench.scheduler.fail(plan)


def abort_before(bench: Bench, plan: StepPlan, writer: Request) -> None:
    bench.abort(writer)
    bench.scheduler.commit(plan, bench.engine.execute(plan))


def abort_after(bench: Bench, plan: StepPlan, writer: Request) -> None:
    result = bench.engine.execute(plan)
    bench.abort(writer)
    bench.scheduler.commit(plan, result)


def reset_meanwhile(bench: Bench, plan: StepPlan, writer: Request) -> None:
    result = bench.engine.execute(plan)
    assert bench.scheduler.reset_prefix_cache(reset_running=True)
    bench.scheduler.commit(plan, result)
    bench.abort(writer)


FAULTS = [fail, abort_before, abort_after, reset_meanwhile]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", [[], list(range(16)), list(range(40)), list(range(48))])
@pytest.mark.parametrize("fault", FAULTS)
def test_1_a_writer_that_is_lost_leaves_nothing_that_it_has_not_computed(
    fault: Callable[[Bench, StepPlan, Request], None], seed: list[int], num_steps: int
) -> None:
    """P33: in any chunk, on a cold cache, on hits, and on rows that are still to be copied."""
    bench = Bench(20, budget=20)
    if seed:
        bench.finish(request("seed", seed))
    writer = request("writer", range(48), max_tokens=40)
    bench.add(writer)
    for _ in range(num_steps):
        bench.step()
    known = set(bench.pool.committed())
    fault(bench, bench.scheduler.plan(), writer)
    bench.scheduler.check_invariants()
    assert set(bench.pool.committed()) <= known
    twin = request("twin", [*range(48), 7], max_tokens=8)
    bench.finish(twin)
    assert twin.output_token_ids == answer([*range(48), 7], 8)


@pytest.mark.parametrize("fault", FAULTS)
def test_1_a_lost_fork_or_leader_leaves_the_others_right(
    fault: Callable[[Bench, StepPlan, Request], None],
) -> None:
    """The same for blocks that are shared and about to be copied before they are written."""
    bench = Bench(30, block_size=4)
    prompt = list(range(10))
    forks = [request(str(i), prompt, block_size=4, max_tokens=9) for i in (1, 2)]
    leader = request("0", prompt, block_size=4, max_tokens=9, forks=forks)
    bench.add(leader)
    bench.step()
    plan = bench.scheduler.plan()
    assert plan.copies
    fault(bench, plan, leader)
    bench.scheduler.check_invariants()
    for _ in run(bench.scheduler, bench.engine):
        pass
    for seq in forks:
        assert seq.status is Status.FAILED or seq.output_token_ids == answer(prompt, 9)
    assert bench.pool.num_free == 30
    twin = request("twin", [*prompt, 7], block_size=4, max_tokens=9)
    bench.finish(twin)
    assert twin.output_token_ids == answer([*prompt, 7], 9)


def test_1_rows_that_a_failed_step_was_to_copy_are_not_found() -> None:
    """The fork that copies goes first, so nobody else has left the same rows yet."""
    bench = Bench(30, block_size=4)
    prompt = list(range(10))
    forks = [request(str(i), prompt, block_size=4, max_tokens=9) for i in (1, 2)]
    leader = request("0", prompt, block_size=4, max_tokens=9, forks=forks)
    bench.add(leader)
    bench.step()
    plan = bench.scheduler.plan()
    copied = {target for _, target, _ in plan.copies}
    copying = [row.seq for row in plan.rows if row.block_table[2] in copied]
    bench.abort(copying[0])
    bench.scheduler.fail(plan)
    twin = request("twin", [*prompt, 7], block_size=4, max_tokens=9)
    bench.finish(twin)
    assert twin.output_token_ids == answer([*prompt, 7], 9)


# --- 2: hits that are not counted as taken ----------------------------------------------------


def test_2_p14_p15_hits_nobody_holds_count_as_taken_and_are_not_evicted() -> None:
    """With each number of free blocks a request fits exactly when hits and new blocks do."""
    for num_held in range(11):
        pool = BlockPool(10, 4)
        serve(pool, list(range(16)))
        held = pool.allocate(min(num_held, 6))
        hits = pool.match(hashes(list(range(16))), list(range(16)), namespace=_NS).blocks
        num_new = 10 - len(held) - 4
        assert pool.can_allocate(num_new, hits=hits)
        assert not pool.can_allocate(num_new + 1, hits=hits)
        new = pool.allocate(num_new, hits=hits)
        assert set(new).isdisjoint(hits)
        assert num_found(pool, [*range(16), 1]) == (4, 0)


_NS = Namespace("m", block_size=4)

# --- 3: another prompt's content --------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2, 3, 4], [1 + 2**8, 2, 3, 4]),
        ([1, 2, 3, 4], [1, 2 + 2**16, 3, 4]),
        ([1, 2, 3, 4], [1, 2, 3, 4 + 2**24]),
        ([1, 2, 3, 2**31], [1, 2, 3, 0]),
        ([0, 0, 0, 0], [0, 0, 0, 2**32 - 1]),
        ([1, 2, 3, 4], [4, 3, 2, 1]),
    ],
)
def test_3_prompts_that_weak_hashes_confuse_are_told_apart(
    one: list[int], other: list[int]
) -> None:
    pool = BlockPool(9, 4)
    serve(pool, one)
    assert num_found(pool, [*other, 1])[0] == 0
    assert hashes(one) != hashes(other)


def test_3_p19_p20_a_hash_has_128_bits_and_is_the_same_in_every_process() -> None:
    """Golden vectors pin the scheme; nothing of it is random per process, as in vLLM."""
    (block_hash,) = hashes([1, 2, 3, 4])
    assert len(block_hash) == 16
    assert block_hash.hex() == "640149a3eb91fedda06f5de4e2ec07bc"


@pytest.mark.parametrize("num_requests", [2, 5])
def test_3_when_every_hash_collides_everybody_still_gets_their_own(num_requests: int) -> None:
    """In one batch, with tails, forks and twins."""
    bench = Bench(60)
    seqs: list[Request] = []
    for index in range(num_requests):
        prompt = [*range(100 * (index // 2), 100 * (index // 2) + 40), *range(900, 900 + index)]
        fork = request(f"f{index}", prompt, max_tokens=12, chain=OneHash())
        seqs += [
            request(str(index), prompt, max_tokens=12, chain=OneHash(), forks=[fork]),
            fork,
        ]
    bench.add(*(seq for seq in seqs if seq.forks))
    for _ in run(bench.scheduler, bench.engine):
        pass
    for seq in seqs:
        assert seq.output_token_ids == answer(seq.prompt_token_ids, 12)


# --- 4: what else the KV depends on -----------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Namespace("m", cache_salt="x"), Namespace("m", adapter="x")),
        (
            Namespace("m", adapter="ab", cache_salt="c"),
            Namespace("m", adapter="a", cache_salt="bc"),
        ),
        (Namespace("m", adapter="a", adapter_version="1"), Namespace("m", adapter="a1")),
        (Namespace("m", adapter="a", adapter_version="1"), Namespace("m", adapter="a")),
        (Namespace("m", cache_salt="x"), Namespace("m")),
        (Namespace("mx"), Namespace("m", cache_salt="x")),
    ],
)
def test_4_p21_p22_s11_namespaces_share_nothing(one: Namespace, other: Namespace) -> None:
    """P21, P22, S11: fields are tagged and have lengths, so none reads as another."""
    tokens = list(range(40))
    assert one.root() != other.root()
    pool = BlockPool(9, 16)
    serve(pool, tokens, namespace=one)
    assert num_found(pool, tokens, other) == (0, 0)
    assert num_found(pool, tokens, one) == (2, 7)
    # Not even where somebody comes with the hashes of the other one.
    stolen = block_hashes(tokens, parent=one.root(), block_size=16)
    assert pool.match(stolen, tokens, namespace=other).blocks == ()


# --- 12: duplicates that are freed while tables still name them -------------------------------


@pytest.mark.parametrize("budget", [4, 16, 20, 33, 64])
@pytest.mark.parametrize("num_blocks", [10, 14, 40])
def test_12_twins_in_chunks_under_pressure_say_what_is_theirs(
    budget: int, num_blocks: int
) -> None:
    """Whatever is found, replaced and reused while they run, tables name what they should."""
    bench = Bench(num_blocks, budget=budget, max_num_seqs=4)
    prompts = [list(range(50)), list(range(50)), [*range(50), 9], [*range(200, 260)]]
    seqs = [request(str(i), prompt, max_tokens=20) for i, prompt in enumerate(prompts)]
    bench.finish(*seqs)
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert seq.output_token_ids == answer(prompt, 20)


def test_12_s3_who_computes_what_is_there_already_uses_what_is_there() -> None:
    """S3, P26: and its table names the block that is found from then on."""
    bench = Bench(20)
    first = request("0", COMMON, max_tokens=9)
    bench.add(first)
    bench.step()
    second = request("1", [*COMMON, 5], max_tokens=9, prompt_logprobs=0)
    bench.add(second)
    bench.step()
    assert second.cached_tokens == 0
    assert second.block_table[:3] == first.block_table[:3]
    assert len(bench.pool.committed()) == 3


# --- 13: nothing left to compute --------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 50))
def test_13_p24_s8_a_prompt_that_is_there_computes_one_token(length: int) -> None:
    """P24 and S8, to the token: at most all but one of the prompt is found, and that much is."""
    bench = Bench(20)
    bench.finish(request("0", range(60), max_tokens=2))
    seq = request("1", range(length), max_tokens=3)
    bench.add(seq)
    assert bench.step() == {"1": 1}
    assert seq.cached_tokens == length - 1
    for _ in run(bench.scheduler, bench.engine):
        pass
    assert seq.output_token_ids == answer(range(length), 3)


def test_13_a_preempted_request_goes_on_from_its_own_tokens() -> None:
    """P36: prompt and answer are found again, and how far it is computed is counted anew."""
    bench = Bench(11)
    first = request("0", range(80), max_tokens=60)
    second = request("1", range(100, 180), max_tokens=30)
    bench.finish(first, second)
    assert bench.scheduler.counters.preemptions > 0
    assert first.output_token_ids == answer(range(80), 60)
    assert second.output_token_ids == answer(range(100, 180), 30)


# --- 14: hits that are not there any more -----------------------------------------------------


@pytest.mark.parametrize("between", [range(100, 225), range(48), range(32)])
def test_14_hits_are_looked_up_when_blocks_are_taken(between: Sequence[int]) -> None:
    """What was found at arrival is not kept: the cache is read in one go with allocation."""
    bench = Bench(8, max_num_seqs=1)
    bench.finish(request("seed", range(48)))
    waits = request("waits", [*range(48), 5], max_tokens=3)
    bench.add(request("between", between, max_tokens=3), waits)
    for _ in run(bench.scheduler, bench.engine):
        pass
    assert waits.output_token_ids == answer([*range(48), 5], 3)


# --- 20: blocks that do not come back ---------------------------------------------------------


def test_20_p3_every_block_comes_back_whatever_ends_a_request() -> None:
    """P3: free and referenced blocks are all there are, after each step and at the end."""
    bench = Bench(16, budget=24, max_num_seqs=3)
    for index in range(12):
        seq = request(str(index), range(index, index + 45), max_tokens=9, ephemeral=index % 3 == 0)
        bench.add(seq)
        plan = bench.scheduler.plan()
        assert bench.pool.num_free + bench.pool.num_referenced == 16
        if index % 4 == 3:
            bench.scheduler.fail(plan)
        elif scheduled(plan):
            bench.scheduler.commit(plan, bench.engine.execute(plan))
        if index % 5 == 2:
            bench.scheduler.abort(str(index - 1))
        bench.scheduler.check_invariants()
    for _ in run(bench.scheduler, bench.engine):
        pass
    assert (bench.pool.num_free, bench.pool.num_referenced) == (16, 0)
