"""Log probabilities of tokens, from the model's own scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvway_worker.scheduling.sampling_params import TokenLogprobs
from kvway_worker.torch_engine.sampling import likeliest

_ROWS_AT_ONCE = 128
"""Rows whose log probabilities are in memory at a time: 77 MB for 150,000 tokens."""


def token_logprobs(
    scores: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Return how likely each row's token was, and its likeliest ones.

    The softmax is over the whole vocabulary, in float32. Of equal scores the smaller token id
    comes first, so a token of rank r <= num_top is number r of `top`, and the token that greedy
    choice takes has rank 1.

    Shapes: scores [num_rows, vocab_size], any float dtype.

    Args:
        scores: the model's, before any change.
        token_ids: one per row.
        num_top: of how many likeliest tokens each row tells.
    """
    out: list[TokenLogprobs] = []
    for first in range(0, len(token_ids), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        out += _token_logprobs(scores[rows].float(), token_ids[rows], num_top[rows])
    return out


def _token_logprobs(
    scores: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    vocab_size = scores.shape[1]
    column = torch.tensor(token_ids, dtype=torch.int64, device=scores.device)[:, None]
    logprobs = torch.log_softmax(scores, dim=-1)
    own = scores.gather(1, column)
    better = (scores > own).sum(dim=-1)
    ids = torch.arange(vocab_size, device=scores.device)
    equal_before = ((scores == own) & (ids < column)).sum(dim=-1)
    ranks = (better + equal_before + 1).tolist()
    values = logprobs.gather(1, column)[:, 0].tolist()
    tops = _tops(scores, logprobs, min(max(num_top), vocab_size))
    return [
        TokenLogprobs(token, value, rank, top=tuple(top[:count]))
        for token, value, rank, top, count in zip(
            token_ids, values, ranks, tops, num_top, strict=True
        )
    ]


def _tops(scores: Tensor, logprobs: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return each row's likeliest (token, log probability), best first."""
    if not count:
        return [[] for _ in scores]
    largest = scores.topk(count, dim=-1)
    # Which of equal ones topk takes, and in what order, is its own affair: put them in order,
    # and choose anew where the last one has equals that were left out.
    ids = largest.indices.sort(dim=-1).values
    order = scores.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    ids = ids.gather(1, order)
    tied = (scores >= largest.values[:, -1:]).sum(dim=-1) > count
    for row in tied.nonzero()[:, 0].tolist():
        ids[row] = likeliest(scores[row], count)
    values = logprobs.gather(1, ids).tolist()
    return [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values, strict=True)]
