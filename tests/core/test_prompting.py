"""What fields of a request make of its prompt: templates' variables, where it ends, truncation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from kvway_core import api
from kvway_core.api import ChatMessage
from kvway_core.chat_template import ChatTemplate
from kvway_core.errors import InvalidRequest
from kvway_core.prompting import encode_prompts
from kvway_core.prompts import PromptEncoder
from kvway_core.testing.byte_model import CHAT_TEMPLATE, IM_END_ID, write_byte_model
from kvway_core.token_bytes import TokenBytes

TRIMMING = CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim")
THINKING = (
    "{% set mine = 1 %}{% if effort is defined %}{{ effort }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}no thoughts{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{{ bos_token }}{% endif %}"
)


def with_template(folder: Path, template: str) -> Path:
    write_byte_model(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[PromptEncoder, Any]]:
    """Our encoder and transformers' tokenizer, of two templates."""
    from transformers import AutoTokenizer

    made = []
    for template in (CHAT_TEMPLATE, TRIMMING):
        folder = with_template(tmp_path_factory.mktemp("model"), template)
        made.append((PromptEncoder.load(folder), AutoTokenizer.from_pretrained(folder)))
    return made


@given(
    contents=st.lists(
        st.text(max_size=8).filter(str.strip) | st.sampled_from(["a ", "\n\nSure:\n", "hi"]),
        min_size=1,
        max_size=4,
    ),
    continues=st.booleans(),
)
def test_prompts_end_where_transformers_ends_them(
    twins: list[tuple[PromptEncoder, Any]], contents: list[str], *, continues: bool
) -> None:
    """Inside the last message or behind it, also for a template that trims contents."""
    roles = ["user", "assistant", "user", "assistant"]
    messages = [ChatMessage(*pair) for pair in zip(roles, contents, strict=False)]
    for ours, theirs in twins:
        expected = theirs.apply_chat_template(
            [{"role": one.role, "content": one.content} for one in messages],
            tokenize=True,
            add_generation_prompt=False,
            continue_final_message=continues,
            return_dict=False,
        )
        got = ours.encode_chat(
            messages, add_generation_prompt=False, continue_final_message=continues
        )
        assert got == expected


def test_a_message_that_the_template_does_not_show_cannot_be_continued() -> None:
    template = ChatTemplate("{{ messages[0].content }}", variables={})
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(InvalidRequest) as caught:
        template.render_open(messages)
    assert caught.value.param == "continue_final_message"


def test_a_request_sets_the_variables_that_the_template_reads_and_no_others() -> None:
    """Not its own, not those of every template, not the special tokens, not the functions."""
    template = ChatTemplate(THINKING, variables={"bos_token": "<s>"})
    assert template.kwargs == {"effort", "enable_thinking", "thinking"}
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages, kwargs={"effort": "low "}) == "low hi><s>"
    assert template.render(messages, kwargs={"enable_thinking": False}) == "no thoughtshi><s>"
    for name in ("other", "mine", "messages", "bos_token", "raise_exception", "documents"):
        with pytest.raises(InvalidRequest) as caught:
            template.render(messages, kwargs={name: "x"})
        assert caught.value.param == "chat_template_kwargs"
        assert name not in caught.value.message


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    return PromptEncoder.load(write_byte_model(tmp_path_factory.mktemp("model")))


def prompts(encoder: PromptEncoder, *, max_model_len: int | None, **fields: Any) -> list[str]:
    request = api.parse_completion(json.dumps({"model": "m", **fields}).encode())
    return [
        bytes(ids).decode()
        for ids in encode_prompts(request, encoder, max_model_len=max_model_len)
    ]


def test_truncation_keeps_the_end_of_every_prompt(encoder: PromptEncoder) -> None:
    both = ["abcdef", "xy"]
    assert prompts(encoder, max_model_len=9, prompt=both) == both
    kept = prompts(encoder, max_model_len=9, prompt=both, truncate_prompt_tokens=3)
    assert kept == ["def", "xy"]
    whole = {"prompt": both, "truncate_prompt_tokens": -1, "max_tokens": 5}
    assert prompts(encoder, max_model_len=9, **whole) == ["cdef", "xy"]
    assert prompts(encoder, max_model_len=None, **whole) == both
    with pytest.raises(InvalidRequest) as caught:
        prompts(encoder, max_model_len=9, prompt="a", truncate_prompt_tokens=10)
    assert caught.value.param == "truncate_prompt_tokens"


@given(text=st.text(max_size=20))
def test_the_bytes_of_a_texts_tokens_are_its_bytes(encoder: PromptEncoder, text: str) -> None:
    ids = encoder.encode_text(text, add_special_tokens=False)
    assert b"".join(map(encoder.token_bytes, ids)) == text.encode()


def test_bytes_of_special_tokens_and_of_ids_without_a_token(encoder: PromptEncoder) -> None:
    assert encoder.token_bytes(IM_END_ID) == b"<|im_end|>"
    assert encoder.token_bytes(10_000) == b""
    assert encoder.token_bytes.is_special(IM_END_ID)
    assert not encoder.token_bytes.is_special(97)


def test_bytes_where_single_bytes_are_a_fallback() -> None:
    """SentencePiece's kind: a token of one byte, and one that begins with a space."""
    vocab = {"<unk>": 0, "<0xE2>": 1, "\u2581hi": 2, "\u00e9": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    bytes_of = TokenBytes(tokenizer)
    assert [bytes_of(token) for token in (1, 2, 3)] == [b"\xe2", b" hi", b"\xc3\xa9"]


def test_bytes_of_words() -> None:
    """A vocabulary of words, without any decoder."""
    tokenizer = Tokenizer(models.WordLevel({"un": 0, "mot": 1}, unk_token="un"))  # noqa: S106
    assert TokenBytes(tokenizer)(1) == b"mot"
