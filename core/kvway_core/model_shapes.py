"""What the sizes in a model's `config.json` say about its KV and its work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from kvway_core.errors import ConfigError
from kvway_core.sizing import Work

_MAX_CONFIG_BYTES: Final = 4 * 1024 * 1024

_GATED: Final = frozenset(
    {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "smollm3", "olmo2"}
)
"""Families of which it is known that a layer has q, k, v, o and an MLP of three matrices."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that count here.

    Attributes:
        num_layers: Layers, each of which attends to all tokens before.
        num_kv_heads: Key and value heads per layer.
        head_dim: Numbers per head.
        work: What it computes; None where the family is not known.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    work: Work | None


def read_shape(folder: Path) -> ModelShape:
    """Returns the shape of the model in a folder.

    Raises:
        ConfigError: There is no such file, or it is of a model whose KV is not keys and values of
            all tokens in all layers.
    """
    path = folder / "config.json"
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_CONFIG_BYTES)
        config = msgspec.json.decode(text, type=dict[str, Any])
    except OSError as exc:
        raise ConfigError([f"cannot read {path}: {exc.strerror}"]) from exc
    except msgspec.DecodeError as exc:
        raise ConfigError([f"{path} is not a JSON object: {exc}"]) from exc
    try:
        return shape_of(config)
    except ValueError as exc:
        raise ConfigError([f"{path}: {exc}"]) from exc


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Returns the shape that a `config.json` tells.

    Raises:
        ValueError: A size is missing or odd, or the KV is of another kind.
    """
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise ValueError("text_config is not an object")  # noqa: TRY004  of a file, not of a caller
    if (why := _other_kv(config, text)) is not None:
        raise ValueError(f"{why}: what its KV takes is not known here")
    num_heads = _size(text, "num_attention_heads")
    num_layers = _size(text, "num_hidden_layers")
    num_kv_heads = _size(text, "num_key_value_heads", default=num_heads)
    hidden = _size(text, "hidden_size")
    head_dim = _size(text, "head_dim", default=hidden // num_heads)
    work = None
    if text.get("model_type") in _GATED:
        attention_weights = 2 * hidden * (num_heads + num_kv_heads) * head_dim
        weights = num_layers * (attention_weights + _mlp_weights(text, hidden))
        work = Work(linear=2 * weights, attention=4 * num_layers * num_heads * head_dim)
    return ModelShape(num_layers, num_kv_heads, head_dim, work)


def _mlp_weights(text: Mapping[str, Any], hidden: int) -> int:
    """Returns the weights of a layer's MLP that a token goes through, experts' among them."""
    names = [name for name in ("num_local_experts", "num_experts") if text.get(name)]
    if not names:
        return 3 * hidden * _size(text, "intermediate_size")
    num_experts = _size(text, names[0])
    size = _size(text, "moe_intermediate_size", default=text.get("intermediate_size"))
    return hidden * (3 * size * _size(text, "num_experts_per_tok") + num_experts)


def _other_kv(config: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    """Returns what makes a model's KV another one than keys and values of every token."""
    if config.get("is_encoder_decoder"):
        return "an encoder-decoder model"
    if text.get("kv_lora_rank"):
        return "latent attention (kv_lora_rank)"
    kinds = set(text.get("layer_types") or text.get("layers_block_type") or ())
    if others := sorted(map(str, kinds - {"full_attention"})):
        return f"layers of type {', '.join(others)}"
    for name in ("mamba_d_state", "attn_layer_period", "hybrid_override_pattern"):
        if text.get(name):
            return f"layers that are no attention ({name})"
    window = text.get("sliding_window")
    if window and text.get("use_sliding_window", not kinds):
        return f"a sliding window of {window} tokens"
    return None


def _size(text: Mapping[str, Any], name: str, *, default: int | None = None) -> int:
    size = text.get(name)
    if size is None:
        size = default
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{name} must be 1 or more, got {size!r}")
    return size
