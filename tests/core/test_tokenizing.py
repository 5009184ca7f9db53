"""Texts become tokens piece by piece, each piece once, with the ids of the whole."""

from __future__ import annotations

import re
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvway_core.cutting import Cutter
from kvway_core.errors import ConfigError
from kvway_core.piece_cache import PieceCache
from kvway_core.testing.byte_model import write_byte_model
from kvway_core.tokenizing import FASTOKENS, TOKENIZERS, TextTokenizer
from tests.core.tokenizer_kinds import CUT, MAKERS, texts_of, tokenizer_of

WORDS = " ".join(f"word{number}" for number in range(3000))


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, TextTokenizer]:
    """Returns one of each kind, cutting wherever it may."""
    made = {kind: TextTokenizer(tokenizer_of(kind, "plain")) for kind in MAKERS}
    for tokenizer in made.values():
        tokenizer.cutter = tokenizer.cutter.often()
    return made


@pytest.mark.parametrize("kind", MAKERS)
@given(text=texts_of("plain"), special=st.booleans(), steps=st.lists(st.integers(0, 30)))
def test_however_a_text_is_read_the_ids_are_those_of_the_tokenizer(
    tokenizers: dict[str, TextTokenizer], kind: str, text: str, steps: list[int], *, special: bool
) -> None:
    expected = tokenizer_of(kind, "plain").encode(text, add_special_tokens=special).ids
    reader = tokenizers[kind].read(text, add_special_tokens=special)
    for num_chars in steps:
        reader.advance(num_chars)
        assert reader.token_ids.tolist() == expected[: len(reader.token_ids)]
        if reader.done:
            assert reader.num_tokens == len(expected)
    assert reader.finish().tolist() == expected
    assert tokenizers[kind].encode(text, add_special_tokens=special) == expected
    assert reader.done


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_settled_at_load(tokenizers: dict[str, TextTokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    assert tokenizer.cutter.kind == CUT[kind]
    assert (tokenizer.backend, tokenizer.backend_why) == (TOKENIZERS, "no file to load")


def test_cuts_that_give_other_ids_are_not_made() -> None:
    """The check at load, given rules that are wrong."""
    made = tokenizer_of("smollm", "stripping")
    tokenizer = TextTokenizer(made)
    probes = ["the quick brown fox doesn't", "a <|l|> the"]
    whole = [made.encode(text).ids[1:-1] for text in probes]
    right = Cutter.of(made)
    assert tokenizer._checked(right, probes, whole) == right
    wrong = tokenizer._checked(replace(right, inner=re.compile("[a-z]c")), probes, whole)
    assert (wrong.kind, wrong.why) == ("added_tokens", "cuts before spaces gave other ids")
    avoided = replace(right, avoided=frozenset[str]())
    nowhere = tokenizer._checked(avoided.without_inner(""), probes, whole)
    assert (nowhere.kind, nowhere.why) == ("nowhere", "cuts gave other ids")


def test_a_next_turn_tokenizes_its_new_text_alone() -> None:
    tokenizer = TextTokenizer(tokenizer_of("gpt-2", "plain"))
    known = tokenizer.encode(WORDS)
    asked: list[str] = []
    encode = tokenizer._encode

    def counted(text: str) -> list[int]:
        asked.append(text)
        return list(encode(text))

    tokenizer._encode = counted
    assert tokenizer.encode(WORDS) == known
    assert asked == []
    turn = f"{WORDS}<|s|>and this is new"
    assert tokenizer.encode(turn) == tokenizer_of("gpt-2", "plain").encode(turn).ids[1:-1]
    assert sum(map(len, asked)) < 4500 < len(WORDS) // 5


def test_a_reader_reads_no_more_than_it_is_asked_for_and_known_pieces_are_free() -> None:
    tokenizer = TextTokenizer(tokenizer_of("gpt-2", "plain"))
    reader = tokenizer.read(WORDS)
    assert len(reader.token_ids) == 0
    reader.advance(1)
    first = len(reader.token_ids)
    assert 0 < first < 2500
    assert not reader.done
    again = tokenizer.read(WORDS)
    again.advance(1)
    assert first < len(again.token_ids) < 3 * first
    assert again.piece_keys[:2] == reader.piece_keys[:2]
    assert tokenizer.read("x" + WORDS).piece_keys[0] != reader.piece_keys[0]


def test_what_is_not_read_is_counted_as_long_as_what_was() -> None:
    tokenizer = TextTokenizer(tokenizer_of("gpt-2", "plain"))
    fresh = tokenizer.read(WORDS).num_tokens
    assert fresh == pytest.approx(len(WORDS) / 4, rel=0.01)  # four characters each, untaught
    num_tokens = len(tokenizer.encode(WORDS))
    about = tokenizer.read(WORDS.replace("w", "v")).num_tokens
    assert about == pytest.approx(num_tokens, rel=0.15)


def test_an_empty_text_is_done_at_once() -> None:
    tokenizer = TextTokenizer(tokenizer_of("gpt-2", "plain"))
    assert tokenizer.read("").done
    assert tokenizer.encode("") == []
    assert len(tokenizer.encode("", add_special_tokens=True)) == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    for kind in MAKERS:
        tokenizer_of(kind, "plain").save(str(folder / f"{kind}.json"))
    return folder


def test_fastokens_runs_where_its_ids_are_the_same(folder: Path) -> None:
    pytest.importorskip(FASTOKENS)
    made = tokenizer_of("smollm", "plain")
    tokenizer = TextTokenizer(made, path=folder / "smollm.json")
    assert tokenizer.backend == FASTOKENS
    other = TextTokenizer(made, path=folder / "llama 3.json")
    assert other.backend == TOKENIZERS
    assert re.fullmatch(r"fastokens gives other ids for \d+ of 25 texts", other.backend_why)
    with pytest.raises(ConfigError, match="other ids"):
        TextTokenizer(made, path=folder / "llama 3.json", library=FASTOKENS)
    slow = TextTokenizer(made, path=folder / "smollm.json", library=TOKENIZERS)
    assert (slow.backend, slow.backend_why) == (TOKENIZERS, "asked for")


LONG_RUNS = {"line ends": "\n" * 1_000_100, "line ends and spaces": " \n" * 500_100}


@pytest.mark.parametrize("run", LONG_RUNS)
def test_what_fastokens_fails_at_the_reference_does(folder: Path, run: str) -> None:
    """It gives up on a million characters of white space in a row."""
    pytest.importorskip(FASTOKENS)
    tokenizer = _with_fastokens(folder, "smollm")
    assert tokenizer.backend == FASTOKENS
    before = tokenizer.num_failed
    text = f"the end{LONG_RUNS[run]}x<|s|>and on"
    made = tokenizer_of("smollm", "plain")
    expected = made.encode_batch_fast([text], add_special_tokens=False)[0].ids
    assert tokenizer.encode(text) == expected
    assert tokenizer.num_failed == before + 1


def test_any_failure_of_fastokens_is_made_good_and_counted(folder: Path) -> None:
    pytest.importorskip(FASTOKENS)
    made = tokenizer_of("smollm", "plain")
    tokenizer = TextTokenizer(made, path=folder / "smollm.json")

    def fail(text: str) -> list[int]:
        raise RuntimeError

    tokenizer._encode = fail
    assert tokenizer.encode("the quick") == made.encode("the quick").ids[1:-1]
    assert tokenizer.num_failed == 1
    slow = TextTokenizer(made)
    slow._encode = fail
    with pytest.raises(RuntimeError):  # nothing is behind the reference
        slow.encode("the quick")


def test_texts_without_tokens_do_not_change_how_long_a_token_is() -> None:
    tokenizer = TextTokenizer(tokenizer_of("gpt-2", "plain"))
    tokenizer._encode = lambda _: []
    before = tokenizer.chars_per_token
    for number in range(100):
        assert tokenizer.encode(f"{number}" * 1000) == []
    assert tokenizer.chars_per_token == before


@pytest.mark.parametrize("kind", MAKERS)
@given(data=st.data())
def test_fastokens_gives_the_same_ids(folder: Path, kind: str, data: st.DataObject) -> None:
    pytest.importorskip(FASTOKENS)
    tokenizer = _with_fastokens(folder, kind)
    if tokenizer.backend != FASTOKENS:
        return  # it says so, and tokenizers runs
    text = data.draw(texts_of("plain"))
    assert tokenizer.encode(text) == tokenizer_of(kind, "plain").encode(text).ids[1:-1]


_made: dict[tuple[Path, str], TextTokenizer] = {}


def _with_fastokens(folder: Path, kind: str) -> TextTokenizer:
    key = (folder, kind)
    if key not in _made:
        _made[key] = TextTokenizer(tokenizer_of(kind, "plain"), path=folder / f"{kind}.json")
    return _made[key]


def test_a_broken_file_and_a_missing_one_are_no_reason_to_fail(tmp_path: Path) -> None:
    pytest.importorskip(FASTOKENS)
    path = write_byte_model(tmp_path) / "tokenizer.json"
    made = tokenizer_of("smollm", "plain")
    path.write_text("{}")
    assert TextTokenizer(made, path=path).backend == TOKENIZERS
    with pytest.raises(ConfigError, match="cannot load it"):
        TextTokenizer(made, path=path, library=FASTOKENS)


@given(texts=st.lists(st.text(min_size=1, max_size=30), max_size=60))
def test_the_cache_keeps_its_budget_and_what_was_used_last(texts: list[str]) -> None:
    cache = PieceCache(max_bytes=4000)
    for text in texts:
        ids = array("I", map(ord, text))
        cache.put(text, ids)
        assert cache.get(text) == ids
        assert cache.size_bytes <= 4000
    kept = [text for text in dict.fromkeys(reversed(texts)) if cache.get(text) is not None]
    assert kept == list(dict.fromkeys(reversed(texts)))[: len(cache)]


def test_a_text_too_large_for_the_cache_pushes_nothing_out() -> None:
    cache = PieceCache(max_bytes=4000)
    cache.put("small", array("I", [1]))
    cache.put("x" * 1001, array("I", [2]))
    assert cache.get("x" * 1001) is None
    assert cache.get("small") is not None
