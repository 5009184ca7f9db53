"""Guesses from an answer's own text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvway_worker.scheduling.drafts import Drafter, NgramIndex
from tests.worker.batching import request


def naive(token_ids: list[int], min_match: int, num_tokens: int) -> list[int]:
    """What a draft is, by searching backwards."""
    last = token_ids[-min_match:]
    for behind in range(len(token_ids) - 1, min_match - 1, -1):
        if token_ids[behind - min_match : behind] == last:
            text = list(token_ids)
            while len(text) < len(token_ids) + num_tokens:
                text.append(text[behind + len(text) - len(token_ids)])
            return text[len(token_ids) :]
    return []


@given(
    token_ids=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    min_match=st.integers(1, 4),
    num_tokens=st.integers(1, 6),
    step=st.integers(1, 5),
)
def test_drafts_follow_the_most_recent_occurrence_however_the_text_grew(
    token_ids: list[int], min_match: int, num_tokens: int, step: int
) -> None:
    index = NgramIndex(min_match)
    for end in range(1, len(token_ids) + 1, step):
        known = token_ids[:end]
        assert index.propose(known, num_tokens) == naive(known, min_match, num_tokens)


def test_a_shorter_match_than_asked_for_proposes_nothing() -> None:
    text = [1, 2, 3, 4, 9, 9, 2, 3, 4]
    assert NgramIndex(4).propose(text, 3) == []
    assert NgramIndex(3).propose(text, 3) == [9, 9, 2]


def test_runs_of_one_hash_are_told_apart() -> None:
    other = 2**61 - 1  # Python's hash of it is that of 0
    assert hash((other,)) == hash((0,))
    assert NgramIndex(1).propose([0, 5, other], 1) == []


def test_a_text_that_repeats_is_expected_to_repeat() -> None:
    assert NgramIndex(2).propose([7, 8, 7, 8, 7], 5) == [8, 7, 8, 7, 8]
    assert NgramIndex(1).propose([5, 5], 3) == [5, 5, 5]


def test_each_sequence_has_its_own_text_and_is_forgotten() -> None:
    drafter = Drafter(4, min_match=1)
    one, other = request("0", [1, 2, 1]), request("1", [1, 3, 1])
    assert drafter.propose(one, 9) == [2, 1, 2, 1]
    assert drafter.propose(other, 2) == [3, 1]
    assert drafter.propose(one, 0) == []
    drafter.forget(one)
    assert drafter.propose(request("0", [4, 5, 4]), 1) == [5], "an id may be used again"


def test_no_drafts_are_no_work() -> None:
    assert Drafter(0).propose(request("0", [1, 1, 1, 1, 1, 1]), 9) == []


@pytest.mark.parametrize(("num_drafts", "min_match"), [(-1, 4), (1, 0)])
def test_numbers_without_meaning_are_refused(num_drafts: int, min_match: int) -> None:
    with pytest.raises(ValueError, match="must be at least 0 and draft_min_match"):
        Drafter(num_drafts, min_match=min_match)
