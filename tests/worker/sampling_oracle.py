"""What SamplingParams mean, in plain Python: slow and as their text says."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvway_worker.scheduling.sampling_params import SamplingParams, TokenLogprobs

NEVER = -math.inf


def bans(params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> set[int]:
    """Which tokens must not come next."""
    tokens = [*prompt, *output]
    banned = set(params.stop_token_ids) if len(output) < params.min_tokens else set()
    for run in params.bad_words:
        if run and tokens[len(tokens) - len(run) + 1 :] == list(run[:-1]):
            banned.add(run[-1])
    return banned


def edited(
    scores: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """The scores from which a token is chosen."""
    vocabulary = range(len(scores))
    allowed = set(params.allowed_token_ids or ()) & set(vocabulary) or set(vocabulary)
    out = [score if token in allowed else NEVER for token, score in enumerate(scores)]
    for token, bias in params.logit_bias:
        if token in vocabulary:
            out[token] += bias
    for token in vocabulary:
        if token in prompt or token in output:
            penalty = params.repetition_penalty
            out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
        if token in output:
            out[token] -= params.frequency_penalty * list(output).count(token)
            out[token] -= params.presence_penalty
    banned = bans(params, prompt, output)
    if allowed - banned:
        out = [NEVER if token in banned else score for token, score in enumerate(out)]
    if max(out) == NEVER:
        return [0.0 if token in allowed else NEVER for token in vocabulary]
    return out


def distribution(scores: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """Token -> weight, of the tokens that may be drawn; temperature above 0."""
    best = max(scores)
    powers = [math.exp((score - best) / params.temperature) for score in scores]
    weights = dict(enumerate(powers))
    order = sorted(weights, key=lambda token: (-weights[token], token))
    if params.top_k:
        order = order[: params.top_k]
    total = math.fsum(weights[token] for token in order)
    kept: list[int] = []
    reached = 0.0
    for token in order:
        if kept and reached >= params.top_p * total:
            break
        kept.append(token)
        reached += weights[token]
    largest = weights[order[0]]
    return {t: weights[t] for t in kept if weights[t] >= params.min_p * largest and weights[t] > 0}


def logprobs(scores: Sequence[float], token: int, num_top: int) -> TokenLogprobs:
    """How likely a token is, and the likeliest ones."""
    best = max(scores)
    norm = best + math.log(math.fsum(math.exp(score - best) for score in scores))
    order = sorted(range(len(scores)), key=lambda t: (-scores[t], t))
    top = tuple((t, scores[t] - norm) for t in order[:num_top])
    return TokenLogprobs(token, scores[token] - norm, order.index(token) + 1, top)
