"""Feeds of vLLM and SGLang over real ZMQ sockets, up to what a prompt matches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import zmq.asyncio
from structlog.testing import capture_logs

from kvway_core.blocks import Namespace, block_hashes, event_hash
from kvway_core.clock import SystemClock
from kvway_core.testing.fake_replica import FakeReplica
from kvway_router.feed_source import EventsOption, FeedSource, find_option
from kvway_router.feed_state import FeedOptions
from kvway_router.index import BlockIndex
from kvway_router.ledger import Ledger
from kvway_router.policy import PolicyParams
from kvway_router.replica import Replica, ReplicaOptions
from kvway_router.replicas import ReplicaSet
from tests.router.engine_publisher import (
    Encode,
    EnginePublisher,
    removed,
    sglang,
    stored,
    two_ranks,
    vllm_0_10,
    vllm_arrays,
    vllm_map_of_maps,
    vllm_maps,
)
from tests.router.zmq_worker import ZmqWorker
from tests.router.zmq_worker import stored as kvway_stored

MODEL = "test-model"
SIZE = 16
NAMESPACE = Namespace(MODEL, SIZE)
TOKENS = list(range(500, 564))
BIG = 2**63 + 5
# A silence is looked into only after an outage; entries go soon while a feed is down.
OPTIONS = FeedOptions(verify_s=60.0, retry_s=0.01, replay_timeout_s=0.2, stale_after_s=0.05)


class Fleet:
    def __init__(self, *options: EventsOption, feed: FeedOptions = OPTIONS) -> None:
        self.index = BlockIndex()
        self.set = ReplicaSet(
            index=self.index,
            ledger=Ledger(clock=SystemClock(), params=PolicyParams()),
            clock=SystemClock(),
            model=MODEL,
            block_size=SIZE,
            options=ReplicaOptions(
                interval_s=0.01,
                timeout_s=10.0,
                engine_interval_s=0.0,
                feed=feed,
                kv_events=options,
            ),
        )

    def matched(self, replica: FakeReplica, tokens: list[int] = TOKENS) -> int:
        chain = block_hashes(tokens, parent=NAMESPACE.root(), block_size=SIZE)
        return self.index.match([*map(event_hash, chain)]).get(replica.replica_id, 0)

    def replica(self, replica: FakeReplica) -> Replica:
        found = self.set.get(replica.replica_id)
        assert found is not None
        return found


async def eventually(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the sockets have their own thread, the index no event
        await asyncio.sleep(0.002)


def option_for(replica: FakeReplica, publisher: EnginePublisher) -> EventsOption:
    replay = f",replay={publisher.replay}" if publisher.replay else ""
    return EventsOption.parse(f"{replica.replica_id}={publisher.pub}{replay}")


@asynccontextmanager
async def following(
    replica: FakeReplica, *options: EventsOption, feed: FeedOptions = OPTIONS
) -> AsyncIterator[Fleet]:
    fleet = Fleet(*options, feed=feed)
    fleet.set.set_replicas([replica.url])
    async with asyncio.TaskGroup() as group:
        task = group.create_task(fleet.set.run())
        await eventually(lambda: bool(fleet.set.feeds(replica.replica_id)))
        yield fleet
        task.cancel()


@pytest.fixture
async def replica() -> AsyncIterator[FakeReplica]:
    """An engine without our load report."""
    async with FakeReplica(model=MODEL) as replica:
        del replica.pages["/load"]
        yield replica


ENGINES = [vllm_0_10, vllm_arrays, vllm_maps, vllm_map_of_maps, sglang]
NAMES = [encode.__name__ for encode in ENGINES]


@pytest.mark.parametrize(
    "encode",
    [vllm_0_10, vllm_arrays, vllm_maps, vllm_map_of_maps, sglang],
    ids=lambda e: e.__name__,
)
async def test_each_engine_is_followed_from_its_first_batch_on(
    replica: FakeReplica, encode: Encode
) -> None:
    async with EnginePublisher(encode) as engine:
        await engine.publish(stored([7, BIG], TOKENS[:32]))
        async with following(replica, option_for(replica, engine)) as fleet:
            await eventually(lambda: fleet.matched(replica) == 2)
            await engine.subscribed()
            await engine.publish(stored([9], TOKENS[32:48], parent=BIG))
            await eventually(lambda: fleet.matched(replica) == 3)
            await engine.publish(removed(9), lost=True)
            await engine.publish(removed(BIG))
            await eventually(lambda: fleet.matched(replica) == 1)
            await eventually(lambda: fleet.set.is_fed(replica.replica_id))
            stats = fleet.replica(replica).feed_stats
            assert (stats.num_gaps, stats.num_lost, stats.num_bad) == (1, 0, 0)
            assert engine.replays == [0, 1]


async def test_hashes_may_be_bytes_and_one_bad_event_does_not_lose_its_batch(
    replica: FakeReplica,
) -> None:
    async with EnginePublisher(vllm_maps) as engine:
        bad = stored([b"\x02" * 32], TOKENS[:16]) | {"block_size": "sixteen"}
        good = stored([b"\x01" * 32], TOKENS[:16])
        await engine.publish(bad, good, {"type": "BlockMigrated", "block_hashes": []})
        async with following(replica, option_for(replica, engine)) as fleet:
            await eventually(lambda: fleet.matched(replica) == 1)
            assert fleet.replica(replica).feed_stats.num_bad == 2


async def test_a_salted_prompt_is_no_match_for_a_plain_one(replica: FakeReplica) -> None:
    async with EnginePublisher(vllm_arrays) as engine:
        await engine.publish(stored([7], TOKENS[:16], extra_keys=[["tenant-a"]]))
        await engine.publish(stored([8], TOKENS[16:32], parent=7))
        await engine.publish(stored([9], TOKENS[48:64]))
        async with following(replica, option_for(replica, engine)) as fleet:
            await eventually(lambda: fleet.matched(replica, TOKENS[48:]) == 1)
            assert fleet.matched(replica) == 0


async def test_another_life_is_taken_from_its_first_number_on(replica: FakeReplica) -> None:
    async with EnginePublisher(sglang) as engine, AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(following(replica, option_for(replica, engine)))
        await engine.subscribed()
        for number in range(3):
            await engine.publish(stored([number], TOKENS[:16]))
        await eventually(lambda: fleet.matched(replica) == 1)
        engine.begin_again()
        await engine.publish(stored([50], TOKENS[16:32]))
        await eventually(lambda: fleet.matched(replica, TOKENS[16:]) == 1)
        assert fleet.matched(replica) == 0
        assert fleet.replica(replica).feed_stats.num_restarts == 1


async def test_without_a_replay_socket_it_is_followed_and_a_gap_clears(
    replica: FakeReplica,
) -> None:
    async with EnginePublisher(vllm_maps, can_replay=False) as engine:
        await engine.publish(stored([1], [1] * 16))
        async with following(replica, option_for(replica, engine)) as fleet:
            await engine.subscribed()
            await eventually(lambda: fleet.set.is_fed(replica.replica_id))
            await engine.publish(stored([7], TOKENS[:16]))
            await eventually(lambda: fleet.matched(replica) == 1)
            await engine.publish(removed(7), lost=True)
            await engine.publish(stored([9], TOKENS[48:64]))
            await eventually(lambda: fleet.matched(replica, TOKENS[48:]) == 1)
            assert fleet.matched(replica) == 0
            assert fleet.replica(replica).feed_stats.num_lost == 1


async def test_without_a_replay_socket_entries_age_while_the_connection_is_down(
    replica: FakeReplica,
) -> None:
    async with (
        EnginePublisher(vllm_maps, can_replay=False) as engine,
        following(replica, option_for(replica, engine)) as fleet,
    ):
        await engine.subscribed()
        await engine.publish(stored([7], TOKENS[:16]))
        await eventually(lambda: fleet.matched(replica) == 1)
        await engine.stop()
        await eventually(lambda: fleet.matched(replica) == 0)
        assert not fleet.set.is_fed(replica.replica_id)
        assert fleet.replica(replica).feed_stats.num_outages == 1
        await engine.start()
        await engine.subscribed()
        await engine.publish(stored([8], TOKENS[16:32], parent=7), stored([7], TOKENS[:16]))
        await eventually(lambda: fleet.matched(replica) == 2)
        assert fleet.set.is_fed(replica.replica_id)


async def test_data_parallel_ranks_have_a_cache_each(replica: FakeReplica) -> None:
    """A prompt is on one rank: beginnings on one and ends on the other make no match."""
    async with two_ranks(vllm_maps) as (one, two):
        option = EventsOption.parse(f"{replica.replica_id}={one.pub},ranks=2")
        async with following(replica, option) as fleet:
            await one.subscribed()
            await two.subscribed()
            await one.publish(stored([7], TOKENS[:16]))
            await eventually(lambda: fleet.matched(replica) == 1)
            await two.publish(stored([8], TOKENS[16:32]), rank=1)
            await two.publish(stored([7, 8, 9], TOKENS[:48]), removed(9), rank=1)
            await eventually(lambda: fleet.matched(replica) == 2)
            await one.publish(removed(7))
            await eventually(lambda: fleet.replica(replica).feed_stats.num_events == 5)
            assert fleet.matched(replica) == 2
            assert len(fleet.set.feeds(replica.replica_id)) == 2
            fleet.set.set_replicas([])
            assert len(fleet.index) == 0


async def test_an_engine_that_connects_finds_us_and_ipc_is_an_endpoint(
    replica: FakeReplica, tmp_path: Path
) -> None:
    async with (
        EnginePublisher(vllm_maps, endpoint=f"ipc://{tmp_path}/kv") as engine,
        following(replica, option_for(replica, engine)) as fleet,
    ):
        await engine.subscribed()
        await engine.publish(stored([7], TOKENS[:16]))
        await eventually(lambda: fleet.matched(replica) == 1)
    context = zmq.asyncio.Context()
    try:
        option = EventsOption.parse(f"{replica.replica_id}=ipc://{tmp_path}/ours,bind")
        async with following(replica, option) as fleet:
            publisher = context.socket(zmq.XPUB)
            publisher.connect(f"ipc://{tmp_path}/ours")
            await publisher.recv()
            payload = vllm_maps(1.0, [stored([7], TOKENS[:16])], 0)
            await publisher.send_multipart([b"any topic", bytes(8), payload])
            await eventually(lambda: fleet.matched(replica) == 1)
    finally:
        context.destroy(linger=0)


async def test_an_endpoint_that_cannot_be_used_costs_the_feed_and_not_the_replica(
    replica: FakeReplica, tmp_path: Path
) -> None:
    option = EventsOption.parse(f"{replica.replica_id}=ipc://{tmp_path}/none/kv,bind")
    async with following(replica, option) as fleet:
        await fleet.set.wait_for(lambda: len(fleet.set.usable()) == 1)
        assert not fleet.set.is_fed(replica.replica_id)


@pytest.mark.parametrize(
    "odd", [{"model": "another"}, {"block_size": 32}, {"hash_scheme": "kvway-0"}], ids=str
)
async def test_a_worker_that_hashes_otherwise_is_not_followed(odd: dict[str, object]) -> None:
    """Its hashes would be taken for those of prompts that they are not of. It is said once."""
    async with ZmqWorker() as worker, FakeReplica(model=MODEL) as replica:
        await worker.publish(kvway_stored(11, 12))
        ports = {
            "pub_port": worker.info.pub_port,
            "replay_port": worker.info.replay_port,
            "topic": worker.info.topic,
        }
        replica.pages["/load"] = (200, replica.load(kv_events=ports, **odd))
        fleet = Fleet()
        fleet.set.set_replicas([replica.url])
        async with asyncio.TaskGroup() as group:
            with capture_logs() as logs:
                task = group.create_task(fleet.set.run())
                looks = 0

                def has_looked_again() -> bool:
                    nonlocal looks
                    looks += 1
                    return looks > 3

                await fleet.set.wait_for(has_looked_again)
            assert fleet.set.feeds(replica.replica_id) == []
            said = [log for log in logs if log["event"] == "kv_events_not_understood"]
            report = replica.load(**odd)
            told = {key: report[key] for key in ("model", "block_size", "hash_scheme")}
            assert [{key: log[key] for key in told} for log in said] == [told]
            replica.pages["/load"] = (200, replica.load(kv_events=ports))
            await eventually(lambda: fleet.index.num_blocks(replica.replica_id) == 2)
            task.cancel()


# -- capacity and lives -------------------------------------------------------------------------


@asynccontextmanager
async def engine_pages(pages: dict[str, bytes]) -> AsyncIterator[str]:
    """Serves pages as they are; what is not there is 404."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        body = pages.get(path)
        status = b"200 OK" if body is not None else b"404 Not Found"
        body = body or b""
        head = b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        writer.write(head % (status, len(body)) + body)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


VLLM = b"""# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{block_size="32",engine="0",note="a \\"b\\"",num_gpu_blocks="3"} 1.0
vllm:cache_config_info{block_size="32",engine="1",num_gpu_blocks="1"} 1.0
process_start_time_seconds %d
"""


@pytest.mark.parametrize(
    ("pages", "num_tokens"),
    [
        ({"/metrics": VLLM % 7}, 128),
        ({"/metrics": b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1\n'}, None),
        (
            {
                "/metrics": b'sglang:max_total_num_tokens{dp_rank="0",tp_rank="0"} 50\n'
                b'sglang:max_total_num_tokens{dp_rank="0",tp_rank="1"} 50\n'
                b'sglang:max_total_num_tokens{dp_rank="1",tp_rank="0"} 40.0\n'
            },
            90,
        ),
        ({"/get_server_info": b'{"max_total_num_tokens":64,"dp_size":2,"more":[1]}'}, 128),
        (
            {"/props": b'{"total_slots":4,"default_generation_settings":{"n_ctx":32,"x":1}}'},
            128,
        ),
        ({"/metrics": b"\xff junk", "/props": b"[" * 10_000, "/get_server_info": b"{"}, None),
        ({"/props": b'{"total_slots":-4,"default_generation_settings":{"n_ctx":32}}'}, None),
        ({}, None),
    ],
    ids=["vllm", "vllm starting", "sglang", "sglang info", "llama.cpp", "junk", "odd", "nothing"],
)
async def test_no_more_is_listed_than_half_again_what_an_engine_says_it_holds(
    pages: dict[str, bytes], num_tokens: int | None
) -> None:
    async with engine_pages({"/health": b"", **pages}) as name:
        fleet = Fleet()
        fleet.set.set_replicas([f"http://{name}"])
        async with asyncio.TaskGroup() as group:
            task = group.create_task(fleet.set.run())
            await fleet.set.wait_for(lambda: len(fleet.set.usable()) == 1)
            fleet.index.speculate(name, list(range(100)))
            limit = 100 if num_tokens is None else -(-num_tokens * 3 // 2 // SIZE)
            assert fleet.index.num_blocks(name) == limit
            task.cancel()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (VLLM % 7, VLLM % 8),
        (b"sglang:prompt_tokens_total 900\n", b"sglang:prompt_tokens_total 1e2\n"),
    ],
    ids=["another start", "a counter that went back"],
)
async def test_an_engine_that_restarted_is_cleared(before: bytes, after: bytes) -> None:
    pages = {"/health": b"", "/metrics": before}
    async with engine_pages(pages) as name:
        fleet = Fleet()
        fleet.set.set_replicas([f"http://{name}"])
        async with asyncio.TaskGroup() as group:
            task = group.create_task(fleet.set.run())
            await fleet.set.wait_for(lambda: len(fleet.set.usable()) == 1)
            fleet.index.confirm(fleet.index.speculate(name, [1, 2]))
            looks = 0

            def has_looked_again() -> bool:
                nonlocal looks
                looks += 1
                return looks > 3

            await fleet.set.wait_for(has_looked_again)
            assert fleet.index.num_blocks(name) == 2
            pages["/metrics"] = after
            await fleet.set.wait_for(lambda: fleet.index.num_blocks(name) == 0)
            task.cancel()


# -- the option ---------------------------------------------------------------------------------


def test_an_option_says_where_the_ranks_of_a_replica_publish() -> None:
    option = EventsOption.parse("tcp://*:5557,replay=tcp://*:5600,topic=kv,ranks=2")
    assert option.sources("a:1", "::1") == [
        FeedSource("a:1", "tcp://[::1]:5557", "tcp://[::1]:5600", "kv"),
        FeedSource("a:1/1", "tcp://[::1]:5558", "tcp://[::1]:5601", "kv"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5557",
        "tcp://*",
        "tcp://*:0",
        "tcp://:5557",
        "udp://*:5557",
        "tcp://*:5557,replay=5558",
        "tcp://*:5557,ranks=0",
        "tcp://*:5557,ranks=x",
        "tcp://*:5557,speed=9",
        "tcp://*:5557,bind=no",
        "tcp://*:5557,topic",
        "tcp://*:5557,bind",
        "a:1=tcp://*:5557,bind",
        "ipc://",
        "ipc:///run/kv",
        "a:1=ipc:///run/kv,ranks=2",
    ],
)
def test_a_value_that_is_no_option_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="'"):
        EventsOption.parse(text)


def test_a_replica_that_is_named_has_its_own_option() -> None:
    general, own = EventsOption.parse("tcp://*:1"), EventsOption.parse("a:1=tcp://*:2")
    assert find_option((general, own), "a:1") is own
    assert find_option((general, own), "b:1") is general
    assert find_option((own,), "b:1") is None
