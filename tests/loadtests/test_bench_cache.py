"""The cache benchmark measures what it says, on a model small enough to run in a second."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import structlog
import torch

from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.sim import SimEngine
from loadtests import bench_cache, cache_baseline, cache_speculation
from loadtests.cache_overhead import Workload, on_engine, on_sim
from loadtests.report import Spread
from loadtests.steps import StepLoop
from tests.worker.batching import answer
from tests.worker.torch_models import TINY, write_model

PROMPTS = [[(i * j) % 250 for i in range(40)] for j in (3, 7)]


def test_the_loop_answers_as_the_model_does_with_and_without_caching() -> None:
    engine = SimEngine(num_blocks=32, block_size=4)
    expected = [answer(prompt, 5) for prompt in PROMPTS]
    caching, plain = StepLoop(engine), StepLoop(engine, prefix_caching=False)
    assert caching.run(PROMPTS, 5).answers == expected
    assert caching.run(PROMPTS, 5).cached_tokens == 2 * 39
    for _ in range(2):
        run = plain.run(PROMPTS, 5)
        assert (run.answers, run.cached_tokens) == (expected, 0)
    assert isinstance(plain.pool, BlockPool)
    assert plain.pool.num_cached == 0


def test_blocks_are_counted_once_however_many_requests_share_them() -> None:
    loop = StepLoop(SimEngine(num_blocks=64, block_size=4))
    prefix = list(range(32))
    loop.run([prefix], 1)
    run = loop.run([[*prefix, 50 + i] for i in range(4)], 4)
    assert run.cached_tokens == 4 * 32
    assert run.num_blocks == 8 + 4  # the prefix, and one block for each


def test_the_overhead_of_a_run_without_hits_is_its_own_time_over_all_of_it() -> None:
    found = on_sim(2, Workload(num_requests=2, prompt_tokens=32, max_tokens=2))
    assert found.lost_pct.median == pytest.approx(found.books_pct.median)


def test_a_pool_of_the_overhead_is_full_before_the_second_run() -> None:
    workload = Workload(num_requests=3, prompt_tokens=32, max_tokens=4)
    engine = SimEngine(num_blocks=workload.num_blocks(4), block_size=4)
    loop = StepLoop(engine)
    chooser = random.Random(1)
    loop.run(workload.prompts(chooser, 1000), 4)
    assert loop.pool.num_evictions == 0
    loop.run(workload.prompts(chooser, 1000), 4)
    assert loop.pool.num_evictions > 0
    on_engine(engine, 1, vocab_size=1000, workload=workload)


@pytest.mark.parametrize("way", ["copies", "batch", "kvway"])
def test_every_way_of_the_baseline_gives_the_same_answers_and_counts_its_kv(
    way: cache_baseline.Way, tmp_path: Path
) -> None:
    case = cache_baseline.Case(
        way=way,
        num_requests=3,
        model_dir=write_model(tmp_path),
        dtype="float32",
        num_threads=torch.get_num_threads(),
        prefix_tokens=64,
        own_tokens=5,
        max_tokens=3,
    )
    plain = cache_baseline.run(case._replace(way="copies"))
    found = cache_baseline.run(case)
    assert found.answers == plain.answers
    per_token = 2 * TINY["num_hidden_layers"] * TINY["num_key_value_heads"] * TINY["head_dim"] * 4
    assert cache_baseline.kv_bytes_per_token(case.model_dir, "float32") == per_token
    tokens = {
        "copies": 64 + 71,  # the prefix, and one copy that has grown by 5 + 2
        "batch": 64 + 3 * 71,
        "kvway": 64 + 3 * 16,  # one block of 16 each
    }
    assert found.kv_bytes == tokens[way] * per_token


def test_speculation_is_counted_where_answers_repeat_and_where_they_do_not() -> None:
    repeating = SimEngine(num_blocks=64, block_size=4, answer_ids=[65])
    found = cache_speculation.measure(repeating, PROMPTS, pairs=1, max_tokens=24)
    assert (found.accepted_pct, found.differing) == (100, 0)
    other = SimEngine(num_blocks=64, block_size=4)
    found = cache_speculation.measure(other, PROMPTS, pairs=1, max_tokens=24)
    assert (found.accepted_pct, found.differing) == (0, 0)


def test_the_spread_is_the_median_and_the_middle_half() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 3.0, 4.0]) == (3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == (7.0, 7.0, 7.0)
    assert Spread(1.234, 0.5, 2.0).metrics("x_s", 1) == {
        "x_s": 1.2,
        "x_s_p25": 0.5,
        "x_s_p75": 2.0,
    }


def test_the_last_line_is_the_report_and_the_output_file_has_it_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "cache.json"
    model = str(write_model(tmp_path / "model"))
    arguments = ["--model", model, "--only", "hash", "overhead-sim", "--pairs", "1"]
    try:
        assert bench_cache.main([*arguments, "--output", str(output)]) == 0
    finally:
        structlog.reset_defaults()
    last = capsys.readouterr().out.splitlines()[-1]
    assert output.read_text() == last + "\n"
    metrics = json.loads(last)["metrics"]
    assert {"hash_ms_per_50k_tokens", "zero_hit_overhead_sim_pct"} <= set(metrics)
