"""Which token ids a request asks to be continued: the same rule for router and worker."""

from __future__ import annotations

from kvway_core.api import ChatRequest, CompletionRequest
from kvway_core.errors import InvalidRequest
from kvway_core.prompts import PromptEncoder


def encode_prompts(
    request: ChatRequest | CompletionRequest, encoder: PromptEncoder, *, max_model_len: int | None
) -> list[list[int]]:
    """Returns the token ids of each prompt of a request, truncated if it asks for that.

    Args:
        request: What was asked for.
        encoder: Template and tokenizer of the model.
        max_model_len: Tokens of prompt and answer together; None when nobody said, and then
            `truncate_prompt_tokens: -1` keeps everything.

    Raises:
        InvalidRequest: As `PromptEncoder.render_chat`; or if more is to be kept than the context
            has room for.
    """
    keep = _kept_tokens(request, max_model_len=max_model_len)
    prompts = _prompts(request, encoder)
    return prompts if keep is None else [prompt[-keep:] for prompt in prompts]


def _prompts(request: ChatRequest | CompletionRequest, encoder: PromptEncoder) -> list[list[int]]:
    if isinstance(request, ChatRequest):
        starts_answer = request.add_generation_prompt
        return [
            encoder.encode_chat(
                request.messages,
                tools=request.tools,
                add_generation_prompt=True if starts_answer is None else starts_answer,
                continue_final_message=bool(request.continue_final_message),
                kwargs=request.chat_template_kwargs,
                add_special_tokens=bool(request.add_special_tokens),
            )
        ]
    special = True if request.add_special_tokens is None else request.add_special_tokens
    return [
        encoder.encode_text(prompt, add_special_tokens=special)
        if isinstance(prompt, str)
        else prompt
        for prompt in request.prompts
    ]


def _kept_tokens(
    request: ChatRequest | CompletionRequest, *, max_model_len: int | None
) -> int | None:
    """Returns how many last tokens of a prompt to keep, at least 1; None for all."""
    keep = request.truncate_prompt_tokens
    if keep is None or max_model_len is None:
        return None if keep == -1 else keep
    if keep == -1:
        return max(1, max_model_len - (request.max_output_tokens or 1))
    if keep > max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {keep}; the model's context has {max_model_len}. Keep "
            "fewer tokens, or -1 for as many as fit.",
            param="truncate_prompt_tokens",
        )
    return keep
