"""One worker's life as its endpoints see it.

starting ──model loaded──> ready ──SIGTERM──> draining
│                        │                    │
└────────────────────────┴──engine given up───┴──> failed
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry

from kvway_core.api import AttentionInfo, BlockCounts, KvEventsInfo, LoadReport, WorkerState
from kvway_core.blocks import SCHEME
from kvway_core.clock import Clock
from kvway_core.errors import EngineFailed, KvwayError, ShuttingDown
from kvway_worker.api.generation import Generator
from kvway_worker.api.served_model import ServedModel
from kvway_worker.engine import EngineLoop
from kvway_worker.executor import BoundedExecutor
from kvway_worker.load import AttentionReading
from kvway_worker.metrics import WorkerMetrics
from kvway_worker.settings import WorkerSettings


class Starting(KvwayError):
    """The model is still loading."""

    code = "starting"
    http_status = 503
    retryable = True


class Worker:
    """What the endpoints share. Lives on the event loop; nothing here blocks.

    Args:
        settings: As started.
        boot_id: Names this life of the process.
        clock: The time.
        registry: Where its metrics register.
        kv_events: Where cache changes are published; None when they are not.

    Invariants:
        1. `num_in_flight` counts the requests inside `request()`; it is 0 when they have ended,
           however they ended.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        boot_id: str,
        clock: Clock,
        registry: CollectorRegistry,
        kv_events: KvEventsInfo | None = None,
    ) -> None:
        self.settings = settings
        self.boot_id = boot_id
        self.clock = clock
        self.metrics = WorkerMetrics(registry, model_name=settings.name)
        self.executor = BoundedExecutor(
            num_threads=settings.tokenizer_threads,
            max_pending=settings.max_tokenizing,
            name="tokenize",
        )
        self.model: ServedModel | None = None
        self.engine: EngineLoop | None = None
        self._kv_events = kv_events
        self._draining = False
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def state(self) -> WorkerState:
        """Where the worker is in its life."""
        if self.engine is not None and self.engine.failed is not None:
            return "failed"
        if self._draining:
            return "draining"
        return "starting" if self.engine is None else "ready"

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended."""
        return self._num_in_flight

    def serve(self, model: ServedModel, engine: EngineLoop) -> None:
        """Take requests from now on, for a model that is loaded and an engine that runs."""
        self.metrics.watch(engine.load, block_size=model.block_size)
        self.model = model
        self.engine = engine

    def begin_drain(self) -> None:
        """Refuse new requests from now on; those in flight go on."""
        self._draining = True

    async def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    def loaded(self) -> tuple[ServedModel, EngineLoop]:
        """Return what serves, whether or not it takes new requests.

        Raises:
            Starting: Nothing is loaded yet.
            EngineFailed: The engine was given up.
        """
        if self.model is None or self.engine is None:
            raise Starting("The model is still loading; try again later.")
        if self.engine.failed is not None:
            raise EngineFailed("The engine failed and was given up; restart the worker.")
        return self.model, self.engine

    @contextmanager
    def request(self) -> Iterator[tuple[ServedModel, Generator]]:
        """Let one request in and count it until it ends.

        Raises:
            Starting: Nothing is loaded yet.
            ShuttingDown: The worker drains.
            EngineFailed: The engine was given up.
        """
        if self._draining:
            raise ShuttingDown("The worker is shutting down and takes no new requests.")
        model, engine = self.loaded()
        self._num_in_flight += 1
        self._idle.clear()
        try:
            yield model, Generator(engine, model.encoder, self.metrics, self.clock)
        finally:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._idle.set()

    def load_report(self) -> LoadReport:
        """Return what GET /load tells; zeros for what is unknown before the model is loaded."""
        settings = self.settings
        load = None if self.engine is None else self.engine.load()
        return LoadReport(
            boot_id=self.boot_id,
            model=settings.name,
            block_size=settings.block_size,
            hash_scheme=SCHEME,
            state=self.state,
            num_running=load.num_running if load else 0,
            num_waiting=load.num_waiting if load else 0,
            waiting_uncached_tokens=load.waiting_uncached_tokens if load else 0,
            blocks=BlockCounts(
                free=load.num_free_blocks - load.num_cached_blocks,
                cached=load.num_cached_blocks,
                total=load.num_blocks,
            )
            if load
            else BlockCounts(free=0, cached=0, total=0),
            prefill_tokens_per_s=load.prefill_tokens_per_s if load else 0.0,
            decode_step_s=load.decode_step_s if load else 0.0,
            max_model_len=self.model.max_model_len if self.model else 0,
            max_num_seqs=settings.max_num_seqs,
            kv_events=self._kv_events,
            kv_dtype=(self.model.kv_dtype or None) if self.model else None,
            attention=_attention_info(load.attention) if load and load.attention else None,
        )


def _attention_info(attention: AttentionReading) -> AttentionInfo:
    return AttentionInfo(attention.implementation, attention.reason, attention.cascade)


WORKER: Final = web.AppKey("worker", Worker)
