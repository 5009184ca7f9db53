"""The example that starts from transformers alone does what its page says."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from docs.examples import plain_transformers
from docs.examples.plain_transformers import continue_from, kv_bytes, prefill
from tests.worker.torch_models import TINY, generate, write_model

PREFIX = [(7 * i) % 250 for i in range(40)]
PROMPTS = [[*PREFIX, 1, 2, 3], [*PREFIX, 9, 8, 7]]
BYTES_PER_TOKEN = (
    2 * TINY["num_hidden_layers"] * TINY["num_key_value_heads"] * TINY["head_dim"] * 4
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path)


def test_a_copied_cache_answers_as_the_whole_prompt_does_and_stays_as_it_was(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cache = prefill(model, PREFIX)
    answers = []
    for prompt in PROMPTS:
        own = copy.deepcopy(cache)
        answers += continue_from(model, own, [prompt], 5)
        assert kv_bytes(own) == (len(prompt) + 4) * BYTES_PER_TOKEN
    assert answers == generate(folder, PROMPTS, 5)
    assert kv_bytes(cache) == len(PREFIX) * BYTES_PER_TOKEN


def test_a_batch_of_copies_answers_as_one_after_another(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cache = prefill(model, PREFIX)
    cache.batch_repeat_interleave(len(PROMPTS))
    assert continue_from(model, cache, PROMPTS, 5) == generate(folder, PROMPTS, 5)


def test_the_example_prints_what_each_request_cost(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        plain_transformers.main([str(folder), "--prefix-tokens", "40", "--max-tokens", "3"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("prefix     40 tokens, ")
    assert sum(line.startswith("request    copy ") for line in lines) == len(
        plain_transformers.QUESTIONS
    )
