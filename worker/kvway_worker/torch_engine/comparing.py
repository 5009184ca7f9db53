"""Whether a model computes on the paged cache what it computes in transformers' own way."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kvway_core.errors import ConfigError

CHECK_TOKENS: Final = 12
"""Enough for a chunk and one twice as long behind it."""

_ORDER: Final = 1e-3
"""Share of the spread by which float32 scores may differ where sums have another order."""

_ROUNDING: Final = 0.5
"""The same in bfloat16, or where cached keys and values are quantised. Models of seven families
with random weights differed by up to 0.36 in bfloat16 (the median position), by up to 0.08 with
int8 and 0.31 with fp8_e4m3."""

_SAME_SHAPES: Final = 0.02
"""The same where they have the same order, but perhaps on a GPU."""


def check_prompt(vocab_size: int, num_tokens: int) -> list[int]:
    """Return random tokens, the same ones in each process."""
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()
    return tokens


def check_positions(scores: Tensor, expected: Tensor) -> None:
    """Refuse a model that does not count positions from 0, or does not heed those it is given.

    Shapes: scores, expected [num_tokens, vocab_size].

    Args:
        scores: with positions 0, 1, 2, ... given.
        expected: with none given.

    Raises:
        ConfigError: they differ, or are not numbers.
    """
    share = float(_differences(scores, expected).max())
    if not share <= _SAME_SHAPES:
        raise ConfigError(
            [f"its positions are not 0, 1, 2, ...: scores differ by {share:.2g} of their spread"]
        )


def check_scores(scores: Tensor, expected: Tensor, *, is_quantised: bool = False) -> None:
    """Refuse a model whose scores on the paged cache are not its own.

    In float32 all positions count, and may differ by 0.001 of the spread. In bfloat16 and with a
    quantised cache the median of them does, and may differ by half of it: rounding can make a
    mixture take another expert for a token, and then everything about that token differs.

    Shapes: scores, expected [num_tokens, vocab_size], of the same dtype.

    Args:
        scores: on the paged cache.
        expected: without it.
        is_quantised: the cache rounds keys and values to 8 bits.

    Raises:
        ConfigError: they differ by more than rounding, or are not numbers.
    """
    shares = _differences(scores, expected)
    is_exact = scores.dtype == torch.float32 and not is_quantised
    share = float(shares.max() if is_exact else shares.median())
    if not share <= (_ORDER if is_exact else _ROUNDING):
        raise ConfigError(
            [f"scores differ from those without the cache by {share:.2g} of their spread"]
        )


def _differences(scores: Tensor, expected: Tensor) -> Tensor:
    """Return each position's largest difference of two scores, as a share of the spread.

    The spread is how far the likeliest token is ahead of the one in the middle, on average over
    the positions.

    Shapes: scores, expected [num_tokens, vocab_size]; result [num_tokens] float32.
    """
    ours, own = scores.float(), expected.float()
    spread = (own.amax(dim=-1) - own.median(dim=-1).values).mean()
    # Some models rule tokens out with -inf, which has no difference to itself.
    largest = (ours - own).where(ours != own, 0.0).abs().amax(dim=-1)
    return (largest / spread).where(largest != 0, 0.0)
