"""What `kvway size` says of KV is what the worker allocates, and of the model what it computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvway_core.model_shapes import read_shape
from kvway_core.sizing import KV_DTYPES, KVSize
from kvway_kernels.quant import DTYPES
from kvway_worker.torch_engine import TorchEngine
from kvway_worker.torch_engine.kv_cache import KVShape, PagedKVCache

TORCH_DTYPES = {name: getattr(torch, name, None) or DTYPES[name] for name in KV_DTYPES}
NUM_BLOCKS = 5


def allocated_bytes(cache: PagedKVCache) -> int:
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*cache.k, *cache.v)
    }
    assert len(storages) == 2 * cache.shape.num_layers
    return sum(storages.values())


@pytest.mark.parametrize("name", KV_DTYPES)
@pytest.mark.parametrize(("block_size", "heads", "head_dim"), [(16, 3, 64), (5, 3, 7), (1, 1, 1)])
def test_a_block_takes_the_bytes_that_are_said(
    name: str, block_size: int, heads: int, head_dim: int
) -> None:
    shape = KVShape(2, block_size, heads, head_dim, TORCH_DTYPES[name])
    cache = PagedKVCache(shape, num_blocks=NUM_BLOCKS, device=torch.device("cpu"))
    said = KVSize(2, heads, head_dim, KV_DTYPES[name], block_size)
    assert allocated_bytes(cache) == NUM_BLOCKS * said.bytes_per_block
    assert shape.bytes_per_block == said.bytes_per_block


@pytest.mark.model
def test_the_default_models_shape_is_the_one_the_worker_loads(
    smollm2: Path, smollm2_engine: TorchEngine
) -> None:
    model, said = smollm2_engine._model, read_shape(smollm2)
    for name, dtype in TORCH_DTYPES.items():
        kv = KVSize(said.num_layers, said.num_kv_heads, said.head_dim, KV_DTYPES[name], 16)
        assert model.kv_shape(16, dtype).bytes_per_block == kv.bytes_per_block
    assert model.kv_shape(16, torch.int8).bytes_per_block == 2 * 30 * 16 * 3 * (64 + 2)


@pytest.mark.model
def test_the_default_models_work_is_what_torch_counts(smollm2: Path) -> None:
    """Without a cache transformers computes every pair, masked or not."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    work = read_shape(smollm2).work
    assert work is not None
    model = AutoModelForCausalLM.from_pretrained(
        smollm2, dtype=torch.float32, attn_implementation="eager"
    )
    num_tokens = 48
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(input_ids=torch.arange(num_tokens)[None], use_cache=False, logits_to_keep=1)
    head = 2 * model.config.hidden_size * model.config.vocab_size  # of the last token alone
    masked_too = num_tokens**2 * work.attention
    assert counter.get_total_flops() == num_tokens * work.linear + masked_too + head
