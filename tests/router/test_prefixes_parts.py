"""The parts of the search: anchors, passages, values, masks."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvway_router.prefixes.aligning import (
    common_prefix,
    common_suffix,
    heaviest_rise,
    matches_behind,
    permutation,
)
from kvway_router.prefixes.seen import (
    ANCHOR_BYTES,
    MAX_ANCHORS,
    SeenPrompt,
    find_anchors,
    locate_parts,
    message_texts,
)
from kvway_router.prefixes.values import Kind, is_json, shape, varying


def words(seed: int, number: int) -> bytes:
    rng = random.Random(seed)
    return " ".join(f"{rng.randrange(10**6):x}" for _ in range(number)).encode()


def seen(data: bytes) -> SeenPrompt:
    return SeenPrompt("1", "m", data, (), len(data) // 4, 0)


def test_a_passage_has_the_same_anchors_wherever_it_stands() -> None:
    passage = words(1, 300)
    alone = set(find_anchors(passage)[0].tolist())
    keys, places = find_anchors(words(2, 100) + passage + words(3, 50))
    assert len(alone) > 50
    assert alone <= set(keys.tolist())
    assert (np.diff(keys.astype(object)) > 0).all()
    assert places.max() < len(words(2, 100) + passage + words(3, 50)) - ANCHOR_BYTES + 1


def test_long_texts_keep_a_bounded_number_of_anchors_that_others_have_too() -> None:
    long = words(1, 40_000)
    keys = set(find_anchors(long)[0].tolist())
    assert MAX_ANCHORS // 4 < len(keys) <= MAX_ANCHORS
    assert len(keys & set(find_anchors(long[:80_000])[0].tolist())) > MAX_ANCHORS // 8


@given(st.binary(max_size=2000), st.binary(max_size=2000))
def test_common_ends_are_exact(a: bytes, b: bytes) -> None:
    x, y = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
    prefix, suffix = common_prefix(x, y), common_suffix(x, y)
    assert a[:prefix] == b[:prefix]
    assert a[prefix : prefix + 1] != b[prefix : prefix + 1] or prefix == min(len(a), len(b))
    assert a[len(a) - suffix :] == b[len(b) - suffix :]


def test_a_long_common_prefix_is_found_to_the_byte() -> None:
    data = np.frombuffer(words(1, 50_000), np.uint8)
    other = data.copy()
    other[200_001] ^= 1
    assert common_prefix(data, other) == 200_001
    assert common_prefix(data, data) == len(data)


@given(st.permutations(range(6)), st.lists(st.integers(0, 5), max_size=3))
def test_matches_are_the_same_bytes_and_do_not_overlap(order: list[int], again: list[int]) -> None:
    passages = [words(n, 40) for n in range(6)]
    a = b"head " + b"|".join(passages)
    b = b"heed " + b"#".join(passages[n] for n in [*order, *again])
    matches = matches_behind(seen(a), seen(b), 2)
    assert sum(match.length for match in matches) >= 6 * 200
    end = 2
    for match in matches:
        assert a[match.a : match.a_end] == b[match.b : match.b_end]
        assert match.b >= end
        end = match.b_end


def test_another_order_is_seen_and_the_same_order_is_not() -> None:
    passages = [words(n, 40) for n in range(5)]
    a = b"head " + b"|".join(passages)
    moved = b"heed " + b"|".join(passages[n] for n in (2, 0, 1, 4, 3))
    same = b"heed " + b"#".join(passages)
    turned = permutation(matches_behind(seen(a), seen(moved), 2), 2)
    assert turned is not None
    assert turned.num_moved >= 200
    in_order = matches_behind(seen(a), seen(same), 2)
    assert permutation(in_order, 2) is None
    assert heaviest_rise(in_order) == in_order


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        ("Now: 2026-11-30T17:38:05Z.", "Now: 2026-11-30T17:41:59Z.", Kind.TIMESTAMP),
        ("At 5:38 PM on", "At 11:02 AM on", Kind.TIMESTAMP),
        ("Mon, 30 Nov 2026 17:38:00 GMT", "Tue, 01 Dec 2026 08:00:12 GMT", Kind.TIMESTAMP),
        ("ts=1764524285 ", "ts=1764524301 ", Kind.EPOCH),
        ("ts=1764524285.123 ", "ts=1764524301.999 ", Kind.EPOCH),
        ("ts=1764524285123 ", "ts=1764524301999 ", Kind.EPOCH),
        ("id 1764524285 ", "id 9964524301 ", Kind.NUMERIC_ID),
        ("id 1464524285 ", "id 2164524301 ", Kind.NUMERIC_ID),  # 22 years apart
        ("Today is 2026-11-30.", "Today is 2026-12-01.", Kind.DATE),
        ("Today is November 30, 2026.", "Today is May 1, 2027.", Kind.DATE),
        ("Today is Monday.", "Today is Friday.", Kind.DATE),
        (
            "id 7d3acd7a-2857-4ec7-a511-f1ecfe74f05f",
            "id 0b1acd7a-2857-4ec7-a511-f1ecfe74f05e",
            Kind.UUID,
        ),
        ("trace 8f3a09bc12de", "trace 0000aabbccdd", Kind.OPAQUE_ID),
        ("run req_2Qx9fTkk01 of", "run req_9ZzA0abcde of", Kind.OPAQUE_ID),
        ("ticket #482913 is", "ticket #918273 is", Kind.NUMERIC_ID),
        ("you have 17 left", "you have 3 left", Kind.NUMBER),
        ("load is 3.5%", "load is 71.2%", Kind.NUMBER),
        ("it costs $1,299.00 now", "it costs $87.50 now", Kind.NUMBER),
        ("You help Maria Lopez.", "You help Jonas Berg.", Kind.NAME),
        ("Mail: a@b.example.", "Mail: cc@dd.example.", Kind.NAME),
        ("name: Ada\nplan: pro", "name: Bo\nplan: free", Kind.USER_HEADER),
        ("a b\n  c  d", "a b\nc d", Kind.WHITESPACE),
        ("one two three four five six", "six five four three two one", Kind.REORDERED),
        ("a question about shoes", "another about hats", None),
        ("Question: why so?\nTopic: shoes", "Question: how?\nTopic: hats", None),
        ("It is 12:00 and raining", "It is 12:05 and snowing", None),
        ("Ana met Bo in May", "Ina met Jo in May", None),  # two names: more than a value
    ],
)
def test_kinds_of_difference(a: str, b: str, kind: Kind | None) -> None:
    found = varying(a, b, (0, len(b)))
    assert (found and found.kind) == kind


def test_what_varies_is_placed_from_the_first_value_to_the_last() -> None:
    b = "At 12:30 for ticket 918273, please."
    found = varying("At 12:31 for ticket 482913, please.", b, (0, len(b)))
    assert found is not None
    assert b[found.begin : found.end] == "12:30 for ticket 918273"


@given(st.text(max_size=200))
def test_a_shape_shows_no_letter_and_no_digit(text: str) -> None:
    masked = shape(text)
    assert len(masked) <= 65
    assert set(masked) <= {"a", "A", "9", "…"} | {c for c in text if not c.isalnum()}


def test_shapes() -> None:
    assert shape("Maria 12 é-Ω") == "Aaaaa 99 a-A"
    assert shape("x" * 100) == "a" * 64 + "…"


def test_json_is_known_by_its_keys() -> None:
    assert is_json('{"a": 1, "b": {"c": "text"}}')
    assert not is_json('He said: "No". ' * 20)


def test_messages_are_located_as_templates_write_them() -> None:
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "  Be kind.\n"},
        {"role": "user", "content": [{"type": "text", "text": "Été"}, {"type": "image_url"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "gone"},
        {"role": "user", "content": "Be kind."},
    ]
    data = "<s>Be kind.</s><u>Été</u><a></a><u>Be kind.</u>".encode()
    parts = locate_parts(data, message_texts(messages))
    assert [(p.message, p.role, data[p.begin : p.end].decode()) for p in parts] == [
        (0, "system", "Be kind."),
        (1, "user", "Été"),
        (4, "user", "Be kind."),
    ]
    prompt = SeenPrompt("1", "m", data, parts, 9, 0, has_tools=True)
    assert prompt.place(data.index(b"t\xc3\xa9")) == (1, "user", 1)
    assert prompt.place(1) == (None, "tools", 1)
    assert SeenPrompt("1", "m", data, parts, 9, 0).place(1) == (None, "template", 1)
    assert SeenPrompt("1", "m", data, (), 9, 0).place(4) == (None, "prompt", 4)
