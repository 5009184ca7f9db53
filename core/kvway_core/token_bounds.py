"""How few tokens a text can have, known without tokenizing it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tokenizers import Tokenizer
from tokenizers.models import BPE

from kvway_core.token_bytes import byte_alphabet

_KEEPING: Final = frozenset({"ByteLevel", "Digits", "Split"})
"""Pre-tokenizers that only cut a text into pieces, `Split` unless it removes what it finds."""


@dataclass(frozen=True, slots=True)
class TokenBound:
    """What is certain of how a tokenizer tokenizes any text.

    Attributes:
        longest: Bytes of a text that a token stands for at most.
        dropped: Bytes that may have no token.
    """

    longest: int
    dropped: bytes

    def least_tokens(self, text: str) -> int:
        """Returns how many tokens a text has at least; O(text), and fast."""
        num_bytes = len(text.encode().translate(None, self.dropped))
        return -(-num_bytes // self.longest)


def token_bound(tokenizer: Tokenizer) -> TokenBound | None:
    """Returns what is certain of a tokenizer; None if nothing is.

    Something is for byte-level BPE without a normalizer (it could shorten a text), with
    pre-tokenizers that keep every byte, and without an added token that takes the white space
    around it along.

    Complexity:
        O(vocabulary); for once, when a model is loaded.
    """
    splitter = tokenizer.pre_tokenizer
    if tokenizer.normalizer is not None or splitter is None:
        return None
    cuts = list(_pre_tokenizers(json.loads(splitter.__getstate__())))
    added = tokenizer.get_added_tokens_decoder().values()
    certain = (
        isinstance(tokenizer.model, BPE)
        and any(cut.get("type") == "ByteLevel" for cut in cuts)
        and all(cut.get("type") in _KEEPING and cut.get("behavior") != "Removed" for cut in cuts)
        and not any(token.lstrip or token.rstrip for token in added)
    )
    if not certain:
        return None
    # A piece of the vocabulary has one character for each byte.
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    lengths = (*map(len, vocabulary), *(len(token.content.encode()) for token in added))
    dropped = (byte for byte, char in enumerate(byte_alphabet()) if char not in vocabulary)
    return TokenBound(max(lengths, default=1), bytes(dropped))


def _pre_tokenizers(state: object) -> Iterator[Mapping[str, object]]:
    """Yields a pre-tokenizer, or those that it is made of."""
    if not isinstance(state, Mapping):
        return
    if state.get("type") == "Sequence":
        for inner in state.get("pretokenizers", ()):
            yield from _pre_tokenizers(inner)
    else:
        yield state
