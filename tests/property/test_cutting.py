"""Cut texts: the pieces' tokens are the text's tokens, for every kind of tokenizer."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvway_core.cutting import Cutter
from kvway_core.tokenizing import pieces
from tests.core.tokenizer_kinds import ADDED, CUT, LINES, MAKERS, texts_of, tokenizer_of

pytestmark = pytest.mark.property


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", MAKERS)
@given(data=st.data(), added=st.sampled_from(sorted(ADDED)))
def test_the_tokens_of_the_pieces_are_those_of_the_text(
    kind: str, data: st.DataObject, added: str
) -> None:
    """Cut wherever it may be, and without any check at load: the rules alone must hold."""
    tokenizer = tokenizer_of(kind, added)
    text = data.draw(texts_of(added))
    cut = list(pieces(text, Cutter.of(tokenizer).often()))
    assert "".join(cut) == text
    assert all(cut)
    assert [token for piece in cut for token in ids_of(tokenizer, piece)] == ids_of(
        tokenizer, text
    )


@pytest.mark.parametrize("kind", MAKERS)
def test_where_each_kind_is_cut(kind: str) -> None:
    """Otherwise a rule that never cuts would pass every other test."""
    cutter = Cutter.of(tokenizer_of(kind, "plain"))
    assert cutter.kind == CUT[kind]
    assert bool(cutter.why) == (CUT[kind] != "words")
    often = cutter.often()
    cut = list(pieces("ab cd<|s|>ef gh<|s|><|e|>ij", often))
    words = CUT[kind] == "words"
    assert cut == (
        ["ab", " cd", "<|s|>ef", " gh", "<|s|><|e|>ij"]
        if words
        else ["ab cd", "<|s|>ef gh", "<|s|><|e|>ij"]
    )


@pytest.mark.parametrize("kind", MAKERS)
def test_where_lines_are_parted(kind: str) -> None:
    """Some scripts have no spaces: otherwise a long text of one would be one piece."""
    often = Cutter.of(tokenizer_of(kind, "plain")).often()
    cut = list(pieces("ab\u3002\n\u4e16\u754c\n\ncd\n/ef\n12", often))
    parted = ["ab\u3002\n", "\u4e16\u754c\n\ncd\n/ef\n", "12"]
    assert cut == (parted if kind in LINES else ["".join(parted)])


@pytest.mark.parametrize(("added", "is_parted"), [("words", True), ("normalized", False)])
def test_a_line_whose_end_an_added_token_takes_along_is_not_cut_off(
    added: str, *, is_parted: bool
) -> None:
    cutter = Cutter.of(tokenizer_of("llama 3", added)).often()
    cut = list(pieces("ab\ncd ef", cutter))
    assert cut == (["ab\n", "cd", " ef"] if is_parted else ["ab\ncd", " ef"])


@pytest.mark.parametrize("added", ADDED)
def test_where_added_tokens_forbid_a_cut(added: str) -> None:
    cutter = Cutter.of(tokenizer_of("gpt-2", added)).often()
    kinds = {"over spaces": "added_tokens", "normalized that strip": "added_tokens"}
    assert cutter.kind == kinds.get(added, "words")
    cut = list(pieces("ab <|l|> <|r|> foo<|s|>foo the<|s|>", cutter))
    assert ("<|s|>" in "".join(piece[:5] for piece in cut)) == (added != "none")
    assert not any(piece.startswith(("<|l|>", "foo", "  ")) for piece in cut)


def test_a_token_behind_a_character_that_the_vocabulary_joins_to_it_is_not_cut_off() -> None:
    cutter = Cutter.of(tokenizer_of("gemma", "none")).often()
    assert list(pieces("a> b> c d", cutter)) == ["a> b> c", " d"]


@given(text=texts_of("plain", max_size=200), more=texts_of("plain"), least=st.integers(1, 40))
@example(text="ab cd", more=" ef", least=1)
def test_texts_that_begin_alike_are_cut_alike(text: str, more: str, least: int) -> None:
    """So that a next turn finds the pieces of the turn before it."""
    cutter = replace(
        Cutter.of(tokenizer_of("llama 3", "plain")), min_special=least, min_inner=2 * least
    )
    before = list(pieces(text, cutter))
    after = list(pieces(text + more, cutter))
    # The last piece goes on, and an added token may begin in the text before it.
    same = sum(1 for one, two in zip(before, after, strict=False) if one == two)
    assert same >= len(before) - 1 - ("<" in text[-10:])


@pytest.mark.parametrize("kind", MAKERS)
@given(text=texts_of("plain", max_size=200), window=st.integers(1, 40), least=st.integers(1, 30))
def test_a_text_is_cut_alike_however_much_of_it_is_searched_at_once(
    kind: str, text: str, window: int, least: int
) -> None:
    whole = replace(Cutter.of(tokenizer_of(kind, "plain")), min_special=least, min_inner=2 * least)
    cut = list(pieces(text, replace(whole, window=10**9)))
    assert list(pieces(text, replace(whole, window=window))) == cut
    assert list(pieces(text, whole)) == cut


class Watched:
    """A pattern that notes how much of a text it was given at once."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern = pattern
        self.most = 0
        self.furthest = 0

    def search(self, text: str, start: int, end: int) -> re.Match[str] | None:
        self.most = max(self.most, end - start)
        self.furthest = max(self.furthest, end)
        return self.pattern.search(text, start, end)


@pytest.mark.parametrize("text", ["a" * 500_000, "a b" * 200_000, "<|" * 200_000])
def test_no_search_holds_other_threads_up_for_long_or_looks_far_ahead(text: str) -> None:
    cutter = Cutter.of(tokenizer_of("gpt-2", "plain"))
    assert cutter.specials is not None
    assert cutter.inner is not None
    patterns = Watched(cutter.specials), Watched(cutter.inner)
    watched = replace(cutter, specials=patterns[0], inner=patterns[1])  # type: ignore[arg-type]
    ends = watched.ends(text)
    first = next(ends)
    assert max(each.furthest for each in patterns) < first + 2 * cutter.window
    assert [first, *ends][-1] == len(text)
    assert max(each.most for each in patterns) < 2 * cutter.window


@given(text=texts_of("plain", max_size=300))
def test_pieces_are_as_long_as_they_must_be(text: str) -> None:
    cutter = replace(Cutter.of(tokenizer_of("llama 3", "plain")), min_special=10, min_inner=20)
    *full, _ = ["", *pieces(text, cutter)]
    assert all(len(piece) >= 10 for piece in full[1:])


def test_a_space_that_an_added_token_takes_along_is_not_cut_off() -> None:
    cutter = Cutter.of(tokenizer_of("gpt-2", "stripping")).often()
    assert list(pieces("<|r|> foo bar", cutter)) == ["<|r|> foo", " bar"]


def test_a_place_is_cut_at_where_an_added_token_begins_that_may_be_cut() -> None:
    cutter = Cutter.of(tokenizer_of("gpt-2", "stripping"))
    text = "a <|l|>b<|s|>c<|s|>"
    places = [text.index("<|l|>"), text.index("b"), text.index("<|s|>"), text.index("|s|>")]
    assert cutter.cuts_at(text, places) == [text.index("<|s|>")]
    assert list(pieces(text, cutter, places)) == ["a <|l|>b", "<|s|>c<|s|>"]
