"""A Hugging Face causal LM that attends through our kernels.

Families that `decoder` knows are computed by it. All others run in transformers' own code, which
lets an attention function be registered by name, and hands it whatever extra keywords the model
was called with. So each call brings its own step: which blocks each request reads, and where new
keys and values go. Nothing is kept between calls but the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.utils import logging as hf_logging

from kvway_core.errors import ConfigError
from kvway_kernels.api import PagedPlan, paged_attention, write_kv
from kvway_worker.torch_engine.decoder import Decoder, supports
from kvway_worker.torch_engine.kv_cache import KVShape, PagedKVCache

ATTENTION_NAME: Final = "kvway_paged"

_PLAIN_KEYWORDS: Final = frozenset(
    {
        "cache",
        "dropout",
        "output_attentions",
        "output_hidden_states",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""What models pass to attention that does not change plain causal attention in inference."""

_SIZES: Final = (
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "max_position_embeddings",
    "vocab_size",
)
"""What the configuration has to tell."""

_VARYING_ROPE: Final = frozenset({"dynamic", "longrope"})
"""Rotary embeddings whose angles depend on the longest request: cached keys would be wrong."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """What one call of the model needs beside its tokens.

    Attributes:
        cache: where keys and values are.
        plan: who owns which rows, and which blocks each reads.
        layers_seen: the layers that have attended in this call.
    """

    cache: PagedKVCache
    plan: PagedPlan
    layers_seen: set[int] = field(default_factory=set)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kvway_step: StepContext | None = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Store a layer's new keys and values and attend: transformers' attention interface.

    Shapes: query [1, Hq, T, D]; key, value [1, Hkv, T, D]; result [1, T, Hq, D].

    Args:
        module: a layer's attention.
        query: the queries.
        key: the keys.
        value: the values.
        attention_mask: None, else the model needs a mask of its own.
        kvway_step: what the model was called with; None from a model that does not hand it on.
        scaling: factor on the scores; 1 / sqrt(D) where a model gives none, as in transformers.
        others: what else the model gives; a module's own `is_causal` counts where this has none.

    Raises:
        ConfigError: the model asks for more than plain causal attention once per layer.
    """
    kind = type(module).__name__
    if kvway_step is None:
        raise ConfigError([f"{kind} hands nothing of a call on to attention"])
    is_causal = others.pop("is_causal", None)
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ConfigError([f"{kind} lets tokens see later ones"])
    strange = [
        name
        for name, setting in others.items()
        if name not in _PLAIN_KEYWORDS and setting is not None and setting is not False
    ]
    if strange or attention_mask is not None:
        strange += [] if attention_mask is None else ["attention_mask"]
        raise ConfigError([f"{kind} needs {', '.join(strange)} in attention"])
    layer = module.layer_idx
    if layer in kvway_step.layers_seen:
        raise ConfigError([f"{kind} attends twice in a layer"])
    kvway_step.layers_seen.add(layer)
    cache, plan = kvway_step.cache, kvway_step.plan
    kv, scales = (cache.k[layer], cache.v[layer]), cache.scales(layer)
    write_kv(*kv, key[0].transpose(0, 1), value[0].transpose(0, 1), plan, **scales)
    rows = query[0].transpose(0, 1)
    scale = rows.shape[-1] ** -0.5 if scaling is None else scaling
    out = paged_attention(rows, *kv, plan, scale=scale, **scales)
    return out[None], None


def _no_mask(*_args: Any, **_keywords: Any) -> None:
    """Build no dense mask: the plan knows who sees what."""


class HuggingFaceModel:
    """Weights and forward pass of the model in a folder. Keeps no state between calls.

    Args:
        folder: config.json and safetensors.
        dtype: of weights and KV.
        device: where they go.
        own_decoder: compute families that `decoder` knows with it; False leaves every model to
            transformers, to compare the two.
        same_bits: every start computes alike, bit for bit: nothing is chosen by measuring.

    Raises:
        ConfigError: the folder cannot be read, weights are missing, or the architecture is one
            whose attention is not plain causal attention over all earlier tokens.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        own_decoder: bool = True,
        same_bits: bool = False,
    ) -> None:
        AttentionInterface.register(ATTENTION_NAME, _attend)
        AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
        self._config = _read_config(folder)
        text = self._config.get_text_config()
        model = _load_weights(folder, self._config, dtype=dtype, device=device)
        is_ours = own_decoder and supports(model)
        self._model = Decoder(model, same_bits=same_bits) if is_ours else model
        self.dtype = dtype
        self.device = device
        self.vocab_size: int = text.vocab_size
        self.max_model_len: int = text.max_position_embeddings
        self.num_layers: int = text.num_hidden_layers
        self.num_heads: int = text.num_attention_heads
        self.num_kv_heads: int = (
            getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        )
        self.head_dim: int = (
            getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        )

    @property
    def model_type(self) -> str:
        """Its family, as transformers names it."""
        name: str = self._config.model_type
        return name

    @property
    def has_own_decoder(self) -> bool:
        """Whether our decoder computes it, and not transformers' code."""
        return isinstance(self._model, Decoder)

    def kv_shape(self, block_size: int, dtype: torch.dtype) -> KVShape:
        """Return what one block of this model's KV looks like when it is kept in a dtype."""
        return KVShape(
            num_layers=self.num_layers,
            block_size=block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
        )

    def forward(
        self, token_ids: Tensor, positions: Tensor, *, keep: Tensor, step: StepContext
    ) -> Tensor:
        """Compute one packed step; keys and values go into the blocks of the step's plan.

        Shapes: token_ids, positions int64 [T]; keep int64 [num_kept], rows to score; result
        [num_kept, vocab_size].

        Raises:
            ConfigError: not every layer attended through the cache exactly as planned.
        """
        if isinstance(self._model, Decoder):
            return self._model(token_ids, positions, keep=keep, cache=step.cache, plan=step.plan)
        logits: Tensor = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=keep,
            kvway_step=step,
        ).logits[0]
        if len(step.layers_seen) != self.num_layers:
            problem = (
                f"{type(self._model).__name__} attends in {len(step.layers_seen)} of its "
                f"{self.num_layers} layers"
            )
            raise ConfigError([problem])
        return logits

    def plain_forward(self, token_ids: Tensor, positions: Tensor | None) -> Tensor:
        """Compute a prompt with transformers' own attention, without blocks.

        For models that our decoder does not compute. Nothing else may compute meanwhile.

        Shapes: token_ids, positions int64 [T]; result [T, vocab_size].

        Args:
            token_ids: the prompt.
            positions: of its tokens; None leaves them to the model.
        """
        model: Any = self._model
        model.set_attn_implementation("eager")
        try:
            logits: Tensor = model(
                input_ids=token_ids[None],
                position_ids=None if positions is None else positions[None],
                use_cache=False,
            ).logits[0]
        finally:
            model.set_attn_implementation(ATTENTION_NAME)
        return logits


def _read_config(folder: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        problems = _unsupported(config)
    except Exception as error:  # whatever a family's own code makes of an odd file
        raise ConfigError(
            [f"cannot read {folder / 'config.json'}: {first_line(error)}"]
        ) from error
    if problems:
        raise ConfigError([f"model {config.model_type!r} in {folder}: {p}" for p in problems])
    return config


def _unsupported(config: Any) -> list[str]:
    """Name what the configuration alone shows to be more than plain causal attention."""
    text = config.get_text_config()
    problems = []
    if config.is_encoder_decoder:
        problems.append("encoder-decoder models are not supported")
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention"})
    if kinds:
        problems.append(f"layers of type {', '.join(kinds)} are not supported")
    window = getattr(text, "sliding_window", None)
    is_used = getattr(text, "use_sliding_window", not getattr(text, "layer_types", None))
    if window and is_used and not kinds:
        problems.append(f"a sliding window of {window} tokens is not supported")
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in _VARYING_ROPE:
        problems.append(f"rotary embeddings of type {rope['rope_type']} are not supported")
    for name in _SIZES:
        size = getattr(text, name, None)
        if size is None:
            problems.append(f"the configuration has no {name}: not supported")
        elif not isinstance(size, int) or size < 1:
            problems.append(f"the configuration has {name} {size!r}: it must be 1 or more")
    return problems


def _load_weights(folder: Path, config: Any, *, dtype: torch.dtype, device: torch.device) -> Any:
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # a worker's stderr is its log
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        model = model.to(device).eval()
    except Exception as error:  # a family's own code, a quantizer that is not installed, no memory
        raise ConfigError([f"cannot load the model in {folder}: {first_line(error)}"]) from error
    finally:
        if bars:
            hf_logging.enable_progress_bar()
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ConfigError(
            [f"the model in {folder} lacks {len(missing)} weights, the first is {missing[0]}"]
        )
    return model


def first_line(error: Exception) -> str:
    """Return what an error says first, with its kind if it is of somebody else's code."""
    if isinstance(error, ConfigError):
        return str(error)
    lines = str(error).strip().splitlines()
    name = type(error).__name__
    return f"{name}: {lines[0]}" if lines else name
