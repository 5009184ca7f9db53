"""`kvway up`: a router and its replicas on one machine, started and stopped as one.

::

    kvway up ──> kvway fetch MODEL            prints the model's folder
             ├─> kvway worker   (N of them)   on loopback ports that are held for them
             └─> kvway router                 with the workers' addresses

The workers' ports are known before the workers run, so everything starts at once. No child
outlives this process: Ctrl-C, SIGTERM and SIGHUP end them with SIGTERM, and with SIGKILL those
still there after `STOP_GRACE_S`; should this process be killed outright, Linux ends them
(see `kvway_core.children`).
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NoReturn
from urllib.parse import urlsplit

import msgspec

from kvway_core.children import Child, Signals, StopRequested, kvway_command, stop_all
from kvway_core.cli import Command
from kvway_core.config import load
from kvway_core.lifecycle import write_ready_file
from kvway_core.models import served_model_name
from kvway_core.up_options import UpOptions, check_surroundings, make_log_dir

STOP_GRACE_S: Final = 3.5
_DRAIN_ARGS: Final = ("--drain-timeout-s", "1")
"""So that answers still running get their last word before the grace is over."""
_HEARTBEAT_S: Final = 5.0
_LOG_LINES_SHOWN: Final = 12
_PROBE_TIMEOUT_S: Final = 2.0
_ROUTER: Final = "router"
_EXIT_CONFIG: Final = 2


class RouterReady(msgspec.Struct, frozen=True):
    """What the router's ready file says."""

    api: str
    admin: str


class Replica(msgspec.Struct, frozen=True):
    """One worker in our ready file: its id as the router knows it, and its address."""

    id: str
    url: str


class UpReady(msgspec.Struct, frozen=True):
    """Our ready file."""

    api: str
    admin: str
    replicas: list[Replica]


class ReplicaSeen(msgspec.Struct, frozen=True):
    """One replica as the router sees it."""

    state: str


class ReplicasSeen(msgspec.Struct, frozen=True):
    """The answer of the router's ``/admin/replicas``, as far as it matters here."""

    replicas: list[ReplicaSeen]


class UpFailed(Exception):
    """The cluster cannot run: what to tell, and the exit code."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run(argv: Sequence[str]) -> int:
    """Run `kvway up` until it is stopped; return its exit code.

    Raises:
        ConfigError: flags contradict, a port is taken, or a file cannot be written.
    """
    options = load(
        UpOptions,
        argv,
        env=os.environ,
        prog="kvway up",
        description="Start a router and its workers on this machine; Ctrl-C stops them.",
    ).config
    check_surroundings(options)
    log_dir = make_log_dir(options.log_dir)
    with Signals() as signals:
        cluster = Cluster(options, log_dir=log_dir, signals=signals, env=os.environ)
        try:
            cluster.start()
            cluster.watch()
        except StopRequested as request:
            _say(f"stopping on {request}")
            return 0
        except UpFailed as error:
            if str(error):
                _warn(str(error))
            return error.exit_code
        finally:
            cluster.stop()


COMMAND: Final = Command("up", "start a router and N workers on this machine", run)


class Cluster:
    """The processes of one `kvway up`.

    Invariants:
        1. Every process that was started is in `_children` until it has ended.
    """

    __slots__ = (
        "_children",
        "_env",
        "_held_ports",
        "_log_dir",
        "_options",
        "_signals",
        "_started_s",
    )

    def __init__(
        self, options: UpOptions, *, log_dir: Path, signals: Signals, env: Mapping[str, str]
    ) -> None:
        self._options = options
        self._log_dir = log_dir
        self._signals = signals
        self._env = env
        self._children: list[Child] = []
        self._held_ports = ExitStack()
        self._started_s = time.monotonic()

    def start(self) -> None:
        """Start everything, wait until all of it is ready, tell where it is.

        Raises:
            StopRequested: someone asked this process to end.
            UpFailed: a process ended, or was not ready in time.
        """
        options = self._options
        name = options.served_model_name or served_model_name(options.model)
        folder = self._fetch()
        self._started_s = time.monotonic()
        _say(f"logs in {self._log_dir}")
        ports = [self._hold_port() for _ in range(options.replicas)]
        for number, port in enumerate(ports, start=1):
            self._start_worker(f"worker-{number}", port=port, folder=folder, served_as=name)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        self._start_router(urls, folder=folder, served_as=name)
        router = self._await_ready()
        self._await_routable(router)
        replicas = [Replica(url.removeprefix("http://"), url) for url in urls]
        if options.ready_file is not None:
            ready = UpReady(router.api, router.admin, replicas)
            write_ready_file(options.ready_file, msgspec.to_builtins(ready))
        _say(_announcement(router, served_as=name))

    def watch(self) -> NoReturn:
        """Report workers that end; return never.

        Raises:
            StopRequested: someone asked this process to end.
            UpFailed: the router ended, or the last worker did.
        """
        while True:
            for child in [child for child in self._children if child.exit_code is not None]:
                if child.name == _ROUTER:
                    raise _ended(child, ", and nothing works without it")
                self._children.remove(child)
                rest = len(self._children) - 1
                if not rest:
                    raise _ended(child, ", and no worker is left")
                _warn(str(_ended(child, f", {rest} of {self._options.replicas} workers go on")))
            self._signals.pause(_HEARTBEAT_S)

    def stop(self) -> None:
        """End every process; return when none is left."""
        stop_all(self._children, signals=self._signals, grace_s=STOP_GRACE_S)
        self._held_ports.close()

    def _fetch(self) -> str:
        """Return the model's folder; what is downloaded meanwhile shows on our stderr."""
        fetch = self._spawn("fetch", ["fetch", self._options.model], env=self._env, visible=True)
        while fetch.exit_code is None:
            self._signals.pause()
        self._children.remove(fetch)
        if fetch.exit_code:  # it has said why, where the user sees it
            raise UpFailed("", exit_code=_EXIT_CONFIG if fetch.exit_code == _EXIT_CONFIG else 1)
        return fetch.last_lines(1)[0]

    def _start_worker(self, name: str, *, port: int, folder: str, served_as: str) -> None:
        options = self._options
        threads = max(1, len(os.sched_getaffinity(0)) // options.replicas)
        args = ["worker", "--engine", options.engine, "--host", "127.0.0.1", "--port", str(port)]
        args += ["--model", folder, "--served-model-name", served_as, *_DRAIN_ARGS]
        if options.engine == "torch":
            # Workers share the cores; more threads than cores slow every one of them down.
            args += ["--num-threads", str(threads)]
        args += [*self._ready_arg(name), *_words(options.worker_arg)]
        self._spawn(name, args, env=self._env)

    def _start_router(self, urls: Sequence[str], *, folder: str, served_as: str) -> None:
        options = self._options
        args = ["router", "--host", options.host, "--port", str(options.port)]
        args += ["--admin-port", str(options.admin_port)]
        args += ["--model", folder, "--served-model-name", served_as, *_DRAIN_ARGS]
        args += ["--lame-duck-s", "0"]  # nobody balances load before it
        args += [word for url in urls for word in ("--replica", url)]
        args += [*self._ready_arg(_ROUTER), *_words(options.router_arg)]
        self._spawn(_ROUTER, args, env=self._env)

    def _spawn(
        self, name: str, args: Sequence[str], *, env: Mapping[str, str], visible: bool = False
    ) -> Child:
        child = Child(
            name,
            [kvway_command(), *args],
            log=self._log_dir / f"{name}.log",
            signals=self._signals,
            env=env,
            show_stderr=visible,
        )
        self._children.append(child)
        return child

    def _ready_file(self, name: str) -> Path:
        return self._log_dir / f"{name}.ready.json"

    def _ready_arg(self, name: str) -> list[str]:
        self._ready_file(name).unlink(missing_ok=True)  # of an earlier run in the same folder
        return ["--ready-file", str(self._ready_file(name))]

    def _hold_port(self) -> int:
        """Return a loopback port that nobody else gets, and that a child can listen on.

        A socket that is bound with SO_REUSEADDR and does not listen keeps the port from being
        handed out, and lets an explicit bind with SO_REUSEADDR through, which servers use.
        """
        holder = self._held_ports.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        return port

    def _await_ready(self) -> RouterReady:
        """Wait until every process has written its ready file; tell about each as it does."""
        waiting = {child.name: child for child in self._children}
        what = "the model" if self._options.engine == "torch" else "the cost model"
        self._progress(f"starting the router, loading {what} in {len(waiting) - 1} worker(s)")
        told_s = time.monotonic()
        while waiting:
            self._check(f"{', '.join(waiting)} not ready")
            for name in [name for name in waiting if self._ready_file(name).exists()]:
                del waiting[name]
                self._progress(f"{name} is ready")
                told_s = time.monotonic()
            if time.monotonic() - told_s > _HEARTBEAT_S:
                self._progress(f"waiting for {', '.join(waiting)}")
                told_s = time.monotonic()
            self._signals.pause()
        return msgspec.json.decode(self._ready_file(_ROUTER).read_bytes(), type=RouterReady)

    def _await_routable(self, router: RouterReady) -> None:
        """Wait until the router itself counts every replica as ready."""
        admin = urlsplit(router.admin).netloc
        while _num_ready(admin) < self._options.replicas:
            self._check("the router does not see every worker")
            self._signals.pause()
        self._progress("all ready")

    def _check(self, missing: str) -> None:
        """Raise UpFailed when a process has ended, or when the time to start is over."""
        for child in self._children:
            if child.exit_code is not None:
                raise _ended(child, " before it was ready")
        if time.monotonic() - self._started_s > self._options.start_timeout_s:
            limit_s = self._options.start_timeout_s
            raise UpFailed(f"{missing} after {limit_s:g} s; logs are in {self._log_dir}")

    def _progress(self, line: str) -> None:
        _say(f"{time.monotonic() - self._started_s:6.1f} s  {line}")


def _num_ready(admin: str) -> int:
    """Return how many replicas the router at `admin` counts as ready; 0 without an answer."""
    connection = http.client.HTTPConnection(admin, timeout=_PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/admin/replicas")
        body = connection.getresponse().read()
        seen = msgspec.json.decode(body, type=ReplicasSeen)
    except (OSError, http.client.HTTPException, msgspec.DecodeError):
        return 0
    finally:
        connection.close()
    return sum(replica.state == "ready" for replica in seen.replicas)


def _ended(child: Child, and_so: str) -> UpFailed:
    """Say how a process ended that should not have, and the last it printed.

    Exit code 2 means that its flags or its surroundings are wrong; then its own line says it all.
    """
    lines = child.last_lines(_LOG_LINES_SHOWN)
    if child.exit_code == _EXIT_CONFIG and lines:
        return UpFailed(
            f"{child.name}: {lines[-1].removeprefix('kvway: ')}", exit_code=_EXIT_CONFIG
        )
    tail = "".join(f"\n  | {line}" for line in lines)
    return UpFailed(f"{child.name} {child.how_it_ended()}{and_so}; log: {child.log}{tail}")


def _announcement(router: RouterReady, *, served_as: str) -> str:
    """Return what the user needs: the two URLs and a command to paste."""
    body = {
        "model": served_as,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 32,
        "temperature": 0,
    }
    url = f"{router.api}/v1/chat/completions"
    header = "content-type: application/json"
    curl = shlex.join(["curl", "-s", url, "-H", header, "-d", json.dumps(body)])
    lines = (
        f"  requests  {router.api}/v1",
        f"  page      {router.admin}/",
        f"  try       {curl}",
    )
    return "\n".join(("", *lines, "", "Ctrl-C stops everything."))


def _words(values: Sequence[str]) -> list[str]:
    return [word for value in values for word in shlex.split(value)]


def _say(text: str) -> None:
    print(text, flush=True)


def _warn(text: str) -> None:
    print(f"kvway up: {text}", file=sys.stderr, flush=True)
