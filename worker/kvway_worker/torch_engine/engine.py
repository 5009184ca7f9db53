"""TorchEngine: executes the scheduler's steps with a real model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import structlog
import torch
from torch import Tensor

from kvway_core.blocks import DEFAULT_BLOCK_SIZE, Namespace
from kvway_core.errors import ConfigError
from kvway_kernels.api import RequestRows, plan
from kvway_worker.scheduling.sampling_params import SamplingParams, TokenLogprobs
from kvway_worker.scheduling.sequence import Sequence as Request
from kvway_worker.scheduling.step import Row, StepPlan, StepResult
from kvway_worker.torch_engine.calls import Part, calls
from kvway_worker.torch_engine.choosing import choose
from kvway_worker.torch_engine.kv_cache import PagedKVCache, blocks_to_allocate
from kvway_worker.torch_engine.logprobs import token_logprobs
from kvway_worker.torch_engine.model import HuggingFaceModel, StepContext
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

    Loading runs one small step, so that the first request is not the one that pays for it.

    In the deterministic mode (float32 on a CPU) the model is only ever called with the same number
    of rows, and attention with the same shapes. What a token's scores are then depends on nothing
    but the tokens before it, bit for bit: not on the batch, the chunks, or what was cached.

    Args:
        model_dir: a folder as `kvway fetch` makes it.
        dtype: "float32", "bfloat16", or "auto": bfloat16 on a GPU and on CPUs with instructions
            for it, else float32; always float32 when deterministic.
        device: "cpu", "cuda", or "auto": the GPU if there is one.
        num_blocks: KV blocks; excludes `kv_cache_bytes`.
        kv_cache_bytes: memory for them; 1 GiB when neither is given.
        block_size: tokens per block.
        max_model_len: tokens of the longest request, which must fit into the blocks; by default
            the model's own limit, or what fits.
        deterministic: bit for bit the same answers, slower.
        num_threads: threads that compute on the CPU, for the whole process; torch's own choice by
            default.

    Raises:
        ConfigError: the model cannot be loaded or is not supported, the cache is too small for one
            request, or options contradict each other.
    """

    def __init__(  # noqa: PLR0913
        self,
        model_dir: Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        num_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        max_model_len: int | None = None,
        deterministic: bool = False,
        num_threads: int | None = None,
    ) -> None:
        torch_device = _choose_device(device)
        torch_dtype = _choose_dtype(dtype, torch_device, deterministic=deterministic)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        model = HuggingFaceModel(model_dir, dtype=torch_dtype, device=torch_device)
        if max_model_len is not None and max_model_len > model.max_model_len:
            problem = (
                f"--max-model-len {max_model_len} is more than the {model.max_model_len} tokens "
                "that the model was made for: give at most that"
            )
            raise ConfigError([problem])
        self.block_size: int = block_size
        self.vocab_size: int = model.vocab_size
        shape = model.kv_shape(block_size)
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
        try:
            self._warm_up()
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            problem = f"the model in {model_dir} does not run on the paged cache: {error}"
            raise ConfigError([problem.splitlines()[0]]) from error
        _log.info(
            "torch_engine_loaded",
            model_dir=str(model_dir),
            dtype=str(torch_dtype).removeprefix("torch."),
            device=str(torch_device),
            num_threads=torch.get_num_threads(),
            num_blocks=self.num_blocks,
            kv_cache_bytes=self.num_blocks * shape.bytes_per_block,
            max_model_len=self.max_model_len,
            deterministic=deterministic,
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step: copy blocks, then compute every row and store its keys and values.

        Raises:
            EngineFailed: the model's scores are not finite.
        """
        if not plan.rows:
            return StepResult({})
        scores: list[Tensor] = []
        prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
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
        step = plan(
            [RequestRows(part.num_tokens, part.end, part.row.block_table) for part in parts],
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            device=device,
            dtype=self._model.dtype,
            fixed_shapes=self._deterministic,
        )
        logits = self._model.forward(
            torch.tensor(token_ids, dtype=torch.int64, device=device),
            torch.tensor(positions, dtype=torch.int64, device=device),
            keep=torch.tensor(keep, dtype=torch.int64, device=device),
            step=StepContext(self._cache, step),
        )
        return logits[:num_kept]

    def _warm_up(self) -> None:
        """Run a prefill and a decode step on blocks that nobody owns yet; leaves them zero."""
        num_tokens = min(_WARM_UP_TOKENS, self.num_blocks * self.block_size)
        blocks = range(-(-num_tokens // self.block_size))
        seq = Request(
            "warm-up",
            [0] * num_tokens,
            params=SamplingParams(max_tokens=1),
            namespace=Namespace("warm-up", block_size=self.block_size),
        )
        with torch.inference_mode():
            for start, end in ((0, num_tokens - 1), (num_tokens - 1, num_tokens)):
                size = end - start
                row = Row(seq, start, size, [0] * size, blocks, sampling=(seq,))
                for parts in self._calls([row] if size else []):
                    self._forward(parts)
            for layer in (*self._cache.k, *self._cache.v):
                layer[: len(blocks)] = 0


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
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="ignore").split())
    except OSError:
        return False
    return not words.isdisjoint({"amx_bf16", "avx512_bf16"})
