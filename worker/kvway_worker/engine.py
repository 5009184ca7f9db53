"""An engine behind asyncio: requests go in, tokens come out.

asyncio                                        step thread (step_thread.py)
submit(seq) ────── add, abort, ask ──────────> inbox
     ▲                                           │ between steps
     │                                        stepper.plan
     │                                        stepper.step   raises: the step's requests fail
     └──── tokens, once per step ───────────────┘
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from itertools import chain, islice
from types import TracebackType
from typing import Self

from kvway_core.blocks import BlockHash
from kvway_core.clock import Clock
from kvway_core.errors import KvwayError
from kvway_core.events import KVEvent
from kvway_worker.cache.pins import PinInfo
from kvway_worker.load import EngineLoad
from kvway_worker.scheduling.scheduler import Scheduler
from kvway_worker.scheduling.sequence import Sequence as Request
from kvway_worker.step_thread import Abort, Add, StepThread
from kvway_worker.stepper import Engine, Stepper
from kvway_worker.streams import Stream, Streams, TokenOut, TokenStream

__all__ = ["Engine", "EngineLoop", "TokenOut", "TokenStream"]


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
        self._pool = pool
        self._reset = scheduler.reset_prefix_cache
        self._streams = Streams(scheduler.max_num_seqs + max_waiting)
        self._steps = StepThread(
            Stepper(engine, scheduler, clock=clock, debug_invariants=debug_invariants),
            clock=clock,
            deliver=self._streams.put,
            on_kv_events=on_kv_events,
        )

    @property
    def failed(self) -> BaseException | None:
        """Why the engine was given up; None while it works. It does not come back."""
        return self._steps.failed

    @property
    def max_requests(self) -> int:
        """Requests that may run and wait at a time, forks included."""
        return self._streams.max_requests

    def start(self) -> None:
        """Starts the step thread; to be called once, inside the running event loop."""
        self._steps.start()

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
            self._steps.post(*(Add(tuple(islice(unsent, len(family)))) for family in families))
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
            self._steps.post(Abort(stream))
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
        return await self._steps.ask(partial(self._reset, reset_running=reset_running))

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
        return await self._steps.ask(partial(self._pool.pin, pin_id, hashes, expires_s=expires_s))

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

        return await self._steps.ask(renew)

    async def unpin(self, pin_id: str) -> bool:
        """Ends a pin; says whether there was one.

        Raises:
            EngineFailed: If the engine was given up.
            ShuttingDown: If the loop is closed.
        """
        return await self._steps.ask(partial(self._pool.unpin, pin_id))

    async def pins(self) -> list[PinInfo]:
        """Returns the pins that have not expired, the oldest first; `expires_s` on the clock.

        Raises:
            EngineFailed: If the engine was given up.
            ShuttingDown: If the loop is closed.
        """
        return await self._steps.ask(self._pool.pins)

    def load(self) -> EngineLoad:
        """Returns how busy the engine is, as of the last step and what was handed over since."""
        return self._steps.load()

    async def close(self) -> None:
        """Ends the step thread and the engine; requests that still run get ShuttingDown."""
        await self._steps.close()

    def _leave(self, stream: Stream) -> None:
        """Aborts a request that nobody reads any more."""
        if self._streams.leave(stream):
            with contextlib.suppress(KvwayError):  # an ended loop has ended the request too
                self._steps.post(Abort(stream))
