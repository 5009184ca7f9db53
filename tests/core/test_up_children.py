"""Children end with their parent; signals are read where the program waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvway_core.children import Child, Signals, StopRequested, stop_all

STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
    "signal.pause()"
)


@pytest.fixture
def signals() -> Iterator[Signals]:
    """Return signals that are read, as `kvway up` reads them, also where `nohup` ignores one."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with Signals() as blocked:
            yield blocked
    finally:
        signal.signal(signal.SIGHUP, before)


def start(code: str, folder: Path, signals: Signals) -> Child:
    """Start Python code as a child."""
    command = [sys.executable, "-c", code]
    return Child("child", command, log=folder / "log", signals=signals, env=os.environ)


def start_stubborn(folder: Path, signals: Signals) -> Child:
    """Start a child that ignores SIGTERM, and return once it does."""
    child = start(STUBBORN, folder, signals)
    while not child.last_lines(1):
        signals.pause()
    return child


def test_a_child_takes_the_signals_that_its_parent_only_reads(
    tmp_path: Path, signals: Signals
) -> None:
    code = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    child = start(code, tmp_path, signals)
    child.wait()
    assert child.last_lines(5) == ["set()"]


def test_the_end_of_a_child_ends_a_pause(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys; from kvway_core.children import Child, Signals\n"
        "with Signals() as signals:\n"
        "    log = pathlib.Path(sys.argv[1])\n"
        "    child = Child('c', ['false'], log=log, signals=signals, env=os.environ)\n"
        "    while child.exit_code is None:\n"
        "        signals.pause(600)\n"
        "print(child.how_it_ended())\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "ended with exit code 1\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_request_ends_a_pause(number: signal.Signals, signals: Signals) -> None:
    signal.raise_signal(number)
    with pytest.raises(StopRequested):
        signals.pause(limit_s=600)


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signal.raise_signal(signal.SIGHUP)
            signals.pause(limit_s=0)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_requests_that_nobody_read_do_not_strike_later() -> None:
    with Signals():
        signal.raise_signal(signal.SIGINT)
    assert signal.SIGINT not in signal.sigpending()


def test_stop_asks_first(tmp_path: Path, signals: Signals) -> None:
    code = "import signal; print('up', flush=True); signal.pause()"
    child = start(code, tmp_path, signals)
    stop_all([child], signals=signals, grace_s=600)
    assert child.how_it_ended() == "was killed by SIGTERM"


def test_stop_kills_what_does_not_listen(tmp_path: Path, signals: Signals) -> None:
    child = start_stubborn(tmp_path, signals)
    stop_all([child], signals=signals, grace_s=0.1)
    assert child.how_it_ended() == "was killed by SIGKILL"


def test_a_second_request_ends_the_waiting(tmp_path: Path, signals: Signals) -> None:
    child = start_stubborn(tmp_path, signals)
    signal.raise_signal(signal.SIGINT)
    stop_all([child], signals=signals, grace_s=600)
    assert child.how_it_ended() == "was killed by SIGKILL"


def test_stop_reaches_what_a_child_started(tmp_path: Path, signals: Signals) -> None:
    code = (
        "import subprocess, sys; grandchild = subprocess.Popen(['sleep', '600']); "
        "print(grandchild.pid, flush=True); grandchild.wait()"
    )
    child = start(code, tmp_path, signals)
    while not child.last_lines(1):
        signals.pause()
    grandchild = psutil.Process(int(child.last_lines(1)[0]))
    stop_all([child], signals=signals, grace_s=600)
    await_end(grandchild)


def test_a_child_ends_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys; from kvway_core.children import Child, Signals\n"
        "with Signals() as signals:\n"
        "    log = pathlib.Path(sys.argv[1])\n"
        "    child = Child('c', ['sleep', '600'], log=log, signals=signals, env=os.environ)\n"
        "    print(child._popen.pid, flush=True)\n"
        "    signals.pause(600)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    await_end(child)


def test_last_lines_are_the_last_and_bounded(tmp_path: Path, signals: Signals) -> None:
    code = "print('x' * 100_000); print('one'); print(); print('two')"
    child = start(code, tmp_path, signals)
    child.wait()
    assert child.last_lines(2) == ["one", "two"]
    assert sum(map(len, child.last_lines(50))) < 9000


def await_end(process: psutil.Process) -> None:
    """Return when the process has ended; whoever inherited it may not have collected it yet."""
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        try:
            process.wait(timeout=0.05)
        except psutil.TimeoutExpired:
            continue
