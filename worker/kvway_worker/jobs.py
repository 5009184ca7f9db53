"""From the bytes of a request to sequences for the engine: everything that is refused, is here.

Pure and slow (parsing, tokenizing and hashing grow with the prompt), so it runs on a thread of its
own and never on the event loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from kvway_core.api import (
    ChatRequest,
    CompletionRequest,
    DetokenizeResponse,
    GenerationRequest,
    TokenizeResponse,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
    unsupported_fields,
)
from kvway_core.blocks import Namespace
from kvway_core.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from kvway_core.prompts import PromptEncoder
from kvway_worker.sampling_params import SamplingParams
from kvway_worker.sequence import Sequence

MAX_SALT_CHARS: Final = 256

_IGNORED: Final = frozenset(
    {"user", "metadata", "store", "prompt_cache_key", "safety_identifier", "service_tier"}
)
"""OpenAI fields that cannot change the answer of one worker; accepted, and without effect."""

_SUPPORTED: Final = _IGNORED | {
    *("model", "max_tokens", "temperature", "top_p", "seed", "stop", "stop_token_ids"),
    *("stream", "stream_options", "ignore_eos", "cache_salt"),
}
CHAT_FIELDS: Final = _SUPPORTED | {"messages", "max_completion_tokens"}
COMPLETION_FIELDS: Final = _SUPPORTED | {"prompt"}
TOKENIZE_FIELDS: Final = frozenset({"model", "prompt", "messages", "add_special_tokens"})
DETOKENIZE_FIELDS: Final = frozenset({"model", "tokens"})


class _Salted(msgspec.Struct, frozen=True):
    """The one supported field that the shared request types do not have."""

    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None


_SALTED: Final = msgspec.json.Decoder(_Salted)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as requests see it.

    Attributes:
        name: What requests call it.
        encoder: Its template and tokenizer.
        block_size: Tokens per KV block.
        max_model_len: Tokens of prompt and answer together at most.
        fingerprint: Changes when answers may change: the `system_fingerprint`.
        created: When it was loaded, Unix seconds.
    """

    name: str
    encoder: PromptEncoder
    block_size: int
    max_model_len: int
    fingerprint: str
    created: int


@dataclass(frozen=True, slots=True)
class Job:
    """A request that was accepted.

    Attributes:
        request_id: The `id` of the answer.
        sequences: One per prompt, in the request's order.
        stops: Strings that end each answer.
        stream: Whether to answer in events.
        include_usage: Whether the events end with the usage.
    """

    request_id: str
    sequences: tuple[Sequence, ...]
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(sequence.num_prompt_tokens for sequence in self.sequences)


def chat_job(body: bytes, model: ServedModel, *, arrival_s: float) -> Job:
    """Read a chat request.

    Raises:
        InvalidRequest: It is malformed, out of range or asks for what is not supported; names
            the field.
        ModelNotFound: It asks for another model.
        ContextLengthExceeded: Prompt and answer do not fit the context.
    """
    request: ChatRequest = parse_chat(body)
    _refuse(request, body, model, supported=CHAT_FIELDS)
    prompt = model.encoder.encode_chat(request.messages)
    return _job("chatcmpl-", request, [prompt], body=body, model=model, arrival_s=arrival_s)


def completion_job(body: bytes, model: ServedModel, *, arrival_s: float) -> Job:
    """Read a completion request of one or more prompts, each text or token ids.

    Raises:
        InvalidRequest: It is malformed, out of range or asks for what is not supported; names
            the field.
        ModelNotFound: It asks for another model.
        ContextLengthExceeded: A prompt and its answer do not fit the context.
    """
    request: CompletionRequest = parse_completion(body)
    _refuse(request, body, model, supported=COMPLETION_FIELDS)
    prompts: list[TokenIds[int]] = []
    for prompt in request.prompts:
        if isinstance(prompt, str):
            prompts.append(model.encoder.encode_text(prompt))
        else:
            _check_vocabulary(prompt, model, param="prompt")
            prompts.append(prompt)
    return _job("cmpl-", request, prompts, body=body, model=model, arrival_s=arrival_s)


def tokenize(body: bytes, model: ServedModel) -> TokenizeResponse:
    """Answer POST /tokenize: the ids that a prompt or messages become, template included.

    Raises:
        InvalidRequest: It is malformed or asks for what is not supported.
        ModelNotFound: It asks for another model.
    """
    request = parse_tokenize(body)
    _check_fields(body, TOKENIZE_FIELDS)
    _check_model(request.model, model)
    if request.messages is not None:
        tokens = model.encoder.encode_chat(request.messages)
    else:
        tokens = model.encoder.encode_text(
            request.prompt or "", add_special_tokens=request.add_special_tokens
        )
    return TokenizeResponse(count=len(tokens), max_model_len=model.max_model_len, tokens=tokens)


def detokenize(body: bytes, model: ServedModel) -> DetokenizeResponse:
    """Answer POST /detokenize: the text of token ids, special tokens written out.

    Raises:
        InvalidRequest: It is malformed or holds an id that the model does not have.
        ModelNotFound: It asks for another model.
    """
    request = parse_detokenize(body)
    _check_fields(body, DETOKENIZE_FIELDS)
    _check_model(request.model, model)
    _check_vocabulary(request.tokens, model, param="tokens")
    return DetokenizeResponse(
        prompt=model.encoder.decode(request.tokens, skip_special_tokens=False)
    )


def _job(
    id_prefix: str,
    request: ChatRequest | CompletionRequest,
    prompts: TokenIds[TokenIds[int]],
    *,
    body: bytes,
    model: ServedModel,
    arrival_s: float,
) -> Job:
    request_id = id_prefix + secrets.token_hex(16)
    namespace = Namespace(
        model=model.name, block_size=model.block_size, cache_salt=_cache_salt(body)
    )
    return Job(
        request_id=request_id,
        sequences=tuple(
            Sequence(
                f"{request_id}-{index}",
                prompt,
                params=_sampling(request, num_prompt_tokens=len(prompt), model=model),
                namespace=namespace,
                arrival_s=arrival_s,
            )
            for index, prompt in enumerate(prompts)
        ),
        stops=request.stop_strings,
        stream=bool(request.stream),
        include_usage=request.include_usage,
    )


def _sampling(
    request: ChatRequest | CompletionRequest, *, num_prompt_tokens: int, model: ServedModel
) -> SamplingParams:
    """Return how to sample; without a limit in the request, the context is the limit."""
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
    return SamplingParams(
        max_tokens=min(limit, room),
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        stop_token_ids=frozenset(request.stop_token_ids or ())
        | (frozenset() if request.ignore_eos else model.encoder.eos_token_ids),
    )


def _asked_tokens(request: ChatRequest | CompletionRequest) -> tuple[int | None, str]:
    """Return the limit that the request states, None without one, and the field that has it."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens, "max_completion_tokens"
    return request.max_tokens, "max_tokens"


def _refuse(
    request: GenerationRequest, body: bytes, model: ServedModel, *, supported: frozenset[str]
) -> None:
    """Raise for a field that is not supported, or for another model."""
    _check_fields(body, supported)
    _check_model(request.model, model)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")


def _check_fields(body: bytes, supported: frozenset[str]) -> None:
    refusal = unsupported_fields(body, supported)
    if refusal is not None:
        raise refusal


def _check_model(name: str | None, model: ServedModel) -> None:
    if name is not None and name != model.name:
        raise ModelNotFound(f"This worker serves {model.name} and no other model.", param="model")


def _check_vocabulary(token_ids: TokenIds[int], model: ServedModel, *, param: str) -> None:
    largest = max(token_ids, default=0)
    if largest >= model.encoder.vocab_size:
        raise InvalidRequest(
            f"{param} has the token id {largest}; the model's ids end at "
            f"{model.encoder.vocab_size - 1}.",
            param=param,
        )


def _cache_salt(body: bytes) -> str:
    """Return the salt of the request's namespace, "" without one."""
    try:
        return _SALTED.decode(body).cache_salt or ""
    except msgspec.ValidationError:
        raise InvalidRequest(
            f"cache_salt must be a string of 1 to {MAX_SALT_CHARS} characters.", param="cache_salt"
        ) from None
