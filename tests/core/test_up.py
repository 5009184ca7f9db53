"""`kvway up` as a user meets it: the console script, sim workers, real sockets."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvway_core.testing.byte_model import write_byte_model
from kvway_core.up import STOP_GRACE_S

pytestmark = pytest.mark.e2e

KVWAY = str(Path(sys.executable).with_name("kvway"))
LAST_LINE = "Ctrl-C stops everything."


class Up:
    """One `kvway up`, and what it has printed so far."""

    def __init__(self, args: Sequence[str]) -> None:
        self.popen = subprocess.Popen(
            [KVWAY, "up", *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.printed: list[str] = []

    def read_until(self, text: str) -> str:
        """Return the first further line with `text` in it."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.printed.append(line.rstrip("\n"))
            if text in line:
                return self.printed[-1]
        raise AssertionError(f"ended without {text!r}:\n" + "\n".join(self.printed))

    def children(self) -> dict[str, psutil.Process]:
        """Return the running children by the subcommand they run, workers with their port."""
        found = {}
        for child in psutil.Process(self.popen.pid).children():
            command = child.cmdline()
            name = command[command.index(KVWAY) + 1]
            port = command[command.index("--port") + 1]
            found[name if name == "router" else port] = child
        return found

    def stop(self, number: signal.Signals) -> int:
        """Send a signal and return the exit code."""
        self.popen.send_signal(number)
        return self.popen.wait(timeout=STOP_GRACE_S + 1)


@pytest.fixture
def started() -> Iterator[list[Up]]:
    """Return a list; every `Up` in it is ended after the test, and its children with it."""
    ups: list[Up] = []
    yield ups
    for up in ups:
        up.popen.kill()
        up.popen.wait()
        assert up.popen.stdout is not None
        up.popen.stdout.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model whose tokens are bytes."""
    return write_byte_model(tmp_path_factory.mktemp("model") / "bytes")


def start_sim(started: list[Up], model: Path, log_dir: Path, *args: str) -> Up:
    """Start sim workers behind a router and return once they are ready."""
    up = Up(["--engine", "sim", "--model", str(model), "--log-dir", str(log_dir), *args])
    started.append(up)
    up.read_until(LAST_LINE)
    return up


def get(url: str) -> dict[str, Any]:
    """GET a JSON object."""
    with urllib.request.urlopen(url, timeout=20) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def post(url: str, body: object) -> dict[str, Any]:
    """POST JSON and return the JSON answer."""
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def ended(processes: Sequence[psutil.Process]) -> bool:
    """Return once all have ended; False when one is still there after ten seconds."""
    _, alive = psutil.wait_procs(processes, timeout=10)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def refused(*args: str) -> list[str]:
    """Run `kvway up` with arguments that it refuses; return the lines that it says."""
    done = subprocess.run([KVWAY, "up", *args], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()


def test_it_tells_where_everything_is_and_ctrl_c_leaves_nothing(
    started: list[Up], model: Path, tmp_path: Path
) -> None:
    ready_file = tmp_path / "ready.json"
    up = start_sim(started, model, tmp_path, "--replicas", "2", "--ready-file", str(ready_file))
    children = up.children()

    ready = json.loads(ready_file.read_text())
    assert set(ready) == {"api", "admin", "replicas"}
    assert [set(replica) for replica in ready["replicas"]] == [{"id", "url"}] * 2
    ports = {replica["id"].rpartition(":")[2] for replica in ready["replicas"]}
    assert set(children) == {"router", *ports}
    seen = {entry["replica_id"] for entry in get(f"{ready['admin']}/admin/replicas")["replicas"]}
    assert seen == {replica["id"] for replica in ready["replicas"]}

    assert f"  requests  {ready['api']}/v1" in up.printed
    assert f"  page      {ready['admin']}/" in up.printed
    curl = shlex.split(next(line for line in up.printed if line.startswith("  try "))[12:])
    assert curl[:3] == ["curl", "-s", f"{ready['api']}/v1/chat/completions"]
    answer = post(curl[2], json.loads(curl[curl.index("-d") + 1]))
    assert answer["model"] == "bytes"
    assert answer["choices"][0]["message"]["content"]

    assert up.stop(signal.SIGINT) == 0
    assert ended(list(children.values()))


def test_sigterm_does_not_wait_for_a_request_that_never_ends(
    started: list[Up], model: Path, tmp_path: Path
) -> None:
    up = start_sim(
        *(started, model, tmp_path, "--replicas", "1"),
        "--worker-arg=--sim-decode-step-s 0.5",
    )
    api = next(line for line in up.printed if line.startswith("  requests")).split()[1]
    children = up.children()
    replica = next(f"http://127.0.0.1:{port}" for port in children if port != "router")
    body = json.dumps({"model": "bytes", "prompt": "hello", "max_tokens": 4000}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    host, _, port = api.removeprefix("http://").removesuffix("/v1").partition(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        while not get(f"{replica}/load")["num_running"]:
            pass
        assert up.stop(signal.SIGTERM) == 0
    assert ended(list(children.values()))


def test_a_worker_that_dies_is_reported_and_the_rest_goes_on(
    started: list[Up], model: Path, tmp_path: Path
) -> None:
    up = start_sim(started, model, tmp_path, "--replicas", "2")
    api = next(line for line in up.printed if line.startswith("  requests")).split()[1]
    children = up.children()
    router = children.pop("router")
    first, last = children.values()

    first.kill()
    report = up.read_until("was killed by SIGKILL, 1 of 2 workers go on; log: ")
    assert report.startswith("kvway up: worker-")
    answer = post(f"{api}/completions", {"model": "bytes", "prompt": "hi", "max_tokens": 2})
    assert answer["usage"]["completion_tokens"] == 2

    last.kill()
    up.read_until("was killed by SIGKILL, and no worker is left; log: ")
    assert up.popen.wait(timeout=STOP_GRACE_S + 1) == 1
    assert ended([router])


def test_without_its_router_all_ends(started: list[Up], model: Path, tmp_path: Path) -> None:
    up = start_sim(started, model, tmp_path, "--replicas", "1")
    children = up.children()
    children["router"].kill()
    up.read_until("router was killed by SIGKILL, and nothing works without it; log: ")
    assert up.popen.wait(timeout=STOP_GRACE_S + 1) == 1
    assert ended(list(children.values()))


def test_killed_outright_it_leaves_nothing(started: list[Up], model: Path, tmp_path: Path) -> None:
    up = start_sim(started, model, tmp_path, "--replicas", "2")
    children = list(up.children().values())
    assert len(children) == 3
    up.popen.kill()
    assert ended(children)


def test_a_worker_that_cannot_start_ends_all_with_its_own_words(
    model: Path, tmp_path: Path
) -> None:
    lines = refused(
        *("--engine", "sim", "--model", str(model), "--log-dir", str(tmp_path)),
        "--worker-arg=--num-blocks many",
    )
    assert len(lines) == 1
    assert lines[0].startswith("kvway up: worker-")
    assert "--num-blocks" in lines[0]


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    lines = refused("--model", str(tmp_path / "none"), "--log-dir", str(tmp_path))
    assert len(lines) == 1
    assert str(tmp_path / "none") in lines[0]


def test_a_taken_port_is_one_line(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        lines = refused("--model", str(model), "--port", str(port))
    assert lines == [f"kvway: --port: cannot listen on 127.0.0.1:{port}: Address already in use"]


def test_an_unknown_flag_is_one_line() -> None:
    assert len(refused("--replica", "2")) == 1
