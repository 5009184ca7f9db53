"""What the router remembers of its fleet across a restart."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import xxhash
from structlog.testing import capture_logs

from kvway_core.clock import SystemClock
from kvway_core.lifecycle import Supervisor
from kvway_core.prompts import PromptEncoder
from kvway_core.testing.fake_replica import FakeReplica
from kvway_router.app import Router
from kvway_router.holding import Tier
from kvway_router.index import BlockIndex
from kvway_router.snapshot_keeper import SnapshotKeeper
from kvway_router.snapshots import (
    VERSION,
    SavedReplica,
    SavedRun,
    Snapshot,
    decode_snapshot,
    encode_snapshot,
    read_snapshot,
    write_snapshot,
)
from tests.router.conftest import MODEL, Bench, StartBench
from tests.router.zmq_worker import ZmqWorker, stored

BOOTS: dict[str, str | None] = {"a:1": "boot-a", "b:1": None}


@pytest.fixture
def index() -> BlockIndex:
    """Two replicas that share a beginning, with orphans and a second tier."""
    index = BlockIndex()
    index.store("a:1", None, [1, 2, 3, 4])
    index.store("b:1", None, [1, 2, 5])
    index.store("a:1", 77, [78, 79])
    index.store("b:1", None, [1, 2, 3], tier=Tier.HOST)
    index.remove("a:1", [3])
    index.store("b:1", 2, [6])
    index.confirm(index.speculate("a:1", [1]))
    return index


def restored(snapshot: Snapshot, *names: str, **options: int) -> BlockIndex:
    after = BlockIndex(**options)
    for name in names:
        assert after.restore(snapshot, name) == BOOTS.get(name)
    after.check_invariants()
    return after


def test_what_was_held_is_held_again(index: BlockIndex) -> None:
    snapshot = decode_snapshot(encode_snapshot(index.snapshot(BOOTS)))
    after = restored(snapshot, "a:1", "b:1")
    for replica_id in BOOTS:
        for tier in Tier:
            held = sorted(index.blocks(replica_id, tier))
            assert sorted(after.blocks(replica_id, tier)) == held
    assert len(after) == len(index)
    after.store("a:1", 2, [3])
    assert after.match([1, 2, 3, 4]) == {"a:1": 4, "b:1": 2}


def test_of_a_shared_run_each_gets_back_what_it_held() -> None:
    index = BlockIndex()
    index.store("a:1", None, [1, 2, 3, 4])
    index.store("b:1", None, [1, 2])
    assert index._tree.num_nodes == 1
    after = restored(index.snapshot(BOOTS), "b:1", "a:1")
    assert after.match([1, 2, 3, 4]) == {"a:1": 4, "b:1": 2}


def test_the_order_of_use_is_kept(index: BlockIndex) -> None:
    after = restored(index.snapshot(BOOTS), "a:1")
    for limit in (4, 3, 2, 1):
        for either in (index, after):
            either.set_limit("a:1", limit)
        assert sorted(after.blocks("a:1")) == sorted(index.blocks("a:1"))


def test_replicas_that_are_gone_are_left_out(index: BlockIndex) -> None:
    after = restored(index.snapshot(BOOTS), "a:1", "c:1")
    assert after.match([1, 2, 5, 6]) == {"a:1": 2}
    assert len(after) == 5
    assert set(index.snapshot({"b:1": None}).replicas) == {"b:1"}


def test_limits_hold_for_what_is_restored(index: BlockIndex) -> None:
    after = restored(index.snapshot(BOOTS), "a:1", max_blocks_per_replica=2)
    assert after.num_blocks("a:1") == 2


def damaged(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


def snapshot_of(
    *, version: int = VERSION, before: int = -1, hashes: bytes = bytes(8), tier: int = 0
) -> bytes:
    runs = [SavedRun(before, None, hashes)]
    replicas = {"a:1": SavedReplica(None, [[tier, 1]])}
    return encode_snapshot(Snapshot(version, sys.byteorder, runs, replicas))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"kvway-index\n",
        damaged(snapshot_of()),
        snapshot_of()[:-1],
        snapshot_of(version=VERSION + 1),
        snapshot_of(before=0),
        snapshot_of(hashes=b"abc"),
        snapshot_of(hashes=b""),
        snapshot_of(tier=1),
        encode_snapshot(msgspec.convert([VERSION, "middle", [], {}], Snapshot)),
    ],
    ids=["empty", "short", "damaged", "cut", "version", "order", "odd", "none", "tier", "endian"],
)
def test_what_cannot_be_trusted_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="it "):
        decode_snapshot(data)


def packed(version: object = VERSION, *rest: object) -> bytes:
    """A snapshot of any layout, with a checksum that is right."""
    payload = msgspec.msgpack.encode([version, *rest])
    return b"kvway-index\n" + xxhash.xxh3_64_digest(payload) + payload


TWO_BLOCKS = bytes(16)


@pytest.mark.parametrize(
    ("run", "saved"),
    [
        ([-1, -1, TWO_BLOCKS], [None, [[0, 2]]]),
        ([-1, -(2**63), TWO_BLOCKS], [None, [[0, 2]]]),
        ([-1, 1.5, TWO_BLOCKS], [None, [[0, 2]]]),
        ([-2, None, TWO_BLOCKS], [None, [[0, 2]]]),
        ([-1, None, TWO_BLOCKS], [None, [[0, 3]]]),
        ([-1, None, TWO_BLOCKS], [None, [[0, 0]]]),
        ([-1, None, TWO_BLOCKS], [None, [[0, -1]]]),
        ([-1, None, TWO_BLOCKS], [None, [[-1, 2]]]),
        ([-1, None, TWO_BLOCKS], [None, [[0, 2**64 - 1]]]),
        ([-1, None, TWO_BLOCKS], [None, [[0]]]),
        ([-1, None, TWO_BLOCKS], [None, [[0, 2]], -1]),
    ],
)
def test_a_number_out_of_its_bounds_is_refused(run: list[object], saved: list[object]) -> None:
    """When the file is read: what is restored later has nobody who would take an error."""
    with pytest.raises(ValueError, match=r"it names|Expected"):
        decode_snapshot(packed(VERSION, sys.byteorder, [run], {"a:1": saved}))


def test_the_largest_numbers_are_restored() -> None:
    runs = [[-1, 2**64 - 1, b"\xff" * 8], [0, None, TWO_BLOCKS]]
    saved = ["boot", [[0, 1, 1, 2], [], [1, 1]], 2**64 - 1]
    snapshot = decode_snapshot(packed(VERSION, sys.byteorder, runs, {"a:1": saved}))
    index = BlockIndex()
    assert index.restore(snapshot, "a:1") == "boot"
    index.check_invariants()
    assert index.num_blocks("a:1") > 0


@pytest.mark.parametrize(
    "rest", [[], [{"runs": []}], [[], [], "x"], [[[0, "x"]], {"a:1": 7}]], ids=str
)
def test_another_layout_is_another_version(rest: list[object]) -> None:
    with pytest.raises(ValueError, match=f"it is of version {VERSION + 1}, "):
        decode_snapshot(packed(VERSION + 1, sys.byteorder, *rest))


def test_a_file_is_replaced_whole_or_not_at_all(index: BlockIndex, tmp_path: Path) -> None:
    path = tmp_path / "index.snapshot"
    assert read_snapshot(path) is None
    first = index.snapshot(BOOTS)
    write_snapshot(path, first)
    index.clear("a:1")
    write_snapshot(path, index.snapshot(BOOTS))
    assert read_snapshot(path) == index.snapshot(BOOTS) != first
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_snapshot(tmp_path / "folder", first)
    assert {entry.name for entry in tmp_path.iterdir()} == {"index.snapshot", "folder"}


# -- in a whole router ------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def next_router(bench: Bench, encoder: PromptEncoder) -> AsyncIterator[Router]:
    """The router that comes after one that was stopped, with the same settings."""
    settings = bench.router._settings
    async with (
        Supervisor() as supervisor,
        Router(
            settings, name=MODEL, encoder=encoder, supervisor=supervisor, clock=SystemClock()
        ) as router,
    ):
        await router.replicas.wait_for(lambda: len(router.replicas.usable()) == 1)
        yield router


def num_held(router: Router, replica: FakeReplica) -> int:
    return router.index.num_blocks(replica.replica_id)


@pytest.fixture
async def stopped(start_bench: StartBench, tmp_path: Path) -> Bench:
    """A router that has sent a prompt to its replica, and has drained."""
    bench = await start_bench(1, index_snapshot=tmp_path / "index.snapshot")
    await bench.chat("a" * 200)
    await bench.router.drain()
    assert num_held(bench.router, bench.replica) > 10
    return bench


async def test_a_router_knows_after_a_restart_what_it_knew(
    stopped: Bench, encoder: PromptEncoder
) -> None:
    async with next_router(stopped, encoder) as router:
        held = num_held(stopped.router, stopped.replica)
        assert num_held(router, stopped.replica) == held


async def test_a_replica_that_restarted_meanwhile_is_cleared(
    stopped: Bench, encoder: PromptEncoder
) -> None:
    stopped.replica.pages["/load"] = (200, stopped.replica.load(boot_id="another"))
    async with next_router(stopped, encoder) as router:
        assert num_held(router, stopped.replica) == 0


async def test_a_snapshot_that_cannot_be_used_is_no_reason_not_to_start(
    stopped: Bench, encoder: PromptEncoder, tmp_path: Path
) -> None:
    (tmp_path / "index.snapshot").write_bytes(b"junk")
    async with next_router(stopped, encoder) as router:
        assert num_held(router, stopped.replica) == 0


async def test_a_snapshot_is_written_again_and_again(stopped: Bench, tmp_path: Path) -> None:
    path = tmp_path / "again"
    keeper = SnapshotKeeper(
        path,
        index=stopped.router.index,
        replicas=stopped.router.replicas,
        interval_s=0.001,
    )
    task = asyncio.create_task(keeper.run())
    for _ in range(2):
        while not path.exists():  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.002)
        path.unlink()
    await keeper.write()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    snapshot = read_snapshot(path)
    assert snapshot is not None
    assert set(snapshot.replicas) == {stopped.replica.replica_id}


async def test_a_snapshot_that_cannot_be_written_does_not_end_the_keeper(
    start_bench: StartBench, tmp_path: Path
) -> None:
    """A folder that is not there, a number that is too large, a name that is no text."""
    async with ZmqWorker() as worker:
        await worker.publish(stored(11, 12))
        bench = await start_bench(1)
        bench.replica.pages["/load"] = (200, bench.replica.load(kv_events=ports_of(worker)))
        replicas, name = bench.router.replicas, bench.replica.replica_id
        await replicas.wait_for(lambda: replicas.is_fed(name))
        state, replica = replicas.feeds(name)[0]._state, replicas.get(name)
        assert replica is not None
        index = bench.router.index
        path = tmp_path / "index.snapshot"
        with capture_logs() as logs:
            await SnapshotKeeper(
                tmp_path / "none" / "file", index=index, replicas=replicas
            ).write()
            keeper = SnapshotKeeper(path, index=index, replicas=replicas)
            next_seq, state.next_seq = state.next_seq, 2**64
            await keeper.write()
            boot_id, state.next_seq, replica.boot_id = replica.boot_id, next_seq, "\ud800"
            await keeper.write()
            replica.boot_id = boot_id
        said = [log["event"] for log in logs]
        assert said.count("index_snapshot_not_written") == 3
        assert files_in(tmp_path) == []
        await keeper.write()
        assert read_snapshot(path) is not None


def files_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def ports_of(worker: ZmqWorker) -> dict[str, object]:
    """As a load report says where events are published."""
    info = worker.info
    return {"pub_port": info.pub_port, "replay_port": info.replay_port, "topic": info.topic}


async def test_feeds_go_on_from_a_snapshot(
    start_bench: StartBench, encoder: PromptEncoder, tmp_path: Path
) -> None:
    async with ZmqWorker() as worker:
        await worker.publish(stored(11, 12))
        await worker.publish(stored(13, parent=12))
        bench = await start_bench(1, index_snapshot=tmp_path / "index.snapshot")
        bench.replica.pages["/load"] = (200, bench.replica.load(kv_events=ports_of(worker)))
        name = bench.replica.replica_id
        await bench.router.replicas.wait_for(lambda: bench.router.replicas.is_fed(name))
        assert bench.router.replicas.next_seqs() == {name: 2}
        await bench.router.drain()
        asked = len(worker.replays)
        await worker.publish(stored(14, parent=13), lost=True)
        async with next_router(bench, encoder) as router:
            index = router.index
            await router.replicas.wait_for(lambda: index.num_blocks(name) == 4)
            assert index.match([11, 12, 13, 14]) == {name: 4}
            assert 0 not in worker.replays[asked:]


def test_what_is_only_expected_is_not_remembered() -> None:
    index = BlockIndex()
    index.store("a:1", None, [1, 2])
    index.speculate("a:1", [1, 2, 3, 4])
    index.speculate("a:1", [7])
    other = BlockIndex()
    other.restore(index.snapshot({"a:1": None}), "a:1")
    assert sorted(other.blocks("a:1")) == [1, 2]
