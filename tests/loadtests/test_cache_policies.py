"""The models of eviction orders are right where they can be checked: against the pool itself."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from kvway_worker.cache.eviction import HITS_TO_PROTECT
from loadtests import cache_policies
from loadtests.cache_policies import Pool, SegmentedLru, hit_rate, interleaved, read


def chains(seed: int, num_requests: int) -> list[list[int]]:
    """Prompts over a random tree of blocks: some beginnings are hot, ends are often new."""
    chooser = random.Random(seed)
    known: list[list[int]] = [[]]
    fresh = iter(range(1, 10_000))
    trace = []
    for _ in range(num_requests):
        begin = known[min(chooser.randrange(len(known)), chooser.randrange(len(known)))]
        prompt = [*begin, *(next(fresh) for _ in range(chooser.randrange(0 if begin else 1, 4)))]
        known.append(prompt[:12])
        trace.append(prompt[:12])
    return trace


@pytest.mark.parametrize("num_blocks", [12, 30, 90])
@pytest.mark.parametrize("seed", range(4))
def test_the_model_with_the_pools_own_rule_hits_what_the_pool_hits(
    seed: int, num_blocks: int
) -> None:
    trace = chains(seed, 300)
    pool, model = Pool(num_blocks), SegmentedLru(num_blocks, HITS_TO_PROTECT)
    assert [pool.request(blocks) for blocks in trace] == [model.request(b) for b in trace]


def test_lru_evicts_the_oldest_end_of_a_chain_first() -> None:
    lru = SegmentedLru(4, None)
    assert lru.request([1, 2, 3]) == 0
    assert lru.request([7, 8]) == 0  # block 3 has to go
    assert lru.request([1, 2]) == 2


def test_a_protected_block_outlives_a_scan() -> None:
    lru, protecting = SegmentedLru(5, None), SegmentedLru(5, 1)
    for policy, left in ((lru, 0), (protecting, 1)):
        policy.request([1])
        policy.request([1])
        for block in range(10, 20):
            policy.request([block])
        assert policy.request([1]) == left


def test_prompts_larger_than_the_pool_are_left_out() -> None:
    assert hit_rate(SegmentedLru(2, None), [[1, 2, 3], [4], [4]], 2) == 0.5


def test_sessions_take_turns_and_share_what_their_parent_had() -> None:
    first = [[0, 0, 0, 0, -1, 0, 2], [0, 0, 0, 0, 0, 1, 3]]
    second = [[0, 0, 0, 0, -1, 0, 1]]
    assert list(interleaved([first, second])) == [[0, 1], [2], [0, 3, 4]]


def test_the_report_has_every_policy_and_unknown_files_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"hash_ids": [1, 2]}, {"hash_ids": [1, 3]}, {"hash_ids": [1, 2]}]
    for name, records in (("small", rows), ("other", [{"text": "no blocks"}])):
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    assert read(tmp_path / "other.jsonl.gz") == []
    assert cache_policies.main(["--traces", str(tmp_path), "--variants", "1:0.5"]) == 0
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
    assert {"small_50pct_lru", "small_50pct_pool", "small_50pct_1:0.5"} <= set(metrics)
    assert not any(key.startswith("other") for key in metrics)


def test_without_traces_it_says_where_there_are_some(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--traces"):
        cache_policies.main(["--traces", str(tmp_path)])
