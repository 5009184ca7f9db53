"""Workers that are killed, frozen, cut off and drained under requests: what their clients see.

Real processes, real signals, a real network that drops. In each test every request ends in exactly
one way, with the one right answer as far as it came, and nothing is left in flight anywhere.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack

import pytest

from kvway_core.testing.fault_proxy import FaultProxy
from loadtests.chaos_clients import Client, Ending, Outcome, Request
from loadtests.namespaces import Namespace, why_not
from tests.e2e.harness import Cluster, Process, until

pytestmark = [pytest.mark.e2e]

DECODES_SLOWLY = ("--sim-decode-step-s", "0.03")
PREFILLS_SLOWLY = ("--sim-prefill-tokens-per-s", "600")
SHORT_TIMES = ("--probe-interval-s", "0.2", "--probe-timeout-s", "0.3")
NO_NAMESPACE = why_not()
"""Without a namespace to cut off, a proxy in front of the worker lets nothing pass."""


async def started(cluster: Cluster, names: str, args: tuple[str, ...]) -> list[Process]:
    """Starts workers, all at once."""
    return await asyncio.gather(*(cluster.worker(name, *args) for name in names))


def asks(topic: str, *, stream: bool = True, max_tokens: int = 40) -> Outcome:
    """A request about a topic; nobody else's prompt begins like that."""
    request = Request(
        client_id=f"test-{topic}",
        at_s=0.0,
        path="/v1/chat/completions",
        topic=topic,
        prompt="Name one.",
        max_tokens=max_tokens,
        stream=stream,
        leaves_after=None,
        is_slow=False,
    )
    return Outcome(request)


def send(router: Process, outcomes: Sequence[Outcome]) -> list[asyncio.Task[Outcome]]:
    """Sends requests at once."""
    client = Client(router.ready["api"])
    return [asyncio.create_task(client.send(outcome.request, outcome)) for outcome in outcomes]


async def holds(condition: Callable[[], bool], *, failure: str) -> None:
    """Waits for something that the clients see."""

    async def seen() -> bool:
        return condition()

    await until(seen, limit_s=30, failure=failure)


async def load(cluster: Cluster, worker: Process) -> int:
    """Requests that a worker runs or holds waiting."""
    report = await cluster.get(worker.ready["url"] + "/load")
    return int(report["num_running"]) + int(report["num_waiting"])


async def busy(cluster: Cluster, workers: Sequence[Process]) -> Process:
    """Waits until one of the workers has a request, and returns it."""

    async def found() -> Process | None:
        for worker in workers:
            if await load(cluster, worker):
                return worker
        return None

    return await until(found, limit_s=30, failure="no worker has the request")


async def nothing_left(cluster: Cluster, router: Process, *workers: Process) -> None:
    """Waits until router and workers count nothing as running."""

    async def idle() -> bool:
        view = await cluster.get(router.ready["admin"] + "/admin/replicas")
        at_router = sum(replica["in_flight"] for replica in view["replicas"])
        return not at_router and not sum([await load(cluster, worker) for worker in workers])

    await until(idle, limit_s=20, failure=f"something is still in flight: {router.tail}")


def replica_of(worker: Process) -> str:
    """The router's name for a worker."""
    return str(worker.ready["url"]).removeprefix("http://")


def is_right(outcome: Outcome) -> bool:
    """Whether all that came of an answer is right."""
    return outcome.request.expected().startswith(outcome.text)


async def test_kill_in_the_middle_of_streams_is_seen_by_theirs_and_nobody_else(
    cluster: Cluster,
) -> None:
    """F1: an error event, no [DONE], no end of the body; the others' answers are whole."""
    workers = await started(cluster, "ab", DECODES_SLOWLY)
    router = await cluster.router(*workers)
    outcomes = [asks(f"topic {number}") for number in range(8)]
    tasks = send(router, outcomes)
    await holds(lambda: all(o.text for o in outcomes), failure="not all streams have begun")
    workers[0].signal(signal.SIGKILL)
    await asyncio.gather(*tasks)

    lost = [o for o in outcomes if o.replica == replica_of(workers[0])]
    assert 0 < len(lost) < len(outcomes)
    for outcome in outcomes:
        assert is_right(outcome)
        if outcome in lost:
            assert outcome.ending is Ending.INTERRUPTED, outcome
            assert outcome.detail in {"replica_lost", "stream_broken"}
        else:
            assert outcome.ending is Ending.DONE, outcome
            assert len(outcome.text) == 40
    await nothing_left(cluster, router, workers[1])


@pytest.mark.parametrize(
    ("doing", "stream"),
    [(PREFILLS_SLOWLY, True), (PREFILLS_SLOWLY, False), (DECODES_SLOWLY, False)],
    ids=["stream in prefill", "whole in prefill", "whole in decode"],
)
async def test_kill_before_the_client_has_a_byte_costs_it_nothing(
    cluster: Cluster, doing: tuple[str, ...], *, stream: bool
) -> None:
    """F2 and F3: 200 from another replica; a whole answer is held back to its end."""
    workers = await started(cluster, "ab", doing)
    router = await cluster.router(*workers)
    outcome = asks("rivers", stream=stream)
    (task,) = send(router, [outcome])
    victim = await busy(cluster, workers)
    victim.signal(signal.SIGKILL)
    await task
    (other,) = [worker for worker in workers if worker is not victim]
    assert outcome.ending is Ending.DONE, outcome
    assert outcome.text == outcome.request.expected()
    assert outcome.replica == replica_of(other)
    await nothing_left(cluster, router, other)


async def test_a_prompt_that_kills_workers_kills_two_and_no_more(cluster: Cluster) -> None:
    """F30: then it is refused, also when it comes again; all else is served."""
    workers = await started(cluster, "abc", PREFILLS_SLOWLY)
    router = await cluster.router(*workers, args=SHORT_TIMES)
    outcome = asks("poison")
    (task,) = send(router, [outcome])
    alive = list(workers)
    for _ in range(2):
        victim = await busy(cluster, alive)
        victim.signal(signal.SIGKILL)
        await victim.wait(limit_s=10)
        alive.remove(victim)
    await task
    assert (outcome.ending, outcome.status) == (Ending.FAILED, 500), outcome
    assert outcome.detail == "request_crashed_replica"
    again, other = asks("poison"), asks("rivers")
    await asyncio.gather(*send(router, [again, other]))
    assert again.detail == "request_crashed_replica"
    assert other.ending is Ending.DONE
    log = alive[0].log.read_text()
    assert "test-rivers" in log
    assert "test-poison" not in log


@pytest.mark.parametrize("when", ["before the first token", "in the stream"])
async def test_a_frozen_worker(cluster: Cluster, when: str) -> None:
    """F5 and F6: another one answers, or the stream breaks off; thawed, it runs nothing."""
    in_stream = when == "in the stream"
    doing = DECODES_SLOWLY if in_stream else PREFILLS_SLOWLY
    workers = await started(cluster, "ab", doing)
    router = await cluster.router(*workers, args=(*SHORT_TIMES, "--token-timeout-s", "1"))
    outcome = asks("rivers", max_tokens=500 if in_stream else 10)
    (task,) = send(router, [outcome])
    victim = await busy(cluster, workers)
    (other,) = [worker for worker in workers if worker is not victim]
    await holds(lambda: bool(outcome.text) or not in_stream, failure="the stream does not begin")
    victim.signal(signal.SIGSTOP)
    await task
    assert is_right(outcome)
    if in_stream:
        assert outcome.ending is Ending.INTERRUPTED, outcome
        assert outcome.detail in {"token_timeout", "replica_lost"}
    else:
        assert outcome.ending is Ending.DONE, outcome
        assert outcome.replica == replica_of(other)
    await cluster.replicas_ready(router, 1)
    victim.signal(signal.SIGCONT)
    await nothing_left(cluster, router, victim, other)
    await cluster.replicas_ready(router, 2)


class Network:
    """A worker whose network can lose everything, in silence."""

    def __init__(self, worker: Process, *, namespace: Namespace | None, proxy: FaultProxy) -> None:
        self.worker = worker
        self.url = worker.ready["url"] if namespace else proxy.url
        self.cut = namespace.cut if namespace else proxy.freeze
        self.mend = namespace.mend if namespace else proxy.thaw


@pytest.fixture
async def network(cluster: Cluster) -> AsyncIterator[Network]:
    """A worker in a namespace of its own where that can be, else behind a proxy."""
    async with AsyncExitStack() as stack:
        namespace = None
        args: tuple[str, ...] = DECODES_SLOWLY
        prefix: tuple[str, ...] = ()
        if not NO_NAMESPACE:
            namespace = stack.enter_context(Namespace())
            args += ("--host", namespace.address, "--kv-events-host", namespace.address)
            prefix = tuple(namespace.command)
        worker = await cluster.worker("far", *args, prefix=prefix)
        port = int(worker.ready["url"].rpartition(":")[2])
        proxy = await stack.enter_async_context(FaultProxy("127.0.0.1", port))
        yield Network(worker, namespace=namespace, proxy=proxy)


@pytest.mark.parametrize("how", ["a frozen proxy" if NO_NAMESPACE else "dropped packets"])
async def test_a_network_that_loses_everything(
    cluster: Cluster, network: Network, how: str
) -> None:
    """F8: streams there break off, all else goes elsewhere, and it comes back by itself."""
    near = await cluster.worker("near", *DECODES_SLOWLY)
    router = await cluster.router(
        near, urls=(network.url,), args=(*SHORT_TIMES, "--token-timeout-s", "1")
    )
    far = network.url.removeprefix("http://")
    outcomes = [asks(f"topic {number}", max_tokens=100) for number in range(6)]
    tasks = send(router, outcomes)
    await holds(lambda: all(o.text for o in outcomes), failure="not all streams have begun")
    network.cut()
    later = [asks(f"later {number}") for number in range(6)]
    await asyncio.gather(*tasks, *send(router, later))
    assert {o.ending for o in outcomes if o.replica == far} == {Ending.INTERRUPTED}
    assert {o.ending for o in outcomes if o.replica != far} == {Ending.DONE}
    assert {o.ending for o in later} == {Ending.DONE}
    assert all(map(is_right, [*outcomes, *later]))
    await cluster.replicas_ready(router, 1)
    network.mend()
    await cluster.replicas_ready(router, 2)
    await nothing_left(cluster, router, near)

    async def far_is_idle() -> bool:
        report = await cluster.get(f"{network.url}/load")
        return int(report["num_running"]) == 0

    await until(far_is_idle, limit_s=20, failure="the far worker still runs something")


async def test_a_worker_that_drains_ends_its_streams_and_gets_nothing_new(
    cluster: Cluster,
) -> None:
    """5.6: all bodies are whole; requests that come meanwhile are answered elsewhere."""
    workers = await started(cluster, "ab", DECODES_SLOWLY)
    router = await cluster.router(*workers, args=SHORT_TIMES)
    outcomes = [asks(f"topic {number}", stream=number % 2 == 0) for number in range(10)]
    tasks = send(router, outcomes)
    begun = [o for o in outcomes if o.request.stream]
    await holds(lambda: all(o.text for o in begun), failure="not all streams have begun")
    workers[0].signal(signal.SIGTERM)
    later = [asks(f"later {number}") for number in range(4)]
    await asyncio.gather(*tasks, *send(router, later))
    assert {o.ending for o in [*outcomes, *later]} == {Ending.DONE}
    assert all(o.text == o.request.expected() for o in [*outcomes, *later])
    assert {o.replica for o in later} == {replica_of(workers[1])}
    assert await workers[0].wait(limit_s=20) == 0, workers[0].tail
    await nothing_left(cluster, router, workers[1])


async def test_a_router_that_is_killed_frees_its_workers(cluster: Cluster) -> None:
    """F14: kill -9 of the router ends what it had asked for; one on the same port goes on."""
    worker = await cluster.worker("a", *DECODES_SLOWLY)
    router = await cluster.router(worker)
    outcome = asks("rivers", max_tokens=2000)
    (task,) = send(router, [outcome])
    await holds(lambda: bool(outcome.text), failure="the stream does not begin")
    router.signal(signal.SIGKILL)
    await task
    assert outcome.ending is not Ending.DONE
    assert is_right(outcome)

    async def idle() -> bool:
        return await load(cluster, worker) == 0

    await until(idle, limit_s=20, failure="the worker goes on for nobody")
    again = await cluster.router(worker)
    later = asks("rivers")
    await asyncio.gather(*send(again, [later]))
    assert later.ending is Ending.DONE
