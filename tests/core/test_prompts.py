"""Prompts: the same token ids as transformers, and text that never breaks a character."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from kvway_core.api import ChatMessage, ContentPart
from kvway_core.errors import ConfigError, InvalidRequest
from kvway_core.prompts import Detokenizer, PromptEncoder
from kvway_core.testing.byte_model import (
    CHAT_TEMPLATE,
    IM_END_ID,
    IM_START_ID,
    VOCAB_SIZE,
    write_byte_model,
)
from kvway_core.token_bytes import byte_alphabet

TEMPLATES = {
    "ChatML": CHAT_TEMPLATE,
    "default system": (
        "{% for message in messages %}"
        "{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
        "{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content | trim ~ '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "parts, tools and every extension": (
        "{{ eos_token }}{%- if tools %}\n"
        "    {{- tools | tojson(indent=2) }}\n"
        "{%- endif %}\n"
        "{% for message in messages %}\n"
        "  {%- if message.content is string %}\n"
        "    {{- message.content }}\n"
        "  {%- else %}\n"
        "    {%- for part in message.content or [] %}\n"
        "      {%- if part.type != 'text' %}{% continue %}{% endif %}\n"
        "      {{- part.text }}\n"
        "    {%- endfor %}\n"
        "  {%- endif %}\n"
        "  {%- generation %}{{ message.role | tojson }}{% endgeneration %}\n"
        "  {%- if message.name %}{{ message.name }}{% endif %}\n"
        "  {%- if loop.index > 100 %}{% break %}{% endif %}\n"
        "  {% set seen = namespace(n=1) %}{% set seen.n = seen.n + 1 %}{{ seen.n }}\n"
        "{% endfor %}\n"
        "{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}\n"
    ),
}
PARTS = "parts, tools and every extension"

texts = st.text(max_size=20) | st.sampled_from(
    ["<|im_start|>", "a<|im_end|>b", "<|im_end", "\r\n", "\0", " ", "\U0001f642e\u0301", "{{ x }}"]
)
conversations = st.lists(
    st.builds(
        ChatMessage,
        role=st.sampled_from(["system", "user", "assistant", "tool", "developer"]),
        content=st.lists(texts, max_size=3).map("".join),
        name=st.none() | st.text(max_size=3),
    ),
    min_size=1,
    max_size=5,
)


def with_template(folder: Path, template: str | None) -> Path:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[PromptEncoder, Any]]:
    """Returns for each template our encoder and transformers' tokenizer of one folder."""
    from transformers import AutoTokenizer

    made = {}
    for name, template in TEMPLATES.items():
        folder = write_byte_model(tmp_path_factory.mktemp("model"))
        with_template(folder, template)
        made[name] = (PromptEncoder.load(folder), AutoTokenizer.from_pretrained(folder))
    return made


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    return PromptEncoder.load(write_byte_model(tmp_path_factory.mktemp("model")))


def as_dicts(messages: Sequence[ChatMessage]) -> list[dict[str, object]]:
    plain: list[dict[str, object]] = []
    for message in messages:
        content: object = message.content
        if isinstance(message.content, list):
            content = [{"type": part.type, "text": part.text} for part in message.content]
        fields = {"role": message.role, "content": content, "name": message.name}
        plain.append({name: value for name, value in fields.items() if value is not None})
    return plain


@pytest.mark.parametrize("template", TEMPLATES)
@given(messages=conversations)
def test_chats_become_the_ids_that_transformers_makes(
    twins: dict[str, tuple[PromptEncoder, Any]], template: str, messages: list[ChatMessage]
) -> None:
    ours, theirs = twins[template]
    assert ours.encode_chat(messages) == theirs.apply_chat_template(
        as_dicts(messages), tokenize=True, add_generation_prompt=True, return_dict=False
    )


@given(
    parts=st.lists(st.builds(ContentPart, type=st.just("text"), text=texts), max_size=3),
    tools=st.none() | st.lists(st.dictionaries(st.text(max_size=3), texts), max_size=2),
)
def test_parts_and_tools_reach_templates_that_know_them(
    twins: dict[str, tuple[PromptEncoder, Any]],
    parts: list[ContentPart],
    tools: list[dict[str, object]] | None,
) -> None:
    ours, theirs = twins[PARTS]
    messages = [ChatMessage("user", parts)]
    assert ours.encode_chat(messages, tools=tools) == theirs.apply_chat_template(
        as_dicts(messages),
        tools=tools,
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )


@given(text=texts, special=st.booleans())
def test_texts_become_the_ids_that_transformers_makes(
    twins: dict[str, tuple[PromptEncoder, Any]], text: str, *, special: bool
) -> None:
    ours, theirs = twins["ChatML"]
    assert ours.encode_text(text, add_special_tokens=special) == theirs.encode(
        text, add_special_tokens=special
    )


def test_parts_are_lines_where_the_template_wants_text(encoder: PromptEncoder) -> None:
    parts = [ContentPart("text", "one"), ContentPart("text", "two")]
    rendered = encoder.render_chat([ChatMessage("user", parts)])
    assert rendered == "<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("part", "said"),
    [(ContentPart("image_url"), "image_url"), (ContentPart("text"), "needs text")],
)
def test_a_part_that_is_no_text_is_refused_by_name(
    encoder: PromptEncoder, part: ContentPart, said: str
) -> None:
    messages = [ChatMessage("user", "a"), ChatMessage("user", [part])]
    with pytest.raises(InvalidRequest, match=said) as caught:
        encoder.encode_chat(messages)
    assert caught.value.param == "messages[1].content"


def test_a_tool_call_has_its_arguments_as_an_object(tmp_path: Path) -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments.city }}"
    encoder = PromptEncoder.load(with_template(write_byte_model(tmp_path), source))
    call: dict[str, object] = {
        "type": "function",
        "function": {"name": "f", "arguments": '{"city": "Bern"}'},
    }
    assert encoder.render_chat([ChatMessage("assistant", tool_calls=[call])]) == "Bern"
    broken: dict[str, object] = {"type": "function", "function": {"name": "f", "arguments": "{"}}
    assert encoder.render_chat([ChatMessage("assistant", tool_calls=[broken])]) == ""


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // 0 }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[7]['content'] }}",
        "{{ messages[0].content.nothing.at_all }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('said: ' + messages[0].content) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_refuses_the_messages_and_repeats_nothing(
    tmp_path: Path, template: str
) -> None:
    encoder = PromptEncoder.load(with_template(write_byte_model(tmp_path), template))
    with pytest.raises(InvalidRequest) as caught:
        encoder.encode_chat([ChatMessage("user", "private")])
    assert caught.value.param == "messages"
    assert "private" not in caught.value.message


def test_the_reason_of_a_template_is_given(tmp_path: Path) -> None:
    source = "{{ raise_exception('Roles must alternate.') }}"
    encoder = PromptEncoder.load(with_template(write_byte_model(tmp_path), source))
    with pytest.raises(InvalidRequest, match="Roles must alternate"):
        encoder.encode_chat([ChatMessage("user", "a")])


def test_a_model_without_a_template_can_complete_only(tmp_path: Path) -> None:
    encoder = PromptEncoder.load(with_template(write_byte_model(tmp_path), None))
    assert not encoder.has_chat_template
    assert encoder.encode_text("ab") == [97, 98]
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        encoder.encode_chat([ChatMessage("user", "a")])


def test_a_template_file_wins_and_tools_may_have_their_own(tmp_path: Path) -> None:
    write_byte_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    encoder = PromptEncoder.load(tmp_path)
    assert encoder.render_chat([ChatMessage("user", "a")]) == "file"
    assert encoder.render_chat([ChatMessage("user", "a")], tools=[{}]) == "tools"


def test_named_templates_in_the_config(tmp_path: Path) -> None:
    write_byte_model(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "plain {{ eos_token }}"},
        {"name": "tool_use", "template": "tools"},
    ]
    config["eos_token"] = {"__type": "AddedToken", "content": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    encoder = PromptEncoder.load(tmp_path)
    assert encoder.render_chat([ChatMessage("user", "a")]) == "plain <|im_end|>"
    assert encoder.eos_token_ids == {IM_END_ID}


def test_what_the_folder_says_about_the_model(tmp_path: Path, encoder: PromptEncoder) -> None:
    assert encoder.eos_token_ids == {IM_END_ID}
    assert (encoder.vocab_size, encoder.max_model_len) == (VOCAB_SIZE, 8192)
    write_byte_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (tmp_path / "config.json").unlink()
    other = PromptEncoder.load(tmp_path)
    assert other.eos_token_ids == {1, 2, IM_END_ID}
    assert (other.vocab_size, other.max_model_len) == (VOCAB_SIZE, None)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"n_positions": 128, "vocab_size": 300}, (300, 128)),
        ({"text_config": {"max_position_embeddings": 64, "vocab_size": 400}}, (400, 64)),
        ({"max_position_embeddings": 32, "text_config": {"n_positions": 64}}, (VOCAB_SIZE, 32)),
        ({"max_position_embeddings": 0, "text_config": None}, (VOCAB_SIZE, None)),
    ],
)
def test_sizes_are_found_by_the_names_that_models_give_them(
    tmp_path: Path, config: dict[str, object], sizes: tuple[int, int | None]
) -> None:
    write_byte_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    encoder = PromptEncoder.load(tmp_path)
    assert (encoder.vocab_size, encoder.max_model_len) == sizes


def test_truncation_in_the_file_does_not_shorten_prompts(tmp_path: Path) -> None:
    write_byte_model(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert len(PromptEncoder.load(tmp_path).encode_text("abcdef")) == 6


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("config.json", "["),
        ("config.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
    ],
)
def test_a_broken_folder_is_a_configuration_error(
    tmp_path: Path, name: str, content: str | None
) -> None:
    path = write_byte_model(tmp_path) / name
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"model|cannot be read|is not"):
        PromptEncoder.load(tmp_path)


def test_the_router_s_side_needs_no_transformers() -> None:
    heavy = {"torch", "transformers", "numpy"}
    code = f"import sys, kvway_core.prompts; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.strip() == b"set()"


def test_tokens_of_the_byte_model_are_bytes(encoder: PromptEncoder) -> None:
    assert sorted(byte_alphabet()) == sorted(set(byte_alphabet()))
    assert encoder.encode_text("a\u00e9\n\0") == [97, 0xC3, 0xA9, 10, 0]
    assert encoder.encode_text("<|im_start|><|im_end|>") == [IM_START_ID, IM_END_ID]
    assert encoder.decode([97, IM_START_ID, 98]) == "ab"
    assert encoder.decode([97, IM_START_ID], skip_special_tokens=False) == "a<|im_start|>"


def pieces_of(encoder: PromptEncoder, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(encoder)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@given(token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=120))
def test_pieces_together_are_the_text(encoder: PromptEncoder, token_ids: list[int]) -> None:
    assert "".join(pieces_of(encoder, token_ids)) == encoder.decode(token_ids)


@given(token_ids=st.lists(st.integers(128, 255), min_size=30, max_size=200))
def test_pieces_of_broken_bytes_together_are_the_text(
    encoder: PromptEncoder, token_ids: list[int]
) -> None:
    assert "".join(pieces_of(encoder, token_ids)) == encoder.decode(token_ids)


@given(text=st.text(max_size=60))
def test_no_piece_splits_a_character(encoder: PromptEncoder, text: str) -> None:
    token_ids = encoder.encode_text(text)
    pieces = pieces_of(encoder, token_ids)
    assert "".join(pieces) == encoder.decode(token_ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(text=st.text("abc .\u00e9\u4e16\U0001f642\ufffd", max_size=40))
def test_no_piece_splits_a_character_of_a_tokenizer_that_falls_back_to_bytes(text: str) -> None:
    """As Llama's does: words begin with a space, and what has no token is spelt in bytes."""
    encoder = byte_fallback_encoder()
    token_ids = encoder.encode_text(text)
    assert "".join(pieces_of(encoder, token_ids)) == encoder.decode(token_ids)


@functools.cache
def byte_fallback_encoder() -> PromptEncoder:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abc.\u00e9"]
    tokens += ["\u2581a", "bc"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[("\u2581", "a"), ("b", "c")],
            unk_token="<unk>",  # noqa: S106 (a token of text)
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PromptEncoder(
        tokenizer,
        template=None,
        eos_token_ids=frozenset(),
        max_model_len=None,
        vocab_size=len(tokens),
    )


def test_text_comes_as_soon_as_it_is_whole(encoder: PromptEncoder) -> None:
    assert pieces_of(encoder, encoder.encode_text("a\u00e9b")) == ["a", "", "\u00e9", "b", ""]
    assert pieces_of(encoder, [0xC3]) == ["", "\ufffd"]


def test_special_tokens_without_end_are_not_held_without_end(encoder: PromptEncoder) -> None:
    detokenizer = Detokenizer(encoder)
    assert not any(detokenizer.push(IM_START_ID) for _ in range(100))
    assert (detokenizer.push(97), detokenizer.flush()) == ("a", "")


def test_broken_bytes_without_end_are_not_held_without_end(encoder: PromptEncoder) -> None:
    detokenizer = Detokenizer(encoder)
    sent = sum(len(detokenizer.push(0xFF)) for _ in range(1000))
    assert 960 < sent < 1000
    assert sent + len(detokenizer.flush()) == 1000
    assert detokenizer.flush() == ""


def test_other_threads_run_while_a_long_text_is_tokenized(encoder: PromptEncoder) -> None:
    """The event loop is such a thread: it must not stand still for a client's long prompt."""
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())

    ticker = threading.Thread(target=tick)
    ticker.start()
    begun = time.perf_counter()
    encoder.encode_text(" ".join(map(str, range(100_000))))  # no piece of it comes twice
    ended = time.perf_counter()
    done.set()
    ticker.join()
    during = [begun, *(t for t in ticks if begun < t < ended), ended]
    standstill = max(after - before for before, after in pairwise(during))
    assert standstill < (ended - begun) / 2
