"""What would happen to a prompt if it came now: its tokens, who holds them, what each would cost.

Nothing is sent, charged or remembered.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from kvway_core.token_bytes import TokenBytes
from kvway_router.chooser import Chooser
from kvway_router.decisions import CandidateRecord, shown_candidates
from kvway_router.reader_pool import ReaderPool
from kvway_router.reading import Reading, Route, ServedModel

MAX_TOKENS: Final = 4096
"""Tokens whose text is told; the page shows no more."""


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """What ``POST /admin/playground`` answers.

    Attributes:
        tokens: The text of each token of the first prompt, the first `MAX_TOKENS`; that of a
            character in several tokens is with the last of them.
        prompt_tokens: How many tokens it has.
        block_size: Tokens per block; only full ones are shared.
        replica_id: Who would be chosen.
        reason: Why, as one word.
        detail: Why, as a sentence with the numbers.
        candidates: The cheapest replicas, the chosen one among them.
    """

    tokens: list[str]
    prompt_tokens: int
    block_size: int
    replica_id: str
    reason: str
    detail: str
    candidates: tuple[CandidateRecord, ...]


class Playground:
    """Tells of prompts what would be decided.

    Args:
        model: What is served.
        readers: Threads that tokenize.
        chooser: How it would be chosen.
        max_model_len: Returns the longest context of the replicas; None if nobody says.
    """

    def __init__(
        self,
        *,
        model: ServedModel,
        readers: ReaderPool,
        chooser: Chooser,
        max_model_len: Callable[[], int | None],
    ) -> None:
        """Takes what it asks."""
        self._model = model
        self._readers = readers
        self._chooser = chooser
        self._max_model_len = max_model_len

    async def preview(self, body: bytes, *, route: Route) -> Preview:
        """Reads a request and says what would be decided.

        Args:
            body: As a client would send it.
            route: Where it would.

        Raises:
            RequestError: No replica could serve it.
            Overloaded: Too many wait to be read.
            NoReplicaAvailable: There is no replica.
        """
        reading = Reading(
            body, route=route, model=self._model, max_model_len=self._max_model_len()
        )
        await self._readers.run(reading.advance)  # which refuses what is too long, early
        await self._readers.run(reading.finish)
        reading.check_fits()
        decision = self._chooser.preview(reading)
        token_ids = reading.token_ids
        return Preview(
            tokens=list(_texts(token_ids[:MAX_TOKENS], self._model.encoder.token_bytes)),
            prompt_tokens=len(token_ids),
            block_size=self._model.namespace.block_size,
            replica_id=decision.replica_id,
            reason=decision.reason.value,
            detail=decision.detail,
            candidates=shown_candidates(decision),
        )


def _texts(token_ids: Sequence[int], bytes_of: TokenBytes) -> Iterator[str]:
    """Yields the text that each token completes."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    last = len(token_ids) - 1
    for place, token_id in enumerate(token_ids):
        yield decoder.decode(bytes_of(token_id), place == last)
