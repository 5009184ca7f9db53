"""Replicas through their states: the pure machine first, then real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from typing_extensions import override

from kvway_core.answers import BlockCounts
from kvway_core.api import LoadReport, WorkerState
from kvway_core.clock import SystemClock
from kvway_core.errors import ConnectFailed, StreamBroken
from kvway_core.testing.fake_replica import FakeReplica
from kvway_router.discovery import ReplicaAddress
from kvway_router.feed_state import FeedOptions
from kvway_router.index import BlockIndex
from kvway_router.ledger import Ledger
from kvway_router.policy import PolicyParams
from kvway_router.replica import Replica, ReplicaOptions, ReplicaState
from kvway_router.replicas import ReplicaSet
from tests.router.zmq_worker import ZmqWorker, stored

MODEL = "test-model"
CHAIN = [11, 12, 13]
FAST = ReplicaOptions(interval_s=0.01, timeout_s=10.0)
# Only a failed request makes it look again.
SLOW = ReplicaOptions(interval_s=1000.0, timeout_s=10.0)

STARTING, READY, UNHEALTHY, DRAINING = ReplicaState


def report(state: WorkerState = "ready") -> LoadReport:
    return LoadReport(
        boot_id="boot-1",
        model=MODEL,
        block_size=16,
        hash_scheme="kvway-1",
        state=state,
        num_running=0,
        num_waiting=0,
        waiting_uncached_tokens=0,
        blocks=BlockCounts(free=10, cached=0, total=10),
        prefill_tokens_per_s=0.0,
        decode_step_s=0.0,
        max_model_len=100,
        max_num_seqs=1,
    )


# What is seen, one after the other: the worker's own word, `ok` from another engine, `wrong` for a
# worker of no use here, `bad` for a soft failure, `hard` for nobody to connect to.
@pytest.mark.parametrize(
    ("seen", "state"),
    [
        ("", STARTING),
        ("ready", READY),
        ("ok", READY),
        ("hard bad bad bad", STARTING),
        ("hard ready", READY),
        ("starting", STARTING),
        ("starting ready", READY),
        ("ready starting", STARTING),
        ("ready bad bad", READY),
        ("ready bad bad ready bad bad", READY),
        ("ready bad bad bad", UNHEALTHY),
        ("ready hard", UNHEALTHY),
        ("ready hard ready", UNHEALTHY),
        ("ready hard ready ready", READY),
        ("ready hard ok ok", READY),
        ("ready hard ready bad ready", UNHEALTHY),
        ("ready hard ready bad ready ready", READY),
        ("ready failed", UNHEALTHY),
        ("failed ready", UNHEALTHY),
        ("ready wrong", UNHEALTHY),
        ("ready wrong ready ready", READY),
        ("ready draining", DRAINING),
        ("ready draining bad bad", DRAINING),
        ("ready draining hard", UNHEALTHY),
        ("ready draining ready", READY),
        ("ready hard draining", DRAINING),
    ],
)
def test_states(seen: str, state: ReplicaState) -> None:
    replica = Replica(ReplicaAddress.parse("http://a:1"), options=ReplicaOptions())
    for what in seen.split():
        match what:
            case "bad" | "hard":
                replica.on_bad("no answer", hard=what == "hard")
            case "ok":
                replica.on_good(None)
            case "wrong":
                replica.on_good(report(), problem="it serves another model")
            case "ready" | "starting" | "draining" | "failed":
                replica.on_good(report(what))
            case _:
                pytest.fail(what)
    assert replica.state is state
    assert (replica.error == "") == (state is READY)


class Fleet:
    """A replica set that runs, with what it keeps."""

    def __init__(self, options: ReplicaOptions, index: BlockIndex) -> None:
        self.index = index
        self.ledger = Ledger(clock=SystemClock(), params=PolicyParams())
        self.set = ReplicaSet(
            index=self.index,
            ledger=self.ledger,
            clock=SystemClock(),
            model=MODEL,
            block_size=16,
            options=options,
        )

    def state(self, replica: FakeReplica | str) -> ReplicaState | None:
        name = replica if isinstance(replica, str) else replica.replica_id
        found = self.set.get(name)
        return found.state if found else None

    async def reaches(self, replica: FakeReplica | str, state: ReplicaState) -> None:
        await self.set.wait_for(lambda: self.state(replica) is state)


@asynccontextmanager
async def watching(
    *replicas: FakeReplica | str,
    options: ReplicaOptions = FAST,
    index: BlockIndex | None = None,
) -> AsyncIterator[Fleet]:
    fleet = Fleet(options, BlockIndex() if index is None else index)
    fleet.set.set_replicas([r if isinstance(r, str) else r.url for r in replicas])
    async with asyncio.TaskGroup() as group:
        task = group.create_task(fleet.set.run())
        yield fleet
        task.cancel()


@pytest.fixture
async def replica() -> AsyncIterator[FakeReplica]:
    async with FakeReplica(model=MODEL) as replica:
        yield replica


@pytest.fixture
async def other() -> AsyncIterator[FakeReplica]:
    async with FakeReplica(model=MODEL) as replica:
        yield replica


async def test_a_worker_that_reports_is_a_candidate(replica: FakeReplica) -> None:
    replica.pages["/load"] = (200, replica.load(prefill_tokens_per_s=1234.0, num_running=2))
    async with watching(replica) as fleet:
        await fleet.reaches(replica, READY)
        (load,) = fleet.set.loads()
        assert load.replica_id == replica.replica_id
        assert (load.prefill_tokens_per_s, load.in_flight, load.blocks_total) == (1234.0, 2, 1000)
        assert not fleet.set.loads(exclude={replica.replica_id})
        assert "/health" not in replica.probes


@pytest.mark.parametrize("load", [None, (404, {"detail": "Not Found"}), (200, {"server_load": 0})])
async def test_another_engine_is_asked_for_its_health(
    replica: FakeReplica, load: tuple[int, object] | None
) -> None:
    """llama.cpp and SGLang have no /load, and vLLM's is another."""
    del replica.pages["/load"]
    if load is not None:
        replica.pages["/load"] = load
    async with watching(replica) as fleet:
        await fleet.reaches(replica, READY)
        (candidate,) = fleet.set.loads()
        assert (candidate.blocks_total, candidate.prefill_tokens_per_s) == (None, None)
        replica.pages["/health"] = (503, {})
        await fleet.reaches(replica, UNHEALTHY)


async def test_errors_in_a_row_make_it_unhealthy_and_good_answers_bring_it_back(
    replica: FakeReplica, other: FakeReplica
) -> None:
    async with watching(replica, other) as fleet:
        await fleet.reaches(replica, READY)
        await fleet.reaches(other, READY)
        replica.pages["/load"] = replica.pages["/health"] = (500, {"error": "out of order"})
        await fleet.reaches(replica, UNHEALTHY)
        assert [usable.id for usable in fleet.set.usable()] == [other.replica_id]
        replica.pages["/load"] = (200, replica.load())
        await fleet.reaches(replica, READY)
        assert len(fleet.set.usable()) == 2


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ((500, {}), "answered 500"),
        ((503, {}), "answered 503"),
        ((None, {}), "broken answer"),
        ((200, {"junk": 1}), "no report"),
        ((404, {}), ""),
    ],
)
async def test_one_that_is_well_and_whose_reports_fail_is_used_and_shown_as_such(
    replica: FakeReplica, page: tuple[int | None, Any], reason: str
) -> None:
    async with watching(replica) as fleet:
        await fleet.reaches(replica, READY)
        replica.pages["/load"] = page
        seen = replica.probes["/load"]
        await replica.wait_for(lambda: replica.probes["/load"] > seen + 5)
        (known,) = fleet.set.usable()
        assert (known.state, reason in known.no_report) == (READY, True)
        replica.pages["/load"] = (200, replica.load())
        await fleet.set.wait_for(lambda: not known.no_report)


async def test_a_report_of_no_context_is_no_report(replica: FakeReplica) -> None:
    async with watching(replica) as fleet:
        await fleet.reaches(replica, READY)
        replica.pages["/load"] = (200, replica.load(max_model_len=0))
        (known,) = fleet.set.all()
        await fleet.set.wait_for(lambda: bool(known.no_report))
        assert known.report is not None
        assert known.report.max_model_len == 8192


async def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while path == b"/load":
                writer.write(b"x" * 65_536)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, watching(f"http://{host}:{port}") as fleet:
        await fleet.reaches(f"{host}:{port}", READY)


async def test_one_failed_connect_of_a_request_is_enough(replica: FakeReplica) -> None:
    async with watching(replica, options=SLOW) as fleet:
        await fleet.reaches(replica, READY)
        await fleet.set.report_failure(replica.replica_id, ConnectFailed("refused"))
        assert fleet.state(replica) is UNHEALTHY
        assert not fleet.set.loads()
        # It was looked at at once, and that was one good look of the two that it takes.
        await fleet.set.wait_for(lambda: replica.probes["/load"] == 2)
        assert fleet.state(replica) is UNHEALTHY


async def test_a_broken_stream_only_has_it_looked_at(replica: FakeReplica) -> None:
    async with watching(replica, options=SLOW) as fleet:
        await fleet.reaches(replica, READY)
        await fleet.set.report_failure(replica.replica_id, StreamBroken("reset"))
        assert fleet.state(replica) is READY
        await fleet.set.wait_for(lambda: replica.probes["/load"] == 2)
        assert fleet.state(replica) is READY
        await fleet.set.report_failure("unknown:1", ConnectFailed("refused"))


async def test_a_worker_that_is_gone_and_back_is_used_again(replica: FakeReplica) -> None:
    async with watching(replica) as fleet:
        await fleet.reaches(replica, READY)
        await replica.stop()
        await fleet.reaches(replica.replica_id, UNHEALTHY)
        await replica.start(int(replica.replica_id.rpartition(":")[2]))
        await fleet.reaches(replica.replica_id, READY)


async def test_a_frozen_worker_becomes_unhealthy() -> None:
    """It accepts connections and says nothing, as a stopped process does."""
    frozen = False
    done = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if frozen:
            await done.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    options = ReplicaOptions(interval_s=0.01, timeout_s=0.2)
    async with server, watching(f"http://{host}:{port}", options=options) as fleet:
        await fleet.reaches(f"{host}:{port}", READY)
        frozen = True
        await fleet.reaches(f"{host}:{port}", UNHEALTHY)
        found = fleet.set.get(f"{host}:{port}")
        assert found is not None
        assert found.error == "no answer within 0.2 s"
        done.set()


@pytest.mark.parametrize(
    ("says", "state"), [("draining", DRAINING), ("starting", STARTING), ("failed", UNHEALTHY)]
)
async def test_what_a_worker_says_of_itself_counts(
    replica: FakeReplica, says: str, state: ReplicaState
) -> None:
    async with watching(replica) as fleet:
        await fleet.reaches(replica, READY)
        replica.pages["/load"] = (503, replica.load(state=says))
        await fleet.reaches(replica, state)
        assert fleet.set.usable() == []


async def test_a_worker_of_another_model_is_not_used(replica: FakeReplica) -> None:
    replica.pages["/load"] = (200, replica.load(model="another"))
    async with watching(replica) as fleet:
        await fleet.reaches(replica, UNHEALTHY)
        found = fleet.set.get(replica.replica_id)
        assert found is not None
        assert found.error == "it serves 'another', not 'test-model'"


async def test_replicas_come_and_go_and_those_that_stay_are_not_disturbed(
    replica: FakeReplica, other: FakeReplica
) -> None:
    async with watching(replica) as fleet:
        await fleet.reaches(replica, READY)
        stays = fleet.set.get(replica.replica_id)
        fleet.index.speculate(other.replica_id, CHAIN)
        fleet.set.set_replicas([replica.url, other.url])
        assert fleet.state(replica) is READY
        await fleet.reaches(other, READY)
        fleet.set.set_replicas([replica.url])
        assert fleet.set.get(other.replica_id) is None
        assert fleet.set.get(replica.replica_id) is stays
        assert fleet.index.match(CHAIN) == {}
        fleet.set.set_replicas([])
        assert fleet.set.all() == []


async def test_a_wrong_address_changes_nothing(replica: FakeReplica) -> None:
    async with watching(replica) as fleet:
        with pytest.raises(ValueError, match="nonsense"):
            fleet.set.set_replicas(["http://new:1", "nonsense"])
        assert [known.id for known in fleet.set.all()] == [replica.replica_id]


async def test_another_boot_clears_what_was_listed(replica: FakeReplica) -> None:
    async with watching(replica) as fleet:
        await fleet.reaches(replica, READY)
        fleet.index.confirm(fleet.index.speculate(replica.replica_id, CHAIN))
        num_probes = replica.probes["/load"]
        await fleet.set.wait_for(lambda: replica.probes["/load"] > num_probes + 1)
        assert fleet.index.match(CHAIN) == {replica.replica_id: 3}
        replica.pages["/load"] = (200, replica.load(boot_id="boot-2"))
        await fleet.set.wait_for(lambda: fleet.index.match(CHAIN) == {})


async def test_the_speed_of_a_former_life_is_forgotten(replica: FakeReplica) -> None:
    replica.pages["/load"] = (200, replica.load(prefill_tokens_per_s=10.0))
    async with watching(replica) as fleet:
        await fleet.reaches(replica, READY)
        replica.pages["/load"] = (200, replica.load(boot_id="boot-2", prefill_tokens_per_s=0.0))
        await fleet.set.wait_for(lambda: fleet.set.loads()[0].prefill_tokens_per_s is None)


@pytest.mark.parametrize(
    "junk",
    [
        b'{"x":' + b"[" * 25_000 + b"]" * 25_000 + b"}",
        b'{"waiting_uncached_tokens":' + b"9" * 400 + b"}",
    ],
    ids=["nesting", "digits"],
)
async def test_a_report_that_cannot_be_read_is_an_engine_without_one(junk: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (line := await reader.readline()).startswith(b"GET"):
            while (await reader.readline()).strip():
                pass
            body = junk if line.startswith(b"GET /load") else b"{}"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        async with watching(f"http://127.0.0.1:{port}") as fleet:
            await fleet.reaches(f"127.0.0.1:{port}", READY)


class _BrokenOnce(BlockIndex):
    """An index with a fault that shows with the first report."""

    broken = True

    @override
    def set_limit(self, replica_id: str, max_blocks: int) -> None:
        if self.broken:
            self.broken = False
            raise RuntimeError("a bug")
        super().set_limit(replica_id, max_blocks)


async def test_a_fault_while_watching_one_replica_is_no_end_to_the_router(
    replica: FakeReplica, other: FakeReplica
) -> None:
    async with watching(replica, other, index=_BrokenOnce()) as fleet:
        await fleet.reaches(replica, READY)
        await fleet.reaches(other, READY)


async def test_an_engine_without_boots_is_cleared_when_nobody_listens(
    replica: FakeReplica,
) -> None:
    del replica.pages["/load"]
    async with watching(replica) as fleet:
        await fleet.reaches(replica, READY)
        fleet.index.confirm(fleet.index.speculate(replica.replica_id, CHAIN))
        await replica.stop()
        await fleet.reaches(replica.replica_id, UNHEALTHY)
        assert fleet.index.match(CHAIN) == {}


async def test_no_more_is_listed_than_half_again_what_it_can_hold(replica: FakeReplica) -> None:
    blocks = {"free": 4, "cached": 0, "total": 4}
    replica.pages["/load"] = (200, replica.load(block_size=32, blocks=blocks))
    async with watching(replica) as fleet:
        await fleet.reaches(replica, READY)
        fleet.index.speculate(replica.replica_id, list(range(100)))
        assert fleet.index.num_blocks(replica.replica_id) == 12


async def test_events_are_followed_into_the_next_life_of_the_worker(replica: FakeReplica) -> None:
    async with ZmqWorker() as first, ZmqWorker(boot_id="boot-2") as second:
        await first.publish(stored(*CHAIN))
        await second.publish(stored(77))
        replica.pages["/load"] = (200, _with_events(replica, first))
        async with watching(replica) as fleet:
            name = replica.replica_id
            await fleet.set.wait_for(lambda: fleet.index.match(CHAIN) == {name: 3})
            assert fleet.set.is_fed(name)
            replica.pages["/load"] = (200, _with_events(replica, second, boot_id="boot-2"))
            await fleet.set.wait_for(lambda: fleet.index.match([77]) == {name: 1})
            assert fleet.index.match(CHAIN) == {}
            fleet.set.set_replicas([])
            assert not fleet.set.is_fed(name)
            assert len(fleet.index) == 0


@pytest.mark.parametrize("changes", [{"block_size": 32}, {"hash_scheme": "kvway-0"}])
async def test_events_of_other_hashes_are_left_alone(
    replica: FakeReplica, changes: dict[str, object]
) -> None:
    async with ZmqWorker() as worker:
        await worker.publish(stored(*CHAIN))
        replica.pages["/load"] = (200, _with_events(replica, worker, **changes))
        async with watching(replica) as fleet:
            await fleet.reaches(replica, READY)
            assert not fleet.set.is_fed(replica.replica_id)
            assert worker.replays == []


def _with_events(replica: FakeReplica, worker: ZmqWorker, **changes: object) -> dict[str, object]:
    info = worker.info
    ports = {
        "pub_port": info.pub_port,
        "replay_port": info.replay_port,
        "topic": info.topic,
    }
    return replica.load(kv_events=ports, **changes)


def test_options_say_how_events_are_read() -> None:
    assert ReplicaOptions().feed == FeedOptions()
