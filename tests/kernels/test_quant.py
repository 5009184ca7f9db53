"""Quantised blocks: what a number loses, where codes and scales lie, and that tokens are alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvway_kernels import quant
from kvway_kernels.quant import DTYPES, BlockLayout, dequantise, quantise

LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}

each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def random_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    """Make rows of very different sizes, some with one channel far above the others."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(*shape, generator=generator)
    rows *= torch.exp(4 * torch.randn(*shape[:-1], 1, generator=generator))
    rows[::3, ..., 0] *= 40
    return rows


def bound(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the largest error of each number that the module promises."""
    largest = rows.abs().amax(-1, keepdim=True)
    if dtype == torch.int8:
        return (0.502 * largest / 127).expand_as(rows)
    return torch.maximum(rows.abs() / 16, largest / 448 / 1000)


@each_dtype
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_no_number_is_further_off_than_promised(dtype: torch.dtype, source: torch.dtype) -> None:
    rows = random_rows(500, 3, 64).to(source)
    quantised = quantise(rows, dtype)
    assert quantised.data.dtype == dtype
    assert quantised.scale.dtype == quant.SCALE_DTYPE
    error = (dequantise(quantised) - rows.float()).abs()
    assert bool((error <= bound(rows.float(), dtype)).all())


@each_dtype
def test_relative_error_of_normal_rows(dtype: torch.dtype) -> None:
    rows = torch.randn(2000, 64, generator=torch.Generator().manual_seed(1))
    error = (dequantise(quantise(rows, dtype)) - rows).norm() / rows.norm()
    assert float(error) < {torch.int8: 0.0065, torch.float8_e4m3fn: 0.027}[dtype]


@each_dtype
def test_scales_in_half_the_bytes_cost_nothing(dtype: torch.dtype) -> None:
    """Against scales in float32, chosen and used the same way."""
    rows = random_rows(2000, 64)
    scale = rows.abs().amax(-1, keepdim=True) / LARGEST[dtype]
    codes = rows / scale
    codes = codes.round() if dtype == torch.int8 else codes.to(dtype).float()
    exact_scales = (codes * scale - rows).norm()
    ours = (dequantise(quantise(rows, dtype)) - rows).norm()
    assert float(ours) < 1.02 * float(exact_scales)


@each_dtype
@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_a_token_is_quantised_the_same_whatever_is_beside_it(
    dtype: torch.dtype, seed: int, size: int
) -> None:
    rows = random_rows(9, 2, 24, seed=seed)
    together, alone = quantise(rows, dtype), quantise(rows[9 - size :], dtype)
    assert torch.equal(alone.data.view(torch.uint8), together.data[9 - size :].view(torch.uint8))
    assert torch.equal(alone.scale, together.scale[9 - size :])


@each_dtype
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    quantised = quantise(torch.zeros(2, 8), dtype)
    assert not quantised.scale.any()
    assert torch.equal(dequantise(quantised), torch.zeros(2, 8))


@each_dtype
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e30, 3e38])
def test_very_small_and_very_large_rows_stay_near_their_size(
    dtype: torch.dtype, size: float
) -> None:
    rows = torch.tensor([[size, -size, 0.0, size]])
    numbers = dequantise(quantise(rows, dtype))
    assert bool(numbers.isfinite().all())
    # Below the range of float32's normal numbers nothing is promised but that it stays small.
    limit = 0.005 * size if size >= 1e-30 else 1e-37
    assert float((numbers - rows).abs().max()) <= limit


@each_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_no_number_stays_none(dtype: torch.dtype, bad: float) -> None:
    """So that an engine whose model has failed says so, quantised or not."""
    rows = torch.ones(2, 8)
    rows[1, 3] = bad
    numbers = dequantise(quantise(rows, dtype))
    assert bool(((numbers[0] - 1).abs() < 0.005).all())
    assert not bool(numbers[1].isfinite().any())


def test_every_code_of_fp8_is_decoded_as_torch_decodes_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]  # without the two for NaN
    data = codes.view(torch.float8_e4m3fn)
    assert torch.equal(quant.decoded(data), data.float())


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.float16 is not one of torch\.int8"):
        quantise(torch.zeros(1, 8), torch.float16)


@each_dtype
@pytest.mark.parametrize(
    ("shape", "num_bytes", "percent"),
    [
        ((16, 3, 64), 3168, 51.5625),  # SmolLM2-135M
        ((16, 8, 128), 16640, 50.78125),  # Llama-3-8B
        ((1, 1, 8), 16, 100.0),  # filled up to 16 bytes
    ],
)
def test_bytes_of_a_block_and_their_share_of_bfloat16(
    dtype: torch.dtype, shape: tuple[int, int, int], num_bytes: int, percent: float
) -> None:
    layout = BlockLayout(*shape, dtype)
    block_size, num_heads, head_dim = shape
    assert layout.block_bytes == num_bytes
    assert 100 * layout.block_bytes / (block_size * num_heads * head_dim * 2) == percent


@each_dtype
@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 70))
def test_codes_and_scales_fill_the_same_block_and_no_other(
    dtype: torch.dtype, block_size: int, num_heads: int, head_dim: int
) -> None:
    layout = BlockLayout(block_size, num_heads, head_dim, dtype)
    cache = layout.allocate(3)
    tokens = (block_size, num_heads)
    assert cache.data.shape == (3, *tokens, head_dim)
    assert cache.scale.shape == (3, *tokens)
    assert layout.block_bytes % 16 == 0
    storage = torch.tensor([], dtype=torch.uint8).set_(cache.data.untyped_storage())
    assert len(storage) == 3 * layout.block_bytes
    # Numbers whose codes and scales have no byte of zero.
    rows = torch.full((block_size, num_heads, head_dim), 1.4)
    quant.store(cache, rows, torch.arange(block_size) + block_size)
    blocks = storage.view(3, layout.block_bytes)
    assert not blocks[[0, 2]].any()
    written = block_size * num_heads * (head_dim + 2)
    assert int((blocks[1] != 0).sum()) == written


@each_dtype
def test_storing_writes_its_slots_and_no_others(dtype: torch.dtype) -> None:
    cache = BlockLayout(4, 2, 16, dtype).allocate(6)
    everything = random_rows(24, 2, 16)
    quant.store(cache, everything, torch.arange(24))
    before = dequantise(cache).flatten(0, 1)
    slots = torch.tensor([23, 0, 7, 8])
    rows = random_rows(4, 2, 16, seed=5)
    quant.store(cache, rows, slots)
    after = dequantise(cache).flatten(0, 1)
    assert torch.equal(after[slots], dequantise(quantise(rows, dtype)))
    others = [slot for slot in range(24) if slot not in slots]
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_zeros_have_codes_of_zero_bits(dtype: torch.dtype) -> None:
    data, scale = quantise(torch.zeros(3, 8), dtype)
    assert not data.view(torch.int8).any()
    assert not scale.any()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_scale_that_is_rounded_far_down_makes_no_code_beyond_the_largest(
    dtype: torch.dtype,
) -> None:
    """Scales below the normal numbers of bfloat16 are coarse: 1.4 of the least one becomes one."""
    least = torch.finfo(torch.bfloat16).smallest_normal / 128
    largest = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}[dtype]
    for sign in (1, -1):
        data, scale = quantise(torch.full((1, 8), sign * 1.4 * least * largest), dtype)
        assert float(scale) == least
        assert bool((data.float() == sign * largest).all())
