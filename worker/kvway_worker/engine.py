"""The loop that steps an engine, between asyncio and its own thread.

    asyncio                                        step thread
    submit(seq) ────── add, abort, ask ──────────> inbox
         ▲                                           │ between steps
         │                                        stepper.plan
         │                                        stepper.step   raises: the step's requests fail
         └──── tokens, once per step ───────────────┘

The scheduler and the pool belong to the step thread. What asyncio sees of them are values.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import structlog

from kvway_core.blocks import BlockHash
from kvway_core.clock import Clock
from kvway_core.errors import EngineFailed, KvwayError, ShuttingDown
from kvway_core.events import KVEvent
from kvway_worker.cache.pins import PinInfo
from kvway_worker.load import EngineLoad
from kvway_worker.scheduling.scheduler import Scheduler
from kvway_worker.scheduling.sequence import Sequence as Request
from kvway_worker.scheduling.step import StepPlan
from kvway_worker.stepper import Engine, Stepper
from kvway_worker.streams import Output, Stream, Streams, TokenOut, TokenStream

__all__ = ["Engine", "EngineLoop", "TokenOut", "TokenStream"]

T = TypeVar("T")
_log = structlog.get_logger(__name__)


class EngineLoop:
    """Steps an engine while there are requests; create and use it inside one running event loop.

    Args:
        engine: What computes; closed with the loop.
        scheduler: What is computed; nobody else touches it after `start`.
        clock: Measures steps and waits, and ends pins.
        max_waiting: Requests beyond `max_num_seqs` of the scheduler that may be there.
        debug_invariants: Check the books after every step.
        on_kv_events: Given the pool's events after each step, on the step thread; must not raise.

    Invariants:
        1. Each request, forks included, ends once: with a finish reason, with an error, or by its
           reader leaving.
        2. A request's buffer holds at most `max_tokens` tokens and an end.
        3. A request that is not read any more has no blocks after the current step.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        *,
        clock: Clock,
        max_waiting: int = 256,
        debug_invariants: bool = False,
        on_kv_events: Callable[[Sequence[KVEvent]], None] | None = None,
    ) -> None:
        pool = scheduler.pool
        if (engine.num_blocks, engine.block_size) != (pool.num_blocks, pool.block_size):
            raise ValueError(
                f"engine of {engine.num_blocks} blocks of {engine.block_size} tokens, "
                f"pool of {pool.num_blocks} of {pool.block_size}"
            )
        self._validate = scheduler.validate
        self._clock = clock
        self._on_kv_events = on_kv_events
        # asyncio side
        self._streams = Streams(scheduler.max_num_seqs + max_waiting)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # both sides, under _wake
        self._wake = threading.Condition()
        self._inbox: list[_Command] = []
        self._taken: list[_Command] = []
        self._closing = False
        self._ended = False
        self._failed: BaseException | None = None
        # step thread
        self._stepper = Stepper(engine, scheduler, clock=clock, debug_invariants=debug_invariants)
        self._pool = pool
        self._load = self._stepper.load()

    @property
    def failed(self) -> BaseException | None:
        """Why the engine was given up; None while it works. It does not come back."""
        return self._failed

    @property
    def max_requests(self) -> int:
        """Requests that may run and wait at a time, forks included."""
        return self._streams.max_requests

    def start(self) -> None:
        """Starts the step thread; to be called once, inside the running event loop."""
        self._event_loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def submit(self, *seqs: Request) -> tuple[TokenStream, ...]:
        """Hands over requests and their forks, all or none of them.

        Returns:
            For each request in its turn its answer, then those of its forks in their order.
            Whoever gets them closes each: that aborts a request that has not ended, and frees its
            blocks.

        Raises:
            RequestError: If one can never run, or an id is in use.
            Overloaded: If too many requests wait.
            ShuttingDown: If the loop is closed.
            EngineFailed: If the engine was given up.
        """
        for seq in seqs:
            self._validate(seq)
        families = [(seq, *seq.forks) for seq in seqs]
        streams = self._streams.open(tuple(chain(*families)), now_s=self._clock.monotonic())
        unsent = iter(streams)
        try:
            self._post(*(_Add(tuple(islice(unsent, len(family)))) for family in families))
        except KvwayError:
            for stream in streams:
                self._streams.leave(stream)
            raise
        return tuple(TokenStream(stream, self._leave) for stream in streams)

    async def generate(self, seq: Request) -> AsyncGenerator[TokenOut, None]:
        """Runs a request without forks and yields its tokens as they come, `submit` in short.

        Closing the generator, or cancelling who waits for it, aborts the request and frees its
        blocks; use `contextlib.aclosing` to close it in time.

        Raises:
            KvwayError: What `submit` raises, before the first token.
            ShuttingDown: If the loop is closed.
            EngineFailed: If its step failed or the engine was given up.
        """
        if seq.forks:
            raise ValueError(f"request {seq.request_id!r} has forks: submit it")
        (stream,) = self.submit(seq)
        async with aclosing(stream):
            async for out in stream:
                yield out

    def abort(self, request_id: str) -> bool:
        """Ends a request by its id; its reader gets a last part with the finish reason "abort".

        A request that ends by itself in the meantime ends as it would have.

        Returns:
            Whether there is such a request. A fork is a request of its own.
        """
        stream = self._streams.find(request_id)
        if stream is None:
            return False
        with contextlib.suppress(KvwayError):  # an ended loop has ended the request too
            self._post(_Abort(stream))
        return True

    async def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Forgets all cached content, unless a request holds blocks; says whether it did.

        Args:
            reset_running: Let running requests give their blocks back first and compute them
                again, so that it does.

        Raises:
            EngineFailed: If the engine was given up.
            ShuttingDown: If the loop is closed.
        """
        reset = self._stepper.scheduler.reset_prefix_cache
        return await self._ask(partial(reset, reset_running=reset_running))

    async def pin(self, pin_id: str, hashes: Sequence[BlockHash], *, ttl_s: float) -> PinInfo:
        """Keeps a prefix in the cache: its blocks are given up last. Replaces a pin of this id.

        Args:
            pin_id: Its name.
            hashes: Of the blocks of the prefix, first block first; what is not cached is kept
                when it is.
            ttl_s: How long it is kept, seconds.

        Raises:
            PinQuotaExceeded: If pins would take more than their share of the pool.
            EngineFailed: If the engine was given up.
            ShuttingDown: If the loop is closed.
        """
        expires_s = self._clock.monotonic() + ttl_s
        return await self._ask(partial(self._pool.pin, pin_id, hashes, expires_s=expires_s))

    async def renew_pin(
        self, pin_id: str, hashes: Sequence[BlockHash], *, ttl_s: float
    ) -> PinInfo | None:
        """Lets the time of a pin begin anew; None, and nothing is pinned, if it has ended.

        Args:
            pin_id: Its name.
            hashes: As it was pinned.
            ttl_s: How long it is kept from now on, seconds.

        Raises:
            EngineFailed: If the engine was given up.
            ShuttingDown: If the loop is closed.
        """
        expires_s = self._clock.monotonic() + ttl_s

        def renew() -> PinInfo | None:
            if all(pin.pin_id != pin_id for pin in self._pool.pins()):
                return None
            return self._pool.pin(pin_id, hashes, expires_s=expires_s)

        return await self._ask(renew)

    async def unpin(self, pin_id: str) -> bool:
        """Ends a pin; says whether there was one.

        Raises:
            EngineFailed: If the engine was given up.
            ShuttingDown: If the loop is closed.
        """
        return await self._ask(partial(self._pool.unpin, pin_id))

    async def pins(self) -> list[PinInfo]:
        """Returns the pins that have not expired, the oldest first; `expires_s` on the clock.

        Raises:
            EngineFailed: If the engine was given up.
            ShuttingDown: If the loop is closed.
        """
        return await self._ask(self._pool.pins)

    def load(self) -> EngineLoad:
        """Returns how busy the engine is, as of the last step and what was handed over since."""
        with self._wake:
            commands = (*self._taken, *self._inbox)
            load = self._load
        new = [command.streams for command in commands if isinstance(command, _Add)]
        return dataclasses.replace(
            load,
            num_waiting=load.num_waiting + sum(map(len, new)),
            waiting_uncached_tokens=load.waiting_uncached_tokens
            + sum(streams[0].seq.num_uncached_tokens for streams in new),
        )

    async def close(self) -> None:
        """Ends the step thread and the engine; requests that still run get ShuttingDown."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._stepper.close()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        elif not self._ended:
            self._event_loop = asyncio.get_running_loop()
            self._end()

    # --- asyncio side -----------------------------------------------------------------------

    def _leave(self, stream: Stream) -> None:
        """Aborts a request that nobody reads any more."""
        if self._streams.leave(stream):
            with contextlib.suppress(KvwayError):  # an ended loop has ended the request too
                self._post(_Abort(stream))

    async def _ask(self, function: Callable[[], T]) -> T:
        """Returns what a function returns on the step thread, between steps.

        Raises:
            KvwayError: What it raises, or why nothing runs any more.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._post(_Ask(function, done))
        return await done

    def _post(self, *commands: _Command) -> None:
        """Hands commands to the step thread, all or none."""
        with self._wake:
            if self._ended or self._closing:
                raise self._refusal()
            self._inbox += commands
            self._wake.notify()

    def _refusal(self) -> KvwayError:
        """Returns a new error that says why nothing runs any more."""
        if self._failed is not None:
            return EngineFailed("The engine failed and was given up; restart the worker.")
        return ShuttingDown("The worker is shutting down.")

    # --- step thread ------------------------------------------------------------------------

    def _run(self) -> None:
        """Supervises the loop: whatever escapes it gives up the engine and fails all requests."""
        try:
            while self._turn():
                pass
        except BaseException as exc:  # noqa: BLE001 - this is what supervises the thread
            _log.exception("engine_failed")
            self._failed = exc
        finally:
            self._end()

    def _turn(self) -> bool:
        """Waits for work, takes commands and computes a step; False when the loop is closed."""
        with self._wake:
            while not (self._closing or self._inbox or self._stepper.scheduler.has_work):
                if not self._wake.wait(self._next_expiry_s()):
                    break  # a pin has ended, which nothing else would tell
            if self._closing:
                return False
            self._taken, self._inbox = self._inbox, []
        self._pool.expire_pins(self._clock.monotonic())
        answers = [answer for command in self._taken if (answer := self._apply(command))]
        plan = self._stepper.plan()
        self._publish()
        for answer in answers:
            self._call(answer)
        if plan.rows:
            self._step(plan)
        return True

    def _next_expiry_s(self) -> float | None:
        """Returns the seconds until the first pin ends, None without pins."""
        first_s = min((pin.expires_s for pin in self._pool.pins()), default=None)
        return None if first_s is None else max(0.0, first_s - self._clock.monotonic())

    def _step(self, plan: StepPlan) -> None:
        """Computes a step and hands out what it gave, its events first."""
        outputs = self._stepper.step(plan)
        self._publish()
        self._deliver(outputs)
        if not self._closing:
            self._stepper.probe()

    def _publish(self) -> None:
        """Hands out KV events, and shows the load with all that was taken from the inbox."""
        events = self._pool.take_events()
        if events and self._on_kv_events is not None:
            self._on_kv_events(events)
        load = self._stepper.load()
        with self._wake:
            self._load, self._taken = load, []

    def _apply(self, command: _Command) -> Callable[[], None] | None:
        """Does what asyncio asked for; returns how to answer, if there is somebody to answer."""
        match command:
            case _Add(streams):
                self._stepper.add(streams)
            case _Abort(stream):
                if self._stepper.abort(stream):
                    end = TokenOut(None, "abort", stream.seq.cached_tokens or 0)
                    return partial(self._streams.put, ((stream, end),))
            case _Ask(function, done):
                if done.cancelled():
                    return None  # whoever asked has left: nothing is to be done for them
                try:
                    return partial(_resolve, done, function())
                except KvwayError as exc:
                    return partial(_reject, done, exc)
        return None

    def _end(self) -> None:
        """Ends every request that is left; nothing is taken any more."""
        with self._wake:
            self._ended = True
            commands, self._inbox = [*self._taken, *self._inbox], []
        left = dict.fromkeys(self._stepper.live)
        for command in commands:
            match command:
                case _Add(streams):
                    left.update(dict.fromkeys(streams))
                case _Abort(stream):
                    left[stream] = None
                case _Ask(_, done):
                    self._call(partial(_reject, done, self._refusal()))
        self._deliver([(stream, self._refusal()) for stream in left])

    def _deliver(self, outputs: Iterable[tuple[Stream, Output]]) -> None:
        if outputs:
            self._call(partial(self._streams.put, outputs))

    def _call(self, function: Callable[[], None]) -> None:
        """Runs a function in the event loop, unless that has ended with nobody left to tell."""
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(function)


@dataclass(frozen=True, slots=True)
class _Add:
    streams: tuple[Stream, ...]


@dataclass(frozen=True, slots=True)
class _Abort:
    stream: Stream


@dataclass(frozen=True, slots=True)
class _Ask:
    function: Callable[[], Any]
    done: asyncio.Future[Any]


_Command: TypeAlias = _Add | _Abort | _Ask


def _resolve(done: asyncio.Future[Any], result: object) -> None:
    """Answers whoever waits, if anybody still does."""
    if not done.done():
        done.set_result(result)


def _reject(done: asyncio.Future[Any], error: KvwayError) -> None:
    """Answers whoever waits with an error, if anybody still does."""
    if not done.done():
        done.set_exception(error)
