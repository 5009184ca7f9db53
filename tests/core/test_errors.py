"""The tree of errors: complete, consistent, and safe to print."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvway_core import errors
from kvway_core.errors import (
    ConfigError,
    ConnectFailed,
    InternalError,
    InvalidRequest,
    KvwayError,
    ReplicaRejected,
    error_body,
)


def leaves(root: type[KvwayError] = KvwayError) -> Iterator[type[KvwayError]]:
    children = [kind for kind in root.__subclasses__() if kind.__module__ == errors.__name__]
    if not children:
        yield root
    for child in children:
        yield from leaves(child)


LEAVES = sorted(leaves(), key=lambda kind: kind.__name__)


def build(kind: type[KvwayError]) -> KvwayError:
    if kind is InternalError:
        return InternalError()
    if kind is ConfigError:
        return ConfigError(["what is wrong"])
    return kind("what is wrong", param="field")


@pytest.mark.parametrize("kind", LEAVES)
def test_every_leaf_is_complete(kind: type[KvwayError]) -> None:
    error = build(kind)
    assert error.code.islower()
    assert 400 <= error.http_status < 600
    expected = "invalid_request_error" if error.http_status < 500 else "server_error"
    assert error.error_type == expected
    assert inspect.getdoc(kind)
    assert kind.__name__ in (errors.__doc__ or "")


def test_no_two_leaves_share_a_code() -> None:
    codes = [kind.code for kind in LEAVES]
    assert sorted(codes) == sorted(set(codes))


def test_only_what_was_not_begun_may_be_tried_again() -> None:
    assert {kind for kind in LEAVES if kind.retryable} == {ConnectFailed, ReplicaRejected}


def test_golden_bodies(golden: Callable[[str, str], None]) -> None:
    lines = [f"{build(kind).http_status} {error_body(build(kind)).decode()}" for kind in LEAVES]
    golden("error_bodies.txt", "\n".join(lines) + "\n")


def test_an_invalid_request_may_name_its_kind() -> None:
    error = InvalidRequest("no", param="n", code="invalid_number")
    assert (error.code, InvalidRequest("no").code) == ("invalid_number", "invalid_request")


def test_a_config_error_carries_every_problem() -> None:
    assert ConfigError(["one", "two"]).problems == ("one", "two")


@given(st.text(), st.none() | st.text())
def test_a_body_is_one_ascii_line_whatever_it_says(message: str, param: str | None) -> None:
    body = error_body(InvalidRequest(message, param=param))
    assert body.isascii()
    assert b"\n" not in body
    assert b"\r" not in body
    error = json.loads(body)["error"]
    assert (error["message"], error["param"]) == (message, param)


def test_half_a_surrogate_pair_does_not_break_the_answer() -> None:
    assert b"\\ud800" in error_body(InvalidRequest("\ud800"))
