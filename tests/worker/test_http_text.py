"""Stop strings against a naive oracle, and the golden transcript of one streamed chat."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvway_core.prompts import PromptEncoder
from kvway_core.testing.byte_model import write_byte_model
from kvway_core.testing.fake_clock import FakeClock
from kvway_core.token_bytes import byte_alphabet
from kvway_worker.api.text import StopScanner, TextRules, TextStream
from tests.worker.http_worker import chat, serving

LETTERS = st.text("ab", max_size=12)


def up_to_first(text: str, stops: list[str]) -> str:
    """The oracle: the longest stop at the end of the shortest beginning that has one."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))]
    return text


@pytest.mark.property
@given(pieces=st.lists(LETTERS, max_size=8), stops=st.lists(st.text("ab", min_size=1, max_size=4)))
@example(pieces=["a", "a", "b"], stops=["aab", "b"])
@example(pieces=["aab"], stops=["ab", "aab"])
def test_what_is_passed_on_is_the_text_up_to_the_first_stop(
    pieces: list[str], stops: list[str]
) -> None:
    """However the text is cut into pieces, and nothing that was passed on is taken back."""
    scanner = StopScanner(stops)
    sent = text = ""
    for piece in pieces:
        text += piece
        sent += scanner.push(piece)
        if scanner.stopped:
            break
        held = text.removeprefix(sent)
        assert sent + held == text
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    assert scanner.stopped == any(stop in text for stop in stops)
    sent += scanner.flush()
    assert sent == up_to_first(text, stops)


@pytest.mark.property
@given(
    text=st.text("abxy", max_size=7),
    stops=st.lists(st.text("abxy", min_size=1, max_size=6), max_size=3),
)
@example(text="xxabyy", stops=["ab", "xxabyy"])
@example(text="xxab", stops=["ab", "xab"])
def test_the_text_is_the_same_wherever_token_borders_lie(text: str, stops: list[str]) -> None:
    """All splittings: into one piece, into characters, and all between."""
    expected = up_to_first(text, stops)
    for borders in product((False, True), repeat=max(len(text) - 1, 0)):
        cuts = [0, *(at for at, cut in enumerate(borders, start=1) if cut), len(text)]
        scanner = StopScanner(stops)
        sent = "".join(scanner.push(text[begin:end]) for begin, end in pairwise(cuts))
        assert sent + scanner.flush() == expected


def test_nothing_comes_after_a_stop() -> None:
    """Neither from later text nor from a flush."""
    scanner = StopScanner(["b"])
    assert [scanner.push("ab"), scanner.push("c"), scanner.flush()] == ["a", "", ""]


@pytest.mark.property
@given(
    text=st.text(max_size=20),
    stops=st.lists(st.text(min_size=1, max_size=3), max_size=3),
)
def test_byte_by_byte_the_text_ends_before_the_first_stop_that_completes(
    encoder: PromptEncoder, text: str, stops: list[str]
) -> None:
    """With one token per byte there is one answer: cut at the stop string that ends first."""
    stream = TextStream(encoder, TextRules(tuple(stops)))
    sent = ""
    for token in text.encode():
        sent += stream.push(token)
        if stream.met:
            break
    else:
        sent += stream.finish()
    assert sent == up_to_first(text, stops)


def shown(tokens: list[int], encoder: PromptEncoder, rules: TextRules) -> tuple[str, str | None]:
    """The text of an answer of these tokens, and the stop string that ended it."""
    stream = TextStream(encoder, rules)
    text = ""
    for token in tokens:
        text += stream.push(token)
        if stream.met:
            return text, stream.met
    return text + stream.finish(), None


@pytest.mark.property
@given(
    pieces=st.lists(st.text("abé🙂", min_size=1, max_size=3), max_size=10),
    stops=st.lists(st.text("abé🙂", min_size=1, max_size=3), max_size=3),
)
def test_the_text_is_the_same_whatever_the_tokens(
    words: PromptEncoder, pieces: list[str], stops: list[str]
) -> None:
    """Tokens of bytes, of characters or of many characters: one text, cut at one place."""
    text = "".join(pieces)
    rules = TextRules(tuple(stops))
    byte_by_byte = shown(list(text.encode()), words, rules)
    merged = words.encode_text(text)
    assert shown(merged, words, rules) == byte_by_byte
    in_pieces = [token for piece in pieces for token in words.encode_text(piece)]
    assert shown(in_pieces, words, rules) == byte_by_byte
    assert byte_by_byte[0] == up_to_first(text, stops)


@pytest.mark.property
@given(
    text=st.text("ab", max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 8),
)
@example(text="xabq", stops=["ab", "xabz"], min_tokens=3)
def test_a_stop_string_counts_once_the_least_number_of_tokens_is_there(
    encoder: PromptEncoder, text: str, stops: list[str], min_tokens: int
) -> None:
    """One token per character: the stop string that completes first behind `min_tokens`."""
    expected: tuple[str, str | None] = (text, None)
    for end in range(min_tokens + 1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            expected = text[: end - len(longest)], longest
            break
    rules = TextRules(tuple(stops), min_tokens=min_tokens)
    assert shown(list(text.encode()), encoder, rules) == expected


@pytest.mark.property
@given(pieces=st.lists(LETTERS, max_size=8), stops=st.lists(st.text("ab", min_size=1, max_size=4)))
def test_an_included_stop_string_ends_the_text(pieces: list[str], stops: list[str]) -> None:
    """The same text as without, and the stop string behind it."""
    without, scanner = StopScanner(stops), StopScanner(stops, include_stop=True)
    shorter = "".join(map(without.push, pieces)) + without.flush()
    text = "".join(map(scanner.push, pieces)) + scanner.flush()
    assert scanner.met == without.met
    assert text == shorter + (scanner.met or "")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    """The byte model with merges: its tokens are bytes, characters, pieces of two characters."""
    folder = write_byte_model(tmp_path_factory.mktemp("words"))
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    alphabet = byte_alphabet()
    for first, second in (("a", "b"), ("ab", "a"), ("b", "\xc3"), ("\xf0", "\x9f")):
        left = "".join(alphabet[byte] for byte in first.encode("latin-1"))
        right = "".join(alphabet[byte] for byte in second.encode("latin-1"))
        vocab[left + right] = len(vocab) + 10
        merges.append([left, right])
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return PromptEncoder.load(folder)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    """The byte model's."""
    return PromptEncoder.load(write_byte_model(tmp_path_factory.mktemp("bytes")))


async def test_a_streamed_chat_is_as_agreed(
    byte_model: Path, golden: Callable[[str, str], None]
) -> None:
    """Byte for byte, but for the id and the fingerprint."""
    body = chat(stream=True, max_tokens=4, stream_options={"include_usage": True})
    async with serving(byte_model, clock=FakeClock()) as running:
        url = running.url + "/v1/chat/completions"
        async with running.http.post(url, data=json.dumps(body)) as response:
            raw = await response.text()
    raw = re.sub(r"chatcmpl-[0-9a-f]{32}", "chatcmpl-ID", raw)
    golden("worker_chat.sse", re.sub(r"kvway-[0-9a-f]{12}", "kvway-FINGERPRINT", raw))
