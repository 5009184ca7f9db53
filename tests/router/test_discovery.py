"""Fixed replicas, and replicas behind names that are looked up again and again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence

import pytest

from kvway_router.discovery import Discovery, DnsName, ReplicaAddress, resolve_ipv4

WORKERS = DnsName("worker", 9000)


class Names:
    """What a name server knows; a name that it does not know is an error."""

    def __init__(self, **known: Sequence[str]) -> None:
        self.known = known
        self.num_asked = 0
        self.asked = asyncio.Condition()

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        async with self.asked:
            self.num_asked += 1
            self.asked.notify_all()
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.known[host]


def discovery(names: Names, told: list[Sequence[str]], *, static: Sequence[str] = ()) -> Discovery:
    return Discovery(static, [WORKERS], on_change=told.append, interval_s=0.001, resolve=names)


async def test_every_address_of_a_name_is_a_replica() -> None:
    told: list[Sequence[str]] = []
    names = Names(worker=["10.0.0.2", "10.0.0.1", "fd00::1"])
    await discovery(names, told, static=["http://fixed:1"]).refresh()
    assert told == [
        (
            "http://fixed:1",
            "http://10.0.0.1:9000",
            "http://10.0.0.2:9000",
            "http://[fd00::1]:9000",
        )
    ]


async def test_only_changes_are_told_and_order_is_none() -> None:
    told: list[Sequence[str]] = []
    names = Names(worker=["10.0.0.1", "10.0.0.2"])
    found = discovery(names, told)
    await found.refresh()
    names.known["worker"] = ["10.0.0.2", "10.0.0.1"]
    await found.refresh()
    assert len(told) == 1
    names.known["worker"] = ["10.0.0.2"]
    await found.refresh()
    assert told[1:] == [("http://10.0.0.2:9000",)]


@pytest.mark.parametrize("broken", ["error", "empty"])
async def test_a_failed_look_up_keeps_what_was_known(broken: str) -> None:
    told: list[Sequence[str]] = []
    names = Names(worker=["10.0.0.1"])
    found = discovery(names, told)
    await found.refresh()
    if broken == "error":
        del names.known["worker"]
    else:
        names.known["worker"] = []
    await found.refresh()
    assert len(told) == 1
    names.known["worker"] = ["10.0.0.1", "10.0.0.3"]
    await found.refresh()
    assert told[1:] == [("http://10.0.0.1:9000", "http://10.0.0.3:9000")]


async def test_names_are_looked_up_again_and_again() -> None:
    told: list[Sequence[str]] = []
    names = Names()
    task = asyncio.create_task(discovery(names, told).run())
    async with names.asked:
        await names.asked.wait_for(lambda: names.num_asked >= 3)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert told == [()]


async def test_without_names_the_fixed_ones_are_told_and_that_is_all() -> None:
    told: list[Sequence[str]] = []
    task = asyncio.create_task(
        Discovery(["http://a:1", "http://a:1"], [], on_change=told.append).run()
    )
    await asyncio.sleep(0)
    task.cancel()
    assert told == [("http://a:1",)]


async def test_the_system_resolves_without_blocking_the_loop() -> None:
    assert "127.0.0.1" in await resolve_ipv4("localhost", 80)


@pytest.mark.parametrize(
    ("url", "normal", "replica_id", "host"),
    [
        ("http://10.0.0.1:8000", "http://10.0.0.1:8000", "10.0.0.1:8000", "10.0.0.1"),
        ("http://Worker/", "http://worker:80", "worker:80", "worker"),
        ("https://worker", "https://worker:443", "worker:443", "worker"),
        ("http://[::1]:8000/", "http://[::1]:8000", "[::1]:8000", "::1"),
    ],
)
def test_an_address_has_one_form(url: str, normal: str, replica_id: str, host: str) -> None:
    address = ReplicaAddress.parse(url)
    assert (address.url, address.id, address.host) == (normal, replica_id, host)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "worker:8000",
        "ftp://worker:8000",
        "http://",
        "http://worker:port",
        "http://worker:99999",
        "http://worker:0",
        "http://worker:8000/v1",
        "http://worker:8000?x=1",
        "http://user:secret@worker:8000",
        "http://[::1",
        "http://a..b:80",
        "http://ex ample:80",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"http|URL|port|host"):
        ReplicaAddress.parse(url)


def test_a_name_has_a_port() -> None:
    assert DnsName.parse("worker:9000") == WORKERS


@pytest.mark.parametrize(
    "text",
    [
        "worker",
        ":9000",
        "worker:",
        "worker:x",
        "worker:0",
        "w:70000",
        "a..b:80",
        "a" * 70 + ":80",
        "a b:80",
    ],
)
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|port|host"):
        DnsName.parse(text)
