"""Forks and drafts: what is chosen is what single draws choose, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvway_core.blocks import Namespace
from kvway_core.errors import EngineFailed
from kvway_worker.scheduling.sampling_params import SamplingParams
from kvway_worker.scheduling.sequence import Sequence as Request
from kvway_worker.scheduling.step import Row, Sampled
from kvway_worker.torch_engine.calls import Part, calls
from kvway_worker.torch_engine.choosing import choose

VOCAB = 6


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def request(request_id: str, tokens: Sequence[int], params: SamplingParams) -> Request:
    return Request(request_id, tokens, params=params, namespace=Namespace("m", block_size=4))


def row_of(*seqs: Request, drafts: Sequence[int] = ()) -> Row:
    """Returns the row that computes a request's last known token, and drafts behind it."""
    known = seqs[0].token_ids
    start, token_ids = len(known) - 1, (known[-1], *drafts)
    return Row(seqs[0], start, len(token_ids), token_ids, (), tuple(seqs), len(drafts))


def scores_after(tokens: Sequence[int]) -> list[float]:
    """Returns the scores of a model that looks at the last two tokens."""
    first, second = [0, *tokens][-2:]
    return [float((3 * first + 5 * second + 7 * token) % 11) / 4 for token in range(VOCAB)]


def scores_of(*rows: Row) -> torch.Tensor:
    out = []
    for row in rows:
        known = row.seq.token_ids[: row.start + 1]
        drafts = row.token_ids[1:]
        out += [scores_after([*known, *drafts[:i]]) for i in range(row.num_drafts + 1)]
    return torch.tensor(out)


def answer(params: SamplingParams, num_tokens: int) -> tuple[list[int], list[Any]]:
    """Returns what is chosen one token per step."""
    seq = request("a", [1, 2], params)
    logprobs: list[Any] = []
    for _ in range(num_tokens):
        sampled = choose(scores_of(row_of(seq)), [row_of(seq)])["a"]
        seq.append(sampled.token_ids[0])
        logprobs += sampled.logprobs
    return seq.output_token_ids, logprobs


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(99),
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 3]),
    seed=st.integers(0, 5),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    bad_words=st.sampled_from([(), ((1, 2), (4, 4))]),
    logprobs=st.sampled_from([None, 0, 2]),
)


@pytest.mark.property
@given(PARAMS, st.data())
def test_drafts_never_change_an_answer(params: SamplingParams, data: st.DataObject) -> None:
    """Good, bad and half good drafts: same tokens and log probabilities, sooner or not."""
    expected, expected_logprobs = answer(params, 12)
    seq = request("a", [1, 2], params)
    logprobs: list[Any] = []
    while seq.num_output_tokens < 12:
        rest = expected[seq.num_output_tokens :]
        num_right = data.draw(st.integers(0, min(4, len(rest) - 1)))
        wrong = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))
        drafts = [*rest[:num_right], *wrong][: len(rest) - 1]
        sampled = choose(scores_of(row_of(seq, drafts=drafts)), [row_of(seq, drafts=drafts)])["a"]
        assert len(sampled.token_ids) > min(num_right, len(drafts))
        for token in sampled.token_ids:
            seq.append(token)
        logprobs += sampled.logprobs
    assert seq.output_token_ids == expected
    assert logprobs == expected_logprobs


def test_all_drafts_may_be_right_and_one_more_token_follows() -> None:
    expected, _ = answer(SamplingParams(9), 4)
    seq = request("a", [1, 2], SamplingParams(9))
    row = row_of(seq, drafts=expected[:3])
    assert choose(scores_of(row), [row]) == {"a": Sampled(tuple(expected))}


def test_forks_draw_from_one_row_each_with_its_own_params() -> None:
    kinds = [
        SamplingParams(9, temperature=1.0, seed=1),
        SamplingParams(9, temperature=1.0, seed=2, logprobs=1),
        SamplingParams(9, allowed_token_ids=frozenset({5})),
    ]
    seqs = [request(str(i), [1, 2], params) for i, params in enumerate(kinds)]
    other = request("other", [3, 4], SamplingParams(9))
    rows = [row_of(other), row_of(*seqs), row_of(request("last", [2, 2], SamplingParams(9)))]
    found = choose(scores_of(*rows), rows)
    for seq in (other, *seqs):
        row = row_of(seq)
        assert found[seq.request_id] == choose(scores_of(row), [row])[seq.request_id]
    assert found["2"].token_ids == (5,)
    assert [len(found[seq.request_id].logprobs) for seq in seqs] == [0, 1, 0]
    assert set(found) == {"other", "0", "1", "2", "last"}


def test_logprobs_are_the_models_own() -> None:
    """Neither temperature nor bias, bans or the chosen token change them."""
    odd: dict[str, Any] = {
        "temperature": 0.3,
        "logit_bias": ((5, 50.0),),
        "frequency_penalty": 2.0,
    }
    plain = request("a", [1, 2], SamplingParams(9, logprobs=VOCAB))
    biased = request("b", [1, 2], SamplingParams(9, logprobs=VOCAB, **odd))
    rows = [row_of(plain), row_of(biased)]
    found = choose(scores_of(*rows), rows)
    (a,), (b,) = found["a"].logprobs, found["b"].logprobs
    assert b.top == a.top
    assert b.token_id == 5
    assert (b.token_id, b.logprob) == b.top[b.rank - 1]
    assert a.rank == 1


def test_nan_behind_a_draft_fails_the_step() -> None:
    row = row_of(request("a", [1, 2], SamplingParams(9)), drafts=[1])
    scores = scores_of(row)
    scores[1, 3] = torch.nan
    with pytest.raises(EngineFailed):
        choose(scores, [row])


# --- how a step is split into calls -------------------------------------------------------------


def prompt_row(
    length: int, *, start: int = 0, prompt_logprobs: bool = False, drafts: int = 0
) -> Row:
    params = SamplingParams(9, prompt_logprobs=0 if prompt_logprobs else None)
    seq = request("a", [1] * length, params)
    size = length - start + drafts
    return Row(seq, start, size, [1] * size, (), (seq,), drafts)


ROWS = st.lists(
    st.builds(
        lambda length, start, asks, drafts: prompt_row(
            length, start=min(start, length - 1), prompt_logprobs=asks, drafts=drafts
        ),
        st.integers(1, 60),
        st.integers(0, 30),
        st.booleans(),
        st.integers(0, 4),
    ),
    min_size=1,
    max_size=6,
)


def fixed(parts: Sequence[Part]) -> int:
    return sum(part.num_tokens for part in parts)


def scored(parts: Sequence[Part]) -> int:
    return sum(len(part.prompt_scored) for part in parts)


@pytest.mark.property
@pytest.mark.parametrize(("num_tokens", "size"), [(8, fixed), (None, scored)])
@given(rows=ROWS)
def test_calls_hold_every_token_once_in_order_and_no_more_than_they_may(
    rows: list[Row], num_tokens: int | None, size: Callable[[Sequence[Part]], int]
) -> None:
    split = list(calls(rows, num_tokens=num_tokens, num_prompt_scored=8))
    assert all(0 < size(parts) <= 8 or len(split) == 1 for parts in split[:-1])
    assert all(size(parts) <= 8 for parts in split)
    parts = [part for call in split for part in call]
    assert all(part.num_tokens > 0 for part in parts)
    order = [rows.index(part.row) for part in parts]
    assert order == sorted(order)
    for row in rows:
        own = [part for part in parts if part.row is row]
        assert [p for part in own for p in range(part.start, part.end)] == list(
            range(row.start, row.end)
        )
        assert [t for part in own for t in part.token_ids] == list(row.token_ids)
        last = row.seq.num_prompt_tokens - 1
        wanted = range(row.start, last) if row.seq.params.prompt_logprobs is not None else ()
        assert [p for part in own for p in part.prompt_scored] == list(wanted)
        assert [p for part in own for p in part.sampled] == list(
            range(row.end - row.num_drafts - 1, row.end)
        )


def test_a_step_without_prompt_logprobs_is_one_call() -> None:
    rows = [prompt_row(500) for _ in range(3)]
    assert len(list(calls(rows, num_tokens=None, num_prompt_scored=8))) == 1
