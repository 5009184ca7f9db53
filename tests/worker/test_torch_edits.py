"""Scores as requests change them: against plain Python, and what wins over what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvway_worker.scheduling.sampling_params import SamplingParams
from kvway_worker.torch_engine.edits import Draw, edited
from kvway_worker.torch_engine.sampling import sample
from tests.worker import sampling_oracle as oracle

VOCAB = 9
NEVER = oracle.NEVER

TOKENS = st.integers(0, VOCAB + 1)  # two of them are not in the vocabulary
QUARTERS = st.integers(-40, 40).map(lambda n: n / 4)  # exact in float32
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.frozensets(TOKENS, max_size=VOCAB + 2),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 1.25, -0.25]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 2.0, 0.5, 4.0]),
    logit_bias=st.dictionaries(TOKENS, QUARTERS, max_size=3).map(lambda d: tuple(d.items())),
    allowed_token_ids=st.none() | st.frozensets(TOKENS, max_size=4),
    bad_words=st.lists(st.lists(TOKENS, max_size=3).map(tuple), max_size=3).map(tuple),
)
SCORES = st.lists(QUARTERS | st.just(NEVER), min_size=VOCAB, max_size=VOCAB)
CASES = st.tuples(
    SCORES.filter(lambda scores: max(scores) > NEVER),
    PARAMS,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
    st.lists(st.integers(0, VOCAB - 1), max_size=5),
)


def draw_of(
    params: SamplingParams, prompt: Sequence[int], output: Sequence[int], num_drafts: int = 0
) -> Draw:
    """The last tokens of the answer may be drafts: nothing is different then."""
    known = [*prompt, *output[: len(output) - num_drafts]]
    drafts = output[len(output) - num_drafts :]
    return Draw(params, len(prompt) + len(output), len(prompt), known, drafts)


@pytest.mark.property
@given(st.lists(CASES, min_size=1, max_size=5), st.integers(0, 5))
def test_every_change_is_the_documented_one(cases: list[Any], num_drafts: int) -> None:
    rows = torch.tensor([scores for scores, *_ in cases])
    before = rows.clone()
    draws = [
        draw_of(params, prompt, output, min(num_drafts, len(output)))
        for _, params, prompt, output in cases
    ]
    found = edited(rows, draws)
    assert torch.equal(rows, before), "the model's own scores are still needed"
    for (scores, params, prompt, output), row in zip(cases, found.tolist(), strict=True):
        assert row == oracle.edited(scores, params, prompt, output)


def changed(
    scores: Sequence[float],
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    **params: Any,
) -> list[float]:
    draw = draw_of(SamplingParams(max_tokens=9, **params), prompt, output)
    row: list[float] = edited(torch.tensor([scores]), [draw])[0].tolist()
    return row


def test_requests_that_change_nothing_cost_nothing() -> None:
    scores = torch.zeros(2, 4)
    plain = SamplingParams(max_tokens=1, min_tokens=1, stop_token_ids=frozenset({1}))
    assert edited(scores, [draw_of(plain, [1], [2]), draw_of(plain, [1], [2])]) is scores


def test_penalties_know_prompt_from_answer() -> None:
    scores = [4.0, 4.0, -4.0, 4.0]
    both: dict[str, Any] = {"prompt": [0, 0], "output": [1, 1, 2]}
    assert changed(scores, presence_penalty=1.0, **both) == [4, 3, -5, 4]
    assert changed(scores, frequency_penalty=1.0, **both) == [4, 2, -5, 4]
    assert changed(scores, repetition_penalty=2.0, **both) == [2, 2, -8, 4]


def test_the_repetition_penalty_comes_first() -> None:
    both: dict[str, Any] = {
        "repetition_penalty": 2.0,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
    }
    assert changed([8.0, 1.0], output=[0, 0], **both) == [8 / 2 - 1 - 2 * 0.5, 1]


def test_a_bias_comes_before_the_penalties() -> None:
    assert changed([1.0, 0.0], output=[0], logit_bias=((0, 7.0),), repetition_penalty=2.0) == [
        4,
        0,
    ]


def test_stop_tokens_are_banned_until_min_tokens() -> None:
    params: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": frozenset({1})}
    assert changed([0.0, 0.0], prompt=[0] * 5, output=[0], **params) == [0, NEVER]
    assert changed([0.0, 0.0], prompt=[0] * 5, output=[0, 0], **params) == [0, 0]


def test_a_run_of_bad_words_may_begin_in_the_prompt() -> None:
    words: dict[str, Any] = {"bad_words": ((1, 2, 3), (0,))}
    assert changed([0.0] * 4, prompt=[1], output=[2], **words) == [NEVER, 0, 0, NEVER]
    assert changed([0.0] * 4, prompt=[2], output=[2], **words) == [NEVER, 0, 0, 0]
    assert changed([0.0] * 4, prompt=[2], **words) == [NEVER, 0, 0, 0]


def test_allowed_tokens_win_over_bans() -> None:
    """A request whose every allowed token ends the answer still gets the likelier one."""
    params: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": frozenset({1, 2})}
    assert changed([3.0, 1.0, 2.0], allowed_token_ids=frozenset({1, 2}), **params) == [NEVER, 1, 2]
    assert changed([3.0, 1.0, 2.0], allowed_token_ids=frozenset({0, 1}), **params) == [
        3,
        NEVER,
        NEVER,
    ]


def test_bans_of_the_whole_vocabulary_are_not_applied() -> None:
    assert changed([1.0, 2.0], bad_words=((0,), (1,))) == [1, 2]


def test_where_the_model_rules_out_what_is_allowed_all_of_it_is_equally_likely() -> None:
    scores = [1.0, NEVER, NEVER]
    assert changed(scores, allowed_token_ids=frozenset({1, 2})) == [NEVER, 0, 0]


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": ((0, 1e39),)},
        {"logit_bias": ((0, float("nan")),)},
        {"repetition_penalty": 1e-45},
        {"frequency_penalty": -1e39},
    ],
)
def test_numbers_out_of_range_still_choose_a_token(params: dict[str, Any]) -> None:
    for temperature in (0.0, 1.0, 1e-320, float("inf")):
        draw = draw_of(SamplingParams(9, temperature=temperature, **params), [0], [0])
        assert sample(torch.tensor([[1.0, 2.0, NEVER]]), [draw])[0] in range(3)


def test_rows_without_changes_stay_as_they_are_in_a_mixed_batch() -> None:
    scores = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    plain = draw_of(SamplingParams(9), [1], [])
    biased = draw_of(SamplingParams(9, logit_bias=((4, 100.0),)), [1], [])
    found = edited(scores, [plain, biased, plain])
    assert torch.equal(found[[0, 2]], scores[[0, 2]])
    assert sample(scores, [plain, biased, plain])[1] == 4
