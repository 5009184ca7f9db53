"""A worker's process from start to exit.

    listen (/health says starting) ─> load on a thread ─> ready file ─> serve
        ─> SIGTERM: refuse what is new, finish what runs ─> engine, HTTP, events close ─> exit 0

An engine that was given up, or any task that fails, ends the same way with exit code 1.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final, TypeVar

import structlog
from aiohttp import web

from kvway_core.clock import Clock, SystemClock
from kvway_core.errors import EngineFailed
from kvway_core.lifecycle import Supervisor, local_url, start_site, write_ready_file
from kvway_core.metrics import new_registry
from kvway_core.web import make_runner
from kvway_worker.api.app import build_app
from kvway_worker.api.state import Worker
from kvway_worker.engine import EngineLoop
from kvway_worker.events import KvEventOptions, KvEventPublisher
from kvway_worker.loading import Loaded, load_model
from kvway_worker.settings import WorkerSettings

ENGINE_CHECK_S: Final = 0.1
FAREWELL_S: Final = 2.0
"""How long connections have to take what was sent to them, once nothing more will be."""

T = TypeVar("T")
_log = structlog.get_logger(__name__)


async def serve(
    settings: WorkerSettings,
    model_dir: Path,
    supervisor: Supervisor,
    *,
    load: Callable[[WorkerSettings, Path, Clock], Loaded] = load_model,
) -> None:
    """Serve a model until the supervisor says stop, then drain.

    Args:
        settings: As started.
        model_dir: The model's folder.
        supervisor: Owns the tasks, and says when to stop.
        load: Loads the model; runs on a thread of its own.

    Raises:
        ConfigError: A port is taken, or the model does not load.
    """
    clock = SystemClock()
    boot_id = uuid.uuid4().hex
    async with AsyncExitStack() as stack:
        publisher = _publisher(settings, boot_id, clock) if settings.kv_events else None
        if publisher is not None:
            stack.callback(publisher.close)
            sending = supervisor.spawn("kv-events", publisher.run())
            stack.push_async_callback(_cancel, sending)
        worker = Worker(
            settings,
            boot_id=boot_id,
            clock=clock,
            registry=new_registry("worker", version=version("kvway")),
            kv_events=None if publisher is None else publisher.info,
        )
        stack.callback(worker.executor.close)
        runner = make_runner(build_app(worker), settings.http_limits)
        stack.push_async_callback(_say_farewell, runner)
        port = await start_site(runner, settings.host, settings.port)
        url = local_url(settings.host, port)
        _log.info("worker_listening", url=url, model=settings.name)

        loaded = await _unless_stopped(partial(load, settings, model_dir, clock), supervisor)
        if loaded is None:
            return
        engine = EngineLoop(
            loaded.engine,
            loaded.scheduler,
            clock=clock,
            max_waiting=settings.max_waiting,
            debug_invariants=settings.debug_invariants,
            on_kv_events=None if publisher is None else publisher.publish,
        )
        await stack.enter_async_context(engine)
        watching = supervisor.spawn("engine", _watch(engine))
        stack.push_async_callback(_cancel, watching)
        worker.serve(loaded.model, engine)
        if settings.ready_file is not None:
            ready = {"url": url, "pid": os.getpid(), "boot_id": boot_id}
            write_ready_file(settings.ready_file, ready)
        _log.info("worker_ready", url=url, max_model_len=loaded.model.max_model_len)

        await supervisor.wait_for_stop()
        await _drain(worker, timeout_s=settings.drain_timeout_s)


def _publisher(settings: WorkerSettings, boot_id: str, clock: Clock) -> KvEventPublisher:
    options = KvEventOptions(
        host=settings.kv_events_host,
        pub_port=settings.kv_events_port,
        replay_port=settings.kv_events_replay_port,
        buffer_batches=settings.kv_events_buffer,
        token_ids=settings.kv_events_token_ids,
    )
    return KvEventPublisher(options, boot_id=boot_id, clock=clock)


async def _unless_stopped(function: Callable[[], T], supervisor: Supervisor) -> T | None:
    """Run a slow function while the event loop goes on; None when told to stop meanwhile."""
    running = _on_daemon_thread(function)
    stop = asyncio.ensure_future(supervisor.wait_for_stop())
    try:
        await asyncio.wait((running, stop), return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else None
    finally:
        stop.cancel()
        running.cancel()


def _on_daemon_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a function on a thread that does not keep the process alive; return its result to be."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(function())
        except BaseException as exc:  # noqa: BLE001 - raised in whoever awaits it
            done.set_exception(exc)

    threading.Thread(target=run, name="load", daemon=True).start()
    return asyncio.wrap_future(done)


async def _watch(engine: EngineLoop) -> None:
    """Raise when the engine is given up.

    Raises:
        EngineFailed: It was.
    """
    while engine.failed is None:  # noqa: ASYNC110 - a thread sets it
        await asyncio.sleep(ENGINE_CHECK_S)
    raise EngineFailed("the engine was given up") from engine.failed


async def _drain(worker: Worker, *, timeout_s: float) -> None:
    """Refuse what is new and wait for what runs, at most so long."""
    worker.begin_drain()
    _log.info("drain_started", num_in_flight=worker.num_in_flight)
    try:
        async with asyncio.timeout(timeout_s):
            await worker.wait_idle()
    except TimeoutError:
        _log.warning("drain_timed_out", num_in_flight=worker.num_in_flight)


async def _say_farewell(runner: web.AppRunner) -> None:
    """Close the listener and the connections, without waiting long for slow readers."""
    try:
        async with asyncio.timeout(FAREWELL_S):
            await runner.cleanup()
    except TimeoutError:
        _log.warning("connections_cut")


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
