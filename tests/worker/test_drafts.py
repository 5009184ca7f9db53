"""Guesses from an answer's own text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvway_worker.scheduling.drafts import MAX_READ, Drafter, NgramIndex
from tests.worker.batching import Counted, request


def propose(token_ids: list[int], min_match: int, num_tokens: int) -> list[int]:
    """What an index proposes that has read all of a text."""
    index = NgramIndex(min_match)
    assert index.read(token_ids, len(token_ids)) == len(token_ids)
    return index.propose(token_ids, num_tokens)


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
    limit=st.integers(1, 7),
)
def test_drafts_follow_the_most_recent_occurrence_however_the_text_grew(
    token_ids: list[int], min_match: int, num_tokens: int, step: int, limit: int
) -> None:
    index = NgramIndex(min_match)
    num_read = 0
    for end in range(1, len(token_ids) + 1, step):
        known = token_ids[:end]
        num_new = index.read(known, limit)
        assert num_new == min(limit, end - num_read)
        num_read += num_new
        expected = naive(known, min_match, num_tokens) if num_read == end else []
        assert index.propose(known, num_tokens) == expected


def test_a_shorter_match_than_asked_for_proposes_nothing() -> None:
    text = [1, 2, 3, 4, 9, 9, 2, 3, 4]
    assert propose(text, 4, 3) == []
    assert propose(text, 3, 3) == [9, 9, 2]


def test_runs_of_one_hash_are_told_apart() -> None:
    other = 2**61 - 1  # Python's hash of it is that of 0
    assert hash((other,)) == hash((0,))
    assert propose([0, 5, other], 1, 1) == []


def test_a_text_that_repeats_is_expected_to_repeat() -> None:
    assert propose([7, 8, 7, 8, 7], 2, 5) == [8, 7, 8, 7, 8]
    assert propose([5, 5], 1, 3) == [5, 5, 5]


def test_each_sequence_has_its_own_text_and_is_forgotten() -> None:
    drafter = Drafter(4, min_match=1)
    one, other = request("0", [1, 2, 1]), request("1", [1, 3, 1])
    assert drafter.propose(one, 9) == [2, 1, 2, 1]
    assert drafter.propose(other, 2) == [3, 1]
    assert drafter.propose(one, 0) == []
    drafter.forget(one)
    assert drafter.propose(request("0", [4, 5, 4]), 1) == [5], "an id may be used again"


def test_a_plan_reads_a_bounded_number_of_tokens_of_all_texts() -> None:
    """And each token once, so that a long prompt is read in the course of several steps."""
    drafter = Drafter(2, min_match=1)
    seqs = [request(str(index), [1]) for index in range(2)]
    texts = [Counted([*range(100, 100 + MAX_READ), 1, 2, 1]) for _ in seqs]
    for seq, text in zip(seqs, texts, strict=True):
        seq.token_ids = text
    drafts = []
    for _ in range(4):
        before = sum(text.num_read for text in texts)
        drafter.begin_plan()
        drafts.append([drafter.propose(seq, 2) for seq in seqs])
        assert sum(text.num_read for text in texts) - before < MAX_READ + 20
    assert drafts == [[[], []], [[2, 1], []], [[2, 1], [2, 1]], [[2, 1], [2, 1]]]
    assert sum(text.num_read for text in texts) < 2 * MAX_READ + 50


def test_no_drafts_are_no_work() -> None:
    assert Drafter(0).propose(request("0", [1, 1, 1, 1, 1, 1]), 9) == []


@pytest.mark.parametrize(("num_drafts", "min_match"), [(-1, 4), (1, 0)])
def test_numbers_without_meaning_are_refused(num_drafts: int, min_match: int) -> None:
    with pytest.raises(ValueError, match="must be at least 0 and draft_min_match"):
        Drafter(num_drafts, min_match=min_match)
