"""The plain way with transformers, a deep copy of the prefix per request, beside kvway's engine.

Each case has a process of its own, so that none inherits another's memory. It loads the model,
computes the prefix, then runs the requests; what is measured is the requests, and the memory
beyond that of the loaded model.

    copies       docs/examples/plain_transformers.py: one request after another
    batch        the same, all requests in one batch; all prompts are equally long, which is kind
    kvway        our engine in process: blocks shared, requests batched as they come
"""

from __future__ import annotations

import copy
import logging
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

import structlog
from tqdm import tqdm

from loadtests.memory import forget_peak, peak_bytes, resident_bytes

Way = Literal["copies", "batch", "kvway"]
BLOCK_SIZE = 16

TURNS = 3
"""How often each case is run: one of them may fall into a bad moment of the machine."""


class Case(NamedTuple):
    """One way to run so many requests on one prefix."""

    way: Way
    num_requests: int
    model_dir: Path
    dtype: str
    num_threads: int
    prefix_tokens: int = 1024
    own_tokens: int = 32
    max_tokens: int = 16

    @property
    def most_tokens(self) -> int:
        """Tokens whose KV one request has at its end: its last token is never fed back."""
        return self.prefix_tokens + self.own_tokens + self.max_tokens - 1

    def prompts(self, vocab_size: int) -> tuple[list[int], list[list[int]]]:
        """Return the prefix, and the prompts that begin with it; the same ones for every way."""
        chooser = random.Random(5)
        ids = range(vocab_size)
        prefix = chooser.choices(ids, k=self.prefix_tokens)
        own = (chooser.choices(ids, k=self.own_tokens) for _ in range(self.num_requests))
        return prefix, [[*prefix, *tokens] for tokens in own]


class Outcome(NamedTuple):
    """What a case took.

    Attributes:
        prefix_s: Computing the prefix.
        requests_s: All requests, from the first copy or lookup to the last token.
        kv_bytes: Most keys and values there were at one time, the prefix's included.
        rss_bytes: Most memory beyond that of the loaded model, while the requests ran.
        answers: Their tokens.
    """

    prefix_s: float
    requests_s: float
    kv_bytes: int
    rss_bytes: int
    answers: list[list[int]]


def measure(cases: list[Case], turns: int = TURNS) -> list[Outcome]:
    """Run the cases one after another, each in a fresh process, and all of them several times.

    Returns:
        The outcome of each case in its last turn, with the medians of all turns as times.
    """
    runs = list(
        tqdm(_outcomes(cases * turns), total=turns * len(cases), unit="case", file=sys.stderr)
    )
    of_case = [runs[index :: len(cases)] for index in range(len(cases))]
    return [
        each[-1]._replace(
            prefix_s=median(outcome.prefix_s for outcome in each),
            requests_s=median(outcome.requests_s for outcome in each),
        )
        for each in of_case
    ]


def cases(
    model_dir: Path, *, dtype: str, num_threads: int, counts: tuple[int, ...] = (1, 8, 32)
) -> list[Case]:
    """Return every way with every number of requests."""
    return [Case(way, n, model_dir, dtype, num_threads) for n in counts for way in get_args(Way)]


def run(case: Case) -> Outcome:
    """Run a case in this process."""
    import torch

    torch.set_num_threads(case.num_threads)
    return _run_kvway(case) if case.way == "kvway" else _run_plain(case)


def quiet() -> None:
    """Say nothing of loading; what goes wrong is said by an exception."""
    from transformers.utils import logging as transformers_logging

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    transformers_logging.disable_progress_bar()


def _outcomes(cases: list[Case]) -> Iterator[Outcome]:
    spawn = get_context("spawn")
    with ProcessPoolExecutor(
        1, mp_context=spawn, max_tasks_per_child=1, initializer=quiet
    ) as pool:
        for case in cases:
            yield pool.submit(run, case).result()


def _run_plain(case: Case) -> Outcome:
    import torch
    from transformers import AutoModelForCausalLM

    from docs.examples.plain_transformers import continue_from, kv_bytes, prefill

    model = AutoModelForCausalLM.from_pretrained(
        case.model_dir, dtype=getattr(torch, case.dtype)
    ).eval()
    prefix, prompts = case.prompts(model.config.vocab_size)
    batches = [prompts] if case.way == "batch" else [[prompt] for prompt in prompts]
    # What has its shape for the first time is slow.
    cache = prefill(model, prefix)
    cache.batch_repeat_interleave(len(batches[0]))
    continue_from(model, cache, batches[0], 2)
    del cache
    before = resident_bytes()
    started = time.perf_counter()
    cache = prefill(model, prefix)
    prefix_s = time.perf_counter() - started
    resident_bytes()
    forget_peak()
    answers: list[list[int]] = []
    most = 0
    started = time.perf_counter()
    for batch in batches:
        own = copy.deepcopy(cache)
        if len(batch) > 1:
            own.batch_repeat_interleave(len(batch))
        answers += continue_from(model, own, batch, case.max_tokens)
        most = max(most, kv_bytes(own))
    requests_s = time.perf_counter() - started
    peak = peak_bytes() - before
    return Outcome(prefix_s, requests_s, kv_bytes(cache) + most, peak, answers)


def _run_kvway(case: Case) -> Outcome:
    from kvway_worker.torch_engine import AttentionOptions, TorchEngine
    from loadtests.steps import StepLoop

    own_blocks = -(-case.most_tokens // BLOCK_SIZE) - case.prefix_tokens // BLOCK_SIZE
    engine = TorchEngine(
        case.model_dir,
        dtype=case.dtype,
        num_blocks=case.prefix_tokens // BLOCK_SIZE + (own_blocks + 1) * case.num_requests + 1,
        block_size=BLOCK_SIZE,
        num_threads=case.num_threads,
        attention=AttentionOptions(),  # as `kvway worker` does
    )
    prefix, prompts = case.prompts(engine.vocab_size)
    # What has its shape for the first time is slow. And every block of the engine is written then,
    # so that its memory is in `before`, to which it does not belong: it is added again below.
    pool_bytes = engine.num_blocks * BLOCK_SIZE * kv_bytes_per_token(case.model_dir, case.dtype)
    other = list(reversed(prefix))
    warm_up = StepLoop(engine)
    warm_up.run([other], 1)
    warm_up.run([[*other, *prompt[len(prefix) :]] for prompt in prompts], case.max_tokens)
    loop = StepLoop(engine)
    before = resident_bytes() - pool_bytes
    first = loop.run([prefix], 1)
    resident_bytes()
    forget_peak()
    rest = loop.run(prompts, case.max_tokens)
    peak = peak_bytes() - before
    if rest.cached_tokens != case.num_requests * case.prefix_tokens:
        sys.exit(f"{rest.cached_tokens} prompt tokens were cached; the prefix was not shared")
    num_bytes = rest.num_blocks * BLOCK_SIZE * kv_bytes_per_token(case.model_dir, case.dtype)
    return Outcome(first.total_s, rest.total_s, num_bytes, peak, rest.answers)


def kv_bytes_per_token(model_dir: Path, dtype: str) -> int:
    """Return the bytes of keys and values of one token, over all layers."""
    import torch
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(model_dir)
    heads = config.num_key_value_heads
    size: int = getattr(torch, dtype).itemsize
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return int(2 * config.num_hidden_layers * heads * head_dim * size)
