"""The default model, fetched as a user would, answers through our engine as through transformers'.

Real weights, real template, float32: greedy answers equal `generate` token for token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvway_core.api import ChatMessage
from kvway_core.prompts import PromptEncoder
from kvway_worker.fetch import DEFAULT_MODEL, resolve_model
from kvway_worker.torch_engine import TorchEngine
from tests.worker.torch_models import Driver, generate

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

NUM_NEW = 12
SYSTEM = (
    "You are the help desk of a small library in a harbour town. Answer in one short sentence. "
    "The library is open from 10 to 18 on weekdays and from 10 to 14 on Saturdays. A card costs "
    "12 euros a year, 6 for students. Books may be kept for 28 days and renewed 2 times; a late "
    "book costs 20 cents a day. The reading room has 45 seats, 8 of them with a computer."
)
QUESTIONS = (
    "What does a card cost?",
    "How long may I keep a book?",
    "When do you close on Saturday?",
    "How many computers are there?",
    "What is the capital of France?",
    "Write a haiku about ships.",
    "Count from 1 to 12.",
    "Who are you?",
)


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
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    chats = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        for question in QUESTIONS
    ]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]


@pytest.fixture(scope="module")
def expected(model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    return generate(model_dir, prompts, NUM_NEW)


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_greedy_equals_generate_cold_warm_and_in_a_batch_of_eight(
    model_dir: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    *,
    deterministic: bool,
) -> None:
    engine = TorchEngine(
        model_dir, dtype="float32", device="cpu", num_blocks=512, deterministic=deterministic
    )
    driver = Driver(engine)
    assert driver.answer(prompts[0], NUM_NEW) == (expected[0], 0)
    answer, num_cached = driver.answer(prompts[1], NUM_NEW)
    assert answer == expected[1]
    assert num_cached >= 96  # every full block of the shared part
    assert num_cached % engine.block_size == 0
    driver = Driver(engine)
    requests = [driver.add(prompt, NUM_NEW) for prompt in prompts]
    driver.finish()
    assert [request.output_token_ids for request in requests] == expected


def test_numbers_are_split_into_digits(model_dir: Path) -> None:
    """The conversion from GGUF loses this, and with it the meaning of every number."""
    encoder = PromptEncoder.load(model_dir)
    assert len(encoder.encode_text("2048")) == len(encoder.encode_text("2")) + 3


def test_text_makes_sense(model_dir: Path) -> None:
    encoder = PromptEncoder.load(model_dir)
    question = ChatMessage(role="user", content="What is the capital of France?")
    engine = TorchEngine(model_dir, device="cpu", num_blocks=8)
    answer, _ = Driver(engine).answer(encoder.encode_chat([question]), 8)
    assert "Paris" in encoder.decode(answer)
