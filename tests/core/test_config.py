"""Configuration: four sources, one order, every problem at once, the same help everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from kvway_core.config import Loaded, load, option, render_config
from kvway_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Example:
    """A field of every kind."""

    model: str | None = option(None, help="model id or folder")
    port: int = option(8000, help="port to listen on, 0 for any free one")
    engine: str = option("torch", help="what computes", choices=("torch", "sim"))
    log_level: Literal["info", "debug"] = option(
        "info", help="least severe event logged", choices=("info", "debug")
    )
    kv_events: bool = option(True, help="publish KV events")
    deterministic: bool = option(False, help="the same bits on every run, 100% slower")
    drain_timeout_s: float = option(30.0, help="time to finish requests", unit="seconds")
    replica: tuple[str, ...] = option((), help="replica to send to", metavar="URL")
    ready_file: Path | None = option(None, help="file to write when ready")

    def validate(self) -> Sequence[str]:
        problems = []
        if self.port < 0:
            problems.append("--port must be 0 or more")
        if self.deterministic and self.engine == "sim":
            problems.append("--deterministic makes no sense with --engine sim")
        return problems


def read(*argv: str, env: dict[str, str] | None = None) -> Loaded[Example]:
    return load(Example, argv, env=env or {}, prog="kvway example", description="Runs an example.")


def problems(*argv: str, env: dict[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read(*argv, env=env)
    return caught.value.problems


def test_defaults_are_written_once() -> None:
    loaded = read()
    assert loaded.config == Example()
    assert set(loaded.sources.values()) == {"default"}


def test_a_flag_wins_over_the_environment_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvway.toml"
    file.write_text('port = 1\nengine = "sim"\nlog_level = "debug"\n')
    env = {"KVWAY_EXAMPLE_PORT": "2", "KVWAY_EXAMPLE_ENGINE": "torch"}
    loaded = read("--config", str(file), "--port", "3", env=env)
    assert loaded.config == Example(port=3, engine="torch", log_level="debug")
    assert loaded.sources["port"] == "flag"
    assert loaded.sources["engine"] == "environment"
    assert loaded.sources["log_level"] == "file"
    assert loaded.sources["model"] == "default"


def test_every_kind_by_flag() -> None:
    argv = [
        "--model",
        "m",
        "--port=9",
        "--engine",
        "sim",
        "--no-kv-events",
        "--drain-timeout-s",
        "1e1",
    ]
    argv += ["--replica", "http://a", "--replica", "http://b", "--ready-file", "x/y"]
    assert read(*argv).config == Example(
        model="m",
        port=9,
        engine="sim",
        kv_events=False,
        drain_timeout_s=10.0,
        replica=("http://a", "http://b"),
        ready_file=Path("x/y"),
    )


def test_every_kind_by_environment() -> None:
    env = {
        "KVWAY_EXAMPLE_MODEL": "m",
        "KVWAY_EXAMPLE_KV_EVENTS": "False",
        "KVWAY_EXAMPLE_DETERMINISTIC": "on",
        "KVWAY_EXAMPLE_DRAIN_TIMEOUT_S": "0",
        "KVWAY_EXAMPLE_REPLICA": "http://a,http://b",
        "KVWAY_EXAMPLE_READY_FILE": "x",
        "KVWAY_OTHER_PORT": "7",
        "PATH": "/bin",
    }
    assert read(env=env).config == Example(
        model="m",
        kv_events=False,
        deterministic=True,
        drain_timeout_s=0.0,
        replica=("http://a", "http://b"),
        ready_file=Path("x"),
    )


def test_every_kind_by_file(tmp_path: Path) -> None:
    file = tmp_path / "kvway.toml"
    file.write_text(
        'model = "m"\nkv_events = false\ndrain_timeout_s = 5\n'
        'replica = ["http://a"]\nready_file = "x"\n'
    )
    assert read("--config", str(file)).config == Example(
        model="m",
        kv_events=False,
        drain_timeout_s=5.0,
        replica=("http://a",),
        ready_file=Path("x"),
    )


def test_the_last_of_two_flags_counts() -> None:
    assert read("--port", "1", "--port", "2", "--no-kv-events", "--kv-events").config == Example(
        port=2
    )


def test_an_empty_variable_is_not_set() -> None:
    assert read(env={"KVWAY_EXAMPLE_PORT": ""}).config == Example()


def test_variables_of_a_kubernetes_service_are_not_options() -> None:
    """A service called kvway-example puts these into every pod."""
    env = {
        "KVWAY_EXAMPLE_SERVICE_HOST": "10.0.0.1",
        "KVWAY_EXAMPLE_SERVICE_PORT": "8000",
        "KVWAY_EXAMPLE_SERVICE_PORT_HTTP": "8000",
        "KVWAY_EXAMPLE_PORT": "tcp://10.0.0.1:8000",
        "KVWAY_EXAMPLE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "KVWAY_EXAMPLE_PORT_8000_TCP_PROTO": "tcp",
        "KVWAY_EXAMPLE_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert read(env=env).config == Example()


@pytest.mark.parametrize(
    ("problem", "argv"),
    [
        ("unknown option --prot; did you mean --port?", ["--prot", "1"]),
        ("unknown option --prot; did you mean --port?", ["--prot=1"]),
        ("unknown option --xyzzy", ["--xyzzy"]),
        ("unknown option --por; did you mean --port?", ["--por", "1"]),
        ("unknown option surplus", ["surplus"]),
        ("--port: expected a whole number, got 'x'", ["--port", "x"]),
        ("--port: expected a whole number, got '1.5'", ["--port", "1.5"]),
        ("--drain-timeout-s: expected a number, got 'soon'", ["--drain-timeout-s", "soon"]),
        ("--drain-timeout-s: expected a finite number, got 'nan'", ["--drain-timeout-s", "nan"]),
        ("--drain-timeout-s: expected a finite number, got 'inf'", ["--drain-timeout-s", "inf"]),
        ("--engine: expected one of torch, sim, got 'tpu'", ["--engine", "tpu"]),
        ("--model: expected a value, got an empty one, got ''", ["--model", ""]),
        ("argument --port: expected one argument (see kvway example --help)", ["--port"]),
        ("--port must be 0 or more", ["--port", "-1"]),
    ],
)
def test_a_wrong_flag_is_one_clear_problem(problem: str, argv: list[str]) -> None:
    assert problems(*argv) == (problem,)


@pytest.mark.parametrize(
    ("problem", "content"),
    [
        ("unknown option prot; did you mean port?", "prot = 1"),
        ("unknown option table", "[table]\nport = 1"),
        ("port: expected a whole number, got '1'", 'port = "1"'),
        ("port: expected a whole number, got 'True'", "port = true"),
        ("kv_events: expected true or false, got '1'", "kv_events = 1"),
        ("drain_timeout_s: expected a finite number, got 'nan'", "drain_timeout_s = nan"),
        ("replica: expected an array of strings, got 'x'", 'replica = "x"'),
        ("replica: expected an array of strings, got '[1]'", "replica = [1]"),
        ("ready_file: expected a string, got '1'", "ready_file = 1"),
        ("engine: expected one of torch, sim, got 'tpu'", 'engine = "tpu"'),
        ("Expected '=' after a key", "port"),
    ],
)
def test_a_wrong_file_is_one_clear_problem(tmp_path: Path, problem: str, content: str) -> None:
    file = tmp_path / "kvway.toml"
    file.write_text(content)
    (found,) = problems("--config", str(file))
    assert found.startswith(f"--config {file}: {problem}")


def test_a_file_that_is_not_there() -> None:
    assert problems("--config", "/nowhere.toml") == (
        "--config /nowhere.toml: No such file or directory",
    )


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "kvway.toml"
    file.write_text("a = 1\nport = []")
    env = {"KVWAY_EXAMPLE_PORTS": "1", "KVWAY_EXAMPLE_KV_EVENTS": "maybe"}
    assert len(problems("--config", str(file), "--nope", "--port", "x", env=env)) == 6


def test_contradictions_are_reported_at_once() -> None:
    assert len(problems("--port", "-1", "--deterministic", "--engine", "sim")) == 2


def test_options_that_contradict_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read("--port", "-1", "--print-config")
    assert caught.value.code == 0
    assert "port = -1  # flag" in capsys.readouterr().out


def test_golden_help(
    golden: Callable[[str, str], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit) as caught:
            read("--help")
        assert caught.value.code == 0
        golden("config_help.txt", capsys.readouterr().out)


def test_golden_print_config(
    golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        read("--print-config", "--port", "1", "--replica", 'a"b', env={"KVWAY_EXAMPLE_MODEL": "m"})
    assert caught.value.code == 0
    golden("config_print.txt", capsys.readouterr().out)


def test_what_is_printed_can_be_read_back(tmp_path: Path) -> None:
    loaded = read("--model", 'a"b\\c\u00e9', "--no-kv-events", "--replica", "x", "--port", "5")
    file = tmp_path / "kvway.toml"
    file.write_text(render_config(loaded), encoding="utf-8")
    assert read("--config", str(file)).config == loaded.config


def test_a_field_of_another_type_is_a_bug_of_ours() -> None:
    @dataclass(frozen=True)
    class Wrong:
        ports: list[int] = field(default_factory=list)

    with pytest.raises(TypeError, match="cannot be configured"):
        load(Wrong, [], env={}, prog="kvway wrong", description="")
