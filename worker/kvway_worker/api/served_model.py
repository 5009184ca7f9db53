"""The model as requests see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvway_core.blocks import Namespace
from kvway_core.errors import InvalidRequest, ModelNotFound
from kvway_core.prompts import PromptEncoder


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as requests see it.

    Attributes:
        name: What requests call it.
        encoder: Its template and tokenizer.
        block_size: Tokens per KV block.
        max_model_len: Tokens of prompt and answer together at most.
        fingerprint: Changes when answers may change: the `system_fingerprint`.
        created: When it was loaded, Unix seconds.
        kv_dtype: What its keys and values are kept as; empty where there are none.
    """

    name: str
    encoder: PromptEncoder
    block_size: int
    max_model_len: int
    fingerprint: str
    created: int
    kv_dtype: str = ""

    def namespace(self, cache_salt: str | None) -> Namespace:
        """Return what the KV of a request depends on besides its tokens."""
        return Namespace(
            model=self.name,
            block_size=self.block_size,
            cache_salt=cache_salt or "",
            kv_dtype=self.kv_dtype,
        )

    def check_name(self, name: str | None) -> None:
        """Raise ModelNotFound for another model."""
        if name is not None and name != self.name:
            raise ModelNotFound(
                f"This worker serves {self.name} and no other model.", param="model"
            )

    def check_vocabulary(self, token_ids: Sequence[int], *, param: str) -> None:
        """Raise InvalidRequest for an id that the model does not have."""
        largest = max(token_ids, default=0)
        if largest >= self.encoder.vocab_size:
            raise InvalidRequest(
                f"{param} has the token id {largest}; the model's ids end at "
                f"{self.encoder.vocab_size - 1}.",
                param=param,
            )
