"""From logits to token ids.

The random number that picks a token is a function of the request's seed and the token's position
alone, and every operation here works on each row by itself. So a request with a seed gets the same
tokens alone, in any batch, after a preemption and with drafts, wherever it gets the same scores.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvway_core.errors import EngineFailed
from kvway_worker.scheduling.sampling_params import SamplingParams
from kvway_worker.torch_engine.edits import Draw, edited

_RANDOM_BITS = 53
"""A float64 in [0, 1) holds this many random bits."""

_ROWS_AT_ONCE = 32
"""Rows whose probabilities are in memory at a time: 40 MB each array for 150,000 tokens."""

_HEAD = 1024
"""So many of the likeliest tokens are tried first for `top_p`; all only where these do not do."""


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Choose one token per row.

    Shapes: logits [num_rows, vocab_size], any float dtype; not changed.

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
    raw = logits.float()
    best = raw.max(dim=-1)
    check_finite(best.values)
    scores = edited(raw, draws)
    if scores is not raw:
        best = scores.max(dim=-1)
    tokens: list[int] = best.indices.tolist()
    hot = [row for row, draw in enumerate(draws) if draw.params.temperature > 0]
    for first in range(0, len(hot), _ROWS_AT_ONCE):
        rows = hot[first : first + _ROWS_AT_ONCE]
        index = torch.tensor(rows, device=scores.device)
        below_best = scores.index_select(0, index) - best.values.index_select(0, index)[:, None]
        drawn = _draw(below_best, [draws[row] for row in rows])
        for row, token in zip(rows, drawn, strict=True):
            tokens[row] = token
    return tokens


def check_finite(largest: Tensor) -> None:
    """Refuse scores of which each row's largest one is not a number.

    Raises:
        EngineFailed: the model computed NaN or infinity.
    """
    if not bool(torch.isfinite(largest).all()):
        raise EngineFailed("The model computed scores that are not finite.")


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1), the same for the same seed and position."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    bits = int.from_bytes(digest, "big") >> (64 - _RANDOM_BITS)
    return math.ldexp(bits, -_RANDOM_BITS)


def likeliest(row: Tensor, count: int) -> Tensor:
    """Return the ids of the largest numbers, best first, the smaller id first among equals.

    Shapes: row [vocab_size]; result int64 [min(count, vocab_size)].

    Complexity: O(vocab_size + count log count), unless many are equal to the last one.
    """
    if count >= len(row):
        return row.sort(descending=True, stable=True).indices
    least = row.topk(count).values[-1]
    ids = (row >= least).nonzero()[:, 0]
    return ids[row[ids].sort(descending=True, stable=True).indices[:count]]


def _draw(scores: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draw from each row's distribution by inverting its cumulative one.

    The vocabulary keeps its order, except for rows with `top_k` or `top_p`.

    Shapes: scores [num_draws, vocab_size] float32, each row's largest 0.
    """
    # The bound keeps what is ruled out (-inf) from becoming NaN.
    temperatures = [min(draw.params.temperature, 1e300) for draw in draws]
    numbers = [uniform(draw.params.seed, draw.position) for draw in draws]
    divisor = torch.tensor(temperatures, dtype=torch.float64, device=scores.device)
    probabilities = torch.softmax(scores.double() / divisor[:, None], dim=-1)
    least_shares = [draw.params.min_p for draw in draws]
    if any(least_shares):
        least = torch.tensor(least_shares, dtype=torch.float64, device=scores.device)
        kept = probabilities >= (least * probabilities.amax(dim=-1))[:, None]
    else:
        kept = None
    weights = probabilities if kept is None else probabilities.where(kept, 0.0)
    tokens = _invert(weights.cumsum(dim=-1), numbers)
    for row, draw in enumerate(draws):
        if draw.params.top_k > 0 or draw.params.top_p < 1:
            ids = _narrow(probabilities[row], draw.params)
            (place,) = _invert(probabilities[row, ids].cumsum(dim=-1)[None], [numbers[row]])
            tokens[row] = int(ids[place])
    return tokens


def _narrow(probabilities: Tensor, params: SamplingParams) -> Tensor:
    """Return the ids that `top_k`, `top_p` and `min_p` leave, best first: at least one.

    `top_p` leaves the smallest set of likeliest tokens that reaches that share of what `top_k`
    left. `min_p` compares with the likeliest token, whatever the others did.
    """
    if 0 < params.top_k < len(probabilities):
        ids = likeliest(probabilities, params.top_k)
        cumulative = probabilities[ids].cumsum(dim=-1)
        total = float(cumulative[-1])
    else:
        total = float(probabilities.cumsum(dim=-1)[-1])
        ids, cumulative = _head(probabilities, params.top_p * total)
    if params.top_p < 1:
        last = int(torch.searchsorted(cumulative, params.top_p * total))
        ids = ids[: last + 1]
    least = params.min_p * float(probabilities[ids[0]])
    return ids[: max(1, int((probabilities[ids] >= least).sum()))]


def _head(probabilities: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return so many of the likeliest tokens that they reach a share, and their cumulative one.

    Sorting a head of them gives the same numbers as sorting all, sooner.
    """
    ids = likeliest(probabilities, _HEAD)
    cumulative = probabilities[ids].cumsum(dim=-1)
    if float(cumulative[-1]) < share:
        ids = likeliest(probabilities, len(probabilities))
        cumulative = probabilities[ids].cumsum(dim=-1)
    return ids, cumulative


def _invert(cumulative: Tensor, numbers: Sequence[float]) -> list[int]:
    """Return each row's first index whose cumulative weight is more than that share of the whole.

    It has a weight of its own; a number below 1 keeps its share below the whole.

    Shapes: cumulative [num_numbers, num_weights] float64.
    """
    shares = torch.tensor(numbers, dtype=torch.float64, device=cumulative.device)
    targets = shares[:, None] * cumulative[:, -1:]
    places: list[int] = torch.searchsorted(cumulative, targets, right=True)[:, 0].tolist()
    return places
