"""The cascade benchmark compares ways that agree, and says what it measured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import structlog
import torch

from kvway_kernels.costs import HeadShape
from kvway_worker.scheduling.prefix_groups import CascadeCosts
from kvway_worker.sim import SimEngine
from loadtests import bench_cascade, cascade_page, cascade_ways
from loadtests.cascade_engine import Decoding, Workload, grouping_s, in_turn
from loadtests.cascade_page import BEGIN, END, Outcome, with_measured
from loadtests.cascade_plot import Panel, svg
from loadtests.cascade_ways import Case, Tables, Ways
from loadtests.report import Report
from tests.worker.batching import answer
from tests.worker.torch_models import write_model

CASE = Case(HeadShape(4, 2, 8), torch.float32, num_requests=3, num_shared=48, num_own=20)
NEVER = CascadeCosts(0.0, 1.0, 0.0, 0.0, 0.0)
REPORT = Report("cascade", "c", "a machine", "a command", {"x": 1.5, "ms_y": 2.0})


@pytest.fixture(autouse=True)
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cascade_ways, "ROTATED_BYTES", 2**16)


def ways(case: Case = CASE, *, max_dense_bytes: int = 2**20) -> Ways:
    return Ways(
        case,
        device=torch.device("cpu"),
        implementation="sdpa",
        max_dense_bytes=max_dense_bytes,
    )


def test_all_ways_give_the_same_attention_on_several_layers() -> None:
    laid = ways()
    assert laid.names == ("paged", "gather", "contiguous", "cascade")
    assert len(laid._layers) > 1
    assert laid.largest_error() < 1e-6
    assert laid._plans["cascade"].shared == (((0, 1, 2), 0, 3),)
    assert laid._plans["paged"].shared == ()


def test_each_way_is_timed_as_often_and_one_without_memory_not_at_all() -> None:
    timed = ways(max_dense_bytes=0).time(rounds=4, budget_s=60)
    assert {way: len(seconds) for way, seconds in timed.seconds.items()} == {
        "paged": 4,
        "gather": 4,
        "cascade": 4,
    }


def test_blocks_of_requests_alternate_and_none_is_used_twice() -> None:
    laid = Tables.of(CASE)
    assert laid.tables == [[0, 1, 2, 3, 6], [0, 1, 2, 4, 7], [0, 1, 2, 5, 8]]
    assert (laid.num_blocks, laid.run) == (9, ((0, 1, 2), 0, 3))


def test_bytes_and_operations_are_those_of_the_case() -> None:
    assert CASE.key_bytes == 2 * 2 * 8 * 4
    assert CASE.once_bytes == (48 + 3 * 20) * 128
    assert CASE.plain_bytes == 3 * 68 * 128
    assert CASE.operations == 3 * 68 * 4 * 8 * 4  # two of one multiplication and one addition
    assert CASE.floor_s(CASE.once_bytes / 2, 1e18) == 2
    assert CASE.floor_s(1e18, CASE.operations / 3) == 3


def test_a_step_that_may_cascade_and_does_not_is_compared_with_a_plain_one() -> None:
    laid = ways()
    taken = iter([1.0, 3.0, 8.0, 4.0, 2.0, 2.0])  # plain first, may cascade first, plain first
    laid._clock.seconds = lambda call: (call(), next(taken))[1]  # type: ignore[method-assign]
    assert laid.slowdown(NEVER, rounds=3, budget_s=0) == 2.0
    assert laid._plans["step"].shared == ()


def test_planning_is_of_the_step_that_reads_the_shared_run_once() -> None:
    assert ways().planning_s(rounds=2) > 0


def test_two_engines_decode_in_turn_and_answers_are_compared() -> None:
    work = Workload(num_requests=3, prefix_tokens=40, own_tokens=5, max_tokens=6)
    prompts = work.prompts(256)

    def decoding() -> Decoding:
        engine = SimEngine(num_blocks=work.num_blocks(4), block_size=4)
        return Decoding(engine, work, vocab_size=256)

    on, off = decoding(), decoding()
    steps = in_turn(on, off)
    assert len(steps.on_s) == len(steps.off_s) >= 4
    assert steps.num_differing == 0
    assert on.answers == [answer(prompt, 6) for prompt in prompts]


def test_grouping_takes_time() -> None:
    assert grouping_s(NEVER, num_requests=3, num_tokens=128, num_steps=20) > 0


def test_a_plot_is_well_formed_and_has_every_line_once() -> None:
    lines = {"512 shared": [(1.0, 0.9), (64.0, 9.0)], "1024 shared": [(1.0, 1.0)]}
    drawn = svg([Panel("a", lines), Panel("b", lines)], x_label="n", y_label="times")
    texts = [each.text for each in ET.fromstring(drawn).iter() if each.text]  # noqa: S314
    assert texts.count("512 shared") == texts.count("1024 shared") == 2
    assert {"a", "b", "1", "64", "16", "0.5"} <= set(texts)


def test_a_run_fills_the_page_between_its_marks_and_nothing_else() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    outcome = Outcome("t", ("n", "p", "s"), [(32, 4096, 32), (1, 512, 32)], {})
    filled = with_measured(page, [outcome], REPORT, at=(4096, 32))
    assert filled.startswith("before\n")
    assert filled.endswith("\nafter\n")
    assert "old" not in filled
    assert "| 32 | 4096 | 32 |" in filled
    assert "| 1 | 512 | 32 |" not in filled
    assert "| `x` | 1.5 |" in filled
    assert "ms_y" not in filled
    assert with_measured(filled, [outcome], REPORT, at=(4096, 32)) == filled


def test_the_page_has_the_marks() -> None:
    text = cascade_page.PAGE.read_text(encoding="utf-8")
    assert 0 < text.index(BEGIN) < text.index(END)


def test_a_gpu_that_is_not_there_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench_cascade.main(["--device", "cuda"])
    assert "--device cuda: torch finds no GPU" in capsys.readouterr().err


def test_a_quick_run_measures_every_part_and_ends_with_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWAY_HOME", os.fspath(tmp_path / "home"))
    monkeypatch.setattr("kvway_kernels.costs._CACHED_BYTES", 2**20)
    output = tmp_path / "cascade.json"
    num_threads = str(torch.get_num_threads())
    arguments = ["--quick", "--rounds", "1", "--case-s", "0", "--implementation", "sdpa"]
    arguments += ["--model", str(write_model(tmp_path / "model")), "--threads", num_threads]
    try:
        assert bench_cascade.main([*arguments, "--output", str(output)]) == 0
    finally:
        structlog.reset_defaults()
    last = capsys.readouterr().out.splitlines()[-1]
    assert output.read_text() == last + "\n"
    metrics = json.loads(last)["metrics"]
    assert metrics["e2e_answers_differing"] == 0
    assert {
        "worst_slowdown_pct",
        "grouping_pct_64x8k",
        "planning_pct_64x8k",
        "e2e_decode_speedup_n32_p4k",
        "read_gb_per_s_float32",
    } <= set(metrics)
    assert metrics["ms_smollm2_float32_4_512_32_cascade"] > 0
