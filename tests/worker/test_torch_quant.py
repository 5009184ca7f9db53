"""Quantised KV blocks in the engine: whatever is shared, copied or reused, answers stay.

In the deterministic mode they do so bit for bit: what a token's codes are depends on the token
alone, and a chunk reads its own new tokens as every later one will, from the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvway_core.errors import ConfigError
from kvway_core.events import BlockStored
from kvway_core.testing.fake_clock import FakeClock
from kvway_kernels import api
from kvway_kernels.quant import DTYPES, dequantise, quantise
from kvway_worker.loading import load_model
from kvway_worker.scheduling.sampling_params import SamplingParams, TokenLogprobs
from kvway_worker.settings import WorkerSettings
from kvway_worker.torch_engine import AttentionOptions, TorchEngine, decoder
from kvway_worker.torch_engine.kv_cache import KVShape, PagedKVCache
from tests.worker.batching import request
from tests.worker.torch_models import Driver, write_model

NUM_NEW = 20
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(90)] + [5, 6, 7, 8] * 5  # 6 blocks and 14 rows

each_dtype = pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


def engine_of(folder: Path, kv_dtype: str, **options: Any) -> TorchEngine:
    return TorchEngine(
        folder,
        **{"device": "cpu", "dtype": "float32", "num_blocks": 64, **options},
        kv_dtype=kv_dtype,
    )


def said(
    driver: Driver, prompt: list[int], **params: Any
) -> tuple[list[int], list[TokenLogprobs], int | None]:
    """Run a request to its end; return its tokens, log probabilities and cached tokens."""
    seq = driver.add(prompt, NUM_NEW, logprobs=3, **params)
    driver.finish()
    return seq.output_token_ids, driver.logprobs[seq.request_id], seq.cached_tokens


@each_dtype
def test_cold_warm_copied_chunked_batched_and_drafted_answers_are_the_same_bit_for_bit(
    folder: Path, kv_dtype: str
) -> None:
    engine = engine_of(folder, kv_dtype, deterministic=True)
    driver = Driver(engine)
    *cold, num_cached = said(driver, PROMPT)
    assert num_cached == 0
    # The same prompt again: whole blocks, and the tail copied from a partly filled block.
    *warm, num_cached = said(driver, PROMPT)
    assert (warm, num_cached) == (cold, len(PROMPT) - 1)
    # A prompt that ends with a block: its last token is computed on a copy of that block.
    *shorter, _ = said(Driver(engine), PROMPT[:96])
    *copied, num_cached = said(driver, PROMPT[:96])
    assert (copied, num_cached) == (shorter, 95)
    for options in ({"max_num_batched_tokens": 16}, {"num_drafts": 3}):
        *other, num_cached = said(Driver(engine, **options), PROMPT)
        assert (other, num_cached) == (cold, 0)
    driver = Driver(engine, max_num_batched_tokens=40)
    seq = driver.add(PROMPT, NUM_NEW, logprobs=3)
    for i in range(3):
        driver.add([*PROMPT[: 40 + i], i], NUM_NEW)
    driver.finish()
    assert [seq.output_token_ids, driver.logprobs[seq.request_id]] == cold


@each_dtype
def test_forks_say_what_each_would_say_alone(folder: Path, kv_dtype: str) -> None:
    engine = engine_of(folder, kv_dtype, deterministic=True)
    sampled = SamplingParams(NUM_NEW, temperature=1.0, seed=5)
    alone = Driver(engine)
    expected = [
        alone.answer(PROMPT, NUM_NEW)[0],
        said(alone, PROMPT, temperature=1.0, seed=5)[0],
    ]
    driver = Driver(engine)
    leader = driver.add(PROMPT, NUM_NEW, forks=[sampled])
    seqs = [leader, *leader.forks]
    driver.finish()
    assert [seq.output_token_ids for seq in seqs] == expected


@each_dtype
def test_a_chunk_reads_its_own_new_tokens_quantised(
    folder: Path, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cold prompt in one chunk equals the same model that rounds keys and values itself."""
    *cold, _ = said(Driver(engine_of(folder, kv_dtype, deterministic=True)), PROMPT)

    def rounding(k_cache: Any, v_cache: Any, k: Any, v: Any, plan: Any, **scales: Any) -> None:
        k, v = (dequantise(quantise(rows, DTYPES[kv_dtype])) for rows in (k, v))
        api.write_kv(k_cache, v_cache, k, v, plan, **scales)

    monkeypatch.setattr(decoder, "write_kv", rounding)
    *expected, _ = said(Driver(engine_of(folder, "auto", deterministic=True)), PROMPT)
    assert cold == expected


def test_through_preemption_the_same_tokens(folder: Path) -> None:
    kv_dtype = "fp8_e4m3"
    prompts = [PROMPT[i : i + 50] for i in (0, 20, 40)]
    roomy = engine_of(folder, kv_dtype, deterministic=True)
    expected = [Driver(roomy).answer(prompt, 20)[0] for prompt in prompts]
    tight = engine_of(folder, kv_dtype, deterministic=True, num_blocks=8, max_model_len=128)
    driver = Driver(tight)
    seqs = [driver.add(prompt, 20) for prompt in prompts]
    driver.finish()
    assert driver.scheduler.counters.preemptions
    assert [seq.output_token_ids for seq in seqs] == expected


@each_dtype
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["gpt2", "phi", "mixtral"])
def test_models_in_transformers_code_load_and_reuse_blocks(
    tmp_path: Path, model_type: str, dtype: str, kv_dtype: str
) -> None:
    """They pass the check at loading, whose tolerance is that of bfloat16."""
    folder = write_model(tmp_path, model_type, num_key_value_heads=6)
    driver = Driver(engine_of(folder, kv_dtype, dtype=dtype))
    answer, num_cached = driver.answer(PROMPT, 4)
    assert (len(answer), num_cached) == (4, 0)
    assert driver.answer(PROMPT, 4)[1] == len(PROMPT) - 1


@each_dtype
def test_the_bytes_of_the_cache_are_what_one_block_says(kv_dtype: str) -> None:
    dtype = DTYPES[kv_dtype]
    shape = KVShape(num_layers=30, block_size=16, num_kv_heads=3, head_dim=64, dtype=dtype)
    plain = KVShape(30, 16, 3, 64, torch.bfloat16)
    assert shape.bytes_per_block / plain.bytes_per_block == 33 / 64
    cache = PagedKVCache(shape, num_blocks=5, device=torch.device("cpu"))
    storages = [t.untyped_storage() for t in (*cache.k, *cache.v)]
    assert sum(s.nbytes() for s in storages) == 5 * shape.bytes_per_block
    scales = [t.untyped_storage() for t in (*cache.k_scale, *cache.v_scale) if t is not None]
    assert {s.data_ptr() for s in scales} == {s.data_ptr() for s in storages}


@each_dtype
def test_copying_takes_codes_and_scales_of_leading_tokens(kv_dtype: str) -> None:
    cache = PagedKVCache(
        KVShape(2, 4, 2, 8, DTYPES[kv_dtype]), num_blocks=3, device=torch.device("cpu")
    )
    tensors = [t for t in (*cache.k, *cache.v, *cache.k_scale, *cache.v_scale) if t is not None]
    assert len(tensors) == 8
    for tensor in tensors:
        tensor[1] = torch.ones(tensor[1].shape).to(tensor.dtype)
    cache.copy([(1, 2, 3)])
    for tensor in tensors:
        numbers = tensor.float()
        assert bool((numbers[2, :3] == 1).all())
        assert not numbers[2, 3:].any()
        assert not numbers[0].any()
    cache.clear([1, 2])
    assert not any(bool(tensor.float().any()) for tensor in tensors)


def test_an_unknown_dtype_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-dtype int4 is not one of auto, int8, fp8_e4m3"):
        engine_of(folder, "int4")


@each_dtype
def test_what_attends_is_told_and_what_cannot_read_quantised_blocks_is_refused(
    folder: Path, kv_dtype: str
) -> None:
    options = AttentionOptions(cascade=False)
    attends = engine_of(folder, kv_dtype, attention=options).attention()
    assert (attends.implementation, attends.reason) == ("sdpa", "quantised blocks")
    with pytest.raises(ConfigError, match=r"--attention compiled: .*not read quantised blocks"):
        engine_of(folder, kv_dtype, attention=AttentionOptions("compiled"))


@pytest.mark.parametrize(
    ("asked", "kept"), [("auto", "float32"), ("int8", "int8"), ("fp8_e4m3", "fp8_e4m3")]
)
def test_a_worker_puts_the_dtype_into_identity_and_events_and_counts_its_bytes(
    folder: Path, asked: str, kept: str
) -> None:
    settings = WorkerSettings(
        model=str(folder),
        kv_cache_gib=2**-12,
        dtype="float32",
        device="cpu",
        kv_dtype=asked,
        compile=False,
        cascade=False,
    )
    assert settings.validate() == []
    made = load_model(settings, folder, FakeClock())
    assert made.model.namespace(None).kv_dtype == kept
    # 3 layers, 16 tokens, 2 heads of 8: 1,024 bytes per layer and side, or 320 with scales.
    assert made.engine.num_blocks == 2**18 // (6 * (1024 if asked == "auto" else 320))
    made.scheduler.add(request("one", PROMPT, max_tokens=2, block_size=16))
    while made.scheduler.has_work:
        plan = made.scheduler.plan()
        made.scheduler.commit(plan, made.engine.execute(plan))
    events = [e for e in made.scheduler.pool.take_events() if isinstance(e, BlockStored)]
    assert events
    assert {event.kv_dtype for event in events} == {kept}
