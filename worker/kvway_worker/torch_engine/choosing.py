"""Who gets which tokens of a step: forks and drafts on top of single draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvway_worker.scheduling.sampling_params import TokenLogprobs
from kvway_worker.scheduling.sequence import Sequence as Request
from kvway_worker.scheduling.step import Row, Sampled
from kvway_worker.torch_engine.edits import Draw
from kvway_worker.torch_engine.logprobs import token_logprobs
from kvway_worker.torch_engine.sampling import sample


def choose(logits: Tensor, rows: Sequence[Row]) -> dict[str, Sampled]:
    """Choose the next tokens of everyone in the rows' `sampling`.

    A row with d drafts has scores for each of them and for the token behind them. At each of these
    places a token is sampled as if there were no drafts: same scores, same seed and position, and
    what depends on earlier tokens counts the drafts before it. Drafts are accepted while they are
    what was sampled; the first other token is accepted in the draft's place. So the answer is the
    one without drafts, greedy or random. Everyone who shares a row draws from the same scores.

    Shapes: logits [sum of (num_drafts + 1) over rows, vocab_size], any float dtype.

    Args:
        logits: the model's scores of the last num_drafts + 1 tokens of each row.
        rows: in that order, each with somebody who samples.

    Returns:
        Request id -> accepted drafts and the token behind them, with log probabilities if asked.

    Raises:
        EngineFailed: the model's scores are not finite.
    """
    seqs, draws, sources = _draws(rows)
    if sources != list(range(len(logits))):
        logits = logits.index_select(0, torch.tensor(sources, device=logits.device))
    tokens = sample(logits, draws)
    chosen: dict[str, tuple[int, ...]] = {}
    wanted: list[tuple[int, int, int]] = []
    first = 0
    for seq, drafts in seqs:
        here = tokens[first : first + len(drafts) + 1]
        chosen[seq.request_id] = accepted = tuple(here[: _num_accepted(here, drafts) + 1])
        if seq.params.logprobs is not None:
            wanted += [(first + i, t, seq.params.logprobs) for i, t in enumerate(accepted)]
        first += len(drafts) + 1
    logprobs = _logprobs(logits, wanted)
    return {
        seq.request_id: Sampled(
            chosen[seq.request_id],
            ()
            if seq.params.logprobs is None
            else tuple(next(logprobs) for _ in chosen[seq.request_id]),
        )
        for seq, _ in seqs
    }


def _draws(
    rows: Sequence[Row],
) -> tuple[list[tuple[Request, Sequence[int]]], list[Draw], list[int]]:
    """Return who draws with which drafts, all their draws in order, and each draw's scores."""
    seqs: list[tuple[Request, Sequence[int]]] = []
    draws: list[Draw] = []
    sources: list[int] = []
    first = 0
    for row in rows:
        drafts = row.token_ids[row.num_tokens - row.num_drafts :]
        for seq in row.sampling:
            seqs.append((seq, drafts))
            for i in range(row.num_drafts + 1):
                draws.append(_draw(seq, row.end - row.num_drafts + i, drafts[:i]))
                sources.append(first + i)
        first += row.num_drafts + 1
    return seqs, draws, sources


def _draw(seq: Request, position: int, drafts: Sequence[int]) -> Draw:
    return Draw(seq.params, position, seq.num_prompt_tokens, seq.token_ids, drafts)


def _num_accepted(tokens: Sequence[int], drafts: Sequence[int]) -> int:
    pairs = enumerate(zip(tokens, drafts, strict=False))
    return next((i for i, (token, draft) in pairs if token != draft), len(drafts))


def _logprobs(logits: Tensor, wanted: Sequence[tuple[int, int, int]]) -> Iterator[TokenLogprobs]:
    """Yield the log probabilities of (row, token, number of likeliest ones)."""
    if not wanted:
        return iter(())
    rows, tokens, num_top = zip(*wanted, strict=True)
    scores = logits.index_select(0, torch.tensor(rows, device=logits.device))
    return iter(token_logprobs(scores, tokens, num_top))
