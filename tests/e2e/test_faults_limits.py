"""A router that runs out of files, that nobody reads the log of, or whose workers are all gone.

Real processes and real limits; it serves again as soon as it can, without being started anew.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from loadtests.chaos_clients import Ending
from tests.e2e.harness import Cluster
from tests.e2e.test_faults_processes import asks, holds, nothing_left, send, started

pytestmark = [pytest.mark.e2e]

NUM_FILES = 96
NOBODY_READS = ("bash", "-c", 'exec "$@" > >(head -c 1) 2>&1', "bash")
SHORT_TIMES = ("--probe-interval-s", "0.2", "--probe-timeout-s", "0.5")


async def test_a_router_without_files_serves_again_when_it_has_some(cluster: Cluster) -> None:
    """F21: more clients connect than it may have open; the worker and the rest live on."""
    worker = await cluster.worker("a")
    router = await cluster.router(
        worker, args=SHORT_TIMES, prefix=("prlimit", f"--nofile={NUM_FILES}:{NUM_FILES}")
    )
    host, port = str(router.ready["api"]).removeprefix("http://").split(":")
    opened = await asyncio.gather(
        *(asyncio.open_connection(host, int(port)) for _ in range(2 * NUM_FILES))
    )
    files = f"/proc/{router.popen.pid}/fd"
    await holds(
        lambda: len(os.listdir(files)) >= NUM_FILES - 2,  # noqa: PTH208 - names, and how many
        failure="it still has files",
    )
    for _, writer in opened:
        writer.transport.abort()
    served = asks("rivers")
    await asyncio.gather(*send(router, [served]))
    assert served.ending is Ending.DONE, served
    await nothing_left(cluster, router, worker)


async def test_a_router_whose_log_nobody_reads_goes_on(cluster: Cluster) -> None:
    """F24: stderr is a pipe without a reader; requests are served, and it ends in order."""
    worker = await cluster.worker("a")
    router = await cluster.router(worker, prefix=NOBODY_READS)
    outcomes = [asks(f"topic {number}") for number in range(4)]
    await asyncio.gather(*send(router, outcomes))
    assert {outcome.ending for outcome in outcomes} == {Ending.DONE}
    await nothing_left(cluster, router, worker)
    router.signal(signal.SIGTERM)
    assert await router.wait(limit_s=20) == 0


async def test_when_all_workers_are_gone_it_says_when_to_come_back_and_then_serves(
    cluster: Cluster,
) -> None:
    """F27: 503 with Retry-After, each at once; then all that come together are answered."""
    workers = await started(cluster, "ab", ())
    router = await cluster.router(*workers, args=SHORT_TIMES)
    for worker in workers:
        worker.signal(signal.SIGKILL)
        await worker.wait(limit_s=10)
    meanwhile = [asks(f"meanwhile {number}") for number in range(6)]
    await asyncio.gather(*send(router, meanwhile))
    assert {(o.ending, o.status) for o in meanwhile} == {(Ending.REFUSED, 503)}
    ports = [int(worker.ready["url"].rpartition(":")[2]) for worker in workers]
    again = await asyncio.gather(*(cluster.worker(f"again {port}", port=port) for port in ports))
    await cluster.replicas_ready(router, 2)
    later = [asks(f"later {number}", stream=number % 2 == 0) for number in range(20)]
    await asyncio.gather(*send(router, later))
    assert {o.ending for o in later} == {Ending.DONE}
    assert all(o.text == o.request.expected() for o in later)
    await nothing_left(cluster, router, *again)
