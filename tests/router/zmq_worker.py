"""A kvway worker's KV events, through real sockets."""

from __future__ import annotations

from kvway_core.api import KvEventsInfo
from kvway_core.events import BlockRemoved, BlockStored, EventBatch, KVEvent, encode_batch
from tests.router.publisher import Publisher

TOPIC = b"kv-events"


def stored(*hashes: int, parent: int | None = None, block_size: int = 16) -> BlockStored:
    return BlockStored(
        block_hashes=list(hashes), parent_block_hash=parent, token_ids=[], block_size=block_size
    )


def removed(*hashes: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=list(hashes))


class ZmqWorker(Publisher):
    """Publishes on demand, with the boot id of its life in every batch."""

    def __init__(self, *, boot_id: str = "boot-1") -> None:
        super().__init__(topic=TOPIC, names_topic=True)
        self.boot_id = boot_id

    @property
    def info(self) -> KvEventsInfo:
        assert self.replay is not None
        ports = [int(endpoint.rpartition(":")[2]) for endpoint in (self.pub, self.replay)]
        return KvEventsInfo(pub_port=ports[0], replay_port=ports[1], topic=TOPIC.decode())

    async def publish(self, *events: KVEvent, lost: bool = False) -> None:
        batch = EventBatch(ts=0.0, events=events, boot_id=self.boot_id)
        await self.publish_raw(encode_batch(batch), lost=lost)

    def restart(self, boot_id: str) -> None:
        """Begin another life behind the same sockets."""
        self.boot_id = boot_id
        self.begin_again()
