"""The page about routing: its drawing, its example and its table of policies are what is done."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from kvway_router.index import BlockIndex
from kvway_router.policies.base import ANY_POLICY
from kvway_router.policies.registry import POLICIES
from kvway_router.policy import Candidate, Prompt
from kvway_router.runs import unpack
from tests.router.policy_cases import PARAMS, choose, load

PAGE = (Path(__file__).parents[2] / "docs" / "routing.md").read_text(encoding="utf-8")
PROMPT = Prompt(num_tokens=8000, block_size=16, num_output_tokens=256)


def tables(heading: str) -> list[list[list[str]]]:
    """Returns the cells of every table whose head begins with `heading`."""
    found = re.findall(rf"^\| {heading} \|.*\n\|[-:|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [
        [[cell.strip(" *`") for cell in line[1:-1].split("|")] for line in table.splitlines()]
        for table in found
    ]


def row_of(candidate: Candidate) -> list[str]:
    terms = (
        candidate.queued_s, candidate.step_s, candidate.own_s, candidate.ttft_s,
        candidate.price_s, candidate.kv_s, candidate.cost_s,
    )  # fmt: skip
    return [candidate.replica_id.removesuffix(":1"), *(f"{term:.3f}" for term in terms)]


@pytest.mark.parametrize(
    ("number", "first_queue_s", "price", "reason"),
    [(1, 0.6, 0.5, "prefix"), (2, 1.5, 1.0, "spill")],
)
def test_the_worked_example_is_what_the_policy_computes(
    number: int, first_queue_s: float, price: float, reason: str
) -> None:
    given, *computed = tables("replica")
    loads = [
        load(
            name,
            queued_prefill_s=first_queue_s if name == "a" else float(queued_s),
            num_prefills=int(num_prefills),
            decode_step_s=float(step_s),
            prefill_tokens_per_s=8000.0,
            blocks_pinned=int(taken),
            blocks_total=4000,
        )
        for name, _, queued_s, num_prefills, step_s, taken in given
    ]
    matches = {f"{row[0]}:1": int(row[1]) for row in given}
    decision = choose("cost", *loads, matches=matches, prompt=PROMPT, mean_work_s=0.5)
    assert [row_of(candidate) for candidate in decision.candidates] == computed[number - 1]
    assert decision.price_of_work == pytest.approx(price)
    assert decision.reason.value == reason
    assert decision.replica_id == f"{computed[number - 1][0][0]}:1"


def test_the_drawing_of_the_index_is_what_the_index_has() -> None:
    (rows,) = tables("holder")
    runs = [0, 1, 2, 3], [4, 5, 6], [7, 8, 9], [104, 105]
    index = BlockIndex()
    for place, (parent, run) in enumerate(zip((None, 3, 6, 3), runs, strict=True), 1):
        # Who has the most of a run first: the others have the beginning of the same one then.
        for name, *counts in sorted(rows, key=lambda row: -int(row[place])):
            index.store(name, parent, run[: int(counts[place - 1])])
    assert index.match([*range(9)]) == {name: int(num) for name, *_, num in rows}
    assert sorted(unpack(node.run) for node in index.parts()[0].nodes()) == list(runs)


def test_constants_of_the_cost_are_those_of_the_code() -> None:
    assert (
        f"`chunk` {PARAMS.chunk_tokens} tokens, `A` {PARAMS.attention_tokens:.0f} tokens, "
        f"`km` {PARAMS.kv_weight_s:.0f} s, `theta` {PARAMS.kv_threshold}"
    ) in PAGE


def test_the_table_has_every_policy_with_its_parameters_and_reasons() -> None:
    (table,) = tables("policy")
    assert [row[0] for row in table] == list(POLICIES)
    for name, _, parameters, reasons in table[1:]:
        policy: Any = POLICIES[name]
        assert parameters.replace("`", "") == ", ".join(
            f"{field.name} {getattr(policy, field.name):.10g}"
            for field in dataclasses.fields(policy)
        )
        own = {reason.value for reason in policy.reasons if reason not in ANY_POLICY}
        assert set(reasons.replace("`", "").split(", ")) == own
