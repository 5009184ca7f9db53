"""Routers and proxies that are started beside each other for a comparison.

Each is run as its makers advise for this use: one process (nginx, haproxy) or as many threads as
it wants (sglang-router), connections to replicas kept, nothing logged per request.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from kvway_core.children import kvway_command
from loadtests.load_wire import Answer, Connection, post_bytes
from loadtests.programs import ProgramFailed

OURS: Final = "kvway"
PEERS: Final = ("sglang-router", "nginx", "haproxy")
INSTALL: Final = {
    "sglang-router": "pip install sglang-router==0.3.2 into an environment of its own",
    "nginx": "apt-get install nginx-light",
    "haproxy": "apt-get install haproxy",
}
MODEL: Final = "m"
_START_LIMIT_S: Final = 60.0
_POLL_S: Final = 0.05
_HELLO: Final = b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"hello"}]}'

_NGINX: Final = """
daemon off; master_process off; worker_processes 1; pid {folder}/nginx.pid;
error_log {folder}/nginx.err warn;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 1m; keepalive_requests 1000000;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream replicas {{ {servers} keepalive 512; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://replicas; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""
_HAPROXY: Final = """
global
  nbthread 1
  maxconn 4000
defaults
  mode http
  timeout connect 5s
  timeout client 300s
  timeout server 300s
  option http-keep-alive
  http-reuse always
frontend clients
  bind 127.0.0.1:{port}
  default_backend replicas
backend replicas
  balance roundrobin
  {servers}
"""


@dataclass(frozen=True, slots=True)
class Running:
    """A router that runs.

    Attributes:
        name: Which one.
        url: Where it listens.
        pid: Of its first process.
        version: What it says of itself.
    """

    name: str
    url: str
    pid: int
    version: str

    def cpu_s(self) -> float:
        """Returns the processor time of its processes so far, in steps of 10 ms."""
        first = psutil.Process(self.pid)
        times = [p.cpu_times() for p in (first, *first.children(recursive=True))]
        return float(sum(t.user + t.system for t in times))


def find(name: str, given: Path | None) -> Path | None:
    """Returns the program of a peer, where it is said to be or on the PATH; None if not there."""
    if given is not None:
        return given if given.exists() else None
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    return Path(found) if found else None


def command(
    name: str, program: Path, *, port: int, replicas: Sequence[str], folder: Path, model: Path
) -> list[str]:
    """Returns the command line of a router; writes its configuration into `folder`."""
    hosts = [url.removeprefix("http://") for url in replicas]
    if name == "nginx":
        servers = " ".join(f"server {host};" for host in hosts)
        config = folder / "nginx.conf"
        config.write_text(_NGINX.format(folder=folder, servers=servers, port=port))
        return [str(program), "-c", str(config)]
    if name == "haproxy":
        servers = "\n  ".join(f"server replica{n} {host}" for n, host in enumerate(hosts))
        config = folder / "haproxy.cfg"
        config.write_text(_HAPROXY.format(servers=servers, port=port))
        return [str(program), "-f", str(config)]
    if name == "sglang-router":
        return [
            *(str(program), "launch", "--host", "127.0.0.1", "--port", str(port)),
            *("--worker-urls", *replicas, "--policy", "cache_aware", "--log-level", "warn"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
        ]
    return [
        *(str(program), "router", "--model", str(model), "--served-model-name", MODEL),
        *("--port", str(port), "--admin-port", "0", "--log-level", "warning"),
        *(word for url in replicas for word in ("--replica", url)),
    ]


@asynccontextmanager
async def running(
    name: str, program: Path, *, replicas: Sequence[str], folder: Path, model: Path
) -> AsyncIterator[Running]:
    """Starts a router, gives it once it has answered a request, and ends it.

    Raises:
        ProgramFailed: It ended, or does not answer.
    """
    port = free_port()
    own = folder / name
    own.mkdir()
    words = command(name, program, port=port, replicas=replicas, folder=own, model=model)
    log = own / "log"
    with log.open("wb") as output:
        popen = subprocess.Popen(  # noqa: S603, ASYNC220 - a peer's program; it takes no time
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        url = f"http://127.0.0.1:{port}"
        await _answering(name, url, popen, log)
        yield Running(name, url, popen.pid, _version(name, program))
    finally:
        popen.terminate()
        try:
            popen.wait(5)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()


async def _answering(name: str, url: str, popen: subprocess.Popen[bytes], log: Path) -> None:
    try:
        async with asyncio.timeout(_START_LIMIT_S):
            while popen.poll() is None:
                if (await _asked(url)).is_good:
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        pass
    raise ProgramFailed(f"{name} does not answer:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


async def _asked(url: str) -> Answer:
    try:
        connection = await Connection.connect(url)
    except OSError:
        return Answer()
    answer = await connection.ask(post_bytes(url, _HELLO))
    connection.close()
    return answer


def our_program() -> Path:
    """Returns the console script."""
    return Path(kvway_command())


def free_port() -> int:
    """Returns a port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _version(name: str, program: Path) -> str:
    flag = {"nginx": "-v", "haproxy": "-v"}.get(name, "--version")
    done = subprocess.run(  # noqa: S603 - the peer's own program
        [str(program), flag], capture_output=True, text=True, check=False
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[0] if lines else "unknown"
