"""What an answer may go on with: guesses from its own text, checked by the model. Pure.

Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023): when the last tokens occurred before, what
followed them then is likely to follow now: quotes, code, names. Guesses cost a little of a step
that is bound by memory and no token of the answer: the model says of each whether it agrees.

    token_ids    a b c d x y z ... a b c d │
                         ▲▲▲▲▲             │ min_match = 4: x y z are proposed
"""

from __future__ import annotations

from collections.abc import Sequence as TokenIds
from typing import Final

from kvway_worker.scheduling.sequence import Sequence

MAX_READ: Final = 4096
"""Tokens of all texts that are read in one plan: about 2 ms. Who has more to read, mostly a long
prompt, has no drafts before it is all read."""


class NgramIndex:
    """Where each run of `min_match` tokens of a growing sequence occurred last.

    Args:
        min_match: Tokens that must agree, at least 1.

    Invariants:
        1. Every run that ends before the last token that was read is in it, once.

    Complexity:
        O(min_match) for each token, once; one table entry per distinct run.
    """

    __slots__ = ("_behind", "_min_match", "_num_read")

    def __init__(self, min_match: int) -> None:
        self._min_match = min_match
        self._num_read = 0
        self._behind: dict[int, int] = {}

    def read(self, token_ids: TokenIds[int], limit: int) -> int:
        """Goes on reading a text.

        Args:
            token_ids: The text; it has grown by tokens at its end since the last call.
            limit: Tokens to read at most.

        Returns:
            How many tokens were read.
        """
        size, start = self._min_match, self._num_read
        self._num_read = min(len(token_ids), start + limit)
        for end in range(max(size, start), self._num_read):
            # The hash stands for the run, which is compared when it is found: that takes a
            # third of the memory of the runs themselves.
            self._behind[hash(tuple(token_ids[end - size : end]))] = end
        return self._num_read - start

    def propose(self, token_ids: TokenIds[int], num_tokens: int) -> list[int]:
        """Returns what followed the last `min_match` tokens where they occurred most recently.

        Nothing while tokens of the text are not read.

        Where that reaches the end of the text, it goes on with itself: a text that repeats is
        expected to repeat.

        Args:
            token_ids: The text that was read.
            num_tokens: Tokens to return, at least 1; none when the run is new.
        """
        if self._num_read < len(token_ids):
            return []
        size = self._min_match
        last = token_ids[-size:]
        behind = self._behind.get(hash(tuple(last)))
        if behind is None or token_ids[behind - size : behind] != last:
            return []
        period = len(token_ids) - behind
        return [token_ids[behind + index % period] for index in range(num_tokens)]


class Drafter:
    """Proposes drafts for sequences, each from its own tokens.

    Args:
        num_drafts: Tokens to propose at most; 0 proposes nothing.
        min_match: Tokens that must have occurred before, at least 1. Few make many wrong guesses.

    Raises:
        ValueError: If one is out of range.
    """

    __slots__ = ("_indexes", "_min_match", "_num_to_read", "num_drafts")

    def __init__(self, num_drafts: int, *, min_match: int = 4) -> None:
        if num_drafts < 0 or min_match < 1:
            raise ValueError(
                f"num_drafts ({num_drafts}) must be at least 0 and draft_min_match ({min_match}) "
                "at least 1"
            )
        self.num_drafts = num_drafts
        self._min_match = min_match
        self._num_to_read = MAX_READ
        self._indexes: dict[str, NgramIndex] = {}

    def begin_plan(self) -> None:
        """Lets the proposals of one more plan read MAX_READ tokens in all."""
        self._num_to_read = MAX_READ

    def propose(self, seq: Sequence, limit: int) -> list[int]:
        """Returns at most `limit` tokens that may follow the sequence; often none."""
        num_tokens = min(limit, self.num_drafts)
        if num_tokens < 1:
            return []
        index = self._indexes.get(seq.request_id)
        if index is None:
            index = self._indexes[seq.request_id] = NgramIndex(self._min_match)
        self._num_to_read -= index.read(seq.token_ids, self._num_to_read)
        return index.propose(seq.token_ids, num_tokens)

    def forget(self, seq: Sequence) -> None:
        """Drops what is known of a sequence that has ended."""
        self._indexes.pop(seq.request_id, None)
