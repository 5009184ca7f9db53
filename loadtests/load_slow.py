"""Clients that stop reading in the middle of long answers: what waits for them is bounded.

Each gets the beginning of a stream of 64 MB and takes nothing more; some megabytes of it are on
their way in the kernel. The router holds little of it, the replica is slowed down, others are
served meanwhile, and in the end the router gives up and the replica is told.
"""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from loadtests.load_fleet import Fleet, fleet
from loadtests.load_wire import Answer, Connection, post_bytes
from loadtests.open_loop import OpenLoop, Shot, evenly, quantile

NUM_CLIENTS: Final = 50
EVENT_BYTES: Final = 16 * 1024
NUM_TOKENS: Final = 4000
STEP_MS: Final = 5.0
WARM_UP: Final = 20
MAX_MB: Final = NUM_CLIENTS * 0.4
"""256 KiB wait for a client; the rest is what any stream takes, and what the allocator keeps."""
AT_MOST: Final = {"slow_more_mb": MAX_MB, "slow_others_broken": 0, "slow_held": 0}
AT_LEAST: Final = {"slow_given_up": NUM_CLIENTS}
_PATH: Final = "/v1/completions"
_STREAM: Final = b'{"model":"m","stream":true,"max_tokens":%d,"prompt":"A long story."}'
_SHORT: Final = b'{"model":"m","max_tokens":2,"prompt":"A question."}'


async def measure(folder: Path, seconds: float) -> dict[str, float | int]:
    """Has clients stop for so long, which is also the router's limit for it."""
    async with fleet(
        folder,
        *("--client-stall-timeout-s", str(seconds)),
        step_ms=STEP_MS,
        event_bytes=EVENT_BYTES,
    ) as servers:
        url = servers.url
        for _ in range(WARM_UP):
            _ = await _ask(url, _STREAM % 20)
        _ = await OpenLoop(url).run(_others(seconds / 2))
        before_mb = servers.resident_mb()
        connections = [await _slow(url) for _ in range(NUM_CLIENTS)]
        request = _post(url, _STREAM % NUM_TOKENS)
        stalled = [asyncio.create_task(c.ask(request)) for c in connections]
        others = asyncio.create_task(OpenLoop(url).run(_others(seconds)))
        most_mb = 0.0
        while not others.done():
            await asyncio.wait([others], timeout=0.1)
            most_mb = max(most_mb, servers.resident_mb())
        given_up = await _given_up(servers, within_s=2 * seconds)
        for task in stalled:
            task.cancel()
        await asyncio.gather(*stalled, return_exceptions=True)
        held = (await servers.count())["num_running"]
    fates = others.result()
    return {
        "slow_more_mb": round(max(0.0, most_mb - before_mb), 1),
        "slow_given_up": given_up,
        "slow_held": held,
        "slow_others": len(fates),
        "slow_others_broken": sum(not fate.answer.is_good for fate in fates),
        "slow_others_ms_p99": round(quantile([f.ended_s for f in fates], 0.99) * 1000, 1),
    }


async def _slow(url: str) -> Connection:
    """Connects with a kernel buffer that holds next to nothing."""
    parts = urlsplit(url)
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (parts.hostname, parts.port))
    _, connection = await loop.create_connection(Connection, sock=sock)
    connection.takes_bytes = 1
    return connection


async def _given_up(servers: Fleet, *, within_s: float) -> int:
    """Returns for how many streams the replicas were told that nobody waits any more."""
    end_s = time.perf_counter() + within_s
    while (left := (await servers.count())["num_left"]) < NUM_CLIENTS:
        if time.perf_counter() > end_s:
            break
        await asyncio.sleep(0.1)
    return left


def _others(seconds: float) -> list[Shot]:
    return evenly(50.0, seconds, _SHORT, path=_PATH)


async def _ask(url: str, body: bytes) -> Answer:
    connection = await Connection.connect(url)
    answer = await connection.ask(_post(url, body))
    connection.close()
    return answer


def _post(url: str, body: bytes) -> bytes:
    return post_bytes(url, body, path=_PATH)
