"""What servers answer in the OpenAI API, and what a worker answers to GET /load.

Import these from `kvway_core.api`.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType


class TokenizeResponse(msgspec.Struct, frozen=True):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct, frozen=True):
    """Answer of POST /detokenize."""

    prompt: str


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Where the prompt's KV came from; `cached_tokens` were not computed again."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """What a request cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


FinishReason = Literal["stop", "length", "abort"]


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The model's answer."""

    role: str = "assistant"
    content: str


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token that was likely. `bytes` are its own, also when it is a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    """A token of an answer, and those that were likeliest in its place, best first."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities of the tokens of a chat's answer."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities of a completion, one entry per token; null for a text's first token.

    `text_offset` is where a token's text begins, in characters; the pieces of one character begin
    together.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """How likely a token was in the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt: its id and the likeliest ones' -> how likely; null for the first."""


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a chat.

    `stop_reason` is the stop string, or the token of `stop_token_ids`, that ended it; null else.
    """

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/chat/completions. `created` is in Unix seconds."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to an answer."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer's part in a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed chat; `usage` is left out unless asked for."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to a prompt, or its part in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/completions, and one event of a streamed one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /pins: a prefix that is kept. `expires_at` is in Unix seconds."""

    id: str
    num_tokens: int
    num_blocks: int
    num_cached_blocks: int
    expires_at: float


class PinList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of GET /pins."""

    pins: list[Pin]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served model."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "kvway"
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of GET /v1/models."""

    object: str = "list"
    data: list[ModelCard]


# Routers read what a worker says of itself: what is out of all bounds is refused there.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
Measured = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
ShortText = Annotated[str, msgspec.Meta(max_length=1024)]


class BlockCounts(msgspec.Struct, frozen=True):
    """A worker's KV blocks: `free` are empty, `cached` reusable, the rest in use."""

    free: Count
    cached: Count
    total: Count


class KvEventsInfo(msgspec.Struct, frozen=True):
    """Where a worker publishes its KV events: ports on the host that answers /load."""

    pub_port: Port
    replay_port: Port
    topic: ShortText


class AttentionInfo(msgspec.Struct, frozen=True):
    """How a worker attends.

    Attributes:
        implementation: What computes attention.
        reason: Why it was chosen.
        cascade: "on" where a prefix that requests share is read once, else why it is not.
    """

    implementation: ShortText
    reason: ShortText
    cascade: ShortText


WorkerState = Literal["starting", "ready", "draining", "failed"]


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a worker's GET /load: what a router needs to predict its next answer.

    Attributes:
        boot_id: Names one life of the process; another one means an empty cache.
        model: Served model name.
        block_size: Tokens per block.
        hash_scheme: The scheme of the hashes in its events.
        state: Whether it takes requests.
        num_running: Requests in the batch.
        num_waiting: Requests in the queue.
        waiting_uncached_tokens: Prompt tokens that the queue has still to compute.
        blocks: Counts of KV blocks.
        prefill_tokens_per_s: Measured rate; 0 when nothing was measured yet.
        decode_step_s: Duration of a decode step now, seconds; 0 when nothing was measured yet.
        max_model_len: Tokens of prompt and answer together.
        max_num_seqs: Requests in a batch at most.
        kv_events: None when it publishes none.
        kv_dtype: What cached keys and values are kept as, such as "int8"; None before the model is
            loaded, and of an engine that has none.
        attention: None before the model is loaded, and of an engine that computes none.
    """

    boot_id: ShortText
    model: ShortText
    block_size: Count
    hash_scheme: ShortText
    state: WorkerState
    num_running: Count
    num_waiting: Count
    waiting_uncached_tokens: Count
    blocks: BlockCounts
    prefill_tokens_per_s: Measured
    decode_step_s: Measured
    max_model_len: Count
    max_num_seqs: Count
    kv_events: KvEventsInfo | None = None
    kv_dtype: ShortText | None = None
    attention: AttentionInfo | None = None
