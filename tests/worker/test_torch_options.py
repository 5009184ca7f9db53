"""`--deterministic` beside every other option: the same bits, or refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvway_core.testing.fake_clock import FakeClock
from kvway_worker.loading import load_model
from kvway_worker.scheduling.sampling_params import TokenLogprobs
from kvway_worker.settings import WorkerSettings
from kvway_worker.torch_engine import TorchEngine
from tests.worker.torch_models import Driver, write_model

PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(60)] + [5, 6, 7, 8] * 5  # drafts are found
NUM_NEW = 12


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> WorkerSettings:
    folder = write_model(tmp_path_factory.mktemp("tiny"))
    return WorkerSettings(model=str(folder), num_blocks=64, device="cpu", deterministic=True)


@dataclass(frozen=True)
class Answer:
    """All that a request says; equality is bit for bit."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


def answers(settings: WorkerSettings) -> list[Answer]:
    """Load a worker's engine; return what one request says cold, warm, and among others."""
    assert settings.validate() == []
    engine = load_model(settings, Path(settings.model or ""), FakeClock()).engine
    assert isinstance(engine, TorchEngine)
    driver = Driver(engine, num_drafts=settings.speculate_ngram)
    found = [said(driver), said(driver)]
    driver = Driver(engine, num_drafts=settings.speculate_ngram, max_num_batched_tokens=64)
    for tail in range(3):  # with it, they share 48 tokens in the same steps
        driver.add([*PROMPT[:50], tail], NUM_NEW)
    found.append(said(driver))
    assert bool(driver.scheduler.counters.num_drafts) == bool(settings.speculate_ngram)
    assert engine.attention().cascade == "off: --deterministic"
    return found


def said(driver: Driver) -> Answer:
    request = driver.add(PROMPT, NUM_NEW, logprobs=2)
    driver.finish()
    return Answer(tuple(request.output_token_ids), tuple(driver.logprobs[request.request_id]))


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8_e4m3"])
def test_no_option_beside_it_changes_a_bit(settings: WorkerSettings, kv_dtype: str) -> None:
    """Cascade, compiling and speculation, on and off; each dtype of keys and values for itself."""
    found: list[Answer] = []
    for cascade, compiles, num_drafts in itertools.product([True, False], [True, False], [0, 3]):
        options: dict[str, Any] = {"cascade": cascade, "compile": compiles}
        found += answers(
            replace(settings, kv_dtype=kv_dtype, speculate_ngram=num_drafts, **options)
        )
    assert len(found) == 24
    assert found == found[:1] * 24


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ({"attention": "compiled"}, "--attention compiled and --deterministic exclude each other"),
        ({"attention": "triton"}, "--attention triton and --deterministic exclude each other"),
        ({"dtype": "bfloat16"}, "--deterministic works in float32 on a CPU"),
        ({"device": "cuda"}, "--deterministic works in float32 on a CPU"),
    ],
)
def test_what_it_cannot_be_beside_is_refused_by_name(
    settings: WorkerSettings, option: dict[str, Any], problem: str
) -> None:
    [line] = replace(settings, **option).validate()
    assert problem in line
