"""A model's own folder: the ids of random texts and chats are those of its tokenizer, whole.

Without options the folders are small tokenizers of each kind. `--tokenizers DIR` takes all folders
below DIR that have a tokenizer.json in their place: those of real models.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvway_core.api import parse_chat
from kvway_core.errors import InvalidRequest
from kvway_core.prompting import encode_prompts, read_prompts
from kvway_core.prompts import PromptEncoder
from kvway_core.tokenizing import pieces
from tests.core.tokenizer_kinds import CUT, TEXTS, tokenizer_of

pytestmark = pytest.mark.property

KINDS = ("smollm", "llama 3", "qwen 3", "gemma", "llama 2", "metaspace, first")
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{{ '<|s|>' ~ message.role ~ '\n' }}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{{ '<tool>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{{ '<|e|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|s|>assistant\n' }}{% endif %}"
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given_dir = metafunc.config.getoption("--tokenizers")
    models: list[Any] = [pytest.param(kind, id=kind) for kind in KINDS]
    if given_dir is not None:
        folders = sorted(path.parent for path in Path(given_dir).rglob("tokenizer.json"))
        models = [pytest.param(path, id=str(path.relative_to(given_dir))) for path in folders]
    metafunc.parametrize("model", models)


class Twins:
    """Our encoder, the reference, and what to make texts of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ours = PromptEncoder.load(folder)
        self.whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
        added = sorted(t.content for t in self.whole.get_added_tokens_decoder().values())
        some = added if len(added) < 60 else added[:: len(added) // 40]
        parts = st.sampled_from(TEXTS) | st.sampled_from(some) | st.text(max_size=4)
        self.texts = st.lists(parts, max_size=60).map("".join)

    @functools.cached_property
    def theirs(self) -> Any:
        """Transformers' tokenizer of the folder."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)

    def ids(self, text: str) -> list[int]:
        return list(self.whole.encode(text, add_special_tokens=False).ids)


@functools.cache
def twins_of(model: str | Path) -> Twins:
    if isinstance(model, Path):
        return Twins(model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer_of(model, "plain").save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        twins = Twins(folder)
        assert twins.theirs
        return twins


@given(data=st.data())
def test_pieces_have_the_ids_of_the_text(model: str | Path, data: st.DataObject) -> None:
    """Cut wherever it may be, by the rules alone; and as in use, by the faster library."""
    twins = twins_of(model)
    text = data.draw(twins.texts)
    expected = twins.ids(text)
    cut = list(pieces(text, twins.ours.texts.cutter.often()))
    assert [token for piece in cut for token in twins.ids(piece)] == expected
    assert twins.ours.encode_text(text, add_special_tokens=False) == expected


def test_where_texts_are_cut_is_known(model: str | Path) -> None:
    """By a rule; or it is said why not: what is not cut costs the path its time."""
    cutter = twins_of(model).ours.texts.cutter
    assert cutter.kind in {"words", "added_tokens"}
    assert bool(cutter.why) == (cutter.kind == "added_tokens")
    if isinstance(model, str):
        assert cutter.kind == CUT[model]


@settings(suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data(), begins_answer=st.booleans(), has_tools=st.booleans())
def test_chats_have_the_ids_of_transformers(
    model: str | Path, data: st.DataObject, *, begins_answer: bool, has_tools: bool
) -> None:
    """Turn by turn, so that pieces of the turn before are known; refused alike where refused."""
    twins = twins_of(model)
    if not twins.ours.has_chat_template:
        assert not twins.theirs.chat_template
        return
    tools = None
    if has_tools:
        function = {"name": "f", "description": data.draw(twins.texts), "parameters": {}}
        tools = [{"type": "function", "function": function}]
    messages: list[dict[str, str]] = []
    for turn in range(data.draw(st.integers(1, 4))):
        role = "assistant" if turn % 2 else "user"
        messages.append({"role": role, "content": data.draw(twins.texts)})
        ask = {"tokenize": True, "return_dict": False, "add_generation_prompt": begins_answer}
        try:
            expected = twins.theirs.apply_chat_template(messages, tools=tools, **ask)
        except Exception:  # noqa: BLE001  jinja's errors and those of what a template does
            expected = None
        body = {"model": "m", "messages": messages, "add_generation_prompt": begins_answer}
        request = parse_chat(json.dumps(body | ({"tools": tools} if tools else {})).encode())
        try:
            ids = encode_prompts(request, twins.ours, max_model_len=None)
        except InvalidRequest:
            assert expected is None
        else:
            assert ids == [expected]


@settings(suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_chats_with_images_have_the_ids_of_transformers(
    model: str | Path, data: st.DataObject
) -> None:
    """The template writes a placeholder for each; each is where its placeholder is."""
    twins = twins_of(model)
    template = twins.ours._template
    if template is None or not template.takes_images:
        assert not isinstance(model, str)
        return
    text = st.builds(lambda text: {"type": "text", "text": text}, twins.texts)
    image = st.sampled_from("abc").map(
        lambda name: {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}}
    )
    messages: list[dict[str, Any]] = []
    for turn in range(data.draw(st.integers(1, 3))):
        parts = data.draw(st.lists(text | image, min_size=1, max_size=5))
        messages.append({"role": "assistant" if turn % 2 else "user", "content": parts})
    plain = [
        one
        | {"content": [p if p["type"] == "text" else {"type": "image"} for p in one["content"]]}
        for one in messages
    ]
    expected = twins.theirs.apply_chat_template(
        plain, tokenize=True, return_dict=False, add_generation_prompt=True
    )
    request = parse_chat(json.dumps({"model": "m", "messages": messages}).encode())
    (reader,) = read_prompts(request, twins.ours, max_model_len=None, with_images=True)
    assert list(reader.finish()) == expected
    urls = [p["image_url"]["url"] for m in messages for p in m["content"] if "image_url" in p]
    contents: dict[str, bytes] = {}
    for (place, content), url in zip(reader.images, urls, strict=True):
        assert contents.setdefault(url, content) == content
        if isinstance(model, str):
            assert expected[place] == twins.whole.token_to_id("<tool>")
    assert len(set(contents.values())) == len(contents)
