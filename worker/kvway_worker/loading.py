"""Loads what a worker serves. Slow: it runs on a thread while the endpoints answer already."""

from __future__ import annotations

import gc
import hashlib
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import structlog

from kvway_core.clock import Clock
from kvway_core.errors import ConfigError
from kvway_core.prompts import PromptEncoder
from kvway_worker.api.served_model import ServedModel
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.engine import Engine
from kvway_worker.scheduling.scheduler import Scheduler
from kvway_worker.settings import SIM_NUM_BLOCKS, WorkerSettings
from kvway_worker.sim import CostModel, SimEngine

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, what computes it and what plans its steps. Nothing runs yet."""

    model: ServedModel
    engine: Engine
    scheduler: Scheduler


def load_model(settings: WorkerSettings, model_dir: Path, clock: Clock) -> Loaded:
    """Load tokenizer and engine from a model's folder.

    Raises:
        ConfigError: The folder or the settings do not fit together.
    """
    encoder = PromptEncoder.load(model_dir, cache_bytes=settings.tokenizer_cache_bytes)
    if settings.engine == "sim":
        engine: Engine = _sim_engine(settings, encoder)
    else:
        engine = _torch_engine(settings, model_dir)
    model = ServedModel(
        name=settings.name,
        encoder=encoder,
        block_size=engine.block_size,
        max_model_len=_max_model_len(settings, encoder, engine),
        fingerprint=_fingerprint(settings, model_dir),
        kv_dtype=engine.kv_dtype or "",
        created=int(clock.time()),
    )
    pool = BlockPool(
        engine.num_blocks,
        engine.block_size,
        prefix_caching=settings.prefix_caching,
        force_miss=settings.force_prefix_misses,
        pin_quota=settings.pin_quota,
        kv_dtype=engine.kv_dtype,
    )
    scheduler = Scheduler(
        pool,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        queue_order="arrival" if settings.queue_order == "arrival" else "shortest",
        ageing=settings.ageing,
        num_drafts=settings.speculate_ngram,
        draft_min_match=settings.ngram_min_match,
    )
    return Loaded(model, engine, scheduler)


def load_for_good(settings: WorkerSettings, model_dir: Path, clock: Clock) -> Loaded:
    """Load a model that stays until the process ends, as `load_model`.

    The garbage collector never looks at what is there now again. Else it goes through all that
    torch and transformers made in every full collection, and a last time at the exit, which took
    a torch worker a second of processor time.

    Raises:
        ConfigError: As `load_model`.
    """
    loaded = load_model(settings, model_dir, clock)
    gc.collect()
    gc.freeze()
    return loaded


def _sim_engine(settings: WorkerSettings, encoder: PromptEncoder) -> SimEngine:
    return SimEngine(
        num_blocks=settings.num_blocks or SIM_NUM_BLOCKS,
        block_size=settings.block_size,
        costs=CostModel(
            prefill_tokens_per_s=settings.sim_prefill_tokens_per_s,
            attention_s_per_pair=settings.sim_attention_s_per_pair,
            step_overhead_s=settings.sim_decode_step_s,
            decode_s_per_seq=settings.sim_decode_s_per_seq,
        ),
        answer_ids=_printable_ids(encoder),
    )


def _torch_engine(settings: WorkerSettings, model_dir: Path) -> Engine:
    from kvway_worker.torch_engine import AttentionOptions, TorchEngine

    gib = settings.kv_cache_gib
    return TorchEngine(
        model_dir,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        device=settings.device,
        num_blocks=settings.num_blocks,
        kv_cache_bytes=None if gib is None else int(gib * 2**30),
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        deterministic=settings.deterministic,
        num_threads=settings.num_threads,
        attention=AttentionOptions(
            settings.attention, compiles=settings.compile, cascade=settings.cascade
        ),
    )


def _printable_ids(encoder: PromptEncoder) -> list[int]:
    """Return ids of the vocabulary's beginning that read as printable ASCII: sim answers' words.

    Raises:
        ConfigError: There is none.
    """
    ids = [
        token_id
        for token_id in range(min(encoder.vocab_size, 1024))
        if (text := encoder.decode([token_id])) and text.isascii() and text.isprintable()
    ]
    if not ids:
        raise ConfigError(["--engine sim: the tokenizer has no printable tokens to answer with"])
    return ids


def _max_model_len(settings: WorkerSettings, encoder: PromptEncoder, engine: Engine) -> int:
    """Return the context: as configured, else what both the model's files and the engine allow.

    Raises:
        ConfigError: More is configured than the model or the pool has.
    """
    capacity = engine.num_blocks * engine.block_size
    limit = encoder.max_model_len
    asked = settings.max_model_len
    if asked is not None:
        if limit is not None and asked > limit:
            raise ConfigError([f"--max-model-len {asked}: the model's context is {limit} tokens"])
        if asked > engine.max_model_len:
            raise ConfigError(
                [f"--max-model-len {asked}: the KV blocks hold {capacity} tokens; add blocks"]
            )
        return asked
    if limit is not None and limit <= engine.max_model_len:
        return limit
    if engine.max_model_len == capacity:
        _log.warning("context_limited_by_kv_blocks", max_model_len=capacity, model_context=limit)
    return engine.max_model_len


def _fingerprint(settings: WorkerSettings, model_dir: Path) -> str:
    """Return a name for everything that decides the answers, as far as it can be told cheaply."""
    parts = (
        version("kvway"),
        settings.name,
        settings.engine,
        settings.dtype,
        settings.kv_dtype,
        settings.device,
        str(settings.deterministic),
        (model_dir / "config.json").read_text(encoding="utf-8"),
    )
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return f"kvway-{digest[:12]}"
