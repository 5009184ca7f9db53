"""TorchEngine: executes the scheduler's steps with a real model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import structlog
import torch
from torch import Tensor

from kvway_core.blocks import DEFAULT_BLOCK_SIZE, Namespace
from kvway_core.errors import ConfigError
from kvway_core.models import kvway_home
from kvway_kernels.costs import HeadShape
from kvway_worker.load import AttentionReading
from kvway_worker.scheduling.prefix_groups import CascadeCosts
from kvway_worker.scheduling.sampling_params import SamplingParams, TokenLogprobs
from kvway_worker.scheduling.sequence import Sequence as Request
from kvway_worker.scheduling.step import Row, StepPlan, StepResult
from kvway_worker.torch_engine.attention import (
    ALWAYS,
    PLAIN,
    Attention,
    AttentionChoice,
    AttentionOptions,
)
from kvway_worker.torch_engine.calibration import cascade_costs
from kvway_worker.torch_engine.calls import Part, calls
from kvway_worker.torch_engine.choosing import choose
from kvway_worker.torch_engine.comparing import (
    CHECK_TOKENS,
    check_positions,
    check_prompt,
    check_scores,
)
from kvway_worker.torch_engine.compiling import CompilingFailed, compiling, keep_compiled, told
from kvway_worker.torch_engine.decoder import FAMILIES
from kvway_worker.torch_engine.kv_cache import PagedKVCache, blocks_to_allocate, kv_dtype_of
from kvway_worker.torch_engine.logprobs import token_logprobs
from kvway_worker.torch_engine.model import HuggingFaceModel, StepContext, first_line
from kvway_worker.torch_engine.processor import processor_flags
from kvway_worker.torch_engine.sampling import check_finite

_log: Final = structlog.get_logger()

_FIXED_ROWS: Final = 32
"""Rows of every call of the model in the deterministic mode."""

_WARM_UP_TOKENS: Final = 128

_PROMPT_SCORED: Final = 128
"""Prompt tokens of a call whose scores are wanted, at most: 77 MB for 150,000 tokens."""

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchEngine:
    """A model on this machine, stepping batches. Used by one thread at a time.

    Loading runs one small step, so that the first request is not the one that pays for it. A model
    that runs in transformers' code also has to show that it computes a short prompt in two chunks
    on the paged cache as it does in one call without.

    In the deterministic mode (float32 on a CPU, models of our own decoder) the model is only ever
    called with the same number of rows, and attention with the same shapes. What a token's scores
    are then depends on nothing but the tokens before it, bit for bit: not on the batch, the
    chunks, or what was cached. Other models may choose shapes by what is in the batch, as mixtures
    of experts do: they are refused.

    Args:
        model_dir: a folder as `kvway fetch` makes it.
        dtype: "float32", "bfloat16", or "auto": bfloat16 on a GPU and on CPUs with instructions
            for it, else float32; always float32 when deterministic.
        kv_dtype: of keys and values in the cache: "int8", "fp8_e4m3", or "auto": the model's.
        device: "cpu", "cuda", or "auto": the GPU if there is one.
        num_blocks: KV blocks; excludes `kv_cache_bytes`.
        kv_cache_bytes: memory for them; 1 GiB when neither is given.
        block_size: tokens per block.
        max_model_len: tokens of the longest request, which must fit into the blocks; by default
            the model's own limit, or what fits.
        deterministic: bit for bit the same answers, slower.
        num_threads: threads that compute on the CPU, for the whole process; torch's own choice by
            default.
        attention: how to attend; by default as plainly as can be.

    Raises:
        ConfigError: the model cannot be loaded or is not supported, the cache is too small for one
            request, or options contradict each other.
    """

    def __init__(  # noqa: PLR0913
        self,
        model_dir: Path,
        *,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        device: str = "auto",
        num_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        max_model_len: int | None = None,
        deterministic: bool = False,
        num_threads: int | None = None,
        attention: AttentionOptions = PLAIN,
    ) -> None:
        torch_device = _choose_device(device)
        torch_dtype = _choose_dtype(dtype, torch_device, deterministic=deterministic)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        compiles = attention.may_compile and not deterministic
        compiled_in = keep_compiled(os.environ) if compiles else None
        model = HuggingFaceModel(
            model_dir, dtype=torch_dtype, device=torch_device, same_bits=deterministic
        )
        choice = AttentionChoice.of(
            attention,
            device=torch_device,
            deterministic=deterministic,
            dtype=torch_dtype,
            is_quantised=kv_dtype != "auto",
            head_dim=model.head_dim,
        )
        if deterministic and not model.has_own_decoder:
            problem = (
                f"--deterministic does not work with this model of type {model.model_type!r}: "
                f"only with {', '.join(FAMILIES)} without sliding windows"
            )
            raise ConfigError([problem])
        if max_model_len is not None and max_model_len > model.max_model_len:
            problem = (
                f"--max-model-len {max_model_len} is more than the {model.max_model_len} tokens "
                "that the model was made for: give at most that"
            )
            raise ConfigError([problem])
        self.block_size: int = block_size
        self.vocab_size: int = model.vocab_size
        cache_dtype, self.kv_dtype = kv_dtype_of(kv_dtype, model.dtype)
        shape = model.kv_shape(block_size, cache_dtype)
        self.num_blocks: int = blocks_to_allocate(
            shape,
            num_blocks=num_blocks,
            kv_cache_bytes=kv_cache_bytes,
            max_model_len=max_model_len,
        )
        self.max_model_len: int = max_model_len or min(
            model.max_model_len, self.num_blocks * block_size
        )
        self._model = model
        self._cache = PagedKVCache(shape, num_blocks=self.num_blocks, device=torch_device)
        self._deterministic = deterministic
        self._attention = self._new_attention(choice, ALWAYS if choice.cascades else None)
        try:
            with torch.inference_mode():
                self._warm_up(choice, compiled_in)
                if not model.has_own_decoder:
                    self._check_scores()
        except CompilingFailed:
            raise
        except Exception as error:  # a family's own code may raise anything
            problem = f"model {model.model_type!r} in {model_dir} does not run on the paged cache"
            raise ConfigError([f"{problem}: {first_line(error)}"]) from error
        costs = attention.costs or self._measured_costs(choice) if choice.cascades else None
        self._attention = self._new_attention(choice, costs)
        _log.info(
            "torch_engine_loaded",
            model_dir=str(model_dir),
            dtype=str(torch_dtype).removeprefix("torch."),
            kv_dtype=self.kv_dtype,
            device=str(torch_device),
            num_threads=torch.get_num_threads(),
            num_blocks=self.num_blocks,
            kv_cache_bytes=self.num_blocks * shape.bytes_per_block,
            max_model_len=self.max_model_len,
            deterministic=deterministic,
            attention=choice.implementation,
            attention_reason=choice.reason,
            cascade=choice.cascade,
        )

    def attention(self) -> AttentionReading:
        """Return what attends, and what was read once since the engine was loaded."""
        return self._attention.read()

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step: copy blocks, then compute every row and store its keys and values.

        Raises:
            EngineFailed: the model's scores are not finite.
        """
        if not plan.rows:
            return StepResult({})
        scores: list[Tensor] = []
        prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self._attention.begin_step()
        with torch.inference_mode():
            self._cache.copy(plan.copies)
            for parts in self._calls(plan.rows):
                logits = self._forward(parts)
                scores.append(_take_prompt_logprobs(parts, logits, prompt_logprobs))
            rows = [row for row in plan.rows if row.sampling]
            # Mostly there is one call; its scores are megabytes, so they are not copied.
            together = scores[0] if len(scores) == 1 else torch.cat(scores)
            sampled = choose(together, rows)
        return StepResult(
            sampled,
            {request_id: tuple(logprobs) for request_id, logprobs in prompt_logprobs.items()},
        )

    def close(self) -> None:
        """Do nothing: what the engine holds goes with the engine."""

    def _calls(self, rows: Sequence[Row]) -> Iterator[list[Part]]:
        num_tokens = _FIXED_ROWS if self._deterministic else None
        return calls(rows, num_tokens=num_tokens, num_prompt_scored=_PROMPT_SCORED)

    def _forward(self, parts: Sequence[Part]) -> Tensor:
        """Run one call and return the scores that its parts want, in order of their positions."""
        token_ids = [token for part in parts for token in part.token_ids]
        positions = [position for part in parts for position in range(part.start, part.end)]
        keep: list[int] = []
        first = 0
        for part in parts:
            wanted = (*part.prompt_scored, *part.sampled)
            keep += [first + position - part.start for position in wanted]
            first += part.num_tokens
        num_kept = len(keep)
        if self._deterministic:
            token_ids += [0] * (_FIXED_ROWS - len(token_ids))
            positions += [0] * (_FIXED_ROWS - len(positions))
            keep += [0] * (_FIXED_ROWS - len(keep)) if keep else []
        device = self._model.device
        logits = self._model.forward(
            torch.tensor(token_ids, dtype=torch.int64, device=device),
            torch.tensor(positions, dtype=torch.int64, device=device),
            keep=torch.tensor(keep, dtype=torch.int64, device=device),
            step=StepContext(self._cache, self._attention.plan(parts)),
        )
        return logits[:num_kept]

    def _new_attention(self, choice: AttentionChoice, costs: CascadeCosts | None) -> Attention:
        return Attention(
            choice,
            costs=costs,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            device=self._model.device,
            dtype=self._model.dtype,
            fixed_shapes=self._deterministic,
        )

    def _measured_costs(self, choice: AttentionChoice) -> CascadeCosts:
        model = self._model
        return cascade_costs(
            HeadShape(model.num_heads, model.num_kv_heads, model.head_dim),
            dtype=model.dtype,
            kv_dtype=self._cache.shape.dtype,
            device=model.device,
            implementation=choice.implementation,
            folder=kvway_home(os.environ) / "attention-costs",
        )

    def _warm_up(self, choice: AttentionChoice, compiled_in: Path | None) -> None:
        """Run steps of every kind, so that all is compiled and nothing is slow later."""
        if not choice.is_compiled:
            self._small_steps()
            return
        with told("compiling_attention", implementation=choice.implementation):
            compiling(self._small_steps, folder=compiled_in)

    def _small_steps(self) -> None:
        """Run a prefill, a decode step of one request, and one of several that share blocks."""
        num_tokens = min(_WARM_UP_TOKENS, self.max_model_len)
        self._compute([0] * num_tokens, chunks=(num_tokens - 1, 1), num_scored=1)
        tables = self._shared_tables()
        size = self.block_size
        rows = []
        for index, table in enumerate(tables):
            seq = self._nobody(f"warm-up-{index}", [0] * ((len(table) - 1) * size + 1))
            rows.append(Row(seq, (len(table) - 1) * size, 1, [0], table, sampling=(seq,)))
        if rows:
            self._forward([Part(row, row.start, row.end) for row in rows])
            self._clear({block for table in tables for block in table})

    def _shared_tables(self) -> tuple[tuple[int, ...], ...]:
        """Return block tables that share at two levels, or what of it the cache has room for."""
        room = min(self.num_blocks, 7), -(-self.max_model_len // self.block_size)
        if room[0] == 7 and room[1] > 2:
            return (0, 1, 3), (0, 1, 4), (0, 2, 5), (0, 2, 6)
        return ((0, 1), (0, 2)) if room[0] > 2 and room[1] > 1 else ()

    def _check_scores(self) -> None:
        """Compare the model on the paged cache with itself without.

        Raises:
            ConfigError: they differ.
        """
        num_tokens = min(CHECK_TOKENS, self.max_model_len)
        prompt = check_prompt(self.vocab_size, num_tokens)
        token_ids = torch.tensor(prompt, device=self._model.device)
        expected = self._model.plain_forward(token_ids, None)
        positions = torch.arange(num_tokens, device=self._model.device)
        check_positions(self._model.plain_forward(token_ids, positions), expected)
        chunks = (num_tokens // 3, num_tokens - num_tokens // 3)
        scores = self._compute(prompt, chunks=chunks, num_scored=num_tokens)
        check_scores(scores, expected, is_quantised=self._cache.shape.quantised is not None)

    def _compute(
        self, token_ids: Sequence[int], *, chunks: Sequence[int], num_scored: int
    ) -> Tensor:
        """Compute tokens chunk after chunk on blocks that nobody owns yet; leaves them zero.

        Shapes: result [at most num_scored of the last tokens of each chunk, vocab_size].
        """
        seq = self._nobody("warm-up", token_ids)
        blocks = range(-(-len(token_ids) // self.block_size))
        scores: list[Tensor] = []
        start = 0
        for size in filter(None, chunks):
            ids = token_ids[start : start + size]
            # What is scored beside the last token passes for drafts.
            num_drafts = min(size, num_scored) - 1
            row = Row(seq, start, size, ids, blocks, sampling=(seq,), num_drafts=num_drafts)
            scores += [self._forward(parts) for parts in self._calls([row])]
            start += size
        self._clear(blocks)
        return torch.cat(scores)

    def _nobody(self, request_id: str, token_ids: Sequence[int]) -> Request:
        """Return a request that nobody waits for."""
        return Request(
            request_id,
            token_ids,
            params=SamplingParams(max_tokens=1),
            namespace=Namespace("warm-up", block_size=self.block_size),
        )

    def _clear(self, blocks: Iterable[int]) -> None:
        self._cache.clear(blocks)


def _take_prompt_logprobs(
    parts: Sequence[Part], logits: Tensor, found: dict[str, list[TokenLogprobs]]
) -> Tensor:
    """Add to `found` what a call's scores tell of prompts; return the scores to sample from.

    Raises:
        EngineFailed: the scores are not finite.
    """
    prompt_rows: list[int] = []
    token_ids: list[int] = []
    num_top: list[int] = []
    owners: list[str] = []
    sample_rows: list[int] = []
    first = 0
    for part in parts:
        positions, seq = part.prompt_scored, part.row.seq
        middle = first + len(positions)
        prompt_rows += range(first, middle)
        token_ids += seq.token_ids[positions.start + 1 : positions.stop + 1]
        num_top += [seq.params.prompt_logprobs or 0] * len(positions)
        owners += [seq.request_id] * len(positions)
        first = middle + len(part.sampled)
        sample_rows += range(middle, first)
    if not prompt_rows:
        return logits
    scores = logits[prompt_rows].float()
    check_finite(scores.amax(dim=-1))
    for owner, logprobs in zip(owners, token_logprobs(scores, token_ids, num_top), strict=True):
        found.setdefault(owner, []).append(logprobs)
    return logits[sample_rows]


def _choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(["--device cuda: torch finds no GPU on this machine; use cpu or auto"])
    return torch.device(name)


def _choose_dtype(name: str, device: torch.device, *, deterministic: bool) -> torch.dtype:
    if deterministic:
        if name not in ("auto", "float32"):
            raise ConfigError([f"--deterministic works in float32, not in {name}"])
        if device.type != "cpu":
            raise ConfigError([f"--deterministic works on the CPU, not on {device.type}"])
        return torch.float32
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" or _cpu_has_bfloat16() else "float32"
    if name not in _DTYPES:
        raise ConfigError([f"--dtype {name} is not one of auto, {', '.join(_DTYPES)}"])
    return _DTYPES[name]


def _cpu_has_bfloat16() -> bool:
    """Tell whether this CPU multiplies bfloat16 in hardware; without it, it is slower."""
    return not processor_flags().isdisjoint({"amx_bf16", "avx512_bf16"})
