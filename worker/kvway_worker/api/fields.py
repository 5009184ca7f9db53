"""Which fields a request may have. Whatever else it asks for is refused by name."""

from __future__ import annotations

from typing import Final

from kvway_core.api import unsupported_fields, unsupported_in_messages

_IGNORED: Final = frozenset(
    {"user", "metadata", "store", "prompt_cache_key", "safety_identifier", "service_tier"}
)
"""OpenAI fields that cannot change the answer of one worker; accepted, and without effect."""

_SUPPORTED: Final = _IGNORED | {
    *("model", "request_id", "priority", "cache_salt", "kv_cache", "truncate_prompt_tokens"),
    *("add_special_tokens", "max_tokens", "min_tokens", "n", "seed"),
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
    *("stream", "stream_options", "skip_special_tokens", "logprobs", "prompt_logprobs"),
    *("return_token_ids", "return_tokens_as_token_ids"),
}
_TEMPLATE: Final = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
)
CHAT_FIELDS: Final = _SUPPORTED | _TEMPLATE | {"max_completion_tokens", "top_logprobs"}
COMPLETION_FIELDS: Final = _SUPPORTED | {"prompt", "echo", "best_of"}
TOKENIZE_FIELDS: Final = _TEMPLATE | {"model", "prompt", "add_special_tokens"}
DETOKENIZE_FIELDS: Final = frozenset({"model", "tokens"})
PIN_FIELDS: Final = frozenset(
    {
        *("model", "prompt", "add_special_tokens", "messages", "chat_template_kwargs"),
        *("cache_salt", "ttl_s"),
    }
)
ABORT_FIELDS: Final = frozenset({"request_ids"})


def check_fields(body: bytes, supported: frozenset[str]) -> None:
    """Raise InvalidRequest for the first field that asks for something outside `supported`.

    Where messages are supported, also for the first one inside of them that is not OpenAI's.
    """
    refusal = unsupported_fields(body, supported)
    if refusal is None and "messages" in supported:
        refusal = unsupported_in_messages(body)
    if refusal is not None:
        raise refusal
