"""The forward pass of Llama and its kin, over packed rows and our blocks.

One file for the families that differ in flags only: Llama and SmolLM2, Mistral, Qwen2 and 2.5
(biases), Qwen3 (norms of queries and keys). Weights, and the rotary angles of every kind of
scaling, are those of a loaded transformers model; what is computed is the same as in its own
forward pass, with fewer and larger products:

* queries, keys and values come from one product, gate and up of the feed-forward from another;
* weights are laid out once for the CPU's matrix unit, where it has one;
* behind the last layer's keys and values only rows whose scores are wanted are computed, and
  nothing at all for a chunk in the middle of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, silu

from kvway_kernels.api import PagedPlan, paged_attention, write_kv
from kvway_worker.torch_engine.kv_cache import PagedKVCache
from kvway_worker.torch_engine.linear import ChoosesPacked, Product, choice, joined, product

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
"""What it computes, by transformers' names."""

_PRODUCTS: Final = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm over the last axis: x / sqrt(mean(x^2) + eps) * weight."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        """Take over a norm of a transformers model."""
        return cls(module.weight.detach(), module.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normed rows."""
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights.

    Attributes:
        attention_norm: before attention.
        qkv: queries, keys and values of all heads, in that order.
        q_norm: of each query head; None where the family has none.
        k_norm: of each key head.
        output: from attention back to the hidden size.
        scale: factor on the scores before the softmax.
        feed_norm: before the feed-forward.
        gate_up: the gate, then what it gates.
        down: back to the hidden size.
    """

    attention_norm: Norm
    qkv: Product
    q_norm: Norm | None
    k_norm: Norm | None
    output: Product
    scale: float
    feed_norm: Norm
    gate_up: Product
    down: Product

    def feed_forward(self, x: Tensor) -> Tensor:
        """Return what the feed-forward adds to the rows."""
        gate, up = self.gate_up(self.feed_norm(x)).chunk(2, dim=-1)
        return self.down(silu(gate).mul_(up))


class Decoder:
    """The model, ready to compute. Takes over the weights of a transformers model.

    The rows of a call may belong to any requests: each is told its position, and the plan knows
    what it attends to. A row's result depends on no other row but through the blocks.

    Args:
        model: a causal language model that `supports` accepts. Its layers are empty afterwards.
        same_bits: choose nothing by measuring: every start computes alike, bit for bit.
    """

    def __init__(self, model: Any, *, same_bits: bool = False) -> None:
        config, body = model.config, model.model
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads: int = config.num_key_value_heads
        self._head_dim: int = body.layers[0].self_attn.head_dim
        self._embedding: Tensor = body.embed_tokens.weight.detach()
        dtype, device = self._embedding.dtype, self._embedding.device
        packed = choice(dtype, device, same_bits=same_bits)
        self._rotary = body.rotary_emb
        self._layers = [_layer(module, packed) for module in body.layers]
        self._norm = Norm.of(body.norm)
        head: Tensor = model.lm_head.weight.detach()
        is_tied = head.data_ptr() == self._embedding.data_ptr()
        # The embedding is read row by row, in its plain layout: packing it would be a second copy.
        num_out, num_in = head.shape
        self._head = product(head, None, pack=not is_tied and packed((num_out, num_in)))

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        *,
        keep: Tensor,
        cache: PagedKVCache,
        plan: PagedPlan,
    ) -> Tensor:
        """Compute one packed step; its keys and values go into the blocks.

        Shapes: token_ids, positions int64 [T]; keep int64 [num_kept], rows to score; result
        [num_kept, vocab_size].
        """
        x = embedding(token_ids, self._embedding)
        turn = _Turn(*self._rotary(x[None], positions[None]))
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, layer.attention_norm(x), turn)
            kv, scales = (cache.k[index], cache.v[index]), cache.scales(index)
            write_kv(*kv, k, v, plan, **scales)
            if index == last and not len(keep):
                return x.new_empty(0, len(self._embedding))
            heads = paged_attention(q, *kv, plan, scale=layer.scale, **scales)
            attended = heads.flatten(1)
            if index == last:
                attended, x = attended.index_select(0, keep), x.index_select(0, keep)
            x = x + layer.output(attended)
            x += layer.feed_forward(x)
        return self._head(self._norm(x))

    def _qkv(self, layer: Layer, x: Tensor, turn: _Turn) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values; queries and keys normed and turned.

        Shapes: x [T, hidden]; q [T, Hq, D]; k, v [T, Hkv, D].
        """
        rows = layer.qkv(x).view(len(x), -1, self._head_dim)
        num_turned = self._num_heads + self._num_kv_heads
        turned, v = rows[:, :num_turned], rows[:, num_turned:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = turned[:, : self._num_heads], turned[:, self._num_heads :]
            turned = torch.cat([layer.q_norm(q), layer.k_norm(k)], dim=1)
        turned = turn(turned)
        return turned[:, : self._num_heads], turned[:, self._num_heads :], v


class _Turn:
    """The rotary embedding of a step's rows: halves (a, b) -> (a cos - b sin, b cos + a sin).

    Shapes: cos, sin [1, T, D], as transformers' rotary modules give them: both halves alike.
    """

    __slots__ = ("_cos", "_half", "_sin")

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._half = cos.shape[-1] // 2
        self._cos = cos[0, :, None]
        low, high = sin[0, :, None].chunk(2, dim=-1)
        self._sin = torch.cat([-low, high], dim=-1)

    def __call__(self, heads: Tensor) -> Tensor:
        """Return the heads turned: [T, H, D], contiguous."""
        return heads * self._cos + heads.roll(self._half, -1) * self._sin


def supports(model: Any) -> bool:
    """Tell whether a transformers model is one that `Decoder` computes the same as it does.

    A model of the families with a setting that we do not know is left to transformers.
    """
    config = model.config
    if config.model_type not in FAMILIES or config.hidden_act != "silu":
        return False
    head_dim: int = model.model.layers[0].self_attn.head_dim
    if 2 * len(model.model.rotary_emb.inv_freq) != head_dim or model.lm_head.bias is not None:
        return False
    return all(_is_plain(layer, config) for layer in model.model.layers)


def _is_plain(layer: Any, config: Any) -> bool:
    """Tell whether a layer sees all earlier tokens and multiplies with plain weights."""
    window = getattr(config, "sliding_window", None)
    if getattr(layer.self_attn, "sliding_window", window) is not None:
        return False
    linears = [
        getattr(getattr(layer, part), name) for part in _PRODUCTS for name in _PRODUCTS[part]
    ]
    return all(type(linear) is torch.nn.Linear for linear in linears)


def _layer(module: Any, packed: ChoosesPacked) -> Layer:
    attention, feed = module.self_attn, module.mlp
    has_norms = hasattr(attention, "q_norm")
    return Layer(
        attention_norm=Norm.of(module.input_layernorm),
        qkv=joined([attention.q_proj, attention.k_proj, attention.v_proj], packed=packed),
        q_norm=Norm.of(attention.q_norm) if has_norms else None,
        k_norm=Norm.of(attention.k_norm) if has_norms else None,
        output=joined([attention.o_proj], packed=packed),
        scale=attention.scaling,
        feed_norm=Norm.of(module.post_attention_layernorm),
        gate_up=joined([feed.gate_proj, feed.up_proj], packed=packed),
        down=joined([feed.down_proj], packed=packed),
    )
