"""Random chats of the default model: our ids are those of transformers' `apply_chat_template`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvway_core.api import parse_chat
from kvway_core.prompting import encode_prompts
from kvway_core.prompts import PromptEncoder
from kvway_worker.fetch import DEFAULT_MODEL, resolve_model

pytestmark = [pytest.mark.property, pytest.mark.model]

_PARTS = (
    *("a", "the ", "  ", "\n", "\r\n", "\t", "\0", "\x85", "\xa0", "\u3000", "\ufeff", "\u200b"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "<repo_name>", "<jupyter_code>"),
    *("\xe9", "e\u0301", "\U0001f468\u200d\U0001f469", "\u202e\u05d0\u05d1", "\u4e16\u754c"),
    *("12 345", "'s", "{{x}}", "{% if %}", "z" * 700, " " * 40, "word and " * 300),
)

contents = st.lists(st.sampled_from(_PARTS) | st.text(max_size=3), max_size=40).map("".join)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": contents}
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def twins() -> tuple[PromptEncoder, Any]:
    from transformers import AutoTokenizer

    folder = resolve_model(DEFAULT_MODEL)
    return PromptEncoder.load(folder), AutoTokenizer.from_pretrained(folder)


@settings(max_examples=300, suppress_health_check=list(HealthCheck), deadline=None)
@given(messages=messages, begins_answer=st.booleans(), described=st.none() | contents)
def test_ids_of_chats_are_those_of_transformers(
    twins: tuple[PromptEncoder, Any],
    messages: list[dict[str, str]],
    described: str | None,
    *,
    begins_answer: bool,
) -> None:
    """White space, special tokens inside contents, long words, tools; known pieces or not."""
    ours, theirs = twins
    tools = None
    if described is not None:
        function = {"name": "f", "description": described, "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": function}]
    expected = theirs.apply_chat_template(
        messages,
        tools=tools,
        tokenize=True,
        add_generation_prompt=begins_answer,
        return_dict=False,
    )
    sent = [one | {"tool_call_id": "1"} if one["role"] == "tool" else one for one in messages]
    body = {"model": "m", "messages": sent, "add_generation_prompt": begins_answer}
    request = parse_chat(json.dumps(body | ({"tools": tools} if tools else {})).encode())
    assert encode_prompts(request, ours, max_model_len=None) == [expected]
