"""The dtype of cached keys and values: in the identity of a block, in its events, in /load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvway_core.blocks import Namespace
from kvway_core.events import BlockStored, EventBatch, decode_batch, encode_batch
from kvway_worker.cache.block_pool import BlockPool
from tests.worker.http_worker import serving
from tests.worker.pools import NAMESPACE, num_found, serve

DTYPES = ("float32", "bfloat16", "int8", "fp8_e4m3")


def stored(pool: BlockPool) -> list[BlockStored]:
    return [event for event in pool.take_events() if isinstance(event, BlockStored)]


def test_hashes_are_the_same_for_every_dtype() -> None:
    """A router looks one chain up for replicas of any dtype."""
    roots = {Namespace("m", kv_dtype=dtype).root() for dtype in ("", *DTYPES)}
    assert len(roots) == 1


def test_a_block_of_one_dtype_is_never_hit_as_another_in_spite_of_the_same_hash() -> None:
    pool = BlockPool(20, 4)
    tokens = list(range(18))
    ours = replace(NAMESPACE, kv_dtype="int8")
    serve(pool, tokens, namespace=ours)
    assert num_found(pool, tokens, ours)[0] == 4
    assert num_found(pool, tokens, replace(NAMESPACE, kv_dtype="fp8_e4m3")) == (0, 0)
    assert num_found(pool, tokens, NAMESPACE) == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_blocks_carry_their_dtype_on_the_wire(dtype: str) -> None:
    pool = BlockPool(20, 4, kv_dtype=dtype)
    serve(pool, list(range(10)))
    events = stored(pool)
    assert [event.kv_dtype for event in events] == [dtype]
    payload = encode_batch(EventBatch(1.0, tuple(events)))
    assert msgspec.msgpack.decode(payload)[1][0]["kv_dtype"] == dtype
    assert decode_batch(payload).events == tuple(events)


def test_an_engine_without_kv_leaves_the_dtype_out_of_its_events() -> None:
    pool = BlockPool(20, 4)
    serve(pool, list(range(10)))
    payload = encode_batch(EventBatch(1.0, tuple(stored(pool))))
    assert "kv_dtype" not in msgspec.msgpack.decode(payload)[1][0]


async def test_load_tells_the_dtype(byte_model: Path) -> None:
    async with serving(byte_model) as running:
        assert (await running.get("/load"))[1]["kv_dtype"] is None
        model = running.worker.model
        assert model is not None
        running.worker.model = replace(model, kv_dtype="int8")
        assert (await running.get("/load"))[1]["kv_dtype"] == "int8"
