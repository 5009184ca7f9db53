"""How the tokens of one answer are chosen and when it ends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request says about its answer; the defaults change nothing.

    In this order, each on what the one before left: allowed tokens and bias, penalties (repetition
    first), what `min_tokens` and `bad_words` forbid, temperature, `top_k`, `top_p`, `min_p`.
    Where everything allowed is forbidden, nothing is.

    Attributes:
        max_tokens: Tokens to generate at most, at least 1.
        temperature: 0 takes the likeliest token.
        top_p: Share of the probability that is sampled from, in (0, 1].
        top_k: So many of the likeliest tokens are sampled from; 0 for all.
        min_p: Tokens less likely than this share of the likeliest one's probability are out.
        seed: Together with a token's position it decides the choice, so an answer repeats.
        stop_token_ids: Tokens that end the answer, the model's own end tokens among them unless
            the request ignores these.
        min_tokens: Before so many tokens none of `stop_token_ids` is chosen.
        presence_penalty: Taken from the score of each token that the answer has.
        frequency_penalty: The same, for each time that it has it.
        repetition_penalty: Divides the positive scores of tokens that prompt or answer have, and
            multiplies the negative ones.
        logit_bias: (token, added to its score) pairs, each token once.
        allowed_token_ids: No other token is chosen; None allows all.
        bad_words: Runs of tokens that never come about: the last one is not chosen after the
            others.
        logprobs: Report each token's log probability and those of so many likeliest ones; None
            reports none.
        prompt_logprobs: The same for the prompt's tokens, which are all computed then.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: frozenset[int] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was, by the model alone: before temperature, bias and penalties.

    Attributes:
        token_id: The token.
        logprob: Natural logarithm of its probability.
        rank: 1 for the likeliest of the vocabulary.
        top: (token, log probability) of the likeliest ones, best first, as many as asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
