"""The bytes that each token of a vocabulary stands for.

A token need not be text: a character of several bytes may be spread over several tokens.
Byte-level vocabularies (GPT-2's kind) write each byte as a character of an alphabet of 256;
vocabularies with byte fallback (SentencePiece's kind) have tokens like `<0xE2>` beside text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Final

from tokenizers import Tokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE: Final = "\u2581"
"""What SentencePiece writes for a space."""


def byte_alphabet() -> list[str]:
    """Returns the character that a byte-level tokenizer writes for each byte, by byte.

    Printable bytes stand for themselves; the others, in order, for the code points from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(code) for code in range(256, 512))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


class TokenBytes:
    """Looks up the bytes of tokens; may be used by several threads at once.

    Args:
        tokenizer: Whose tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        kinds = set() if decoder is None else set(_kinds(json.loads(decoder.__getstate__())))
        self._bytes_of_char = (
            {char: byte for byte, char in enumerate(byte_alphabet())}
            if "ByteLevel" in kinds
            else None
        )
        self._has_byte_tokens = "ByteFallback" in kinds
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    def __call__(self, token_id: int) -> bytes:
        """Returns the bytes of a token, none for an id that stands for nothing."""
        if token_id in self._added:
            return self._added[token_id]
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._bytes_of_char is not None:
            return bytes(
                self._bytes_of_char[char] for char in piece if char in self._bytes_of_char
            )
        if self._has_byte_tokens:
            byte = _BYTE_TOKEN.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text.encode()

    def is_special(self, token_id: int) -> bool:
        """Says whether a token is left out of texts without special tokens."""
        return token_id in self._special


def _kinds(decoder: object) -> Iterator[str]:
    """Yields the types of a decoder and of those that it is made of."""
    if isinstance(decoder, Mapping):
        yield str(decoder.get("type"))
        for inner in decoder.get("decoders", ()):
            yield from _kinds(inner)
