"""The `kvway` command as a user meets it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from kvway_core import cli
from kvway_core.cli import Command
from kvway_core.errors import ConfigError


def interrupted(_argv: object) -> int:
    raise KeyboardInterrupt


def misconfigured(_argv: object) -> int:
    raise ConfigError(["the first thing\nis wrong", "the second too"])


GOOD = Command("good", "Does what it is told.", len)
WRONG = Command("wrong", "Is never configured.", misconfigured)
STOPPED = Command("stopped", "Is stopped by hand.", interrupted)
NO_COMMAND = "not a command"
INSTALL = "run: pip install 'kvway[worker]'"


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the commands of this file as if a distribution had registered them."""
    targets = {"good": "GOOD", "wrong": "WRONG", "stopped": "STOPPED"}
    entries = [EntryPoint(name, f"{__name__}:{at}", cli.GROUP) for name, at in targets.items()]
    entries.append(EntryPoint("worker", "kvway_nowhere.cli:COMMAND", cli.GROUP))
    monkeypatch.setattr(cli, "entry_points", lambda group: entries if group == cli.GROUP else [])


def test_a_command_gets_the_rest_and_gives_the_exit_code() -> None:
    assert cli.main(["good", "a", "--help"]) == 2
    assert cli.main(["good"]) == 0


def test_problems_are_lines_and_the_exit_code_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["wrong"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "kvway: the first thing is wrong\nkvway: the second too\n"


@pytest.mark.parametrize(
    ("problem", "argv"),
    [
        ("unknown command 'goood'; did you mean good?", ["goood"]),
        ("unknown command 'xyzzy'; there are good, stopped, worker, wrong", ["xyzzy"]),
        ("unknown option '--verbose'; there are good, stopped, worker, wrong", ["--verbose"]),
        ("worker needs kvway_nowhere, which is not installed; " + INSTALL, ["worker"]),
    ],
)
def test_a_wrong_command_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], problem: str, argv: list[str]
) -> None:
    assert cli.main(argv) == 2
    assert capsys.readouterr().err == f"kvway: {problem}\n"


def test_an_interrupted_command_exits_as_shells_expect() -> None:
    assert cli.main(["stopped"]) == 130


def test_an_entry_point_that_is_no_command_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = EntryPoint("odd", f"{__name__}:NO_COMMAND", cli.GROUP)
    monkeypatch.setattr(cli, "entry_points", lambda **_group: [odd])
    with pytest.raises(TypeError, match="not a Command"):
        cli.main(["odd"])


def test_no_command_is_help_and_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: kvway COMMAND")


def test_version_and_help_of_the_real_command() -> None:
    from importlib.metadata import version

    def kvway(*argv: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; from kvway_core.cli import main; sys.exit(main())"
        return subprocess.run(
            [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False
        )

    assert kvway("--version").stdout == f"kvway {version('kvway')}\n"
    helped = kvway("--help")
    assert helped.returncode == 0
    for name in ("fetch", "router", "up", "worker"):
        assert f"\n  {name} " in helped.stdout


def test_a_library_that_will_be_needed_is_missed_at_once() -> None:
    cli.require("worker", "json", "msgspec")
    with pytest.raises(ConfigError) as caught:
        cli.require("worker", "msgspec", "kvway_nowhere")
    assert list(caught.value.problems) == [
        "worker needs kvway_nowhere, which is not installed; " + INSTALL
    ]
