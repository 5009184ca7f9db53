"""Costs are measured once per setting, and kept in files that may be missing, bad or foreign."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest
import torch
from structlog.testing import capture_logs

from kvway_kernels.costs import Costs, HeadShape
from kvway_worker.torch_engine.calibration import Setting, kept

COSTS = Costs(paged_key=5e-7, run=2e-4, run_key=4e-7, run_pair=8e-8, merge=3e-6)
SETTING = Setting.here(
    HeadShape(9, 3, 64),
    dtype=torch.float32,
    kv_dtype=torch.float32,
    device=torch.device("cpu"),
    implementation="sdpa",
)


class Measuring:
    """Counts how often it measures."""

    def __init__(self) -> None:
        self.num_times = 0

    def __call__(self) -> Costs:
        self.num_times += 1
        return COSTS


def test_a_second_start_measures_nothing(tmp_path: Path) -> None:
    measure = Measuring()
    folder = tmp_path / "deeper" / "costs"
    first = kept(SETTING, folder=folder, measure=measure)
    assert kept(SETTING, folder=folder, measure=measure) == first
    assert asdict(first) == asdict(COSTS)
    assert measure.num_times == 1
    assert [path.suffix for path in folder.iterdir()] == [".json"]  # nothing half written is left


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("processor", "another"),
        ("num_threads", 99),
        ("torch_version", "1.0"),
        ("implementation", "compiled"),
        ("num_heads", 12),
        ("num_kv_heads", 9),
        ("head_dim", 128),
        ("dtype", "bfloat16"),
        ("kv_dtype", "int8"),
        ("version", 99),
    ],
)
def test_every_part_of_a_setting_has_costs_of_its_own(
    tmp_path: Path, field: str, value: str | int
) -> None:
    measure = Measuring()
    kept(SETTING, folder=tmp_path, measure=measure)
    other = msgspec.structs.replace(SETTING, **{field: value})
    kept(other, folder=tmp_path, measure=measure)
    assert measure.num_times == 2
    kept(SETTING, folder=tmp_path, measure=measure)
    assert measure.num_times == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"setting": 3}', b"\xff\x00"])
def test_a_bad_file_is_logged_and_measured_again(tmp_path: Path, content: bytes) -> None:
    measure = Measuring()
    SETTING.file(tmp_path).write_bytes(content)
    with capture_logs() as logs:
        kept(SETTING, folder=tmp_path, measure=measure)
    assert logs[0]["event"] == "attention_costs_unreadable"
    assert measure.num_times == 1
    kept(SETTING, folder=tmp_path, measure=measure)
    assert measure.num_times == 1


@pytest.mark.parametrize(
    ("old", "new"), [(b'"num_threads":', b'"num_threads":9'), (b'"run":0.0002', b'"run":-1.0')]
)
def test_a_file_of_another_setting_or_with_nonsense_is_not_used(
    tmp_path: Path, old: bytes, new: bytes
) -> None:
    measure = Measuring()
    kept(SETTING, folder=tmp_path, measure=measure)
    path = SETTING.file(tmp_path)
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))
    kept(SETTING, folder=tmp_path, measure=measure)
    assert measure.num_times == 2


def test_a_file_that_cannot_be_put_in_place_leaves_none_behind(tmp_path: Path) -> None:
    SETTING.file(tmp_path).mkdir()
    with capture_logs() as logs:
        kept(SETTING, folder=tmp_path, measure=Measuring())
    assert "attention_costs_not_kept" in [log["event"] for log in logs]
    assert list(tmp_path.iterdir()) == [SETTING.file(tmp_path)]


def test_others_may_read_the_file_as_they_may_others_of_this_user(tmp_path: Path) -> None:
    kept(SETTING, folder=tmp_path, measure=Measuring())
    (tmp_path / "other").touch()
    assert SETTING.file(tmp_path).stat().st_mode == (tmp_path / "other").stat().st_mode


def test_how_long_it_took_to_measure_is_told(tmp_path: Path) -> None:
    with capture_logs() as logs:
        for _ in range(2):
            kept(SETTING, folder=tmp_path, measure=Measuring())
    assert [log["event"] for log in logs] == [
        "measuring_attention_started",
        "measuring_attention_done",
        "attention_costs",
        "attention_costs",
    ]
    assert logs[2]["from"] == "measured"
    assert logs[2]["duration_s"] >= 0
    assert logs[3]["from"] == "file"
    assert "duration_s" not in logs[3]


def test_where_nothing_can_be_written_it_is_measured_each_time(tmp_path: Path) -> None:
    measure = Measuring()
    (tmp_path / "file").touch()
    with capture_logs() as logs:
        for _ in range(2):
            found = kept(SETTING, folder=tmp_path / "file" / "costs", measure=measure)
            assert asdict(found) == asdict(COSTS)
    assert measure.num_times == 2
    assert "attention_costs_not_kept" in [log["event"] for log in logs]
