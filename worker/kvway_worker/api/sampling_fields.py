"""From a request to how its tokens are chosen."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import replace

from kvway_core.api import ChatRequest, CompletionRequest
from kvway_core.errors import ContextLengthExceeded, InvalidRequest
from kvway_core.prompts import PromptEncoder
from kvway_worker.api.served_model import ServedModel
from kvway_worker.scheduling.sampling_params import SamplingParams


def sampling_params(
    request: ChatRequest | CompletionRequest,
    *,
    num_prompt_tokens: int,
    seed: int,
    model: ServedModel,
) -> SamplingParams:
    """Return how to sample; without a limit in the request, the context is the limit.

    Raises:
        ContextLengthExceeded: Prompt and answer do not fit the context.
        InvalidRequest: A token id is none of the model's, `min_tokens` do not fit, or there is no
            token to choose.
    """
    max_tokens = _max_tokens(request, num_prompt_tokens=num_prompt_tokens, model=model)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {min_tokens} and the context has room for {max_tokens}; lower it.",
            param="min_tokens",
        )
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    allowed = request.allowed_token_ids
    stop_token_ids = request.stop_token_ids or ()
    model.check_vocabulary(list(bias), param="logit_bias")
    model.check_vocabulary(allowed or (), param="allowed_token_ids")
    model.check_vocabulary(stop_token_ids, param="stop_token_ids")
    stops = frozenset(stop_token_ids)
    if not request.ignore_eos:
        stops |= model.encoder.eos_token_ids
    bad_words = bad_word_runs(request.bad_words or (), model.encoder)
    banned = frozenset(run[0] for run in bad_words if len(run) == 1)
    _check_choice(allowed, banned, stops if min_tokens else frozenset(), model)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_given(request.temperature, 1.0),
        top_p=_given(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),
        min_p=_given(request.min_p, 0.0),
        seed=seed,
        stop_token_ids=stops,
        min_tokens=min_tokens,
        presence_penalty=_given(request.presence_penalty, 0.0),
        frequency_penalty=_given(request.frequency_penalty, 0.0),
        repetition_penalty=_given(request.repetition_penalty, 1.0),
        logit_bias=tuple(bias.items()),
        allowed_token_ids=None if allowed is None else frozenset(allowed),
        bad_words=bad_words,
        logprobs=request.num_logprobs,
        prompt_logprobs=num_prompt_logprobs(request),
    )


def of_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """Return how to sample one of several answers to a prompt: each with a seed of its own.

    The first has the seed itself; the others' seeds are a hash of it and their index, so that
    they repeat as well and do not meet those of a request with the next seed.
    """
    if choice == 0:
        return params
    digest = hashlib.blake2b(f"{params.seed}/{choice}".encode(), digest_size=8).digest()
    return replace(params, seed=int.from_bytes(digest, "big") >> 1)


def _given(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _max_tokens(
    request: ChatRequest | CompletionRequest, *, num_prompt_tokens: int, model: ServedModel
) -> int:
    room = model.max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"The prompt has {num_prompt_tokens} tokens; the model's context has "
            f"{model.max_model_len}, and the answer needs some of it. Shorten the prompt.",
            param="messages" if isinstance(request, ChatRequest) else "prompt",
        )
    asked, field = _asked_tokens(request)
    if asked is not None and asked > room:
        raise ContextLengthExceeded(
            f"The prompt has {num_prompt_tokens} tokens and {field} asks for {asked} more, "
            f"together {num_prompt_tokens + asked}; the model's context has "
            f"{model.max_model_len}. Shorten one of them.",
            param=field,
        )
    limit = room if request.max_output_tokens is None else request.max_output_tokens
    return min(limit, room)


def _asked_tokens(request: ChatRequest | CompletionRequest) -> tuple[int | None, str]:
    """Return the limit that the request states, None without one, and the field that has it."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens, "max_completion_tokens"
    return request.max_tokens, "max_tokens"


def bad_word_runs(words: Collection[str], encoder: PromptEncoder) -> tuple[tuple[int, ...], ...]:
    """Return the runs of tokens that write the words.

    A vocabulary may have two tokens for the beginning of a word, one with the space before it. So
    the word behind a space counts as well where it has as many tokens. Where it has more, the run
    is that of another text, as for a word that brings its own white space.
    """
    runs: dict[tuple[int, ...], None] = {}
    for word in words:
        run = tuple(encoder.encode_text(word, add_special_tokens=False))
        runs[run] = None
        if word[0].isspace():
            continue
        inside = tuple(encoder.encode_text(" " + word, add_special_tokens=False))
        if len(inside) == len(run):
            runs[inside] = None
    return tuple(run for run in runs if run)


def _check_choice(
    allowed: Collection[int] | None,
    banned: frozenset[int],
    stops: frozenset[int],
    model: ServedModel,
) -> None:
    """Raise InvalidRequest if no token can come first.

    Args:
        allowed: The tokens that may be chosen, None for all.
        banned: Tokens that `bad_words` forbids, whatever is before them.
        stops: Tokens that `min_tokens` forbids at first.
        model: Whose vocabulary.
    """

    def leaves_none(forbidden: frozenset[int]) -> bool:
        if allowed is None:
            return len(forbidden) >= model.encoder.vocab_size
        return forbidden.issuperset(allowed)

    if leaves_none(banned):
        raise InvalidRequest(
            "bad_words forbids every token that may be chosen; allow others, or forbid fewer.",
            param="bad_words",
        )
    if stops and leaves_none(banned | stops):
        raise InvalidRequest(
            "min_tokens forbids end tokens and stop_token_ids at first, and no other token may be "
            "chosen; set it to 0, or allow others.",
            param="min_tokens",
        )


def num_prompt_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    """Return how many likeliest tokens to report per prompt token: for the field, for an echo."""
    wanted = [] if request.prompt_logprobs is None else [request.prompt_logprobs]
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        wanted.append(request.logprobs)
    return max(wanted, default=None)
