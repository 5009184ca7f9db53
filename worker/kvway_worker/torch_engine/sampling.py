"""From logits to token ids.

The random number that picks a token is a function of the request's seed and the token's position
alone. So a request with a seed gets the same tokens alone, in any batch, and after a preemption.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvway_core.errors import EngineFailed
from kvway_worker.sampling_params import SamplingParams

_RANDOM_BITS = 53
"""A float64 in [0, 1) holds this many random bits."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to choose.

    Attributes:
        params: how.
        position: of the new token in its sequence.
    """

    params: SamplingParams
    position: int


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Choose one token per row.

    Shapes: logits [num_rows, vocab_size], any float dtype.

    Args:
        logits: the model's scores.
        draws: one per row.

    Returns:
        The token ids, in the order of the rows.

    Raises:
        EngineFailed: a row has no finite largest score: the model computed NaN or infinity.
    """
    if not draws:
        return []
    logits = logits.float()
    best = logits.max(dim=-1)
    if not bool(torch.isfinite(best.values).all()):
        raise EngineFailed("The model computed scores that are not finite.")
    tokens: list[int] = best.indices.tolist()
    for row, draw in enumerate(draws):
        if draw.params.temperature > 0:
            tokens[row] = _draw(logits[row] - best.values[row], draw)
    return tokens


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1), the same for the same seed and position."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    bits = int.from_bytes(digest, "big") >> (64 - _RANDOM_BITS)
    return math.ldexp(bits, -_RANDOM_BITS)


def _draw(scores: Tensor, draw: Draw) -> int:
    """Draw by inverting the cumulative distribution.

    With `top_p` below 1 only the smallest set of likeliest tokens that reaches that share is drawn
    from; it has at least one token. It takes a sort of the vocabulary, so without it none is done.
    """
    probabilities = torch.softmax(scores.double() / draw.params.temperature, dim=-1)
    number = uniform(draw.params.seed, draw.position)
    if draw.params.top_p == 1:
        return _invert(probabilities.cumsum(dim=-1), number)
    ordered, order = probabilities.sort(descending=True, stable=True)
    cumulative = ordered.cumsum(dim=-1)
    last = int(torch.searchsorted(cumulative, draw.params.top_p * float(cumulative[-1])))
    return int(order[_invert(cumulative[: last + 1], number)])


def _invert(cumulative: Tensor, number: float) -> int:
    """Return the first index whose cumulative weight is more than that share of the whole.

    It has a weight of its own; a number below 1 keeps its share below the whole.
    """
    target = number * float(cumulative[-1])
    return int(torch.searchsorted(cumulative, target, right=True))
