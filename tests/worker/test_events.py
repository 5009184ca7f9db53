"""The KV event publisher against plain ZMQ sockets and vLLM's own message shapes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvway_core.clock import SystemClock
from kvway_core.errors import ConfigError
from kvway_core.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvway_worker.events import KvEventOptions, KvEventPublisher

BOOT = "boot-1"
END = b"\xff" * 8


class VllmEvent(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """How vLLM 0.32 tags its events: maps with a `type`."""


class VllmStored(VllmEvent, tag="BlockStored"):
    """BlockStored with the fields that a vLLM subscriber reads."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None


class VllmRemoved(VllmEvent, tag="BlockRemoved"):
    """BlockRemoved as vLLM reads it."""

    block_hashes: list[bytes | int]
    medium: str | None = None


class VllmCleared(VllmEvent, tag="AllBlocksCleared"):
    """AllBlocksCleared as vLLM reads it."""


class VllmBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The batch as vLLM reads it: it does not know a boot id."""

    ts: float
    events: list[VllmStored | VllmRemoved | VllmCleared]
    data_parallel_rank: int | None = None


VLLM = msgspec.msgpack.Decoder(VllmBatch)


def stored(*hashes: int, parent: int | None = None) -> BlockStored:
    """A BlockStored of 2-token blocks."""
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=parent,
        token_ids=list(range(2 * len(hashes))),
        block_size=2,
    )


@asynccontextmanager
async def publishing(**options: object) -> AsyncIterator[KvEventPublisher]:
    """A publisher that runs until the block is left."""
    publisher = KvEventPublisher(
        msgspec.convert(options, KvEventOptions), boot_id=BOOT, clock=SystemClock()
    )
    task = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        publisher.close()


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    """ZMQ context of the test's own sockets."""
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


async def replay(
    context: zmq.asyncio.Context, publisher: KvEventPublisher, start: int
) -> list[tuple[int, bytes]]:
    """Ask the replay socket as vLLM's subscriber does; return (seq, payload) of each answer."""
    got: list[tuple[int, bytes]] = []
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://127.0.0.1:{publisher.info.replay_port}")
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            empty, topic, seq, payload = await dealer.recv_multipart()
            assert (empty, topic) == (b"", publisher.info.topic.encode())
            if seq == END:
                assert payload == b""
                return got
            got.append((int.from_bytes(seq, "big"), payload))


async def test_a_vllm_subscriber_reads_live_events_and_replays_what_it_missed(
    context: zmq.asyncio.Context,
) -> None:
    """Map form, sequence numbers from 0, and a replay that is byte for byte what was sent."""
    events: list[KVEvent] = [stored(1, 2), BlockRemoved(block_hashes=[1]), AllBlocksCleared()]
    async with publishing() as publisher:
        publisher.publish(events)  # nobody listens yet: lost on PUB, kept for replay
        assert len(await replay(context, publisher, 0)) == 1  # by now it went out, to nobody
        with context.socket(zmq.SUB) as sub:
            sub.setsockopt(zmq.SUBSCRIBE, publisher.info.topic.encode())
            sub.connect(f"tcp://127.0.0.1:{publisher.info.pub_port}")
            while not await sub.poll(20):
                publisher.publish([stored(7, parent=2)])
            topic, seq, payload = await sub.recv_multipart()
        assert topic == publisher.info.topic.encode()
        live = int.from_bytes(seq, "big")
        batch = VLLM.decode(payload)
        assert [type(event) for event in batch.events] == [VllmStored]

        missed = await replay(context, publisher, 0)

    assert [number for number, _ in missed[: live + 1]] == list(range(live + 1))
    assert missed[live] == (live, payload)
    first = VLLM.decode(missed[0][1])
    assert [type(event) for event in first.events] == [VllmStored, VllmRemoved, VllmCleared]
    assert isinstance(first.events[0], VllmStored)
    assert first.events[0].block_hashes == [1, 2]
    assert first.events[0].medium == "GPU"
    assert msgspec.msgpack.decode(missed[0][1])[3] == BOOT


@pytest.mark.parametrize(("token_ids", "expected"), [(False, []), (True, [0, 1, 2, 3])])
async def test_token_ids_leave_the_worker_only_when_asked_to(
    context: zmq.asyncio.Context, *, token_ids: bool, expected: list[int]
) -> None:
    """Prompts are not published by default."""
    async with publishing(token_ids=token_ids) as publisher:
        publisher.publish([stored(1, 2)])
        [(_, payload)] = await replay(context, publisher, 0)
    event = VLLM.decode(payload).events[0]
    assert isinstance(event, VllmStored)
    assert event.token_ids == expected


async def test_replay_starts_where_asked_and_forgets_only_the_oldest(
    context: zmq.asyncio.Context,
) -> None:
    """At most `buffer_batches` are kept; numbers go on all the same."""
    async with publishing(buffer_batches=3) as publisher:
        for number in range(10):
            publisher.publish([stored(number)])
        assert [seq for seq, _ in await replay(context, publisher, 0)] == [7, 8, 9]
        assert [seq for seq, _ in await replay(context, publisher, 9)] == [9]
        assert await replay(context, publisher, 10) == []
        assert await replay(context, publisher, 2**64 - 1) == []
        assert publisher.num_published == 10


async def test_bytes_are_bounded_too_and_one_large_batch_is_kept_alone(
    context: zmq.asyncio.Context,
) -> None:
    """A few huge batches do not fill the memory; the newest is always there."""
    async with publishing(buffer_bytes=2000) as publisher:
        for number in range(50):
            publisher.publish([stored(number)])
        kept = await replay(context, publisher, 0)
        assert 1 < len(kept) < 50
        assert kept[-1][0] == 49
        assert sum(len(payload) for _, payload in kept) <= 2000
        publisher.publish([stored(*range(2**40, 2**40 + 500))])
        assert [seq for seq, _ in await replay(context, publisher, 0)] == [50]


async def test_nothing_happened_takes_no_number(context: zmq.asyncio.Context) -> None:
    """A step without cache changes is not a batch."""
    async with publishing() as publisher:
        publisher.publish([])
        assert publisher.num_published == 0
        assert await replay(context, publisher, 0) == []


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"", b"short"], [b"", b"\x00" * 8, b"more"], [b"x", b"\x00" * 8], [b"\x00" * 8]],
)
async def test_a_malformed_replay_request_costs_only_itself(
    context: zmq.asyncio.Context, frames: list[bytes]
) -> None:
    """The replay socket serves the next peer as if nothing had been."""
    async with publishing() as publisher:
        publisher.publish([stored(1)])
        with context.socket(zmq.DEALER) as rude:
            rude.connect(f"tcp://127.0.0.1:{publisher.info.replay_port}")
            await rude.send_multipart(frames)
            await rude.send_multipart([b"", b"\x00" * 8])  # read after the rude one
            assert int.from_bytes((await rude.recv_multipart())[2], "big") == 0
            assert (await rude.recv_multipart())[2] == END
        assert [seq for seq, _ in await replay(context, publisher, 0)] == [0]


async def test_two_peers_replay_at_once_and_each_gets_its_own(
    context: zmq.asyncio.Context,
) -> None:
    """Answers are addressed to who asked, whole and in order."""
    async with publishing() as publisher:
        for number in range(300):
            publisher.publish([stored(number)])
        whole, tail = await asyncio.gather(
            replay(context, publisher, 0), replay(context, publisher, 250)
        )
    assert [seq for seq, _ in whole] == list(range(300))
    assert [seq for seq, _ in tail] == list(range(250, 300))


async def test_publishing_from_another_thread_keeps_the_order(
    context: zmq.asyncio.Context,
) -> None:
    """The step thread publishes; numbers are without gap or repetition."""
    async with publishing() as publisher:

        def step() -> None:
            for number in range(200):
                publisher.publish([stored(number)])

        threads = [threading.Thread(target=step) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        got = await replay(context, publisher, 0)
    assert [seq for seq, _ in got] == list(range(600))


async def test_closing_frees_the_ports_and_later_events_go_nowhere() -> None:
    """A restart in the same process can bind the same port; publish after close is harmless."""
    async with publishing() as publisher:
        info = publisher.info
    publisher.publish([stored(1)])
    assert publisher.num_published == 0
    async with publishing(pub_port=info.pub_port, replay_port=info.replay_port) as again:
        assert again.info == info


async def test_a_taken_port_is_a_config_error_that_names_the_flag() -> None:
    """Start-up fails with one clear line, and the other socket is not leaked."""
    async with publishing() as publisher:
        for field, flag in (
            ("pub_port", "--kv-events-port"),
            ("replay_port", "--kv-events-replay-port"),
        ):
            with pytest.raises(ConfigError, match=f"{flag}: cannot bind") as failure:
                async with publishing(**{field: publisher.info.pub_port}):
                    pass
            assert len(failure.value.problems) == 1


async def test_a_host_that_is_not_ours_is_a_config_error() -> None:
    """An address of another machine cannot be bound."""
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        async with publishing(host="192.0.2.1"):
            pass
