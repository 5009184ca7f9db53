"""From text to token ids and back, for those who ask for nothing else. Pure and slow, as jobs."""

from __future__ import annotations

from kvway_core.api import (
    DetokenizeResponse,
    TokenizeResponse,
    parse_detokenize,
    parse_tokenize,
)
from kvway_worker.api.fields import DETOKENIZE_FIELDS, TOKENIZE_FIELDS, check_fields
from kvway_worker.api.served_model import ServedModel


def tokenize(body: bytes, model: ServedModel) -> TokenizeResponse:
    """Answer POST /tokenize: the ids that a prompt or messages become, template included.

    Raises:
        InvalidRequest: It is malformed or asks for what is not supported.
        ModelNotFound: It asks for another model.
    """
    request = parse_tokenize(body)
    check_fields(body, TOKENIZE_FIELDS)
    model.check_name(request.model)
    if request.messages is not None:
        starts_answer = request.add_generation_prompt
        tokens = model.encoder.encode_chat(
            request.messages,
            add_generation_prompt=True if starts_answer is None else starts_answer,
            continue_final_message=bool(request.continue_final_message),
            kwargs=request.chat_template_kwargs,
            add_special_tokens=bool(request.add_special_tokens),
        )
    else:
        special = request.add_special_tokens
        tokens = model.encoder.encode_text(
            request.prompt or "", add_special_tokens=True if special is None else special
        )
    return TokenizeResponse(count=len(tokens), max_model_len=model.max_model_len, tokens=tokens)


def detokenize(body: bytes, model: ServedModel) -> DetokenizeResponse:
    """Answer POST /detokenize: the text of token ids, special tokens written out.

    Raises:
        InvalidRequest: It is malformed or holds an id that the model does not have.
        ModelNotFound: It asks for another model.
    """
    request = parse_detokenize(body)
    check_fields(body, DETOKENIZE_FIELDS)
    model.check_name(request.model)
    model.check_vocabulary(request.tokens, param="tokens")
    return DetokenizeResponse(
        prompt=model.encoder.decode(request.tokens, skip_special_tokens=False)
    )
