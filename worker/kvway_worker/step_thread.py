"""The thread that steps an engine, and what is handed to it between steps.

    other threads                                  step thread
    post ───────────── add, abort, ask ──────────> inbox
                                                     │ between steps
                                                   stepper.plan
                                                   stepper.step
    deliver <──────────── call_soon_threadsafe ──────┘

The stepper, its scheduler and the pool belong to this thread. What others see of them are values.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import structlog

from kvway_core.clock import Clock
from kvway_core.errors import EngineFailed, KvwayError, ShuttingDown
from kvway_core.events import KVEvent
from kvway_worker.load import EngineLoad
from kvway_worker.scheduling.step import StepPlan
from kvway_worker.stepper import Stepper
from kvway_worker.streams import Output, Stream, TokenOut

T = TypeVar("T")
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Add:
    """A request; the streams behind the first are those of its forks."""

    streams: tuple[Stream, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Somebody does not want a request any more."""

    stream: Stream


@dataclass(frozen=True, slots=True)
class _Ask:
    """A function to be called between steps, and who waits for what it returns."""

    function: Callable[[], Any]
    done: asyncio.Future[Any]


_Command: TypeAlias = Add | Abort | _Ask


class StepThread:
    """Steps an engine while there are requests, and does between steps what it is asked to.

    Args:
        stepper: What is stepped; nobody else touches it after `start`.
        clock: Ends pins.
        deliver: Given what a step made for whom, in the event loop.
        on_kv_events: Given the pool's events after each step, on the step thread; must not raise.

    Invariants:
        1. Whatever was posted is done, or ended when the thread ends.
    """

    def __init__(
        self,
        stepper: Stepper,
        *,
        clock: Clock,
        deliver: Callable[[Iterable[tuple[Stream, Output]]], None],
        on_kv_events: Callable[[Sequence[KVEvent]], None] | None,
    ) -> None:
        self._clock = clock
        self._put = deliver
        self._on_kv_events = on_kv_events
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # both sides, under _wake
        self._wake = threading.Condition()
        self._inbox: list[_Command] = []
        self._taken: list[_Command] = []
        self._closing = False
        self._ended = False
        self._failed: BaseException | None = None
        self._load = stepper.load()
        # step thread
        self._stepper = stepper
        self._pool = stepper.scheduler.pool

    @property
    def failed(self) -> BaseException | None:
        """Why the engine was given up; None while it works. It does not come back."""
        return self._failed

    def start(self) -> None:
        """Starts the thread; to be called once, inside the running event loop."""
        self._event_loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self._thread.start()

    def post(self, *commands: _Command) -> None:
        """Hands commands to the thread, all or none.

        Raises:
            EngineFailed: If the engine was given up.
            ShuttingDown: If the thread was closed.
        """
        with self._wake:
            if self._ended or self._closing:
                raise self._refusal()
            self._inbox += commands
            self._wake.notify()

    async def ask(self, function: Callable[[], T]) -> T:
        """Returns what a function returns on the step thread, between steps.

        Raises:
            KvwayError: What it raises, or why nothing runs any more.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.post(_Ask(function, done))
        return await done

    def load(self) -> EngineLoad:
        """Returns how busy the engine is, as of the last step and what was handed over since."""
        with self._wake:
            commands = (*self._taken, *self._inbox)
            load = self._load
        new = [command.streams for command in commands if isinstance(command, Add)]
        return dataclasses.replace(
            load,
            num_waiting=load.num_waiting + sum(map(len, new)),
            waiting_uncached_tokens=load.waiting_uncached_tokens
            + sum(streams[0].seq.num_uncached_tokens for streams in new),
        )

    async def close(self) -> None:
        """Ends the thread and the engine; requests that still run get ShuttingDown."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._stepper.close()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        elif not self._ended:
            self._event_loop = asyncio.get_running_loop()
            self._end()

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
        """Computes a step and hands out what it gave, its events first.

        What ended is not among the live requests any more, so it is told whatever comes between.
        """
        outputs = self._stepper.step(plan)
        try:
            self._publish()
        finally:
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
            case Add(streams):
                self._stepper.add(streams)
            case Abort(stream):
                if self._stepper.abort(stream):
                    end = TokenOut(None, "abort", stream.seq.cached_tokens or 0)
                    return partial(self._put, ((stream, end),))
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
                case Add(streams):
                    left.update(dict.fromkeys(streams))
                case Abort(stream):
                    left[stream] = None
                case _Ask(_, done):
                    self._call(partial(_reject, done, self._refusal()))
        self._deliver([(stream, self._refusal()) for stream in left])

    def _deliver(self, outputs: Iterable[tuple[Stream, Output]]) -> None:
        if outputs:
            self._call(partial(self._put, outputs))

    def _call(self, function: Callable[[], None]) -> None:
        """Runs a function in the event loop, unless that has ended with nobody left to tell."""
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(function)


def _resolve(done: asyncio.Future[Any], result: object) -> None:
    """Answers whoever waits, if anybody still does."""
    if not done.done():
        done.set_result(result)


def _reject(done: asyncio.Future[Any], error: KvwayError) -> None:
    """Answers whoever waits with an error, if anybody still does."""
    if not done.done():
        done.set_exception(error)
