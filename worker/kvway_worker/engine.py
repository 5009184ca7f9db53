"""The loop that steps an engine, between asyncio and its own thread.

    asyncio                                        step thread
    generate(seq) ──── add, abort, reset ────────> inbox
         ▲                                           │ between steps
         │                                        scheduler.plan
         │                                        engine.execute   raises: the step's requests fail
         └──── tokens, once per step ──────────── scheduler.commit

The scheduler and the pool belong to the step thread. What asyncio sees of them are values.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, Protocol, Self, TypeAlias

import structlog

from kvway_core.blocks import Namespace
from kvway_core.clock import Clock
from kvway_core.errors import EngineFailed, KvwayError, ShuttingDown
from kvway_core.events import KVEvent
from kvway_worker.load import EngineLoad, Meter, StepStats
from kvway_worker.sampling_params import SamplingParams
from kvway_worker.scheduler import Scheduler
from kvway_worker.sequence import Sequence as Request
from kvway_worker.step import Row, StepPlan, StepResult
from kvway_worker.streams import Output, Stream, Streams, TokenOut

__all__ = ["Engine", "EngineLoop", "TokenOut"]

FAILURES_BEFORE_PROBE: Final = 3
"""So many failing steps in a row, and the engine has to show that it computes at all."""

_log = structlog.get_logger(__name__)


class Engine(Protocol):
    """What computes steps; used by one thread, except for `close`."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks it has room for."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Computes a step: copies first, then the KV of all rows, then what the rows read."""
        ...

    def close(self) -> None:
        """Ends the engine, from any thread; a step under way returns or raises soon."""
        ...


class EngineLoop:
    """Steps an engine while there are requests; create and use it inside one running event loop.

    Args:
        engine: What computes; closed with the loop.
        scheduler: What is computed; nobody else touches it after `start`.
        clock: Measures steps.
        max_waiting: Requests beyond `max_num_seqs` of the scheduler that may be there.
        debug_invariants: Check the books after every step.
        on_kv_events: Given the pool's events after each step, on the step thread; must not raise.

    Invariants:
        1. Each request ends once: with a finish reason, with an error, or by its reader leaving.
        2. A request's buffer holds at most `max_tokens` tokens and one error.
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
        self._engine = engine
        self._scheduler = scheduler
        self._clock = clock
        self._debug_invariants = debug_invariants
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
        self._live: dict[str, Stream] = {}
        self._meter = Meter()
        self._failures: list[Exception] = []
        self._load = self._meter.read(scheduler)

    @property
    def failed(self) -> BaseException | None:
        """Why the engine was given up; None while it works. It does not come back."""
        return self._failed

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

    async def generate(self, seq: Request) -> AsyncGenerator[TokenOut, None]:
        """Runs a request and yields its tokens as they come; the last has a finish reason.

        Closing the generator, or cancelling who waits for it, aborts the request and frees its
        blocks; use `contextlib.aclosing` to close it in time.

        Raises:
            RequestError: If it can never run; before the first token.
            Overloaded: If too many requests wait; before the first token.
            ShuttingDown: If the loop is closed.
            EngineFailed: If its step failed or the engine was given up.
        """
        self._scheduler.validate(seq)
        stream = self._streams.open(seq)
        try:
            self._post(_Add(stream))
            while True:
                out = await stream.outputs.get()
                if isinstance(out, KvwayError):
                    raise out
                yield out
                if out.finish_reason is not None:
                    return
        finally:
            if self._streams.close(stream):
                with contextlib.suppress(KvwayError):  # an ended loop has ended the request too
                    self._post(_Abort(stream))

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached content, unless a request holds blocks; says whether it did.

        Raises:
            EngineFailed: If the engine was given up.
            ShuttingDown: If the loop is closed.
        """
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._post(_Reset(done))
        return await done

    def load(self) -> EngineLoad:
        """Returns how busy the engine is, as of the last step and what was handed over since."""
        with self._wake:
            commands = (*self._taken, *self._inbox)
            load = self._load
        new = [command.stream.seq for command in commands if isinstance(command, _Add)]
        return dataclasses.replace(
            load,
            num_waiting=load.num_waiting + len(new),
            waiting_uncached_tokens=load.waiting_uncached_tokens
            + sum(seq.num_uncached_tokens for seq in new),
        )

    async def close(self) -> None:
        """Ends the step thread and the engine; requests that still run get ShuttingDown."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._engine.close()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        elif not self._ended:
            self._event_loop = asyncio.get_running_loop()
            self._end()

    # --- asyncio side -----------------------------------------------------------------------

    def _post(self, command: _Command) -> None:
        """Hands a command to the step thread."""
        with self._wake:
            if self._ended or self._closing:
                raise self._refusal()
            self._inbox.append(command)
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
            while not (self._closing or self._inbox or self._scheduler.has_work):
                self._wake.wait()
            if self._closing:
                return False
            self._taken, self._inbox = self._inbox, []
        resets = [answer for command in self._taken if (answer := self._apply(command))]
        plan = self._scheduler.plan()
        self._publish()
        for answer in resets:
            self._call(answer)
        outputs = self._step(plan) if plan.rows else []
        if self._debug_invariants:
            self._scheduler.check_invariants()
        self._publish()
        self._deliver(outputs)
        if len(self._failures) >= FAILURES_BEFORE_PROBE and not self._closing:
            self._probe()
        return True

    def _publish(self) -> None:
        """Hands out KV events, and shows the load with all that was taken from the inbox."""
        events = self._scheduler.pool.take_events()
        if events and self._on_kv_events is not None:
            self._on_kv_events(events)
        load = self._meter.read(self._scheduler)
        with self._wake:
            self._load, self._taken = load, []

    def _apply(self, command: _Command) -> Callable[[], None] | None:
        """Does what asyncio asked for; returns how to answer, if there is somebody to answer."""
        match command:
            case _Add(stream):
                self._scheduler.add(stream.seq)
                self._live[stream.seq.request_id] = stream
            case _Abort(stream):
                if self._live.get(stream.seq.request_id) is stream:
                    del self._live[stream.seq.request_id]
                    self._scheduler.abort(stream.seq.request_id)
            case _Reset(done):
                return partial(_resolve, done, self._scheduler.reset_prefix_cache())
        return None

    def _step(self, plan: StepPlan) -> list[tuple[Stream, Output]]:
        """Computes a step and returns what it gave whom."""
        started_s = self._clock.monotonic()
        try:
            result = self._execute(plan)
        except Exception as exc:  # noqa: BLE001 - this is what supervises a step
            return self._failed_step(plan, exc)
        stats = StepStats.of(plan, duration_s=self._clock.monotonic() - started_s)
        self._failures.clear()
        self._meter.observe(stats)
        return [
            (
                self._ended_or_live(out.seq, ended=out.finish_reason is not None),
                TokenOut(out.token_id, out.finish_reason, out.seq.cached_tokens or 0),
            )
            for out in self._scheduler.commit(plan, result)
        ]

    def _execute(self, plan: StepPlan) -> StepResult:
        result = self._engine.execute(plan)
        if missing := plan.missing(result):
            raise EngineFailed(f"the engine gave no token for {missing}")
        return result

    def _probe(self) -> None:
        """Computes one token of no request: whether requests fail, or the engine does.

        Raises:
            EngineFailed: If it is the engine, which is then given up.
        """
        pool = self._scheduler.pool
        seq = Request(
            "probe",
            [0],
            params=SamplingParams(max_tokens=1),
            namespace=Namespace("probe", block_size=pool.block_size),
        )
        blocks = pool.allocate(1)  # there is one: the requests of the failed step gave theirs back
        try:
            self._execute(StepPlan(0, (Row(seq, 0, 1, seq.token_ids, blocks, sampling=(seq,)),)))
        except Exception as exc:
            message = f"{len(self._failures)} steps failed in a row, and then a probe"
            raise EngineFailed(message) from exc
        finally:
            pool.free(blocks)
        self._failures.clear()

    def _failed_step(self, plan: StepPlan, exc: Exception) -> list[tuple[Stream, Output]]:
        """Fails the requests of a step that raised; the others go on."""
        if self._closing:
            return []
        _log.error("step_failed", step_id=plan.step_id, num_requests=len(plan.rows), exc_info=exc)
        self._failures.append(exc)
        self._meter.num_failed_steps += 1
        message = "The engine failed while it computed this request; try again."
        return [
            (self._ended_or_live(seq, ended=True), EngineFailed(message))
            for seq in self._scheduler.fail(plan)
        ]

    def _ended_or_live(self, seq: Request, *, ended: bool) -> Stream:
        """Returns the stream of a request, which is no longer live if it ended."""
        return self._live.pop(seq.request_id) if ended else self._live[seq.request_id]

    def _end(self) -> None:
        """Ends every request that is left; nothing is taken any more."""
        with self._wake:
            self._ended = True
            commands, self._inbox = [*self._taken, *self._inbox], []
        added = [command.stream for command in commands if isinstance(command, _Add)]
        left = dict.fromkeys([*self._live.values(), *added])
        self._deliver([(stream, self._refusal()) for stream in left])
        for command in commands:
            if isinstance(command, _Reset):
                self._call(partial(_resolve, command.done, self._refusal()))

    def _deliver(self, outputs: Sequence[tuple[Stream, Output]]) -> None:
        if outputs:
            self._call(partial(self._streams.put, outputs))

    def _call(self, function: Callable[[], None]) -> None:
        """Runs a function in the event loop, unless that has ended with nobody left to tell."""
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(function)


@dataclass(frozen=True, slots=True)
class _Add:
    stream: Stream


@dataclass(frozen=True, slots=True)
class _Abort:
    stream: Stream


@dataclass(frozen=True, slots=True)
class _Reset:
    done: asyncio.Future[bool]


_Command: TypeAlias = _Add | _Abort | _Reset


def _resolve(done: asyncio.Future[bool], result: bool | KvwayError) -> None:  # noqa: FBT001 - a result
    """Answers whoever waits, if anybody still does."""
    if done.done():
        return
    if isinstance(result, KvwayError):
        done.set_exception(result)
    else:
        done.set_result(result)
