"""The default model with real weights: cascade on, off and transformers agree token for token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvway_worker.fetch import DEFAULT_MODEL, resolve_model
from kvway_worker.torch_engine import AttentionOptions, TorchEngine
from kvway_worker.torch_engine.attention import ALWAYS
from tests.worker.torch_models import Driver, generate

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

NUM_NEW = 12
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
def model_dir() -> Path:
    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    """Two tenants under one system prompt, three questions each, and a lone request."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    texts = [SYSTEM + tenant + question for tenant in TENANTS for question in QUESTIONS]
    return [tokenizer(text)["input_ids"] for text in (*texts, LONE)]


@pytest.fixture(scope="module")
def expected(model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    return generate(model_dir, prompts, NUM_NEW)


@pytest.mark.parametrize(
    "attention",
    [
        AttentionOptions("sdpa", costs=ALWAYS),
        AttentionOptions(compiles=False),
        AttentionOptions(compiles=False, cascade=False),
    ],
    ids=["on", "on where it pays, as measured", "off"],
)
def test_greedy_equals_generate_whatever_is_read_once(
    model_dir: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    attention: AttentionOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVWAY_HOME", str(tmp_path))
    engine = TorchEngine(
        model_dir, dtype="float32", device="cpu", num_blocks=128, attention=attention
    )
    driver = Driver(engine, max_num_batched_tokens=64)  # all but the lone one come in chunks
    requests = [driver.add(prompt, NUM_NEW) for prompt in prompts]
    driver.finish()
    assert [request.output_token_ids for request in requests] == expected
    assert bool(engine.attention().num_passes) or attention.costs != ALWAYS
