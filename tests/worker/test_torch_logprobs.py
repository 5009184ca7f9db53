"""Log probabilities: the model's own, with ranks, whatever else the request asks for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvway_worker.scheduling.sampling_params import TokenLogprobs
from kvway_worker.torch_engine.logprobs import token_logprobs
from kvway_worker.torch_engine.sampling import likeliest
from tests.worker import sampling_oracle as oracle


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


VOCAB = 7
ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB),
        st.integers(0, VOCAB - 1),
        st.integers(0, VOCAB + 2),
    ),
    min_size=1,
    max_size=6,
)


def close(found: TokenLogprobs, expected: TokenLogprobs) -> bool:
    same = (found.token_id, found.rank, [t for t, _ in found.top]) == (
        expected.token_id,
        expected.rank,
        [t for t, _ in expected.top],
    )
    numbers = [found.logprob, *(p for _, p in found.top)]
    return same and numbers == pytest.approx(
        [expected.logprob, *(p for _, p in expected.top)], abs=1e-5
    )


@pytest.mark.property
@given(ROWS)
def test_logprob_rank_and_top_are_those_of_a_plain_softmax(rows: list[Any]) -> None:
    """Ties are common here: the smaller id comes first, in `top` and in the rank."""
    scores, tokens, tops = zip(*rows, strict=True)
    found = token_logprobs(torch.tensor(scores), tokens, tops)
    for one, row in zip(found, rows, strict=True):
        assert close(one, oracle.logprobs(*row))
        if one.rank <= len(one.top):
            assert one.top[one.rank - 1] == (one.token_id, one.logprob)


@pytest.mark.property
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 70))
def test_the_likeliest_are_in_order_and_the_smaller_id_first(row: list[int], count: int) -> None:
    expected = sorted(range(len(row)), key=lambda token: (-row[token], token))[:count]
    assert likeliest(torch.tensor(row, dtype=torch.float64), count).tolist() == expected


def test_more_rows_than_fit_in_memory_at_once() -> None:
    scores = torch.randn(300, 50, generator=torch.Generator().manual_seed(1))
    tokens = [random.Random(i).randrange(50) for i in range(300)]
    found = token_logprobs(scores, tokens, [i % 4 for i in range(300)])
    for i in (0, 127, 128, 255, 256, 299):
        assert close(found[i], oracle.logprobs(scores[i].tolist(), tokens[i], i % 4))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    scores = torch.randn(70, 49_152, generator=torch.Generator().manual_seed(2)) * 4
    tokens = list(range(70))
    batch = token_logprobs(scores, tokens, [5] * 70)
    for rows in (slice(0, 1), slice(3, 20), slice(69, 70)):
        tops = [5] * len(tokens[rows])
        assert token_logprobs(scores[rows].clone(), tokens[rows], tops) == batch[rows]
    torch.set_num_threads(1)


def test_bfloat16_scores_are_summed_in_float32() -> None:
    scores = torch.zeros(1, 4096, dtype=torch.bfloat16)
    (found,) = token_logprobs(scores, [7], [0])
    assert found.logprob == pytest.approx(-8.3177662, abs=1e-6)
    assert found.rank == 8
