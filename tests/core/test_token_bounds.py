"""A text that cannot fit is known by its bytes, where the tokenizer allows to tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from typing_extensions import override

from kvway_core import api
from kvway_core.errors import ContextLengthExceeded
from kvway_core.prompting import encode_prompts
from kvway_core.prompts import PromptEncoder
from kvway_core.testing.byte_model import write_byte_model
from kvway_core.token_bounds import token_bound
from kvway_core.token_bytes import byte_alphabet

SPACE = byte_alphabet()[ord(" ")]
ByteLevel = pre_tokenizers.ByteLevel


def tokenizer(*, num_bytes: int = 256) -> Tokenizer:
    """Byte-level BPE whose longest token is " abab"; the last bytes may have no token."""
    merges = [("a", "b"), ("ab", "ab"), (SPACE, "abab")]
    pieces = [*byte_alphabet()[:num_bytes], *("".join(merge) for merge in merges)]
    made = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return made


def without_vocabulary(model: models.Model) -> Tokenizer:
    made = Tokenizer(model)
    made.pre_tokenizer = ByteLevel()
    return made


def with_token(token: AddedToken, *, num_bytes: int = 256) -> Tokenizer:
    made = tokenizer(num_bytes=num_bytes)
    made.add_special_tokens([token])
    return made


def with_cuts(*cuts: object) -> Tokenizer:
    made = tokenizer()
    made.pre_tokenizer = pre_tokenizers.Sequence(list(cuts))
    return made


def normalizing() -> Tokenizer:
    made = tokenizer()
    made.normalizer = normalizers.NFC()
    return made


def cut(behavior: str) -> pre_tokenizers.Split:
    return pre_tokenizers.Split(Regex("x"), behavior)


@pytest.mark.parametrize(
    ("make", "longest"),
    [
        (tokenizer, 5),
        (lambda: tokenizer(num_bytes=128), 5),
        (lambda: without_vocabulary(models.BPE()), 1),
        (lambda: with_cuts(pre_tokenizers.Digits(), cut("isolated"), ByteLevel()), 5),
        (lambda: with_token(AddedToken("<end €>", normalized=False)), 9),
        (lambda: with_token(AddedToken("<end>", rstrip=True)), None),
        (lambda: with_token(AddedToken("<end>", lstrip=True)), None),
        (lambda: with_cuts(cut("removed"), ByteLevel()), None),
        (lambda: with_cuts(pre_tokenizers.Whitespace(), ByteLevel()), None),
        (lambda: with_cuts(pre_tokenizers.Digits()), None),
        (lambda: Tokenizer(models.BPE()), None),
        (lambda: without_vocabulary(models.WordLevel()), None),
        (normalizing, None),
    ],
)
def test_what_a_token_stands_for_is_bounded_only_where_no_text_is_dropped(
    make: Callable[[], Tokenizer], longest: int | None
) -> None:
    """By no normalizer, by nothing that cuts the text, by no token that takes space along."""
    bound = token_bound(make())
    assert (bound and bound.longest) == longest


@given(
    text=st.text() | st.text(" ab<end€>\x04é", max_size=60), num_bytes=st.sampled_from([256, 128])
)
def test_no_text_has_fewer_tokens_than_the_bound_says(text: str, num_bytes: int) -> None:
    """Also where the vocabulary lacks bytes, which become no token at all."""
    made = TOKENIZERS[num_bytes]
    bound = token_bound(made)
    assert bound is not None
    assert len(made.encode(text, add_special_tokens=False).ids) >= bound.least_tokens(text)


def test_the_bound_counts_every_byte_that_has_a_token() -> None:
    """Six bytes of a text of eight, five to a token at most."""
    bound = token_bound(tokenizer(num_bytes=128))
    assert bound is not None
    assert (bound.least_tokens("ab é cd"), bound.least_tokens("é" * 99)) == (2, 0)


END = AddedToken("<end €>", normalized=False)
TOKENIZERS = {256: with_token(END), 128: with_token(END, num_bytes=128)}


def request(num_chars: int, *, keep: int | None = None) -> api.CompletionRequest:
    prompt = "x" * num_chars
    return api.CompletionRequest(model="m", prompt=prompt, truncate_prompt_tokens=keep)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    """The byte model: its longest token has 12 bytes."""
    return PromptEncoder.load(write_byte_model(tmp_path_factory.mktemp("bytes")))


class Untokenizable(PromptEncoder):
    """Fails when a text is tokenized."""

    @override
    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise AssertionError(f"{len(text)} characters, special tokens {add_special_tokens}")


@pytest.mark.parametrize("as_chat", [False, True])
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(
    tmp_path: Path, *, as_chat: bool
) -> None:
    encoder = Untokenizable.load(write_byte_model(tmp_path))
    long: api.ChatRequest | api.CompletionRequest = request(12 * 63 + 1)
    if as_chat:
        messages = [api.ChatMessage("user", "x" * 12 * 63)]
        long = api.ChatRequest(model="m", messages=messages)
    with pytest.raises(ContextLengthExceeded) as caught:
        encode_prompts(long, encoder, max_model_len=64)
    assert caught.value.param == ("messages" if as_chat else "prompt")


def test_a_prompt_that_may_fit_or_is_cut_or_has_no_limit_is_tokenized(
    encoder: PromptEncoder,
) -> None:
    """The bound is exact: with one byte less there might be room for one token more."""
    assert len(encode_prompts(request(12 * 63), encoder, max_model_len=64)[0]) == 12 * 63
    cut_off = request(10_000, keep=5)
    assert len(encode_prompts(cut_off, encoder, max_model_len=64)[0]) == 5
    assert len(encode_prompts(request(10_000), encoder, max_model_len=None)[0]) == 10_000
