"""How a process stops: on its own, when a task fails, on signals, and at once."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvway_core.errors import ConfigError
from kvway_core.lifecycle import Supervisor, local_url, run, write_ready_file

PROGRAM = """
import asyncio, sys
from kvway_core import logs
from kvway_core.lifecycle import Supervisor, run

async def main(supervisor):
    print("ready", flush=True)
    await supervisor.wait_for_stop()
    print("stopping", flush=True)
    {drain}
    print("drained", flush=True)

logs.setup()
sys.exit(run(main))
"""


@contextmanager
def program(drain: str) -> Iterator[subprocess.Popen[str]]:
    code = PROGRAM.format(drain=drain)
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_program_finish(number: signal.Signals) -> None:
    with program(drain="pass") as process:
        assert line_of(process) == "ready"
        process.send_signal(number)
        assert (line_of(process), line_of(process)) == ("stopping", "drained")
        assert process.wait() == 0


def test_a_second_signal_ends_it_at_once() -> None:
    with program(drain="await asyncio.Event().wait()") as process:
        assert line_of(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert line_of(process) == "stopping"
        process.send_signal(signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT


def test_a_program_that_returns_is_done() -> None:
    ran = []

    async def main(supervisor: Supervisor) -> None:
        assert type(asyncio.get_running_loop()).__module__.startswith("uvloop")
        assert not supervisor.stopping
        ran.append(True)

    assert run(main) == 0
    assert ran == [True]


def test_a_failed_task_stops_the_process_with_its_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def fail() -> None:
        raise RuntimeError("the reason")

    async def main(supervisor: Supervisor) -> None:
        _ = supervisor.spawn("doomed", fail())
        await supervisor.wait_for_stop()
        assert supervisor.failed

    assert run(main) == 1
    said = capsys.readouterr().out
    assert "task_failed" in said
    assert "doomed" in said
    assert "RuntimeError: the reason" in said


def test_an_error_of_the_program_comes_out_as_it_is() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    async def main(supervisor: Supervisor) -> None:
        _ = supervisor.spawn("waiting", wait())
        raise ConfigError(["no model"])

    with pytest.raises(ConfigError, match="no model"):
        run(main)


async def test_every_task_has_ended_when_the_supervisor_is_left() -> None:
    ended = []

    async def wait(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    async with Supervisor() as supervisor:
        tasks = [supervisor.spawn(name, wait(name)) for name in ("a", "b")]
        await asyncio.sleep(0)
    assert sorted(ended) == ["a", "b"]
    assert all(task.done() for task in tasks)
    assert not supervisor.failed


async def test_a_task_may_return_or_be_cancelled_without_stopping_the_process() -> None:
    async def finish() -> None:
        return

    async def wait() -> None:
        await asyncio.Event().wait()

    async with Supervisor() as supervisor:
        await supervisor.spawn("short", finish())
        waiting = supervisor.spawn("long", wait())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert not supervisor.stopping
        supervisor.stop("test")
        supervisor.stop("twice")
        await supervisor.wait_for_stop()
    assert not supervisor.failed


async def test_a_task_that_fails_while_being_cancelled_is_still_a_failure() -> None:
    async def fail_late() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("while cleaning up")

    async with Supervisor() as supervisor:
        _ = supervisor.spawn("late", fail_late())
        await asyncio.sleep(0)
    assert supervisor.failed


def test_a_ready_file_replaces_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    path.write_text("old")
    write_ready_file(path, {"url": "http://127.0.0.1:1", "pid": 7})
    assert json.loads(path.read_text()) == {"url": "http://127.0.0.1:1", "pid": 7}
    assert [entry.name for entry in tmp_path.iterdir()] == ["ready.json"]


def test_a_ready_file_that_cannot_be_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        write_ready_file(tmp_path / "missing" / "ready.json", {})


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("worker", "http://worker:80"),
    ],
)
def test_a_url_is_one_that_clients_here_can_use(host: str, url: str) -> None:
    assert local_url(host, 80) == url
