"""TorchEngine: executes the scheduler's steps with a real model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Final

import structlog
import torch
from torch import Tensor

from kvway_core.blocks import DEFAULT_BLOCK_SIZE
from kvway_core.errors import ConfigError
from kvway_kernels.api import RequestRows, plan
from kvway_worker.sampling_params import SamplingParams
from kvway_worker.step import Row, Sampled, StepPlan, StepResult
from kvway_worker.torch_engine.kv_cache import PagedKVCache, blocks_to_allocate
from kvway_worker.torch_engine.model import HuggingFaceModel, StepContext
from kvway_worker.torch_engine.sampling import Draw, sample

_log: Final = structlog.get_logger()

_FIXED_ROWS: Final = 32
"""Rows of every call of the model in the deterministic mode."""

_WARM_UP_TOKENS: Final = 128

_GREEDY: Final = SamplingParams(max_tokens=1)

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive tokens of one request that one call of the model computes."""

    request_id: str
    params: SamplingParams
    start: int
    token_ids: Sequence[int]
    block_table: Sequence[int]
    samples: bool

    @classmethod
    def of(cls, row: Row) -> _Part:
        return cls(
            request_id=row.seq.request_id,
            params=row.seq.params,
            start=row.start,
            token_ids=row.token_ids,
            block_table=row.block_table,
            samples=bool(row.sampling),
        )

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    def split(self, num_tokens: int) -> tuple[_Part, _Part | None]:
        """Return the first tokens, and what is left if anything is."""
        if len(self.token_ids) <= num_tokens:
            return self, None
        head = replace(self, token_ids=self.token_ids[:num_tokens], samples=False)
        tail = replace(self, start=self.start + num_tokens, token_ids=self.token_ids[num_tokens:])
        return head, tail


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
        sampled: dict[str, Sampled] = {}
        with torch.inference_mode():
            self._cache.copy(plan.copies)
            for parts in self._calls([_Part.of(row) for row in plan.rows]):
                sampling = [part for part in parts if part.samples]
                logits = self._forward(parts)[: len(sampling)]
                tokens = sample(logits, [Draw(part.params, part.end) for part in sampling])
                sampled |= {
                    part.request_id: Sampled((token,))
                    for part, token in zip(sampling, tokens, strict=True)
                }
        return StepResult(sampled)

    def close(self) -> None:
        """Do nothing: what the engine holds goes with the engine."""

    def _calls(self, parts: Sequence[_Part]) -> Iterator[list[_Part]]:
        """Split a step into calls of the model: one, or in the deterministic mode several.

        The order stays, so that a row finds what an earlier one writes in the same step.
        """
        if not self._deterministic:
            yield list(parts)
            return
        call: list[_Part] = []
        room = _FIXED_ROWS
        for part in parts:
            rest: _Part | None = part
            while rest is not None:
                head, rest = rest.split(room)
                call.append(head)
                room -= len(head.token_ids)
                if not room:
                    yield call
                    call, room = [], _FIXED_ROWS
        if call:
            yield call

    def _forward(self, parts: Sequence[_Part]) -> Tensor:
        """Run one call; the first rows of the result are the parts that sample, in order."""
        token_ids = [token for part in parts for token in part.token_ids]
        positions = [position for part in parts for position in range(part.start, part.end)]
        ends = accumulate(len(part.token_ids) for part in parts)
        keep = [end - 1 for part, end in zip(parts, ends, strict=True) if part.samples]
        if self._deterministic:
            token_ids += [0] * (_FIXED_ROWS - len(token_ids))
            positions += [0] * (_FIXED_ROWS - len(positions))
            keep += [0] * (_FIXED_ROWS - len(keep)) if keep else []
        device = self._model.device
        step = plan(
            [RequestRows(len(part.token_ids), part.end, part.block_table) for part in parts],
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            device=device,
            fixed_shapes=self._deterministic,
        )
        return self._model.forward(
            torch.tensor(token_ids, dtype=torch.int64, device=device),
            torch.tensor(positions, dtype=torch.int64, device=device),
            keep=torch.tensor(keep, dtype=torch.int64, device=device),
            step=StepContext(self._cache, step),
        )

    def _warm_up(self) -> None:
        """Run a prefill and a decode step on blocks that nobody owns yet; leaves them zero."""
        num_tokens = min(_WARM_UP_TOKENS, self.num_blocks * self.block_size)
        blocks = range(-(-num_tokens // self.block_size))
        with torch.inference_mode():
            for start, end in ((0, num_tokens - 1), (num_tokens - 1, num_tokens)):
                part = _Part("warm-up", _GREEDY, start, [0] * (end - start), blocks, samples=True)
                for parts in self._calls([part] if end > start else []):
                    self._forward(parts)
            for layer in (*self._cache.k, *self._cache.v):
                layer[: len(blocks)] = 0


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
