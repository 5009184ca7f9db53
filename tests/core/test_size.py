"""`kvway size`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvway_core.cli import main
from kvway_core.errors import ConfigError
from kvway_core.size import run
from tests.core.test_sizing import LLAMA_70B

BY_HAND = ("--layers", "80", "--kv-heads", "8", "--head-dim", "128")


@pytest.fixture
def llama(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return str(tmp_path)


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert run([*argv, "--json"]) == 0
    sizes: dict[str, Any] = json.loads(capsys.readouterr().out)
    return sizes


def test_the_worked_numbers_are_printed(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    run(["--model", llama, "--prefix-tokens", "1500", "--new-tokens", "100"])
    shown = " ".join(capsys.readouterr().out.split())
    for line in (
        "per token and layer 4,096 bytes",
        "per token 327,680 bytes",
        "1,600 -> 100: 16.00 times fewer",
        "1,280,800 -> 155,050: 8.26 times fewer",
        "work of both 15.78 times less",
        "attention doubles it from 52,224 tokens on",
    ):
        assert line in shown
    run([*BY_HAND, "--prefix-tokens", "1020"])
    shown = " ".join(capsys.readouterr().out.split())
    for line in (
        "prefix of 1,020 tokens 335.5 MB",
        "prefix of 1,020 tokens 63 full",
        "stranded behind them 12 tokens, in no full block",
        "pad to share them too 4 tokens, to 64 full blocks",
        "work of both between the two: what the family computes is not known",
    ):
        assert line in shown


def test_work_lies_between_tokens_and_attention(
    capsys: pytest.CaptureFixture[str], llama: str
) -> None:
    prefill = as_json(capsys, "--model", llama)["prefill"]
    assert prefill["attention_saved"] < prefill["work_saved"] < prefill["tokens_saved"]
    assert prefill["cold_s"] is prefill["warm_s"] is None


def test_times_and_break_evens_come_with_a_prefill_rate(
    capsys: pytest.CaptureFixture[str], llama: str
) -> None:
    """70B at 2,000 tokens/s makes 655 MB/s of KV: a slow disk pays where contexts are long."""
    sizes = as_json(
        capsys, "--model", llama, "--prefill-rate", "2000", "--disk-mb-per-s", "500",
        "--disk-latency-ms", "0", "--peer-mb-per-s", "1000", "--peer-latency-ms", "10",
    )  # fmt: skip
    assert sizes["needed_bytes_per_s"] == 327_680 * 2000
    disk, peer = sizes["break_even"]
    # n (n + 1) / 2A = n (655.36 / 500 - 1), A = 52,224
    assert disk["tokens"] == 2 * 52_224 * 0.31072 // 1  # one less than the root, rounded up
    assert peer["tokens"] == 58  # 10 ms / (1/2000 - 327.68e3/1e9) s, less a little attention
    assert peer["prefix_s"] == pytest.approx(0.01 + 1500 * 327_680 / 1e9)
    assert sizes["prefill"]["cold_s"] == pytest.approx((1600 + 1_280_800 / 52_224) / 2000)


def test_where_the_model_is_not_known_attention_is_assumed_or_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = (*BY_HAND, "--prefill-rate", "2000")
    for more, tokens in (((), 60_000), (("--attention-tokens", "1000"), 1000)):
        cold_s = as_json(capsys, *argv, *more)["prefill"]["cold_s"]
        assert cold_s == pytest.approx((1600 + 1_280_800 / tokens) / 2000)


def test_a_pool_is_that_of_one_replica(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = as_json(
        capsys, *BY_HAND, "--users", "90", "--running", "8", "--replicas", "4",
        "--prefix-tokens", "1024", "--prefixes", "3", "--session-tokens", "160",
    )  # fmt: skip
    pool = sizes["pool"]
    assert sizes["replica_sessions"] == 23
    assert (pool["pinned"], pool["live"], pool["warm"]) == (3 * 64, 2 * 10, 21 * 10)
    assert sizes["pool_bytes"] == pool["total"] * 5_242_880
    assert sizes["scattered_bytes"] == (3 * 64 + 90 * 10) * 5_242_880


def test_given_memory_says_how_many_sessions_stay(capsys: pytest.CaptureFixture[str]) -> None:
    pool = as_json(
        capsys, *BY_HAND, "--users", "11", "--running", "1", "--prefixes", "0",
        "--session-tokens", "1600", "--memory-gib", "3",
    )["pool"]  # fmt: skip
    assert pool["total"] == 3 * 2**30 // 5_242_880 == 614
    assert (pool["live"], pool["warm"], pool["warm_sessions"]) == (100, 500, 0.5)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ((), "no model: give --model, or all of"),
        (("--layers", "80"), "no model: give --model, or all of"),
        (("--model", "m", "--layers", "80"), "exclude each other"),
        ((*BY_HAND, "--layers", "0"), "--layers must be 1 to"),
        ((*BY_HAND, "--new-tokens", "0"), "--new-tokens must be 1 to"),
        ((*BY_HAND, "--prefill-rate", "nan"), "--prefill-rate"),
        ((*BY_HAND, "--users", "3"), r"--running \(8\) must be at most --users \(3\)"),
        ((*BY_HAND, "--memory-gib", "1"), "--memory-gib 1 has 204 blocks of 16 tokens, too few"),
        ((*BY_HAND, "--kv-dtype", "int4"), "int4"),
    ],
)
def test_what_makes_no_sense_is_refused(argv: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run(argv)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "config.json"),
        ("[]", "is not a JSON object"),
        ("{", "is not a JSON object"),
        (json.dumps(LLAMA_70B | {"kv_lora_rank": 512}), "latent attention"),
    ],
)
def test_an_odd_model_folder_is_refused(tmp_path: Path, text: str | None, problem: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        run(["--model", str(tmp_path)])


def test_it_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", *BY_HAND]) == 0
    assert "327,680 bytes" in capsys.readouterr().out
