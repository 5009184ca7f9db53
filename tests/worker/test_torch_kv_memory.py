"""Memory of a cache is taken where it is written, and given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvway_kernels.memory import zeros
from kvway_kernels.quant import BlockLayout
from kvway_worker.torch_engine.kv_cache import KVShape, PagedKVCache

MIB = 2**20
STATUS = Path("/proc/self/status")

needs_linux = pytest.mark.skipif(not STATUS.is_file(), reason="asks Linux what is resident")


def resident_mib() -> float:
    return next(
        int(line.split()[1]) / 1024
        for line in STATUS.read_text(encoding="utf-8").splitlines()
        if line.startswith("VmRSS")
    )


@needs_linux
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_blocks_never_written_take_no_memory(dtype: torch.dtype) -> None:
    """A cache of 512 MiB of a model with many small layers, of which one block is written."""
    shape = KVShape(num_layers=64, block_size=16, num_kv_heads=2, head_dim=64, dtype=dtype)
    num_blocks = 512 * MIB // shape.bytes_per_block
    before = resident_mib()
    cache = PagedKVCache(shape, num_blocks=num_blocks, device=torch.device("cpu"))
    assert resident_mib() - before < 64
    for layer in (*cache.k, *cache.v):
        assert layer.shape == (num_blocks, 16, 2, 64)
        layer.view(dtype)[num_blocks // 2] = 1
        assert int(layer[num_blocks // 2].float().sum()) == 16 * 2 * 64
        assert not layer[0].any()
    assert resident_mib() - before < 384  # pages may be as large as 2 MiB


@needs_linux
def test_what_was_written_is_given_back() -> None:
    layers = [zeros(3 * MIB) for _ in range(100)]
    for layer in layers:
        layer.fill_(1)
    full = resident_mib()
    del layer, layers
    assert full - resident_mib() > 250


def test_what_no_machine_has_is_refused() -> None:
    for num_bytes in (2**60, 2**70):
        with pytest.raises(RuntimeError, match=f"no memory for {num_bytes} bytes"):
            zeros(num_bytes)
    with pytest.raises(RuntimeError, match="no memory"):
        BlockLayout(16, 2, 64, torch.int8).allocate(2**50)
