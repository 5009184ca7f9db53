"""The default model with real weights: cascade on, off and transformers agree token for token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvway_worker.torch_engine import AttentionOptions, TorchEngine
from kvway_worker.torch_engine.attention import ALWAYS
from tests.worker.torch_models import Driver, check_by_transformers

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

NUM_NEW = 6
SYSTEM = "You answer for a ferry line between two islands. Be brief, be polite, be exact. " * 4
TENANTS = ("The morning boat leaves at six and takes cars. " * 5, "No boat leaves in storms. " * 6)
QUESTIONS = ("When is the first boat?", "May I bring a bicycle?", "What if there is a storm?")
LONE = "Write one line about lighthouses."


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    """Two tenants under one system prompt, three questions each, and a lone request."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = [SYSTEM + tenant + question for tenant in TENANTS for question in QUESTIONS]
    return [tokenizer(text)["input_ids"] for text in (*texts, LONE)]


def answers(engine: TorchEngine, prompts: list[list[int]]) -> list[list[int]]:
    driver = Driver(engine, max_num_batched_tokens=64)  # all but the lone one come in chunks
    requests = [driver.add(prompt, NUM_NEW) for prompt in prompts]
    driver.finish()
    return [request.output_token_ids for request in requests]


def test_greedy_equals_transformers_whatever_is_read_once(
    smollm2: Path,
    smollm2_engine: TorchEngine,
    prompts: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing, what pays by what is measured here, and everything."""
    monkeypatch.setenv("KVWAY_HOME", str(tmp_path))
    expected = answers(smollm2_engine, prompts)
    assert smollm2_engine.attention().cascade == "off: --no-cascade"
    check_by_transformers(smollm2, list(zip(prompts, expected, strict=True)))
    options = AttentionOptions(compiles=False)
    engine = TorchEngine(smollm2, dtype="float32", device="cpu", num_blocks=128, attention=options)
    assert answers(engine, prompts) == expected
    engine._attention = engine._new_attention(engine._attention._choice, ALWAYS)
    assert answers(engine, prompts) == expected
    assert engine.attention().num_passes
