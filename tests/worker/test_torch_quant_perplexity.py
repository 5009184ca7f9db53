"""What quantised KV blocks cost the default model: its perplexity on a text of our own.

The text (perplexity.txt, 855 tokens) was written for this test. It is computed in chunks through
scheduler and engine, so that attention reads every key and value from quantised blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvway_core.prompts import PromptEncoder
from kvway_worker.fetch import DEFAULT_MODEL, resolve_model
from kvway_worker.torch_engine import TorchEngine
from tests.worker.torch_models import Driver

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

TEXT = (Path(__file__).parent / "perplexity.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def perplexity(kv_dtype: str) -> float:
    model_dir = resolve_model(DEFAULT_MODEL)
    engine = TorchEngine(
        model_dir, dtype="float32", device="cpu", num_blocks=64, kv_dtype=kv_dtype
    )
    driver = Driver(engine, max_num_batched_tokens=128)
    token_ids = PromptEncoder.load(model_dir).encode_text(TEXT)
    request = driver.add(token_ids, 1, prompt_logprobs=0)
    driver.finish()
    logprobs = [token.logprob for token in request.prompt_logprobs]
    assert len(logprobs) == len(token_ids) - 1 == 854
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.fixture(scope="module")
def unquantised() -> float:
    return perplexity("auto")


def test_the_model_reads_the_text_as_text(unquantised: float) -> None:
    """Else a change of the perplexity would say nothing."""
    assert 10 < unquantised < 60


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
def test_perplexity_changes_by_less_than_one_percent(kv_dtype: str, unquantised: float) -> None:
    changed = perplexity(kv_dtype)
    print(f"{kv_dtype}: {changed:.4f}, unquantised {unquantised:.4f}")  # noqa: T201
    assert abs(changed / unquantised - 1) < 0.01
