"""A cable that is cut loses everything in silence, both ways, and what TCP had is not lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from loadtests.namespaces import Namespace, why_not

ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
client, _ = server.accept()
while data := client.recv(100):
    client.sendall(data)
"""
NO_NAMESPACE = why_not()


@contextmanager
def echo(namespace: Namespace) -> Iterator[int]:
    """Echoes one connection inside a namespace; gives its port."""
    command = [*namespace.command, sys.executable, "-c", ECHO, namespace.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()


def test_why_there_are_none_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "ip" in why_not()


if not NO_NAMESPACE:  # where the system does not allow them there is nothing to be cut
    import socket

    def test_a_cut_cable_is_silent_and_loses_nothing_that_tcp_has() -> None:
        with ExitStack() as stack:
            namespace = stack.enter_context(Namespace())
            port = stack.enter_context(echo(namespace))
            there = (namespace.address, port)
            client = stack.enter_context(socket.create_connection(there, timeout=10))
            client.sendall(b"a")
            assert client.recv(10) == b"a"
            namespace.cut()
            client.sendall(b"b")
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.recv(10)
            with pytest.raises(TimeoutError):
                socket.create_connection(there, timeout=0.3)
            namespace.mend()
            client.settimeout(30)
            assert client.recv(10) == b"b"
        names = subprocess.run(
            ["ip", "netns", "list"], check=True, capture_output=True, text=True
        ).stdout
        assert namespace.name not in names
