"""Logs: one line per event whatever it says, the same form for libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvway_core import logs

PROGRAM = """
import logging, structlog
from kvway_core import logs
logs.setup({level!r}, json={json})
log = structlog.get_logger()
with structlog.contextvars.bound_contextvars(request_id="r1"):
    log.debug("request_seen")
    log.info("request_finished", path={path!r}, num_tokens=3)
logging.getLogger("library").warning("careful: %s", {path!r})
logging.getLogger("library").info("chatter")
def answer():
    prompt = "told in " + "confidence"
    return 1 / (len(prompt) - len(prompt))
try:
    answer()
except ZeroDivisionError:
    log.exception("request_crashed")
try:
    answer()
except ZeroDivisionError:
    logging.getLogger("library").exception("crashed")
"""
STRANGE = 'a\r\nb\x1b[31m\x00"\u2028'


def run(level: str, *, json: bool) -> list[str]:
    code = PROGRAM.format(level=level, json=json, path=STRANGE)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b""
    return done.stderr.decode().split("\n")[:-1]


def test_json_lines() -> None:
    seen, finished, library, crashed, its_crash = map(json.loads, run("debug", json=True))
    assert seen["event"] == "request_seen"
    assert finished["event"] == "request_finished"
    assert (finished["path"], finished["num_tokens"]) == (STRANGE, 3)
    assert (finished["request_id"], finished["level"]) == ("r1", "info")
    assert finished["timestamp"].endswith("Z")
    assert (library["event"], library["level"]) == (f"careful: {STRANGE}", "warning")
    assert crashed["exception"][0]["exc_type"] == "ZeroDivisionError"
    assert its_crash["exception"][0]["exc_type"] == "ZeroDivisionError"


def test_text_lines() -> None:
    finished, library, *rest = run("info", json=False)
    assert "request_finished" in finished
    assert f"careful: {repr(STRANGE)[1:-1]}" in library
    assert repr(STRANGE) in finished
    assert "request_id='r1'" in finished
    assert "\x1b" not in "".join([finished, library, *rest])
    assert rest[-1].startswith("ZeroDivisionError")


@pytest.mark.parametrize("json", [True, False])
def test_a_traceback_tells_nothing_of_what_variables_held(*, json: bool) -> None:
    lines = "\n".join(run("debug", json=json))
    assert "ZeroDivisionError" in lines
    assert "told in confidence" not in lines


def test_the_level_is_the_least_severe_event_logged() -> None:
    lines = [json.loads(line)["level"] for line in run("error", json=True)]
    assert lines == ["warning", "error", "error"]


@pytest.mark.parametrize("json", [True, False])
def test_what_cannot_be_written_is_lost_and_ends_nothing(*, json: bool) -> None:
    """A full disk; a pipe without a reader fails the same way, with another number."""
    code = PROGRAM.format(level="debug", json=json, path=STRANGE) + "print('went on')"
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, check=True)
    assert done.stdout == b"went on\n"


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="debug, info, warning, error"):
        logs.setup("loud")
