"""Sampling: the distribution is the model's, and a seed decides alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvway_core.errors import EngineFailed
from kvway_worker.scheduling.sampling_params import SamplingParams
from kvway_worker.torch_engine import sampling
from kvway_worker.torch_engine.edits import Draw
from kvway_worker.torch_engine.sampling import sample, uniform
from tests.worker.sampling_oracle import distribution


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


PROBABILITIES = torch.tensor([0.1, 0.5, 0.15, 0.25])


def drawn(logits: torch.Tensor, params: SamplingParams, count: int) -> Counter[int]:
    """Draw at many positions in one call."""
    rows = logits.expand(count, -1)
    return Counter(sample(rows, [Draw(params, position) for position in range(count)]))


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    greedy = SamplingParams(max_tokens=1)
    assert sample(logits, [Draw(greedy, 0), Draw(greedy, 7)]) == [1, 0]


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.zeros(0, 4), []) == []


def test_shares_follow_the_probabilities() -> None:
    params = SamplingParams(max_tokens=1, temperature=1.0, seed=3)
    counts = drawn(PROBABILITIES.log(), params, 4000)
    for token, probability in enumerate(PROBABILITIES.tolist()):
        assert abs(counts[token] / 4000 - probability) < 0.03


def test_temperature_sharpens_and_flattens() -> None:
    """At temperature t the shares are those of p ** (1 / t)."""
    for temperature in (0.5, 2.0):
        powered = PROBABILITIES ** (1 / temperature)
        params = SamplingParams(max_tokens=1, temperature=temperature, seed=4)
        counts = drawn(PROBABILITIES.log(), params, 4000)
        for token, probability in enumerate((powered / powered.sum()).tolist()):
            assert abs(counts[token] / 4000 - probability) < 0.03


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    params = SamplingParams(max_tokens=1, temperature=1e-9, seed=5)
    assert drawn(PROBABILITIES.log() * 1e4, params, 50) == {1: 50}


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-9, {1}), (0.49, {1}), (0.6, {1, 3}), (0.8, {1, 2, 3}), (0.95, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    params = SamplingParams(max_tokens=1, temperature=1.0, top_p=top_p, seed=6)
    counts = drawn(PROBABILITIES.log(), params, 2000)
    assert set(counts) == kept
    total = sum(PROBABILITIES[token].item() for token in kept)
    for token in kept:
        assert abs(counts[token] / 2000 - PROBABILITIES[token].item() / total) < 0.05


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 2, 3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"min_p": 0.4}, {1, 3}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 2, "top_p": 0.6}, {1}),  # of 0.5 and 0.25 the first is two thirds
        ({"top_k": 2, "top_p": 0.7}, {1, 3}),
        ({"top_p": 0.8, "min_p": 0.4}, {1, 3}),
        ({"top_k": 3, "min_p": 0.4}, {1, 3}),
    ],
)
def test_top_k_top_p_and_min_p_narrow_what_the_one_before_left(
    changes: dict[str, Any], kept: set[int]
) -> None:
    params = SamplingParams(max_tokens=1, temperature=1.0, seed=6, **changes)
    counts = drawn(PROBABILITIES.log(), params, 2000)
    assert set(counts) == kept
    total = sum(PROBABILITIES[token].item() for token in kept)
    for token in kept:
        assert abs(counts[token] / 2000 - PROBABILITIES[token].item() / total) < 0.05


SAMPLED = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 20]),
    top_p=st.sampled_from([1.0, 1.0, 0.83, 0.31, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.07, 0.6]),
    seed=st.integers(0, 2**63),
)
ROWS = st.lists(
    st.integers(-12, 12).map(lambda n: n / 4) | st.just(-inf), min_size=12, max_size=12
)


@pytest.mark.property
@given(
    st.lists(st.tuples(ROWS.filter(lambda row: max(row) > -inf), SAMPLED), min_size=1, max_size=6)
)
def test_a_draw_inverts_the_documented_distribution(rows: list[tuple[Any, Any]]) -> None:
    """Vocabulary order, or best first with `top_k` or `top_p`; within rounding of the borders."""
    logits = torch.tensor([row for row, _ in rows])
    draws = [Draw(params, position) for position, (_, params) in enumerate(rows)]
    for token, draw, (row, params) in zip(sample(logits, draws), draws, rows, strict=True):
        weights = distribution(row, params)
        order = list(weights) if params.top_k or params.top_p < 1 else sorted(weights)
        below = sum(weights[t] for t in order[: order.index(token)])
        whole = sum(weights.values())
        number = uniform(params.seed, draw.position)
        assert below / whole - 1e-9 <= number <= (below + weights[token]) / whole + 1e-9


def test_top_p_of_a_flat_distribution_looks_at_the_whole_vocabulary() -> None:
    """More tokens are needed than the head that is sorted first has."""
    params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.5, seed=6)
    counts = drawn(torch.zeros(5000), params, 2000)
    assert max(counts) < 2500
    assert len(counts) > 1200


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(num_threads: int) -> None:
    """The draw is a function of seed, position and scores: nearly equal tokens show any change."""
    torch.set_num_threads(num_threads)
    logits = torch.randn(40, 49_152, generator=torch.Generator().manual_seed(0)) * 0.1
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 500}, {"min_p": 0.9}]
    draws = [Draw(SamplingParams(1, temperature=1.0, **kinds[i % 4]), i) for i in range(40)]
    batch = sample(logits, draws)
    alone = [sample(logits[i : i + 1].clone(), [draws[i]])[0] for i in range(40)]
    torch.set_num_threads(1)
    assert alone == batch
    assert len(set(batch)) == 40


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    hot = SamplingParams(max_tokens=1, temperature=1.0, seed=7)
    others = SamplingParams(max_tokens=1, temperature=1.0)
    batch = sample(logits, [Draw(others, 1), Draw(hot, 9), Draw(others, 2), Draw(hot, 11)])
    assert sample(logits[1:2], [Draw(hot, 9)]) == [batch[1]]
    assert sample(logits[3:4], [Draw(hot, 11)]) == [batch[3]]


def test_without_top_p_the_vocabulary_keeps_its_order() -> None:
    """It is not sorted: a draw is the first token whose cumulative share exceeds the number."""
    cumulative = list(accumulate(PROBABILITIES.tolist()))
    params = SamplingParams(max_tokens=1, temperature=1.0, seed=9)
    for position in range(200):
        number = uniform(9, position)
        expected = next(token for token, share in enumerate(cumulative) if share > number)
        assert sample(PROBABILITIES.log()[None], [Draw(params, position)]) == [expected]


def test_the_largest_number_draws_a_token_that_has_a_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even where the tokens at the end of the vocabulary have none."""
    monkeypatch.setattr(sampling, "uniform", lambda *_: 1 - 2.0**-53)
    logits = torch.full((1, 999), -torch.inf)
    logits[0, :500] = torch.randn(500, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(max_tokens=1, temperature=1.0)
    assert sample(logits, [Draw(params, 0)]) == [499]


def test_uniform_numbers_are_in_range_and_differ() -> None:
    numbers = [uniform(seed, position) for seed in (0, -1, 2**63) for position in range(50)]
    assert len(set(numbers)) == 150
    assert all(0 <= number < 1 for number in numbers)


def test_a_golden_number_keeps_seeds_stable_across_releases() -> None:
    assert uniform(1, 1) == 0.5623181634912586


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_are_refused(bad: float) -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = bad
    greedy = Draw(SamplingParams(max_tokens=1), 0)
    with pytest.raises(EngineFailed):
        sample(logits, [greedy, greedy])


def test_tokens_that_the_model_rules_out_are_never_drawn() -> None:
    logits = PROBABILITIES.log()
    logits[1] = -torch.inf
    params = SamplingParams(max_tokens=1, temperature=2.0, seed=8)
    assert 1 not in drawn(logits, params, 500)
