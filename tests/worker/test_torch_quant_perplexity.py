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


@pytest.fixture(scope="module")
def token_ids(smollm2: Path) -> list[int]:
    return PromptEncoder.load(smollm2).encode_text(TEXT)


def perplexity(engine: TorchEngine, token_ids: list[int]) -> float:
    driver = Driver(engine, max_num_batched_tokens=128)
    request = driver.add(token_ids, 1, prompt_logprobs=0)
    driver.finish()
    logprobs = [token.logprob for token in request.prompt_logprobs]
    assert len(logprobs) == len(token_ids) - 1 == 854
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.fixture(scope="module")
def unquantised(smollm2_engine: TorchEngine, token_ids: list[int]) -> float:
    assert smollm2_engine.kv_dtype == "float32"
    return perplexity(smollm2_engine, token_ids)


def test_the_model_reads_the_text_as_text(unquantised: float) -> None:
    """Else a change of the perplexity would say nothing."""
    assert 10 < unquantised < 60


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
def test_perplexity_changes_by_less_than_one_percent(
    smollm2: Path, kv_dtype: str, token_ids: list[int], unquantised: float
) -> None:
    """It changes by 1.7 % where int8 has two bits less."""
    engine = TorchEngine(smollm2, dtype="float32", device="cpu", num_blocks=64, kv_dtype=kv_dtype)
    changed = perplexity(engine, token_ids)
    print(f"{kv_dtype}: {changed:.4f}, unquantised {unquantised:.4f}")  # noqa: T201
    assert abs(changed / unquantised - 1) < 0.01
