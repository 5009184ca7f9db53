"""From the bytes of a request to sequences for the engine: everything that is refused, is here.

Pure and slow (parsing, tokenizing and hashing grow with the prompt), so it runs on a thread of its
own and never on the event loop.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

from kvway_core.api import ChatRequest, CompletionRequest, parse_chat, parse_completion
from kvway_core.errors import InvalidRequest
from kvway_core.prompting import encode_prompts
from kvway_worker.api.fields import CHAT_FIELDS, COMPLETION_FIELDS, check_fields
from kvway_worker.api.sampling_fields import num_prompt_logprobs, of_choice, sampling_params
from kvway_worker.api.served_model import ServedModel
from kvway_worker.api.text import TextRules
from kvway_worker.scheduling.sequence import Sequence

MAX_PROMPT_LOGPROBS: Final = 2**20
"""Log probabilities of prompts that one answer tells at most. Each takes some 300 bytes while the
answer is written, and nothing is sent before all are there."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What an answer tells besides its text.

    Attributes:
        logprobs: Likeliest tokens to tell for each token; None tells no log probabilities.
        prompt_logprobs: The same for the prompt.
        echo: Whether the answer begins with the prompt.
        token_ids: Whether to tell the ids of prompt and answer.
        tokens_as_ids: Whether log probabilities name tokens by their ids.
    """

    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool
    token_ids: bool
    tokens_as_ids: bool


@dataclass(frozen=True, slots=True)
class Job:
    """A request that was accepted.

    Attributes:
        answer_id: The `id` of the answer.
        sequences: The answers in their order: those to the first prompt, to the second, ...
        echoes: The text of each prompt if the answers are to begin with it, else "".
        num_choices: Answers per prompt.
        rules: What of an answer is shown.
        extras: What is told besides.
        stream: Whether to answer in events.
        include_usage: Whether the events end with the usage.
        continuous_usage: Whether every event has the usage so far.
    """

    answer_id: str
    sequences: tuple[Sequence, ...]
    echoes: tuple[str, ...]
    num_choices: int
    rules: TextRules
    extras: Extras
    stream: bool
    include_usage: bool
    continuous_usage: bool

    @property
    def leaders(self) -> tuple[Sequence, ...]:
        """The first answer to each prompt; the others to it are its forks."""
        return self.sequences[:: self.num_choices]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(sequence.num_prompt_tokens for sequence in self.leaders)


def chat_job(
    body: bytes, model: ServedModel, *, answer_id: str, arrival_s: float, max_answers: int
) -> Job:
    """Read a chat request.

    Args:
        body: The request.
        model: Who is to answer.
        answer_id: The `id` of the answer.
        arrival_s: When it came, seconds on the worker's clock.
        max_answers: Answers that there may be at a time, running and waiting.

    Raises:
        InvalidRequest: It is malformed, out of range or asks for what is not supported; names
            the field.
        ModelNotFound: It asks for another model.
        ContextLengthExceeded: Prompt and answer do not fit the context.
    """
    request: ChatRequest = parse_chat(body)
    check_fields(body, CHAT_FIELDS)
    _check_num_answers(1, request.num_choices, most=max_answers)
    return _job(request, model, answer_id=answer_id, arrival_s=arrival_s)


def completion_job(
    body: bytes, model: ServedModel, *, answer_id: str, arrival_s: float, max_answers: int
) -> Job:
    """Read a completion request of one or more prompts, each text or token ids.

    Args:
        body: The request.
        model: Who is to answer.
        answer_id: The `id` of the answer.
        arrival_s: When it came, seconds on the worker's clock.
        max_answers: Answers that there may be at a time, running and waiting.

    Raises:
        InvalidRequest: It is malformed, out of range or asks for what is not supported; names
            the field.
        ModelNotFound: It asks for another model.
        ContextLengthExceeded: A prompt and its answer do not fit the context.
    """
    request: CompletionRequest = parse_completion(body)
    check_fields(body, COMPLETION_FIELDS)
    _check_num_answers(len(request.prompts), request.num_choices, most=max_answers)
    for prompt in request.prompts:
        if not isinstance(prompt, str):
            model.check_vocabulary(prompt, param="prompt")
    return _job(request, model, answer_id=answer_id, arrival_s=arrival_s)


def _check_num_answers(num_prompts: int, num_choices: int, *, most: int) -> None:
    """Raise InvalidRequest for more answers than there can ever be at a time."""
    num_answers = num_prompts * num_choices
    if num_answers > most:
        raise InvalidRequest(
            f"{num_prompts} prompts with n = {num_choices} are {num_answers} answers; this worker "
            f"runs and queues {most} at most. Ask for fewer, or in several requests.",
            param="n" if num_prompts == 1 else "prompt",
        )


def _job(
    request: ChatRequest | CompletionRequest,
    model: ServedModel,
    *,
    answer_id: str,
    arrival_s: float,
) -> Job:
    model.check_name(request.model)
    prompts = encode_prompts(request, model.encoder, max_model_len=model.max_model_len)
    for prompt in prompts:  # a tokenizer may have tokens that its model was not made with
        model.check_vocabulary(
            prompt, param="messages" if isinstance(request, ChatRequest) else "prompt"
        )
    _check_prompt_logprobs(request, num_prompt_tokens=sum(map(len, prompts)))
    return Job(
        answer_id=answer_id,
        sequences=tuple(
            sequence
            for index, prompt in enumerate(prompts)
            for sequence in _sequences(
                f"{answer_id}-{index}", request, prompt, model=model, arrival_s=arrival_s
            )
        ),
        echoes=_echoes(request, prompts, model),
        num_choices=request.num_choices,
        rules=TextRules(
            stops=request.stop_strings,
            include_stop=bool(request.include_stop_str_in_output),
            min_tokens=request.min_tokens or 0,
            skip_special_tokens=request.skip_special_tokens is not False,
            stop_token_ids=frozenset(request.stop_token_ids or ())
            - (frozenset() if request.ignore_eos else model.encoder.eos_token_ids),
        ),
        extras=Extras(
            logprobs=request.num_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            echo=isinstance(request, CompletionRequest) and bool(request.echo),
            token_ids=bool(request.return_token_ids),
            tokens_as_ids=bool(request.return_tokens_as_token_ids),
        ),
        stream=bool(request.stream),
        include_usage=request.include_usage,
        continuous_usage=request.continuous_usage,
    )


def _check_prompt_logprobs(
    request: ChatRequest | CompletionRequest, *, num_prompt_tokens: int
) -> None:
    """Raise InvalidRequest if the prompts have more log probabilities than one answer tells."""
    num_top = num_prompt_logprobs(request)
    if num_top is None:
        return
    num_told = num_prompt_tokens * (1 + num_top) * request.num_choices
    if num_told > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"The prompts have {num_prompt_tokens} tokens; with {num_top} likeliest ones of each "
            f"and n = {request.num_choices} these are {num_told} log probabilities, and an answer "
            f"tells {MAX_PROMPT_LOGPROBS} at most. Ask for fewer of each, or for fewer prompts.",
            param="logprobs" if request.prompt_logprobs is None else "prompt_logprobs",
        )


def _sequences(
    request_id: str,
    request: ChatRequest | CompletionRequest,
    prompt: list[int],
    *,
    model: ServedModel,
    arrival_s: float,
) -> tuple[Sequence, ...]:
    """Return the answers to a prompt, all but the first as forks of the first."""
    params = sampling_params(
        request,
        num_prompt_tokens=len(prompt),
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        model=model,
    )

    leader = Sequence(
        f"{request_id}-0",
        prompt,
        params=of_choice(params, 0),
        namespace=model.namespace(request.cache_salt),
        arrival_s=arrival_s,
        priority=request.priority or 0,
        ephemeral=request.is_ephemeral,
    )
    forks = [
        leader.fork(f"{request_id}-{choice}", of_choice(params, choice))
        for choice in range(1, request.num_choices)
    ]
    return (leader, *forks)


def _echoes(
    request: ChatRequest | CompletionRequest, prompts: list[list[int]], model: ServedModel
) -> tuple[str, ...]:
    """Return what each answer begins with: the prompt as its tokens read, by the answer's rules.

    So text and offsets of log probabilities agree, and what was cut off is not shown.
    """
    if not (isinstance(request, CompletionRequest) and request.echo):
        return ("",) * len(prompts)
    skip = request.skip_special_tokens is not False
    return tuple(model.encoder.decode(prompt, skip_special_tokens=skip) for prompt in prompts)
