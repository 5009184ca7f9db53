"""The OpenAPI document of a server, made of the structs and bounds that its checks use.

What the document refuses, the server refuses with a 4xx. The other way round there is more to it
than a schema can say: rules between fields (`min_tokens` and `max_tokens`), sizes in bytes, and
what depends on the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvway_core.request_checks import BOUNDS
from kvway_core.unsupported import NEUTRAL

OPENAPI_PATH: Final = "/openapi.json"
_REF: Final = "#/components/schemas/{name}"
_JSON: Final = "application/json"
_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "server_error"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that a server does.

    Attributes:
        method: In small letters.
        path: With parameters in braces.
        summary: A few words.
        request: What its body is read into; None for no body.
        supported: Fields that a body may have, those that ask for nothing aside; None for any.
        answer: What it answers; None for JSON of any kind.
        content_types: What it answers in.
        flags: Parameters of the query, true or false.
    """

    method: str
    path: str
    summary: str
    request: type[msgspec.Struct] | None = None
    supported: frozenset[str] | None = None
    answer: type[msgspec.Struct] | None = None
    content_types: tuple[str, ...] = (_JSON,)
    flags: tuple[str, ...] = ()


def openapi(*, title: str, version: str, model: str, operations: Sequence[Operation]) -> bytes:
    """Returns the document as JSON.

    Args:
        title: Of the server.
        version: Of the program.
        model: The one model that requests may name.
        operations: What the server does.
    """
    named = [kind for operation in operations for kind in _structs(operation)]
    _, components = msgspec.json.schema_components(
        dict.fromkeys(named), schema_hook=_schema_of, ref_template=_REF
    )
    for operation in operations:
        if operation.request is not None:
            _bound(components, operation.request.__name__, model=model)
            if operation.supported is not None:
                _close(components[operation.request.__name__], operation.supported)
    _bound(components, "ChatMessage", model=model)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": title, "version": version},
            "paths": paths,
            "components": {"schemas": {**components, "Error": _ERROR}},
        }
    )


def _structs(operation: Operation) -> Iterable[type[msgspec.Struct]]:
    return (kind for kind in (operation.request, operation.answer) if kind is not None)


def _schema_of(kind: type) -> dict[str, Any]:
    """Returns the schema of a value that nobody looks into."""
    if kind is object:
        return {"description": "Any JSON"}
    raise NotImplementedError


def _bound(components: Mapping[str, Any], name: str, *, model: str) -> None:
    """Adds to the fields of a struct the bounds that its checks have."""
    for field, schema in components.get(name, {}).get("properties", {}).items():
        bounds = {"enum": [model, None]} if field == "model" else BOUNDS.get(field, {})
        for branch in schema.get("anyOf", [schema]):
            if branch.get("type") != "null":
                branch.update(bounds if field != "model" else {"enum": [model]})


def _close(schema: dict[str, Any], supported: frozenset[str]) -> None:
    """Leaves a struct the supported fields; others may have values that ask for nothing."""
    fields = schema["properties"]
    for name in (fields.keys() | NEUTRAL.keys()) - supported:
        fields[name] = {"enum": [*NEUTRAL.get(name, ()), None]}
    schema["additionalProperties"] = {"type": "null"}


def _described(operation: Operation) -> dict[str, Any]:
    """Returns an operation in OpenAPI's words."""
    described: dict[str, Any] = {"summary": operation.summary, "parameters": []}
    if operation.request is not None:
        schema = {"$ref": _REF.format(name=operation.request.__name__)}
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    for name in operation.path.split("{")[1:]:
        described["parameters"].append(
            {
                "in": "path",
                "name": name.split("}")[0],
                "required": True,
                "schema": {"type": "string"},
            }
        )
    for flag in operation.flags:
        described["parameters"].append(
            {"in": "query", "name": flag, "schema": {"type": "boolean"}}
        )
    answer: dict[str, Any] = {}
    if operation.answer is not None:
        answer = {"$ref": _REF.format(name=operation.answer.__name__)}
    error = {
        "description": "Error",
        "content": {_JSON: {"schema": {"$ref": _REF.format(name="Error")}}},
    }
    described["responses"] = {
        "200": {
            "description": "Answer",
            "content": {
                kind: {"schema": answer} if kind == _JSON else {}
                for kind in operation.content_types
            },
        },
        "4XX": error,
        "5XX": error,
    }
    return described
