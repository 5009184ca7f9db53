"""What the torch engine does not compute right it refuses at load, in one line that says why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typing_extensions import override

from kvway_core.errors import ConfigError
from kvway_core.testing.byte_model import write_byte_model
from kvway_worker.settings import MAX_NUM_BLOCKS
from kvway_worker.torch_engine import TorchEngine
from tests.worker.torch_models import TINY, Driver, generate, write_model


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def engine_of(folder: Path, **options: Any) -> TorchEngine:
    defaults: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_blocks": 64}
    return TorchEngine(folder, **{**defaults, **options})


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        engine_of(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


# --- what would answer wrong without a word -----------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("model_type", "changes", "problem"),
    [
        ("diffllama", {}, "DiffLlamaAttention attends twice in a layer"),
        ("bert", {"is_decoder": False}, "BertSelfAttention lets tokens see later ones"),
        ("electra", {"is_decoder": False}, "ElectraSelfAttention lets tokens see later ones"),
        ("roberta", {"is_decoder": True}, "its positions are not 0, 1, 2"),
        ("camembert", {"is_decoder": True}, "its positions are not 0, 1, 2"),
        ("nemotron", {}, "NemotronAttention hands nothing of a call on to attention"),
        ("stablelm", {}, "StableLmAttention hands nothing of a call on to attention"),
    ],
)
def test_models_that_would_answer_wrong_are_refused(
    tmp_path: Path, model_type: str, changes: dict[str, object], problem: str, dtype: str
) -> None:
    folder = write_model(tmp_path, model_type, **{"num_key_value_heads": 6, **changes})
    assert problem in refusal(folder, dtype=dtype)
    assert repr(model_type) in refusal(folder, dtype=dtype)


class OddConfig(LlamaConfig):  # type: ignore[misc]
    model_type = "odd"


class OddModel(LlamaForCausalLM):  # type: ignore[misc]
    """Its own attention does something that it does not tell ours."""

    config_class = OddConfig

    @override
    def forward(self, *args: Any, **keywords: Any) -> Any:
        for layer in self.model.layers:
            is_own = self.config._attn_implementation == "eager"
            layer.self_attn.scaling = layer.self_attn.head_dim**-0.5 * (-8 if is_own else 1)
        return super().forward(*args, **keywords)


@pytest.fixture
def odd_model(tmp_path: Path) -> Path:
    AutoConfig.register("odd", OddConfig, exist_ok=True)
    AutoModelForCausalLM.register(OddConfig, OddModel, exist_ok=True)
    write_byte_model(tmp_path)
    torch.manual_seed(0)
    OddModel(OddConfig(**TINY)).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_whose_own_scores_are_others_is_refused(odd_model: Path, dtype: str) -> None:
    assert "scores differ from those without the cache" in refusal(odd_model, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["gpt2", "opt", "phi", "mixtral", "granitemoe"])
def test_what_computes_the_same_is_taken(tmp_path: Path, model_type: str, dtype: str) -> None:
    """Mixtures too, which in bfloat16 may take another expert for a token."""
    folder = write_model(tmp_path, model_type, num_key_value_heads=6)
    engine = engine_of(folder, dtype=dtype)
    assert not any(layer.any() for layer in (*engine._cache.k, *engine._cache.v))
    if dtype == "float32":
        prompt = [(7 * i) % 250 for i in range(50)]
        assert [Driver(engine).answer(prompt, 8)[0]] == generate(folder, [prompt], 8)


def test_a_context_or_a_cache_shorter_than_the_check_is_enough(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "gpt2", num_key_value_heads=6, max_position_embeddings=8)
    assert engine_of(folder).max_model_len == 8
    assert engine_of(folder, num_blocks=1, block_size=1).max_model_len == 1


# --- deterministic where it holds ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
        ("phi3", {}),
        ("llama", {"hidden_act": "gelu"}),
    ],
)
def test_deterministic_is_refused_where_we_cannot_promise_it(
    tmp_path: Path, model_type: str, changes: dict[str, object]
) -> None:
    """A mixture of experts multiplies as many rows as chose an expert, whoever they are of."""
    folder = write_model(tmp_path, model_type, **changes)
    engine_of(folder)
    problem = refusal(folder, deterministic=True)
    assert "--deterministic" in problem
    assert repr(model_type) in problem


# --- odd folders --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "cannot load the model"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "cannot load the model"),
        ({"num_attention_heads": 0}, "config"),
        ({"num_attention_heads": "6"}, "config"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0: it must be 1 or more"),
        ({"vocab_size": -1}, "vocab_size -1: it must be 1 or more"),
        ({"max_position_embeddings": None}, "config"),
        ({"num_key_value_heads": 0}, "cannot load the model"),
        ({"hidden_act": "nope"}, "cannot load the model"),
        ({"rope_parameters": {"rope_type": "foo"}}, "cannot load the model"),
        ({"rope_parameters": 7}, "config"),
    ],
)
def test_an_odd_configuration_is_refused(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    folder = edit_config(write_model(tmp_path), **changes)
    found = refusal(folder)
    assert problem in found
    assert str(tmp_path) in found


@pytest.mark.parametrize("model_type", ["ours", "llama"])
def test_code_in_a_models_folder_never_runs(
    tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is asked either: who answers yes at a terminal would have it run."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    names = {"AutoConfig": "odd.Config", "AutoModelForCausalLM": "odd.Model"}
    folder = edit_config(write_model(tmp_path), model_type=model_type, auto_map=names)
    ran = tmp_path / "ran"
    (folder / "odd.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig):\n    model_type = 'ours'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    if model_type == "llama":
        engine_of(folder)
    else:
        assert "custom code" in refusal(folder)
    assert not ran.exists()


def test_memory_for_more_blocks_than_a_pool_may_have_is_refused(tmp_path: Path) -> None:
    """A block of this model is 6,144 bytes."""
    folder = write_model(tmp_path)
    too_much = 6144 * (MAX_NUM_BLOCKS + 1)
    problem = refusal(folder, num_blocks=None, kv_cache_bytes=too_much)
    assert f"1048577 KV blocks, and a pool has at most {MAX_NUM_BLOCKS}" in problem


def test_the_default_memory_never_makes_more_blocks_than_a_pool_may_have(tmp_path: Path) -> None:
    small: dict[str, Any] = {
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "num_attention_heads": 1,
    }
    folder = write_model(tmp_path, head_dim=2, **small)
    assert engine_of(folder, num_blocks=None).num_blocks == MAX_NUM_BLOCKS
