"""The sim engine: its words depend on the tokens alone, its time on the cost model."""

from __future__ import annotations

import threading

import pytest

from kvway_core.errors import ShuttingDown
from kvway_worker.scheduling.step import Row, Sampled, StepPlan, StepResult
from kvway_worker.sim import PRINTABLE_ASCII, CostModel, SimEngine, next_token
from tests.worker.batching import answer, request


def row(start: int, num_tokens: int, *, num_prompt: int = 100, request_id: str = "0") -> Row:
    seq = request(request_id, range(num_prompt))
    for token in range(start + num_tokens - num_prompt):
        seq.append(token)
    return Row(
        seq=seq,
        start=start,
        num_tokens=num_tokens,
        token_ids=seq.token_ids[start : start + num_tokens],
        block_table=range(10),
        sampling=(seq,) if start + num_tokens >= num_prompt else (),
    )


COSTS = CostModel(
    prefill_tokens_per_s=1000.0,
    attention_s_per_pair=1e-4,
    step_overhead_s=5.0,
    decode_s_per_seq=2.0,
)


@pytest.mark.parametrize(
    ("rows", "expected_s"),
    [
        ((), 0.0),
        ((row(0, 1),), 5.0 + 0.001),
        ((row(0, 100),), 5.0 + 0.1 + 4950e-4),
        ((row(50, 50),), 5.0 + 0.05 + (2500 + 1225) * 1e-4),
        ((row(99, 1),), 5.0 + 0.001 + 99e-4),  # the one token of a fully cached prompt
        ((row(100, 1),), 5.0 + 2.0 + 100e-4),
        ((row(100, 1), row(101, 1)), 5.0 + 4.0 + 201e-4),
    ],
)
def test_what_a_step_costs(rows: tuple[Row, ...], expected_s: float) -> None:
    assert COSTS.step_s(StepPlan(1, rows)) == pytest.approx(expected_s)


def test_a_prompt_in_chunks_costs_as_much_attention_as_whole() -> None:
    costs = CostModel(attention_s_per_pair=1.0)
    whole = costs.step_s(StepPlan(1, (row(0, 100),)))
    chunks = [costs.step_s(StepPlan(1, (row(start, 25),))) for start in (0, 25, 50, 75)]
    assert sum(chunks) == whole


def test_no_costs_by_default() -> None:
    assert CostModel().step_s(StepPlan(1, (row(0, 100), row(100, 1)))) == 0.0


def test_answers_are_printable_differ_and_repeat() -> None:
    first, second = answer(range(50), 40), answer(range(1, 51), 40)
    assert set(first) <= set(PRINTABLE_ASCII)
    assert first != second
    assert first == answer(range(50), 40)
    assert len(set(first)) > 10


def test_every_token_of_the_prompt_counts() -> None:
    prompt = list(range(30))
    wide = range(2**31)
    changed = {next_token([*prompt[:i], 99, *prompt[i + 1 :]], wide) for i in range(30)}
    assert len(changed) == 30
    assert next_token(prompt, wide) not in changed
    assert next_token([2**32 - 1], wide) != next_token([255], wide), "high bits too"


def test_answers_are_made_of_the_given_ids() -> None:
    engine = SimEngine(num_blocks=10, block_size=16, answer_ids=[7])
    assert engine.execute(StepPlan(1, (row(0, 100),))) == StepResult({"0": Sampled((7,))})
    with pytest.raises(ValueError, match="needs token ids"):
        SimEngine(num_blocks=1, block_size=1, answer_ids=())


def test_copies_come_before_rows() -> None:
    engine = SimEngine(num_blocks=10, block_size=16)
    engine.execute(StepPlan(1, (row(0, 100, num_prompt=200),)))
    seq = request("1", range(33))
    moved = Row(
        seq=seq,
        start=32,
        num_tokens=1,
        token_ids=(32,),
        block_table=(0, 9, 2),
        sampling=(seq,),
    )
    result = engine.execute(StepPlan(2, (moved,), copies=((1, 9, 16),)))
    assert result == StepResult({"1": Sampled((next_token(range(33)),))})


def test_closing_ends_a_step_that_waits() -> None:
    engine = SimEngine(num_blocks=10, block_size=16, costs=CostModel(step_overhead_s=3600.0))
    failures: list[Exception] = []

    def execute() -> None:
        try:
            engine.execute(StepPlan(1, (row(0, 10),)))
        except ShuttingDown as exc:
            failures.append(exc)

    thread = threading.Thread(target=execute)
    thread.start()
    engine.close()
    thread.join()
    assert len(failures) == 1
