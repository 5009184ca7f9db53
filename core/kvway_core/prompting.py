"""Which token ids a request asks to be continued: the same rule for router and worker."""

from __future__ import annotations

from collections.abc import Sequence

from kvway_core.api import ChatMessage, ChatRequest, CompletionRequest
from kvway_core.blocks import Image
from kvway_core.errors import ContextLengthExceeded, InvalidRequest
from kvway_core.images import PlacedImage, images_of
from kvway_core.prompts import PromptEncoder
from kvway_core.tokenizing import TextReader


class TokenReader:
    """A prompt whose tokens are known; read like a text (`TextReader`)."""

    done = True
    head = ""
    images: Sequence[Image] = ()
    text: str | None = None

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self.piece_keys: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        """How many there are."""
        return len(self.token_ids)

    def advance(self, num_chars: int) -> int:
        """Returns the argument: all is read."""
        return num_chars

    def finish(self) -> Sequence[int]:
        """Returns all ids."""
        return self.token_ids


class EndReader:
    """The last tokens of a text; read like a text (`TextReader`), but there only once it ends."""

    text: str | None = None
    """It is no text from the front that the tokens are of."""

    def __init__(self, reader: TextReader, *, keep: int) -> None:
        self._reader = reader
        self._keep = keep
        self.token_ids: Sequence[int] = ()
        self.images: Sequence[Image] = ()
        self.piece_keys: Sequence[int] = ()
        self.done = False

    @property
    def head(self) -> str:
        """The first characters of the text, kept or not."""
        return self._reader.head

    @property
    def num_tokens(self) -> int:
        """How many are kept; about so many while it is not done."""
        return min(self._reader.num_tokens, self._keep)

    def advance(self, num_chars: int) -> int:
        """Reads on as `TextReader.advance`; there is nothing to see of it before the end."""
        left = self._reader.advance(num_chars)
        if self._reader.done and not self.done:
            self.token_ids = self._reader.token_ids[-self._keep :]
            num_cut = len(self._reader.token_ids) - len(self.token_ids)
            self.images = [
                Image(max(0, image.place - num_cut), image.content)
                for image in self._reader.images
            ]
            self.done = True
        return left

    def finish(self) -> Sequence[int]:
        """Reads to the end and returns the ids that are kept."""
        _ = self._reader.finish()
        _ = self.advance(0)
        return self.token_ids


PromptReader = TextReader | TokenReader | EndReader
"""One prompt that is tokenized from the front, as far as it is asked for."""


def encode_prompts(
    request: ChatRequest | CompletionRequest, encoder: PromptEncoder, *, max_model_len: int | None
) -> list[list[int]]:
    """Returns the token ids of each prompt of a request, truncated if it asks for that.

    Args:
        request: As for `read_prompts`, like the other arguments.
        encoder: Template and tokenizer of the model.
        max_model_len: Tokens of prompt and answer together.

    Raises:
        InvalidRequest: As `read_prompts`.
        ContextLengthExceeded: As `read_prompts`.
    """
    readers = read_prompts(request, encoder, max_model_len=max_model_len)
    return [list(reader.finish()) for reader in readers]


def read_prompts(
    request: ChatRequest | CompletionRequest,
    encoder: PromptEncoder,
    *,
    max_model_len: int | None,
    with_images: bool = False,
) -> list[PromptReader]:
    """Returns each prompt of a request, to be tokenized as far as it is needed.

    Takes no longer than it takes to render: nothing is tokenized yet.

    Args:
        request: What was asked for.
        encoder: Template and tokenizer of the model.
        max_model_len: Tokens of prompt and answer together; None when nobody said, and then
            `truncate_prompt_tokens: -1` keeps everything.
        with_images: Whether messages may have images: for whoever passes them on.

    Raises:
        InvalidRequest: As `PromptEncoder.render_chat` and `images_of`; or if more is to be kept
            than the context has room for.
        ContextLengthExceeded: As `check_text_fits`, of a prompt that is not truncated.
    """
    keep = _kept_tokens(request, max_model_len=max_model_len)
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    readers: list[PromptReader] = []
    for prompt, images in _prompts(request, encoder, with_images=with_images):
        if isinstance(prompt, str):
            if keep is None and max_model_len is not None:
                check_text_fits(prompt, encoder, max_model_len=max_model_len, param=param)
            reader = encoder.read_text(
                prompt, add_special_tokens=_adds_special(request), images=images
            )
            readers.append(reader if keep is None else EndReader(reader, keep=keep))
        else:
            readers.append(TokenReader(prompt if keep is None else prompt[-keep:]))
    return readers


def check_text_fits(text: str, encoder: PromptEncoder, *, max_model_len: int, param: str) -> None:
    """Refuses a text that is too long for the context however it is tokenized.

    So that the time it takes to refuse a text is bound by the context, not by the text. Where the
    model's tokenizer allows no such bound, nothing is refused.

    Raises:
        ContextLengthExceeded: It leaves no room for an answer.
    """
    bound = encoder.token_bound
    if bound is None:
        return
    least = bound.least_tokens(text)
    if least >= max_model_len:
        raise ContextLengthExceeded(
            f"The prompt has {len(text)} characters, which are {least} tokens at least; the "
            f"model's context has {max_model_len}, and the answer needs some of it. Shorten the "
            "prompt.",
            param=param,
        )


def _prompts(
    request: ChatRequest | CompletionRequest, encoder: PromptEncoder, *, with_images: bool
) -> list[tuple[str | list[int], Sequence[PlacedImage]]]:
    """Returns the prompts as text with the images in it, or as the token ids that were given."""
    if isinstance(request, CompletionRequest):
        return [(prompt, ()) for prompt in request.prompts]
    starts_answer = request.add_generation_prompt

    def render(messages: Sequence[ChatMessage]) -> str:
        return encoder.render_chat(
            messages,
            tools=request.tools,
            add_generation_prompt=True if starts_answer is None else starts_answer,
            continue_final_message=bool(request.continue_final_message),
            kwargs=request.chat_template_kwargs,
            with_images=with_images,
        )

    text = render(request.messages)
    return [(text, images_of(request.messages, text, render) if with_images else ())]


def _adds_special(request: ChatRequest | CompletionRequest) -> bool:
    """Says whether the tokenizer puts its own tokens around a text: most templates write them."""
    if request.add_special_tokens is None:
        return isinstance(request, CompletionRequest)
    return request.add_special_tokens


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
