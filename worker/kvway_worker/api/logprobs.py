"""Log probabilities as answers tell them: OpenAI's two forms, and vLLM's for prompts."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Final

from kvway_core.api import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from kvway_core.prompts import PromptEncoder
from kvway_worker.scheduling.sampling_params import TokenLogprobs

LEAST: Final = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


class TokenNames:
    """How tokens are called: by their text, or by their ids.

    A piece of a character is no text: it is called `bytes:` and its bytes, so that no two of a
    character's pieces have one name.
    """

    def __init__(self, encoder: PromptEncoder, *, as_ids: bool) -> None:
        self.bytes_of = encoder.token_bytes
        self._as_ids = as_ids

    def __call__(self, token_id: int) -> str:
        """Return what a token is called."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self.bytes_of(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatWriter:
    """Writes log probabilities as chats have them."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def write(self, tokens: Iterable[TokenLogprobs]) -> ChatLogprobs:
        """Return what is told of these tokens."""
        return ChatLogprobs(
            content=[
                TokenLogprob(
                    token=self._names(token.token_id),
                    logprob=_finite(token.logprob),
                    bytes=list(self._names.bytes_of(token.token_id)),
                    top_logprobs=[self._top(*top) for top in token.top],
                )
                for token in tokens
            ]
        )

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=self._names(token_id),
            logprob=_finite(logprob),
            bytes=list(self._names.bytes_of(token_id)),
        )


class CompletionWriter:
    """Writes log probabilities as completions have them; one for each answer, in its order.

    Args:
        names: How tokens are called.
        skip_special_tokens: Whether special tokens are not in the text.
        num_top: Likeliest tokens to tell; the token itself is told in any case.
    """

    def __init__(self, names: TokenNames, *, skip_special_tokens: bool, num_top: int) -> None:
        self._names = names
        self._skip_special_tokens = skip_special_tokens
        self._num_top = num_top
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def write(self, tokens: Iterable[TokenLogprobs]) -> CompletionLogprobs:
        """Return what is told of these tokens, which follow those before."""
        written = _nothing()
        self._write_told(written, tokens)
        return written

    def write_echo(
        self,
        first_token_id: int,
        prompt: Iterable[TokenLogprobs],
        tokens: Iterable[TokenLogprobs],
    ) -> CompletionLogprobs:
        """Return what is told of a prompt and the beginning of its answer.

        No character is made of pieces of both: each is decoded by itself.

        Args:
            first_token_id: The prompt's first token, of which nothing can be told.
            prompt: Its other tokens.
            tokens: The answer's first tokens.
        """
        written = _nothing()
        self._write_token(written, first_token_id)
        written.token_logprobs.append(None)
        written.top_logprobs.append(None)
        self._write_told(written, prompt)
        self._num_chars += len(self._text.decode(b"", final=True))
        self._write_told(written, tokens)
        return written

    def _write_told(self, written: CompletionLogprobs, tokens: Iterable[TokenLogprobs]) -> None:
        for token in tokens:
            self._write_token(written, token.token_id)
            written.token_logprobs.append(_finite(token.logprob))
            top: dict[str, float] = {}
            told = (*token.top[: self._num_top], (token.token_id, token.logprob))
            for token_id, logprob in told:
                top.setdefault(self._names(token_id), _finite(logprob))
            written.top_logprobs.append(top)

    def _write_token(self, written: CompletionLogprobs, token_id: int) -> None:
        written.tokens.append(self._names(token_id))
        written.text_offset.append(self._num_chars)
        if not (self._skip_special_tokens and self._names.bytes_of.is_special(token_id)):
            self._num_chars += len(self._text.decode(self._names.bytes_of(token_id)))


def _nothing() -> CompletionLogprobs:
    return CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])


def prompt_logprobs(
    tokens: Sequence[TokenLogprobs], names: TokenNames, *, num_top: int
) -> PromptLogprobs:
    """Return vLLM's form for the tokens of a prompt from its second on.

    Each has the token itself first, then the likeliest ones.
    """
    told: PromptLogprobs = [None]
    for token in tokens:
        ranked = {token.token_id: (token.rank, token.logprob)}
        for rank, (token_id, logprob) in enumerate(token.top[:num_top], start=1):
            ranked.setdefault(token_id, (rank, logprob))
        told.append(
            {
                str(token_id): PromptLogprob(
                    logprob=_finite(logprob), rank=rank, decoded_token=names(token_id)
                )
                for token_id, (rank, logprob) in ranked.items()
            }
        )
    return told


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
