"""Tiny models with random weights, and a driver that runs prompts through scheduler and engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvway_core.blocks import Namespace
from kvway_core.testing.byte_model import write_byte_model
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.scheduling.sampling_params import SamplingParams, TokenLogprobs
from kvway_worker.scheduling.scheduler import Scheduler
from kvway_worker.scheduling.sequence import Sequence as Request
from kvway_worker.scheduling.step import StepPlan
from kvway_worker.torch_engine import TorchEngine

TINY: Mapping[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    # Wide enough that the likeliest token is ahead of the next by more than rounding.
    "initializer_range": 0.4,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}


def write_model(folder: Path, model_type: str = "llama", **changes: Any) -> Path:
    """Write a tiny model of an architecture with random weights and the byte tokenizer."""
    write_byte_model(folder)
    config = AutoConfig.for_model(model_type, **{**TINY, **changes})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def generate(folder: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Return transformers' own greedy answers, in float32, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def check_by_transformers(folder: Path, answered: Sequence[tuple[list[int], list[int]]]) -> None:
    """Check greedy answers in one call of transformers' model, which is given prompt and answer.

    What is behind a token has no effect on it: rows are as long as the longest.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    longest = max(len(prompt) + len(answer) for prompt, answer in answered)
    ids = torch.tensor([[*p, *a, *[0] * (longest - len(p) - len(a))] for p, a in answered])
    with torch.inference_mode():
        best = model(ids, use_cache=False).logits.argmax(-1)
    for row, (prompt, answer) in zip(best.tolist(), answered, strict=True):
        assert row[len(prompt) - 1 : len(prompt) + len(answer) - 1] == answer


class Driver:
    """Runs requests to their end: the engine's loop without its thread.

    Attributes:
        logprobs: Request id -> those of its answer so far, if it asks for them.
    """

    def __init__(
        self,
        engine: TorchEngine,
        *,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 16,
        num_drafts: int = 0,
    ) -> None:
        self.engine = engine
        self.pool = BlockPool(engine.num_blocks, engine.block_size)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=engine.max_model_len,
            num_drafts=num_drafts,
            draft_min_match=1,
        )
        self.logprobs: defaultdict[str, list[TokenLogprobs]] = defaultdict(list)
        self._num_requests = 0

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        forks: Sequence[SamplingParams] = (),
        **params: Any,
    ) -> Request:
        request = self._request(
            prompt, SamplingParams(max_tokens, **params), [self._request(prompt, p) for p in forks]
        )
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        for output in self.scheduler.commit(plan, self.engine.execute(plan)):
            if output.logprobs is not None:
                self.logprobs[output.seq.request_id].append(output.logprobs)
        self.scheduler.check_invariants()
        return plan

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def answer(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], int]:
        """Return a prompt's greedy answer, alone, and how many of its tokens were cached."""
        request = self.add(prompt, max_tokens)
        self.finish()
        assert request.cached_tokens is not None
        return request.output_token_ids, request.cached_tokens

    def _request(
        self, prompt: Sequence[int], params: SamplingParams, forks: Sequence[Request] = ()
    ) -> Request:
        self._num_requests += 1
        return Request(
            f"request-{self._num_requests}",
            prompt,
            params=params,
            namespace=Namespace("tiny", block_size=self.engine.block_size),
            forks=forks,
        )
