"""The OpenAPI documents: complete, and made of what the checks use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvway_core import api
from kvway_core.errors import InvalidRequest
from kvway_core.openapi import Operation, openapi
from kvway_router.openapi import OPERATIONS as ROUTER
from kvway_worker.api.openapi import OPERATIONS as WORKER


def document(operations: Sequence[Operation]) -> Any:
    return json.loads(openapi(title="t", version="1", model="m", operations=operations))


@pytest.mark.parametrize("operations", [ROUTER, WORKER], ids=["router", "worker"])
def test_every_reference_leads_somewhere(operations: Sequence[Operation]) -> None:
    text = openapi(title="t", version="1", model="m", operations=operations).decode()
    schemas = json.loads(text)["components"]["schemas"]
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named <= schemas.keys()


@pytest.mark.parametrize("operations", [ROUTER, WORKER], ids=["router", "worker"])
def test_a_request_has_the_fields_of_its_struct(operations: Sequence[Operation]) -> None:
    schemas = document(operations)["components"]["schemas"]
    for operation in operations:
        if operation.request is not None:
            fields = set(operation.request.__struct_fields__)
            assert fields <= schemas[operation.request.__name__]["properties"].keys()


def edges(schema: Any) -> list[tuple[object, bool]]:
    """Numbers at the bounds of a field, and just beyond, with whether they may be."""
    for branch in schema.get("anyOf", [schema]):
        if branch.get("type") in {"integer", "number"} and "minimum" in branch:
            low, high = branch["minimum"], branch["maximum"]
            return [(low, True), (high, True), (low - 1, False), (high + 1, False)]
    return []


@pytest.mark.parametrize(
    ("name", "parse", "least"),
    [
        ("ChatRequest", api.parse_chat, {"messages": [{"role": "user", "content": "x"}]}),
        ("CompletionRequest", api.parse_completion, {"prompt": "x"}),
    ],
)
def test_bounds_are_those_of_the_checks(name: str, parse: Any, least: dict[str, Any]) -> None:
    """At the bound it is taken, unless another field forbids it; beyond it is refused."""
    fields = document(ROUTER)["components"]["schemas"][name]["properties"]
    num_bounded = 0
    for field, schema in fields.items():
        for value, fits in edges(schema):
            num_bounded += 1
            body = json.dumps({"model": "m", **least, **_others(field, value), field: value})
            if fits and (field, value) not in {("top_p", 0), ("truncate_prompt_tokens", 0)}:
                parse(body.encode())
                continue
            with pytest.raises(InvalidRequest) as caught:
                parse(body.encode())
            assert caught.value.param == field
    assert num_bounded >= 4 * 13


def _others(field: str, value: object) -> dict[str, object]:
    """What else a request must say for a value to be taken."""
    if field == "best_of":
        return {"n": value if value in range(1, 9) else 1}
    others: dict[str, dict[str, object]] = {
        "top_logprobs": {"logprobs": True},
        "min_tokens": {"max_tokens": 2**31 - 1},
    }
    return others.get(field, {})


def test_the_worker_takes_no_other_fields() -> None:
    """Unless they ask for nothing."""
    schema = document(WORKER)["components"]["schemas"]["ChatRequest"]
    assert schema["additionalProperties"] == {"type": "null"}
    assert schema["properties"]["tools"] == {"enum": [[], None]}
    assert "additionalProperties" not in document(ROUTER)["components"]["schemas"]["ChatRequest"]


def test_a_struct_that_holds_anything_is_any_json() -> None:
    class Holder(msgspec.Struct):
        anything: object

    made = document([Operation("post", "/x", "x", request=Holder)])
    assert "type" not in made["components"]["schemas"]["Holder"]["properties"]["anything"]
