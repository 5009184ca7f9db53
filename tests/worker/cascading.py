"""Random batches whose prompts share prefixes inside prefixes, and transformers' answers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from kvway_worker.torch_engine import TorchEngine
from tests.worker.torch_models import Driver, generate

NUM_NEW = 12
"""Tokens of an answer at most."""


@dataclass(frozen=True)
class Batch:
    """Prompts that share prefixes inside prefixes, and how they come.

    Attributes:
        prompts: Of two groups under one system prompt, of a group of its own, and lone ones.
        num_new: Tokens of each answer.
        gaps: Steps before the next one comes.
        chunk: Tokens of a step at most.
    """

    prompts: list[list[int]]
    num_new: list[int]
    gaps: list[int]
    chunk: int


def random_batch(seed: int) -> Batch:
    rng = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return [rng.randrange(256) for _ in range(length)]

    system, other = tokens(rng.randint(16, 70)), tokens(rng.randint(16, 50))
    heads = [[*system, *tokens(rng.randint(5, 50))] for _ in range(2)] + [system, other, []]
    prompts = [[*rng.choice(heads), *tokens(rng.randint(1, 60))] for _ in range(10)]
    prompts.append(list(rng.choice(prompts)))  # one twice: shared up to its last full block
    return Batch(
        prompts,
        [rng.randint(3, NUM_NEW) for _ in prompts],
        [rng.choice([0, 0, 0, 1, 3]) for _ in prompts],
        rng.choice([24, 60, 2048]),
    )


def answers(engine: TorchEngine, batch: Batch) -> list[list[int]]:
    driver = Driver(engine, max_num_batched_tokens=batch.chunk)
    requests = []
    for prompt, num_new, gap in zip(batch.prompts, batch.num_new, batch.gaps, strict=True):
        requests.append(driver.add(prompt, num_new))
        for _ in range(gap):
            driver.step()
    driver.finish()
    return [request.output_token_ids for request in requests]


def expected(folder: Path, batch: Batch) -> list[list[int]]:
    whole = generate(folder, batch.prompts, NUM_NEW)
    return [answer[:num] for answer, num in zip(whole, batch.num_new, strict=True)]


def batch_of_256(engine: TorchEngine) -> list[tuple[list[int], list[int]]]:
    """Let 256 requests decode together; return prompts and answers.

    They are of five groups, four under one system prompt, and lone ones. No prompt is there twice.
    """
    rng = random.Random(256)

    def tokens(length: int) -> list[int]:
        return [rng.randrange(256) for _ in range(length)]

    system = tokens(16)
    heads = [[*system, *tokens(16 + i)] for i in range(4)] + [tokens(32), []]
    prompts = [[*heads[i % 6], i, *tokens(i % 9)] for i in range(256)]
    driver = Driver(engine, max_num_seqs=256, max_num_batched_tokens=4096)
    for head in heads:  # so that the others find it
        driver.answer([*head, 255], 1)
    requests = [driver.add(prompt, 4) for prompt in prompts]
    most = 0
    while driver.scheduler.has_work:
        most = max(most, len(driver.step().rows))
    assert most == 256
    return [(prompt, r.output_token_ids) for prompt, r in zip(prompts, requests, strict=True)]
