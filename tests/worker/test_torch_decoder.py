"""Our own forward pass against transformers': same weights, same tokens, float32 scores alike.

The reference is transformers' whole model with its own attention and no cache.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvway_kernels.api import RequestRows, plan
from kvway_worker.torch_engine import linear
from kvway_worker.torch_engine.decoder import Decoder, supports
from kvway_worker.torch_engine.kv_cache import PagedKVCache
from kvway_worker.torch_engine.model import HuggingFaceModel, StepContext
from tests.worker.torch_models import write_model

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 72
BLOCKS_EACH = 24
TOLERANCE = 2e-5
"""Of the largest score. Sums in another order differ by about a tenth of it."""

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, one key head": {"model_type": "llama", "num_key_value_heads": 1},
    "llama, a key head each": {"model_type": "llama", "num_key_value_heads": 6},
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, tied head": {"model_type": "llama", "tie_word_embeddings": True},
    "llama, eps": {"model_type": "llama", "rms_norm_eps": 0.1},
    "llama, llama3 angles": {
        "model_type": "llama",
        "rope_parameters": {"rope_theta": 5e3, **LLAMA3},
    },
    "llama, linear angles": {
        "model_type": "llama",
        "rope_parameters": {"rope_theta": 1e4, **LINEAR},
    },
    "llama, yarn angles": {"model_type": "llama", "rope_parameters": {"rope_theta": 1e4, **YARN}},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "qwen3, biases": {"model_type": "qwen3", "attention_bias": True},
}


def randomized(folder: Path) -> Path:
    """Give every weight random numbers: transformers starts norms at one and biases at zero."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight.add_(0.5 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def tokens_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


class Runner:
    """Computes packed steps of a model over blocks that are in no order."""

    def __init__(self, model: HuggingFaceModel) -> None:
        self.model = model
        shape = model.kv_shape(BLOCK_SIZE, model.dtype)
        self.cache = PagedKVCache(shape, num_blocks=NUM_BLOCKS, device=CPU)

    def step(self, parts: Sequence[tuple[Sequence[int], int, int]], keep: Sequence[int]) -> Tensor:
        """Compute tokens [start, end) of each of the prompts; return scores of packed rows."""
        order = random.Random(3).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        share = BLOCKS_EACH
        requests = [
            RequestRows(end - start, end, order[i * share : (i + 1) * share])
            for i, (_, start, end) in enumerate(parts)
        ]
        step = plan(requests, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, implementation="sdpa")
        with torch.inference_mode():
            return self.model.forward(
                torch.tensor([t for tokens, start, end in parts for t in tokens[start:end]]),
                torch.tensor([p for _, start, end in parts for p in range(start, end)]),
                keep=torch.tensor(list(keep), dtype=torch.int64),
                step=StepContext(self.cache, step),
            )


def scores(folder: Path, tokens: Sequence[int]) -> Tensor:
    """Return transformers' scores of all positions."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        out: Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return out


def assert_close(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return randomized(write_model(tmp_path, **FAMILIES[request.param]))


def own(folder: Path, dtype: torch.dtype = torch.float32) -> HuggingFaceModel:
    model = HuggingFaceModel(folder, dtype=dtype, device=CPU)
    assert isinstance(model._model, Decoder)
    return model


def test_scores_equal_transformers_in_one_step_in_chunks_and_token_by_token(folder: Path) -> None:
    tokens = tokens_of(90)
    expected = scores(folder, tokens)
    runner = Runner(own(folder))
    assert_close(runner.step([(tokens, 0, 90)], range(90)), expected)
    runner = Runner(runner.model)
    for start, end in ((0, 40), (40, 47), (47, 88), (88, 89), (89, 90)):
        found = runner.step([(tokens, start, end)], range(end - start))
        assert_close(found, expected[start:end])


def test_requests_of_a_step_do_not_touch_each_other(folder: Path) -> None:
    prompts = [tokens_of(30, 1), tokens_of(21, 2), tokens_of(12, 3)]
    runner = Runner(own(folder))
    runner.step([(prompts[0], 0, 29), (prompts[1], 0, 11)], [])
    found = runner.step(
        [(p, start, len(p)) for p, start in zip(prompts, (29, 11, 0), strict=True)], [22, 0, 10]
    )
    wanted = [scores(folder, p)[-1] for p in (prompts[2], prompts[0], prompts[1])]
    assert_close(found, torch.stack(wanted))


def test_a_step_that_scores_nothing_still_stores_every_layer(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    tokens = tokens_of(20)
    silent, scored = Runner(own(folder)), Runner(own(folder))
    assert silent.step([(tokens, 0, 20)], []).shape == (0, 258)
    scored.step([(tokens, 0, 20)], range(20))
    for found, expected in zip(
        (*silent.cache.k, *silent.cache.v), (*scored.cache.k, *scored.cache.v), strict=True
    ):
        assert torch.equal(found, expected)
        assert bool(found.any())


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "llama", "hidden_act": "gelu"},
        {"model_type": "olmo2"},
    ],
    ids=["another activation", "another family"],
)
def test_what_the_decoder_does_not_know_runs_in_transformers(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = randomized(write_model(tmp_path, **changes))
    model = HuggingFaceModel(folder, dtype=torch.float32, device=CPU)
    assert not isinstance(model._model, Decoder)
    tokens = tokens_of(30)
    assert_close(Runner(model).step([(tokens, 0, 30)], range(30)), scores(folder, tokens))


def test_layers_of_which_the_configuration_does_not_tell_are_left_to_transformers(
    tmp_path: Path,
) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path))
    assert supports(model)
    model.model.layers[2].mlp.down_proj = torch.nn.Sequential(model.model.layers[2].mlp.down_proj)
    assert not supports(model)


def test_a_window_is_not_computed_as_full_attention(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "mistral", sliding_window=8)
    assert not supports(AutoModelForCausalLM.from_pretrained(folder))


def test_no_weight_is_held_twice(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path))
    Decoder(model)
    left = {name for name, _ in model.named_parameters() if "proj" in name}
    assert left == set()


needs_bfloat16 = pytest.mark.skipif(
    not linear.choice(torch.bfloat16, CPU, same_bits=True)((1, 1)),
    reason="no bfloat16 in hardware",
)


@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [
        (torch.float32, 1e-5, 1e-5),
        pytest.param(torch.bfloat16, 2**-7, 2e-2, marks=needs_bfloat16),
    ],
)
@pytest.mark.parametrize("num_rows", [0, 1, 7, 64, 300])
def test_a_packed_product_is_the_plain_one(
    num_rows: int, dtype: torch.dtype, rtol: float, atol: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 48, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype)
    wide = torch.randn(num_rows, 64, generator=generator).to(dtype)
    rows = wide[:, :48]  # as a model may give them: not contiguous
    for b in (None, bias):
        with torch.inference_mode():
            found = linear.product(weight, b, pack=True)(rows).double()
        exact = rows.double() @ weight.double().T + (0 if b is None else b.double())
        assert found.shape == exact.shape
        assert torch.allclose(found, exact, rtol=rtol, atol=atol)


def test_what_is_to_have_the_same_bits_is_not_chosen_by_measuring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "is_faster_packed", lambda _: True)
    assert linear.choice(torch.float32, CPU, same_bits=False)((3072, 576))
    assert not linear.choice(torch.float32, CPU, same_bits=True)((3072, 576))
    assert not linear.choice(torch.bfloat16, torch.device("cuda"), same_bits=False)((3072, 576))


@pytest.mark.parametrize("packed_s", [0.5, 0.95, 2.0])
def test_float32_weights_are_packed_where_that_is_measured_to_be_faster(
    monkeypatch: pytest.MonkeyPatch, packed_s: float
) -> None:
    clock = [0.0]

    def product(weight: torch.Tensor, bias: None, *, pack: bool) -> linear.Product:
        def multiply(x: torch.Tensor) -> torch.Tensor:
            clock[0] += packed_s if pack else 1.0
            return x

        return multiply

    monkeypatch.setattr(linear, "product", product)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    measure = linear.is_faster_packed.__wrapped__
    assert measure((1024, 1024)) is (packed_s < 0.9)
    assert measure((512, 1024)) is False


@needs_bfloat16
def test_bfloat16_with_packed_weights_is_as_close_to_float32_as_transformers(
    folder: Path,
) -> None:
    tokens = tokens_of(40)
    exact = scores(folder, tokens)
    packed = Runner(own(folder, torch.bfloat16)).step([(tokens, 0, 40)], range(40)).float()
    plain = HuggingFaceModel(folder, dtype=torch.bfloat16, device=CPU, own_decoder=False)
    theirs = Runner(plain).step([(tokens, 0, 40)], range(40)).float()
    norm = torch.linalg.vector_norm
    assert float(norm(packed - exact)) <= 1.25 * float(norm(theirs - exact)) + 1e-3
