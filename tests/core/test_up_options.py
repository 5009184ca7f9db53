"""What `kvway up` refuses before it starts anything: one line each."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvway_core.config import load
from kvway_core.errors import ConfigError
from kvway_core.up_options import DEFAULT_MODEL, UpOptions, check_surroundings, make_log_dir


def parse(*argv: str) -> UpOptions:
    """Return the options that a command line means."""
    return load(UpOptions, argv, env={}, prog="kvway up", description="").config


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (("--replicas", "0"), "--replicas must be 1 to 256: 0"),
        (("--replicas", "257"), "--replicas must be 1 to 256: 257"),
        (("--port", "70000"), "--port must be 0 to 65535: 70000"),
        (("--port", "9", "--admin-port", "9"), "--port and --admin-port must differ: both are 9"),
        (("--start-timeout-s", "0"), "--start-timeout-s must be more than 0: 0"),
        (
            ("--worker-arg=--num-blocks 9 --port=1",),
            "--worker-arg sets --port, which `kvway up` sets itself",
        ),
        (
            ("--router-arg=--replica http://h:1",),
            "--router-arg sets --replica, which `kvway up` sets itself",
        ),
        (("--worker-arg=--help",), "--worker-arg sets --help, which `kvway up` sets itself"),
        (("--worker-arg='",), '--worker-arg "\'": No closing quotation'),
    ],
)
def test_a_contradiction_is_named(argv: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    assert list(caught.value.problems) == [problem]


def test_the_ports_may_both_be_any() -> None:
    assert parse("--port", "0", "--admin-port", "0").validate() == []


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_a_taken_port_is_refused(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            check_surroundings(parse(flag, str(port)))
    assert list(caught.value.problems) == [
        f"{flag}: cannot listen on 127.0.0.1:{port}: Address already in use"
    ]


def test_an_unknown_host_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        check_surroundings(parse("--host", "no-such-host.invalid"))
    assert "--port: cannot listen on no-such-host.invalid:0" in caught.value.problems[0]


def test_a_ready_file_needs_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_surroundings(parse("--ready-file", str(tmp_path / "no" / "ready.json")))
    assert list(caught.value.problems) == [f"--ready-file: no such folder: {tmp_path / 'no'}"]


def test_a_ready_file_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_surroundings(parse("--ready-file", str(tmp_path)))
    assert list(caught.value.problems) == [
        f"--ready-file: cannot replace {tmp_path}: Is a directory"
    ]


def test_an_old_ready_file_goes_at_once(tmp_path: Path) -> None:
    old = tmp_path / "ready.json"
    old.write_text("{}")
    check_surroundings(parse("--ready-file", str(old)))
    assert not old.exists()


def test_a_log_dir_is_made(tmp_path: Path) -> None:
    assert make_log_dir(tmp_path / "a" / "b").is_dir()


def test_a_log_dir_that_cannot_be_written_to_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        make_log_dir(Path("/proc"))
    assert "--log-dir: cannot make or write to /proc" in caught.value.problems[0]


def test_a_log_dir_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        make_log_dir(tmp_path / "file")
    assert "--log-dir: cannot make" in caught.value.problems[0]


def test_the_default_model_is_the_one_that_fetch_brings() -> None:
    from kvway_worker import fetch

    assert DEFAULT_MODEL == fetch.DEFAULT_MODEL
