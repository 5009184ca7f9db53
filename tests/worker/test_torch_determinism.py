"""The deterministic mode: the same tokens and log probabilities, whatever happens to a request."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from kvway_worker.scheduling.sampling_params import SamplingParams, TokenLogprobs
from kvway_worker.torch_engine import TorchEngine
from kvway_worker.torch_engine.decoder import FAMILIES
from tests.worker.torch_models import Driver, write_model

NUM_NEW = 30

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 11},
    # So few that guesses are often right.
    "three tokens": {"temperature": 1.0, "seed": 13, "allowed_token_ids": frozenset({1, 2, 3})},
    "everything": {
        "temperature": 1.1,
        "top_k": 50,
        "min_p": 0.02,
        "seed": 12,
        "min_tokens": 20,
        "stop_token_ids": frozenset(range(40)),
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": ((7, 1.5), (9, -2.0)),
        "bad_words": ((3, 4), (5,)),
    },
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> TorchEngine:
    return TorchEngine(folder, device="cpu", num_blocks=256, deterministic=True)


@pytest.fixture(scope="module")
def small_engine(folder: Path) -> TorchEngine:
    """An engine in whose blocks three requests do not fit."""
    return TorchEngine(folder, device="cpu", num_blocks=16, max_model_len=256, deterministic=True)


def tokens_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


# Its end repeats itself, so drafts are found; 150 tokens are nine blocks and a part of one.
PROMPT = [*tokens_of(0, 120), *tokens_of(1, 10) * 3]


@dataclass(frozen=True)
class Answer:
    """All that a request says, floats as they are: equality is bit for bit."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


Run: TypeAlias = Callable[[TorchEngine, dict[str, Any]], Answer]


def answer(driver: Driver, params: dict[str, Any], *, cached: int = 0) -> Answer:
    request = driver.add(PROMPT, NUM_NEW, logprobs=3, **params)
    driver.finish()
    assert request.cached_tokens == cached
    return Answer(tuple(request.output_token_ids), tuple(driver.logprobs[request.request_id]))


def alone(engine: TorchEngine, params: dict[str, Any]) -> Answer:
    return answer(Driver(engine), params)


def on_cached_blocks(engine: TorchEngine, params: dict[str, Any]) -> Answer:
    driver = Driver(engine)
    driver.answer([*PROMPT[:64], 1, 2, 3], 5)
    return answer(driver, params, cached=64)


def on_a_copied_tail(engine: TorchEngine, params: dict[str, Any]) -> Answer:
    driver = Driver(engine)
    driver.answer([*PROMPT[:107], 256], 5)
    return answer(driver, params, cached=107)


def fully_cached(engine: TorchEngine, params: dict[str, Any]) -> Answer:
    driver = Driver(engine)
    driver.answer([*PROMPT, 256], 5)
    return answer(driver, params, cached=len(PROMPT) - 1)


def in_chunks_of(num_tokens: int) -> Run:
    def run(engine: TorchEngine, params: dict[str, Any]) -> Answer:
        return answer(
            Driver(engine, max_num_batched_tokens=num_tokens, max_num_seqs=min(4, num_tokens)),
            params,
        )

    return run


def in_a_batch(engine: TorchEngine, params: dict[str, Any]) -> Answer:
    driver = Driver(engine, max_num_batched_tokens=96)
    for i in range(6):
        driver.add(tokens_of(20 + i, 5 + 17 * i), 10 + 9 * i, temperature=float(i % 2))
        if i % 2:
            driver.step()
    return answer(driver, params)


def with_drafts(engine: TorchEngine, params: dict[str, Any]) -> Answer:
    driver = Driver(engine, num_drafts=5)
    found = answer(driver, params)
    counters = driver.scheduler.counters
    assert counters.num_drafts > counters.num_accepted
    assert counters.num_accepted or "allowed_token_ids" not in params
    return found


def with_drafts_in_a_batch(engine: TorchEngine, params: dict[str, Any]) -> Answer:
    driver = Driver(engine, num_drafts=3, max_num_batched_tokens=50)
    for i in range(4):
        driver.add(tokens_of(30 + i, 9) * 3, 40)
    driver.step()
    return answer(driver, params)


def as_a_fork(engine: TorchEngine, params: dict[str, Any]) -> Answer:
    driver = Driver(engine)
    own = SamplingParams(NUM_NEW, logprobs=3, **params)
    first = driver.add(PROMPT, NUM_NEW, temperature=1.0, seed=99, forks=[own])
    (fork,) = first.forks
    driver.finish()
    return Answer(tuple(fork.output_token_ids), tuple(driver.logprobs[fork.request_id]))


RUNS: list[Run] = [
    on_cached_blocks,
    on_a_copied_tail,
    fully_cached,
    in_chunks_of(1),
    in_chunks_of(7),
    in_chunks_of(32),
    in_chunks_of(90),
    in_a_batch,
    with_drafts,
    with_drafts_in_a_batch,
    as_a_fork,
]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logprobs_are_the_same_bit_for_bit(engine: TorchEngine, kind: str) -> None:
    """Section 6 numbers 15, 18 and 19: cold is warm, whole is chunked, alone is batched."""
    expected = alone(engine, KINDS[kind])
    assert len(expected.logprobs) == len(expected.token_ids)
    assert len(expected.token_ids) >= 20
    for run in RUNS:
        assert run(engine, KINDS[kind]) == expected, run


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_that_may_be_deterministic_is(tmp_path: Path, model_type: str) -> None:
    """Those of our own decoder."""
    folder = write_model(tmp_path, model_type, sliding_window=None)
    engine = TorchEngine(folder, device="cpu", num_blocks=256, deterministic=True)
    expected = alone(engine, KINDS["sampled"])
    for run in (on_a_copied_tail, in_chunks_of(7), in_a_batch, with_drafts_in_a_batch):
        assert run(engine, KINDS["sampled"]) == expected, run


@pytest.mark.parametrize("num_drafts", [0, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_preempted_request_says_the_same(
    engine: TorchEngine, small_engine: TorchEngine, kind: str, num_drafts: int
) -> None:
    """Its tokens are drawn by position, so those behind a preemption are the same, too."""
    expected = alone(engine, KINDS[kind])
    driver = Driver(small_engine, num_drafts=num_drafts)
    driver.add(tokens_of(40, 60), 100, temperature=1.0)
    request = driver.add(PROMPT, NUM_NEW, logprobs=3, **KINDS[kind])
    driver.finish()
    assert driver.scheduler.counters.preemptions
    logprobs = driver.logprobs[request.request_id]
    assert Answer(tuple(request.output_token_ids), tuple(logprobs)) == expected


def prompt_logprobs(driver: Driver) -> list[TokenLogprobs]:
    request = driver.add(PROMPT, 3, prompt_logprobs=2)
    driver.finish()
    assert request.cached_tokens == 0
    return request.prompt_logprobs


def test_prompt_logprobs_are_the_same_cold_warm_chunked_and_batched(engine: TorchEngine) -> None:
    """P28, section 6 number 15: the cache is not read, every position is there."""
    expected = prompt_logprobs(Driver(engine))
    assert [one.token_id for one in expected] == PROMPT[1:]
    assert all(len(one.top) == 2 for one in expected)
    warm = Driver(engine)
    warm.answer(PROMPT, 3)
    assert prompt_logprobs(warm) == expected
    for chunk in (5, 33, 100):
        driver = Driver(engine, max_num_batched_tokens=chunk, max_num_seqs=4)
        driver.add(tokens_of(50, 40), 30)
        driver.add(tokens_of(51, 40), 3, prompt_logprobs=0)
        assert prompt_logprobs(driver) == expected


def test_prompt_logprobs_are_those_of_the_answers_positions(engine: TorchEngine) -> None:
    """A prompt that holds the answer gets the log probabilities that the answer had."""
    expected = alone(engine, {})
    driver = Driver(engine)
    whole = driver.add([*PROMPT, *expected.token_ids], 1, prompt_logprobs=3)
    driver.finish()
    assert tuple(whole.prompt_logprobs[len(PROMPT) - 1 :]) == expected.logprobs


@pytest.mark.parametrize("seed", range(4))
def test_drafts_on_shared_prefixes_with_aborts_in_a_loop_change_no_answer(
    engine: TorchEngine, seed: int
) -> None:
    """Section 6 number 19: what is wrongly guessed is never found by anybody."""
    rng = random.Random(seed)
    prompts = [[*PROMPT[: rng.randrange(40, 150)], *tokens_of(60 + i, 4) * 4] for i in range(6)]
    few = {"allowed_token_ids": frozenset({1, 2, 3})}
    kinds: list[dict[str, Any]] = [
        few,
        {"temperature": 0.8, "seed": 5},
        few | {"temperature": 1.0},
    ]
    expected = []
    for i, prompt in enumerate(prompts):
        request = (plain := Driver(engine)).add(prompt, 25, **kinds[i % 3])
        plain.finish()
        expected.append(request.output_token_ids)
    driver = Driver(engine, num_drafts=6, max_num_batched_tokens=64)
    for _ in range(4):
        requests = []
        order = rng.sample(range(6), 6)
        for i in order:
            requests.append(driver.add(prompts[i], 25, **kinds[i % 3]))
            victim = driver.add(prompts[i], 25, **kinds[i % 3])
            for _ in range(rng.randrange(4)):
                driver.step()
            driver.scheduler.abort(victim.request_id)
        driver.finish()
        for i, request in zip(order, requests, strict=True):
            assert request.output_token_ids == expected[i]
    assert 0 < driver.scheduler.counters.num_accepted < driver.scheduler.counters.num_drafts


def largest_difference(one: Sequence[TokenLogprobs], other: Sequence[TokenLogprobs]) -> float:
    assert [a.token_id for a in one] == [b.token_id for b in other]
    return max(abs(a.logprob - b.logprob) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_it_cold_and_warm_are_close(folder: Path, dtype: str) -> None:
    """The answer's tokens are given, so that one different token does not change all others."""
    engine = TorchEngine(folder, dtype=dtype, device="cpu", num_blocks=64)
    cold = prompt_logprobs(Driver(engine))
    chunked = prompt_logprobs(Driver(engine, max_num_batched_tokens=13, max_num_seqs=4))
    assert largest_difference(cold, chunked) <= {"float32": 1e-4, "bfloat16": 2.0}[dtype]
