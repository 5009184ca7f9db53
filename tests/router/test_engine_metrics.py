"""What is read of the pages on which other engines say how they are."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvway_router.engine_metrics import MAX_LINE_BYTES, MetricsReader
from kvway_router.engine_report import EngineReport
from kvway_router.telemetry import Telemetry

VLLM = b"""# HELP python_gc_objects_collected_total Objects collected during gc
python_gc_objects_collected_total{generation="0"} 1.2437e+04
process_start_time_seconds 1.7e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 7.0
vllm:num_requests_waiting{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 9001.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 3.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000"} 1.0
"""
VLLM_OLD = b"""vllm:num_requests_running{model_name="m"} 7.0
vllm:num_requests_swapped{model_name="m"} 0.0
vllm:num_requests_waiting{model_name="m"} 3.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.25
vllm:cpu_cache_usage_perc{model_name="m"} 0.9
vllm:cache_config_info{block_size="16",num_cpu_blocks="9",num_gpu_blocks="1000"} 1.0
"""
VLLM_RANKS = b"""vllm:num_requests_running{engine="0",model_name="m"} 4
vllm:num_requests_running{engine="1",model_name="m"} 3
vllm:num_requests_waiting{engine="0",model_name="m"} 1
vllm:num_requests_waiting{engine="1",model_name="m"} 2
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.1
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="375"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="625"} 1.0
"""
LABELS = b'engine_type="unified",model_name="Qwen/Qwen3-0.6B",pp_rank="0"'
SGLANG = b"""# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{%(l)s,tp_rank="0"} 7.0
sglang:num_running_reqs_offline_batch{%(l)s,tp_rank="0"} 5.0
sglang:num_queue_reqs{%(l)s,tp_rank="0"} 3.0
sglang:token_usage{%(l)s,tp_rank="0"} 0.25
sglang:num_used_tokens{%(l)s,tp_rank="0"} 4000.0
sglang:max_total_num_tokens{%(l)s,tp_rank="0"} 16000.0
sglang:cache_hit_rate{%(l)s,tp_rank="0"} 0.8
""" % {b"l": LABELS}
SGLANG_RANKS = b"""sglang:num_running_reqs{dp_rank="0",priority="",tp_rank="0"} 4
sglang:num_running_reqs{dp_rank="0",priority="1",tp_rank="0"} 3
sglang:num_running_reqs{dp_rank="0",priority="",tp_rank="1"} 4
sglang:num_running_reqs{dp_rank="1",priority="",tp_rank="2"} 3
sglang:num_queue_reqs{dp_rank="0",priority="",tp_rank="0"} 3
sglang:num_queue_reqs{dp_rank="1",priority="",tp_rank="2"} 0
sglang:token_usage{dp_rank="0"} 0.5
sglang:token_usage{dp_rank="1"} 0.0
sglang:max_total_num_tokens{dp_rank="0"} 8000
sglang:max_total_num_tokens{dp_rank="1"} 8000
"""
LLAMA_CPP = b"""llamacpp:prompt_tokens_total 120
llamacpp:requests_processing 7
llamacpp:requests_deferred 3
"""
PAGES = {
    "vllm": VLLM,
    "vllm before 0.10": VLLM_OLD,
    "vllm ranks": VLLM_RANKS,
    "sglang": SGLANG,
    "sglang ranks": SGLANG_RANKS,
    "llama.cpp": LLAMA_CPP,
}


def read(*pieces: bytes) -> EngineReport:
    reader = MetricsReader()
    for piece in pieces:
        reader.feed(piece)
    return reader.report()


@pytest.mark.parametrize("engine", PAGES)
def test_each_engine_says_how_many_run_and_wait_and_how_full_it_is(engine: str) -> None:
    told = read(PAGES[engine]).telemetry()
    assert told is not None
    assert (told.num_running, told.num_waiting, told.waiting_tokens) == (7, 3, None)
    if engine != "llama.cpp":
        assert (told.used_tokens, told.total_tokens) == (4000, 16_000)
    assert told.lag_s == (30.0 if engine.startswith("sglang") else 1.0)


def test_what_is_not_said_is_not_taken_for_nothing() -> None:
    assert read(b"").telemetry() is None
    assert read(b"process_start_time_seconds 7\nup 1\n") == EngineReport(started_s=7.0, lag_s=1.0)
    usage_alone = read(b"vllm:kv_cache_usage_perc 0.5\nvllm:num_requests_running 2\n")
    assert usage_alone.telemetry() == Telemetry(num_running=2, lag_s=1.0)
    capacity_alone = read(b"sglang:max_total_num_tokens 64\n").telemetry()
    assert capacity_alone == Telemetry(total_tokens=64, lag_s=30.0)


@pytest.mark.parametrize(
    "line",
    [
        b"vllm:num_requests_running",
        b"vllm:num_requests_running{",
        b'vllm:num_requests_running{engine="0} 99',
        b'vllm:num_requests_running{engine="0"}99',
        b"vllm:num_requests_running{} many",
        b"vllm:num_requests_running NaN",
        b"vllm:num_requests_running +Inf",
        b"vllm:num_requests_running -4",
        b"vllm:num_requests_running_total 99",
        b" vllm:num_requests_running 99",
        b"# vllm:num_requests_running 99",
        b"\xff\x00\xfe",
        b"{" * 5000,
        b'vllm:num_requests_running{a="' + b"\\" * 5001,
        b"vllm:num_requests_running " + b"9" * (MAX_LINE_BYTES + 1),
        b"x" * MAX_LINE_BYTES + b"\rvllm:num_requests_running 99",
    ],
    ids=lambda line: repr(line[:50]),
)
def test_a_line_that_is_not_understood_costs_nothing_but_itself(line: bytes) -> None:
    good = b'vllm:num_requests_waiting{engine="0"} 3\n'
    assert read(line, b"\n", good) == read(good)
    assert read(good, line) == read(good)


def test_times_and_exemplars_behind_a_number_are_no_part_of_it() -> None:
    page = b'vllm:num_requests_running{m="a} b"} 5 1700000000\r\n'
    page += b'vllm:prompt_tokens_total{m="}"} 7 # {trace_id="x"} 9\n'
    report = read(page)
    assert (report.num_running, report.prompt_tokens) == (5, 7.0)


@given(
    page=st.sampled_from(sorted(PAGES.values())),
    cuts=st.lists(st.integers(0, 1100), max_size=8),
)
def test_a_page_may_come_in_any_pieces(page: bytes, cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(page)]
    assert read(*(page[a:b] for a, b in itertools.pairwise(ends))) == read(page)


def test_a_page_of_endless_ranks_and_lines_is_read_in_bounded_memory() -> None:
    reader = MetricsReader()
    for rank in range(3000):
        reader.feed(b'vllm:num_requests_running{engine="%d"} 1\n' % rank)
    for _ in range(50):
        reader.feed(b"y" * MAX_LINE_BYTES)
        assert len(reader._line) <= MAX_LINE_BYTES
    assert reader.report().num_running == 1024


@pytest.mark.timeout(60)
@pytest.mark.parametrize("unit", [b"x", b'a"', b'"', b"\\", b"{", b'"\\', b'x="', b"a=,"])
def test_a_line_takes_time_in_proportion_to_its_length(unit: bytes) -> None:
    """Were it the square of it, as when each letter may begin a name, this would take minutes."""
    labels = (unit * MAX_LINE_BYTES)[: MAX_LINE_BYTES - 100]
    for end in (b"", b"} 5"):
        line = b"vllm:num_requests_running{" + labels + end + b"\n"
        read(*[line] * 10)


def test_numbers_beyond_reason_are_bounded() -> None:
    report = read(
        b"vllm:num_requests_waiting 1e300\nvllm:kv_cache_usage_perc 97\n"
        b"sglang:max_total_num_tokens 1e300\n"
    )
    assert (report.num_waiting, report.usage, report.num_tokens) == (10**6, 1.0, None)
