"""Hosts that can be cut off: network namespaces of Linux, each with one cable to this machine.

A cut cable here is two wrong addresses in the neighbour tables: frames go out and the other side
drops them, as in a network that loses everything. Nobody is told; TCP finds out by itself.
Needs root and the `ip` command.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from typing import Final, Self

_NUM_NETWORKS: Final = 2**14
_numbers: Final = itertools.count()
_NOWHERE: Final = "02:00:00:00:00:99"


def why_not() -> str:
    """Returns why there can be no namespaces here; empty if there can."""
    if shutil.which("ip") is None:
        return "there is no `ip` command (package iproute2)"
    try:
        with Namespace():
            return ""
    except subprocess.CalledProcessError as exc:
        return f"`{' '.join(exc.cmd)}` failed: {exc.stderr.strip()}"


class Namespace:
    """One namespace and its cable, while it is open as a context manager.

    Attributes:
        name: Of the namespace, and of the cable's two ends with a letter behind it.
        address: Where this machine reaches it: in a network of its own of 10.203.0.0/16.
    """

    def __init__(self) -> None:
        """Names it after this process; nothing is made yet."""
        number = (4 * os.getpid() + next(_numbers)) % _NUM_NETWORKS
        self.name = f"kvway-{number}"
        self._near, self._far = f"{self.name}n", f"{self.name}f"
        high, low = divmod(4 * number, 256)
        self._host = f"10.203.{high}.{low + 1}"
        self.address = f"10.203.{high}.{low + 2}"

    def __enter__(self) -> Self:
        """Makes it.

        Raises:
            subprocess.CalledProcessError: The system does not allow it.
        """
        _ip("netns", "add", self.name)
        try:
            _ip(
                *("link", "add", self._near, "type", "veth"),
                *("peer", "name", self._far, "netns", self.name),
            )
            _ip("addr", "add", f"{self._host}/30", "dev", self._near)
            _ip("link", "set", self._near, "up")
            self._inside("addr", "add", f"{self.address}/30", "dev", self._far)
            self._inside("link", "set", self._far, "up")
            self._inside("link", "set", "lo", "up")
        except subprocess.CalledProcessError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Removes it and its cable; processes in it lose their network."""
        _ip("netns", "del", self.name)

    @property
    def command(self) -> list[str]:
        """What to put in front of a command that is to run in it."""
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        """Drops everything, both ways, silently, until `mend`."""
        wrong = ("lladdr", _NOWHERE, "nud", "permanent")
        _ip("neigh", "replace", self.address, *wrong, "dev", self._near)
        self._inside("neigh", "replace", self._host, *wrong, "dev", self._far)

    def mend(self) -> None:
        """Lets everything pass again."""
        _ip("neigh", "del", self.address, "dev", self._near)
        self._inside("neigh", "del", self._host, "dev", self._far)

    def _inside(self, *args: str) -> None:
        _ip("-n", self.name, *args)


def _ip(*args: str) -> None:
    subprocess.run(  # noqa: S603 - a fixed command, no shell
        ["ip", *args],  # noqa: S607 - the one on the PATH
        check=True,
        capture_output=True,
        text=True,
    )
