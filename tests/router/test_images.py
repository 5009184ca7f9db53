"""Images in chats: they name the blocks that they begin in, and reach the replica as sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvway_core.api import parse_chat
from kvway_core.blocks import Namespace
from kvway_core.errors import InvalidRequest
from kvway_core.images import MAX_IMAGES
from kvway_core.prompting import read_prompts
from kvway_core.prompts import PromptEncoder
from kvway_core.testing.byte_model import write_byte_model
from kvway_router.reading import Reading, ReadRequest, Route, ServedModel, read_request
from tests.router.conftest import MODEL, StartBench

BEFORE = "Look at this one well, it matters to me, and so do you: "
BEHIND = " what is in it? Be exact. " * 8
SENTENCES = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for part in m.content %}{{ PLACEHOLDER if part.type == 'image' "
    "else part.text }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
)


def encoder_with(folder: Path, template: str) -> PromptEncoder:
    write_byte_model(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return PromptEncoder.load(folder)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    """In the place of the other tests' encoder: the template has a token for images."""
    template = SENTENCES.replace("PLACEHOLDER", "'<|im_start|>'")
    return encoder_with(tmp_path_factory.mktemp("models") / MODEL, template)


def image(name: str, **fields: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"} | fields}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def chat(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": list(parts)}]}


def read(encoder: PromptEncoder, body: dict[str, Any]) -> ReadRequest:
    model = ServedModel(name=MODEL, encoder=encoder, namespace=Namespace(MODEL))
    return read_request(
        json.dumps(body).encode(), route=Route.CHAT, model=model, max_model_len=None
    )


def num_common(one: ReadRequest, other: ReadRequest) -> int:
    pairs = zip(one.hashes, other.hashes, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(one.hashes))


def test_prompts_agree_up_to_the_block_in_which_another_image_begins(
    encoder: PromptEncoder,
) -> None:
    cat = read(encoder, chat(text(BEFORE), image("cat"), text(BEHIND)))
    again = read(encoder, chat(text(BEFORE), image("cat"), text(BEHIND)))
    others = [
        read(encoder, chat(text(BEFORE), other, text(BEHIND)))
        for other in (image("dog"), image("cat", detail="low"))
    ]
    frame = len("|user\n") + len(BEFORE)
    assert list(cat.hashes) == list(again.hashes)
    for other in others:
        assert len(other.hashes) == len(cat.hashes) > frame // 16 + 5
        assert num_common(cat, other) == frame // 16
        assert set(cat.hashes[frame // 16 :]).isdisjoint(other.hashes)


def test_a_later_image_changes_nothing_before_it(encoder: PromptEncoder) -> None:
    first = chat(text(BEFORE), image("cat"), text(BEHIND))
    later = chat(text(BEFORE), image("cat"), text(BEHIND), image("dog"), text(BEHIND))
    one, two = read(encoder, first), read(encoder, later)
    # The end of the first turn is where they part.
    assert num_common(one, two) == (len("|user\n|") + len(BEFORE) + len(BEHIND)) // 16
    swapped = chat(text(BEFORE), image("dog"), text(BEHIND), image("cat"), text(BEHIND))
    assert num_common(two, read(encoder, swapped)) == (len("|user\n") + len(BEFORE)) // 16


def test_siblings_of_a_prompt_that_is_being_read_have_its_images(encoder: PromptEncoder) -> None:
    def keys(name: str) -> list[int]:
        body = json.dumps(chat(text(BEFORE), image(name), text(BEHIND))).encode()
        model = ServedModel(name=MODEL, encoder=encoder, namespace=Namespace(MODEL))
        reading = Reading(body, route=Route.CHAT, model=model, max_model_len=None)
        reading.finish()
        return list(reading.piece_keys)

    cat, again, dog = keys("cat"), keys("cat"), keys("dog")
    assert cat == again
    assert cat[0] == dog[0]
    assert set(cat[1:]).isdisjoint(dog[1:])


def test_of_a_prompt_that_is_cut_off_in_front_what_is_kept_has_its_images(
    encoder: PromptEncoder,
) -> None:
    body = chat(image("cat"), text(BEHIND), image("dog"), text(BEHIND))
    (reader,) = read_prompts(
        parse_chat(json.dumps(body | {"truncate_prompt_tokens": 250}).encode()),
        encoder,
        max_model_len=None,
        with_images=True,
    )
    kept = reader.finish()
    assert len(kept) == 250
    # The first is in what was cut off: what is left depends on it all the same.
    assert [place for place, _ in reader.images] == [0, 250 - len(BEHIND) - len("||\n")]


def test_an_image_without_a_token_of_its_own_is_where_its_piece_of_text_begins(
    tmp_path: Path,
) -> None:
    """Earlier than it is: some blocks are told apart for nothing, none are taken for equal."""
    encoder = encoder_with(tmp_path, SENTENCES.replace("PLACEHOLDER", "' (image) '"))
    words = "word " * 1000
    cat = read(encoder, chat(text(words), image("cat"), text(BEHIND)))
    dog = read(encoder, chat(text(words), image("dog"), text(BEHIND)))
    place = len("|user\n") + len(words)
    assert (place - 2048) // 16 <= num_common(cat, dog) <= place // 16


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, "messages[0].content[1].image_url"),
        ({"type": "image_url", "image_url": {}}, "messages[0].content[1].image_url"),
        ({"type": "image_url", "image_url": {"url": 5}}, "messages[0].content[1].image_url"),
        ({"type": "input_audio", "input_audio": {}}, "messages[0].content"),
    ],
)
def test_a_part_that_is_no_image_is_refused(
    encoder: PromptEncoder, part: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(encoder, chat(text("x"), part))
    assert refused.value.param == param


def test_images_are_bounded(encoder: PromptEncoder) -> None:
    assert read(encoder, chat(*[image("a")] * MAX_IMAGES)).exact
    with pytest.raises(InvalidRequest, match=f"{MAX_IMAGES} images"):
        read(encoder, chat(*[image("a")] * (MAX_IMAGES + 1)))


def test_a_template_without_a_place_for_images_refuses_them_by_name(tmp_path: Path) -> None:
    template = SENTENCES.replace("PLACEHOLDER", "''")
    for each in (template, "{% for m in messages %}{{ m.content }}{% endfor %}"):
        encoder = encoder_with(tmp_path / str(len(each)), each)
        with pytest.raises(InvalidRequest, match="image_url are not supported"):
            read(encoder, chat(text("x"), image("cat")))


async def test_who_has_an_image_gets_it_again(start_bench: StartBench) -> None:
    bench = await start_bench(2)
    url = bench.api("/v1/chat/completions")
    chosen: dict[str, str] = {}
    for name in ("cat", "dog", "cat", "dog"):
        body = json.dumps(chat(image(name), text(BEHIND * 20))).encode()
        async with bench.client.post(url, data=body) as response:
            assert response.status == 200
            decision = await bench.decision(response.headers)
        replica = decision["replica_id"]
        assert bench.named(replica).requests[-1].body == body
        is_known = name in chosen
        assert chosen.setdefault(name, replica) == replica
        assert (decision["matched_tokens"] > len(BEHIND) * 19) == is_known
