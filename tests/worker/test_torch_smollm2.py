"""The default model, fetched as a user would, answers through our engine as through transformers'.

Real weights, real template, float32: greedy answers equal `generate` token for token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvway_core.api import ChatMessage
from kvway_core.prompts import PromptEncoder
from kvway_worker.scheduling.sampling_params import TokenLogprobs
from kvway_worker.torch_engine import TorchEngine
from tests.worker.torch_models import Driver, check_by_transformers

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

NUM_NEW = 8
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
def prompts(smollm2: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chats = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        for question in QUESTIONS
    ]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]


@pytest.fixture(scope="module")
def expected(
    smollm2: Path, smollm2_engine: TorchEngine, prompts: list[list[int]]
) -> list[list[int]]:
    """Answers in a batch of eight, which are transformers' own."""
    driver = Driver(smollm2_engine)
    requests = [driver.add(prompt, NUM_NEW) for prompt in prompts]
    driver.finish()
    answers = [request.output_token_ids for request in requests]
    check_by_transformers(smollm2, list(zip(prompts, answers, strict=True)))
    return answers


def test_greedy_equals_transformers_in_a_batch_cold_and_warm(
    smollm2_engine: TorchEngine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    cold_and_warm(smollm2_engine, prompts, expected)


def cold_and_warm(
    engine: TorchEngine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    driver = Driver(engine)
    assert driver.answer(prompts[0], NUM_NEW) == (expected[0], 0)
    answer, num_cached = driver.answer(prompts[1], NUM_NEW)
    assert answer == expected[1]
    assert num_cached >= 96  # the shared part


@dataclass(frozen=True)
class Answer:
    """All that a request says; equality is bit for bit."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]


def ask(driver: Driver, prompt: Sequence[int], num_new: int, **params: Any) -> Answer:
    request = driver.add(prompt, num_new, logprobs=5, **params)
    driver.finish()
    logprobs = driver.logprobs[request.request_id]
    return Answer(tuple(request.output_token_ids), tuple(logprobs), tuple(request.prompt_logprobs))


def test_deterministic_answers_are_the_same_bit_for_bit(
    smollm2: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """P28, section 6 numbers 15 and 18; on two threads, where more would differ than on one."""
    engine = TorchEngine(smollm2, device="cpu", num_blocks=64, deterministic=True)
    cold_and_warm(engine, prompts, expected)
    asked, other, third = (prompt[-60:] for prompt in prompts[:3])  # 2 blocks and more are shared
    torch.set_num_threads(2)
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    whole = ask(Driver(engine), asked, 3, prompt_logprobs=1, **sampled)
    assert [one.token_id for one in whole.prompt_logprobs] == asked[1:]
    answer = replace(whole, prompt_logprobs=())

    warm = Driver(engine)
    warm.answer(other, 1)
    assert ask(warm, asked, 3, **sampled) == answer  # cached blocks and a copied tail
    assert ask(warm, asked, 3, **sampled) == answer  # fully cached
    assert ask(warm, asked, 1, prompt_logprobs=1).prompt_logprobs == whole.prompt_logprobs
    batched = Driver(engine, num_drafts=4, max_num_batched_tokens=75)
    batched.add(third, 9)
    assert ask(batched, asked, 3, **sampled) == answer
    torch.set_num_threads(1)


OWN_TOLERANCE, TOP_TOLERANCE = 0.25, 0.8
"""How far log probabilities of cold and warm may be apart in bfloat16: see decision 0010."""


def test_in_bfloat16_cold_and_warm_log_probabilities_are_close(
    smollm2: Path, prompts: list[list[int]]
) -> None:
    """Compared as far as the answers are the same, which they mostly are."""
    engine = TorchEngine(smollm2, dtype="bfloat16", device="cpu", num_blocks=128)
    colds = [ask(Driver(engine), prompt, NUM_NEW) for prompt in prompts[:4]]
    warm = Driver(engine)  # from here on: drivers of one engine write the same blocks
    warm.answer(prompts[-1], 2)
    hits = [ask(warm, prompt, NUM_NEW) for prompt in prompts[:4]]
    num_compared = 0
    for cold, hit in zip(colds, hits, strict=True):
        for a, b in zip(cold.logprobs, hit.logprobs, strict=True):
            if a.token_id != b.token_id:
                break
            num_compared += 1
            assert abs(a.logprob - b.logprob) <= OWN_TOLERANCE
            top = dict(a.top)
            assert all(abs(top[t] - p) <= TOP_TOLERANCE for t, p in b.top if t in top)
    assert num_compared >= 2 * NUM_NEW


def test_numbers_are_split_into_digits(smollm2: Path) -> None:
    """The conversion from GGUF loses this, and with it the meaning of every number."""
    encoder = PromptEncoder.load(smollm2)
    assert len(encoder.encode_text("2048")) == len(encoder.encode_text("2")) + 3


def test_text_makes_sense(smollm2: Path, smollm2_engine: TorchEngine) -> None:
    encoder = PromptEncoder.load(smollm2)
    question = ChatMessage(role="user", content="What is the capital of France?")
    answer, _ = Driver(smollm2_engine).answer(encoder.encode_chat([question]), 8)
    assert "Paris" in encoder.decode(answer)
