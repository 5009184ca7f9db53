"""`kvway router` on the command line: help, the example file, and what stops it from starting."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvway_core.config import load
from kvway_core.errors import ConfigError
from kvway_router import cli
from kvway_router.cli import COMMAND, DESCRIPTION
from kvway_router.index import MIN_BYTES
from kvway_router.settings import RouterSettings

EXAMPLE = Path(__file__).parents[2] / "router" / "config.example.toml"
NEEDED = ("--model", "m", "--replica", "http://127.0.0.1:1")


def settings_of(*argv: str) -> RouterSettings:
    return load(RouterSettings, argv, env={}, prog="kvway router", description=DESCRIPTION).config


def test_help_is_as_agreed(
    golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        COMMAND.run(["--help"])
    assert stopped.value.code == 0
    golden("router_help.txt", capsys.readouterr().out)


def test_the_example_file_is_the_defaults() -> None:
    assert settings_of(*NEEDED, "--config", str(EXAMPLE)) == settings_of(*NEEDED)


def test_the_example_file_has_every_option() -> None:
    names = {
        line.removeprefix("# ").partition(" = ")[0]
        for line in EXAMPLE.read_text().splitlines()
        if " = " in line
    }
    assert {field.name for field in dataclasses.fields(RouterSettings)} == names


@pytest.mark.parametrize(
    ("problem", "argv"),
    [
        ("no replicas: give --replica URL", ("--model", "m")),
        ("no model: give --model", ("--replica", "http://127.0.0.1:1")),
        ("'ftp://x' is not http://HOST:PORT", ("--model", "m", "--replica", "ftp://x")),
        ("'worker' is not HOST:PORT", ("--model", "m", "--replica-dns", "worker")),
        ("--port must be 0 to 65535, got 65536", (*NEEDED, "--port", "65536")),
        ("both 8081", (*NEEDED, "--port", "8081")),
        ("--max-attempts must be more than 0", (*NEEDED, "--max-attempts", "0")),
        (f"--max-index-bytes must be {MIN_BYTES} to", (*NEEDED, "--max-index-bytes", "1000")),
        ("--drain-timeout-s must not be negative", (*NEEDED, "--drain-timeout-s", "-1")),
        ("--host-reload-us must not be negative", (*NEEDED, "--host-reload-us", "-1")),
        ("--disk-reload-us must be 1e+06 at most", (*NEEDED, "--disk-reload-us", "2e6")),
        ("--policy 'best' is not one of cost, round_robin,", (*NEEDED, "--policy", "best")),
        ("--bogus", (*NEEDED, "--bogus")),
    ],
)
def test_what_is_wrong_is_said_in_one_line(problem: str, argv: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(*argv)
    (line,) = caught.value.problems
    assert problem in line


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of("--port", "-1", "--max-attempts", "0")
    assert len(caught.value.problems) == 4


def test_both_listeners_may_take_any_free_port() -> None:
    settings = settings_of(*NEEDED, "--port", "0", "--admin-port", "0")
    assert (settings.port, settings.admin_port) == (0, 0)


def test_a_model_that_is_not_there_says_how_to_fetch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWAY_HOME", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        COMMAND.run(["--model", "owner/name", "--replica", "http://127.0.0.1:1"])
    (line,) = caught.value.problems
    assert "kvway fetch owner/name" in line


def test_the_command_loads_neither_torch_nor_the_worker() -> None:
    code = (
        "import sys, kvway_router.app, kvway_router.cli\n"
        "print(sorted({'torch', 'transformers', 'kvway_worker'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"


def test_full_collections_do_not_go_through_what_stays(
    byte_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvway_core.logs.setup", lambda _: None)
    monkeypatch.setattr(cli, "run_supervised", lambda _: gc.get_freeze_count())
    argv = ["--model", str(byte_model), "--replica", "http://127.0.0.1:1"]
    assert COMMAND.run(argv) > 10_000
    gc.unfreeze()
