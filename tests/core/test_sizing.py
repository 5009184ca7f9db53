"""What KV and prefill take: against numbers worked out by hand, and against counting."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvway_core.model_shapes import shape_of
from kvway_core.sizing import (
    BUSY_SHARE,
    KV_DTYPES,
    Demand,
    Filling,
    KVSize,
    PrefillSpeed,
    Tier,
    Work,
    filling,
    num_pairs,
    pool_of,
    recommended_pool,
)

LARGE = KVSize(
    num_layers=80, num_kv_heads=8, head_dim=128, dtype=KV_DTYPES["bfloat16"], block_size=16
)
LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "intermediate_size": 28672,
}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def test_kv_of_80_layers_with_8_heads_of_128_in_bfloat16() -> None:
    assert LARGE.bytes_per_token / LARGE.num_layers == 4096
    assert LARGE.bytes_per_token == 327_680
    assert LARGE.bytes_of(512) == 167_772_160  # 167.8 MB
    assert LARGE.bytes_of(1024) == 335_544_320  # 335.5 MB
    assert LARGE.bytes_of(1025) - LARGE.bytes_of(1024) == LARGE.bytes_per_block == 5_242_880


def test_attention_falls_8_fold_where_tokens_fall_16_fold() -> None:
    cold, warm = num_pairs(1600, 0), num_pairs(100, 1500)
    assert (cold, warm) == (1_280_800, 155_050)
    assert round(cold / warm, 2) == 8.26


def test_a_prompt_of_1020_tokens_strands_12() -> None:
    assert filling(1020, 16) == Filling(full_blocks=63, stranded_tokens=12, pad_tokens=4)
    assert filling(1024, 16) == Filling(full_blocks=64, stranded_tokens=0, pad_tokens=0)
    assert filling(0, 16) == Filling(full_blocks=0, stranded_tokens=0, pad_tokens=0)


@given(st.integers(0, 60), st.integers(0, 60))
def test_pairs_are_those_of_a_causal_mask(new: int, cached: int) -> None:
    assert num_pairs(new, cached) == sum(
        key <= query for query in range(cached, cached + new) for key in range(cached + new)
    )


@pytest.mark.parametrize("config", [LLAMA_70B, {"model_type": "x", "text_config": LLAMA_70B}])
def test_work_of_a_dense_model(config: dict[str, Any]) -> None:
    """Per layer q and o of 8192 x 8192, k and v of 8192 x 1024, three of 8192 x 28672."""
    shape = shape_of(config)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (80, 8, 128)
    weights = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    assert shape.work == Work(linear=2 * weights, attention=4 * 80 * 64 * 128)
    assert weights == 68_451_041_280  # of 70.6e9; embeddings and head are the rest


def test_work_of_a_mixture_is_that_of_the_experts_a_token_goes_to() -> None:
    work = shape_of(MIXTRAL).work
    assert work is not None
    mlp = 2 * 3 * 4096 * 14336 + 4096 * 8  # two experts, and the router
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    assert work.linear == 2 * 32 * (attention + mlp)


def test_an_unknown_family_has_kv_but_no_work() -> None:
    shape = shape_of(LLAMA_70B | {"model_type": "strange", "head_dim": 96})
    assert (shape.head_dim, shape.work) == (96, None)
    no_groups = {k: v for k, v in LLAMA_70B.items() if k != "num_key_value_heads"}
    assert shape_of(no_groups).num_kv_heads == 64


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "type sliding_attention"),
        ({"sliding_window": 4096}, "sliding window of 4096"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding window"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be 1 or more, got None"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_size": True}, "hidden_size"),
        ({"text_config": [1]}, "text_config"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_name(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        shape_of(LLAMA_70B | fields)


def test_a_window_that_is_not_used_does_not_matter() -> None:
    assert shape_of(LLAMA_70B | {"sliding_window": 4096, "use_sliding_window": False}).work


@given(
    rate=st.floats(1, 1e6),
    attention=st.floats(100, 1e6) | st.just(math.inf),
    speed=st.floats(1e5, 1e12),
    latency=st.floats(0, 1),
)
def test_break_even_is_where_bringing_gets_sooner_than_computing(
    rate: float, attention: float, speed: float, latency: float
) -> None:
    prefill, tier = PrefillSpeed(rate, attention), Tier(speed, latency)
    tokens = tier.break_even_tokens(prefill, LARGE)

    def lead_s(number: int) -> float:
        bring = tier.seconds(number, LARGE)
        return (prefill.seconds(number, 0) - bring) / bring

    if tokens is None:
        assert attention == math.inf
        assert lead_s(10**6) < 1e-6
        return
    assert lead_s(tokens) >= -1e-6
    if tokens > 1:
        assert lead_s(tokens - 1) <= 1e-6


DEMAND = Demand(prefixes=2, prefix_tokens=1020, sessions=50, session_tokens=500, running=5)


def test_a_pool_keeps_pins_what_runs_and_the_sessions_between_requests() -> None:
    """A session has 500 tokens and the 12 that its prefix strands: 32 blocks."""
    pool = recommended_pool(DEMAND, 16)
    assert (pool.pinned, pool.live, pool.warm) == (2 * 63, 5 * 32, 45 * 32)
    assert pool.total == 2 * 63 + 50 * 32
    assert pool.warm_share == (2 * 63 + 45 * 32) / pool.total


def test_running_requests_leave_a_fifth_of_the_pool() -> None:
    pool = recommended_pool(Demand(0, 0, sessions=10, session_tokens=160, running=10), 16)
    assert (pool.live, pool.warm) == (100, 0)
    assert pool.total == math.ceil(100 / BUSY_SHARE) == 125


def test_a_given_pool_keeps_as_many_sessions_as_fit() -> None:
    everything = recommended_pool(DEMAND, 16)
    assert pool_of(DEMAND, 16, num_blocks=everything.total) == everything
    busy = everything.pinned + everything.live
    some = pool_of(DEMAND, 16, num_blocks=busy + 9 * 32 + 31)
    assert some is not None
    assert (some.warm, some.warm_sessions) == (9 * 32, 0.2)
    none = pool_of(DEMAND, 16, num_blocks=busy)
    assert none is not None
    assert (none.warm, none.warm_sessions) == (0, 0.0)
    assert pool_of(DEMAND, 16, num_blocks=busy - 1) is None
